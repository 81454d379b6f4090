"""Decoding JPEG files on a GPU (nvJPEG), a batch at a time.

By TorchCodec, in whose favour torchvision's own call of nvJPEG is deprecated. The loader then only gathers the files' bytes. The pixels
differ slightly from those of libjpeg-turbo, so recorded teacher outputs name the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.errors import DataError, SettingsError
from trainer.served_student.preprocessing import is_jpeg

_BACK = "set data.decode_on=cpu"


def check_gpu_decoding(encoded: bytes | memoryview, *, on_device: bool) -> None:
    """Make sure that a GPU can decode the stored images, of which `encoded` is one.

    Args:
        encoded: one of the files.
        on_device: whether views are made on the device.

    Raises:
        SettingsError: it cannot, and why.
    """
    if not torch.cuda.is_available():
        raise SettingsError(f"data.decode_on is cuda, but torch finds no GPU on this machine; {_BACK}")
    if not on_device:
        raise SettingsError(
            "data.decode_on is cuda, but data.views_on is cpu, and images would have to come back; "
            f"set data.views_on=device, or {_BACK}"
        )
    if not is_jpeg(encoded):
        raise SettingsError(
            f"data.decode_on is cuda, which decodes JPEG only, but the stored images are none; {_BACK}, or prepare with data.encoding=jpeg"
        )


def join_files(files: Sequence[memoryview]) -> tuple[Tensor, Tensor]:
    """Concatenate B files: their bytes, uint8 [bytes], and the length of each, int64 [B]."""
    return torch.frombuffer(bytearray().join(files), dtype=torch.uint8), torch.tensor([len(file) for file in files])


def decode_jpegs(joined: Tensor, lengths: Tensor, device: torch.device) -> Tensor:
    """Decode a batch of JPEG files of equal size on a GPU.

    Args:
        joined: their bytes, concatenated, uint8 [bytes], on the CPU.
        lengths: length of each file in bytes, int64 [B], on the CPU.
        device: the GPU.

    Returns:
        RGB pixels, uint8 [B, 3, S, S], on the device.

    Raises:
        DataError: a file cannot be decoded.
    """
    from torchcodec.decoders import decode_jpeg  # here, because few need it

    try:
        images = decode_jpeg(list(joined.split(lengths.tolist())), mode="RGB", device=device)
    except RuntimeError as error:
        raise DataError(
            f"a batch of {len(lengths)} images cannot be decoded on the GPU: {error}; {_BACK} to see which, or prepare the data set again"
        ) from error
    return torch.stack(list(images))
