"""A micro-batch, as a loader hands it to a training step.

Shapes: b samples in a micro-batch, b + x images (x: partners that are mixed in and are no samples of this micro-batch), K recorded
logits, D recorded features.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.data.views.parameters import ViewParameters
from trainer.io.errors import DataError, SettingsError
from trainer.models.served_student.preprocessing import is_jpeg

_BACK = "set data.decode_on=cpu"


class Mixing(NamedTuple):
    """How each sample's view is mixed with that of its partner."""

    partner: Tensor  # row of the partner among the images, int64 [b]; a sample may be its own
    labels: Tensor  # the partner's label, int64 [b]
    share: Tensor  # weight of the sample itself in the target, float32 [b]; the partner has the rest
    blend: Tensor  # weight of the sample itself in its pixels outside of the box, float32 [b]; 1 for CutMix
    box: Tensor  # part CutMix takes from the partner, as shares of the edge: left, top, right, bottom; float32 [b, 4]


class Recorded(NamedTuple):
    """A teacher's recorded outputs for each sample's view."""

    indices: Tensor  # classes of the largest logits, int64 [b, K], the largest first
    logits: Tensor  # their logits, float32 [b, K]
    rest: Tensor  # log of the others' sum of exp(logit / T) at T = 1 and 2, float32 [b, 2]; -inf where there are none
    features: Tensor | None = None  # pooled features, float32 [b, D]
    tokens: Tensor | None = None  # patch tokens as they are stored, float16 or int8 [b, h, w, D]
    token_steps: Tensor | None = None  # one step of an int8 token's numbers, float32 [b, h, w, 1]; None for float16
    further: tuple[Recorded, ...] = ()  # what further teachers say of the same views

    def restored(self) -> Recorded:
        """Return the same with its tokens as they are used, float32; on the device, since stored ones are faster sent."""
        if self.tokens is None:
            return self
        tokens = self.tokens.float()
        return self._replace(tokens=tokens if self.token_steps is None else tokens * self.token_steps, token_steps=None)


class Batch(NamedTuple):
    """A micro-batch of b samples."""

    images: Tensor
    """Views, uint8 [b + x, 3, V, V], the first b the samples' own. Where `views` says which views the device still has to make: stored
    images [b + x, 3, S, S]; or their indices, int64 [b + x], if they lie on the device (`Views.resident`); or their JPEG files one after
    another, uint8 [bytes], if `lengths` says where each ends. Once on the device: views, mixed, [b, 3, V, V]."""
    labels: Tensor  # int64 [b]; -1 for a sample without label
    keys: Tensor  # sample keys, the bits of a uint64 as int64 [b]; on the CPU, where random numbers are drawn
    numbers: Tensor  # view numbers, int64 [b]; on the CPU
    views: ViewParameters | None = None
    """The b + x views that the device still has to make of stored images, or None where the loader made them; on the CPU, like the
    random numbers that they were drawn from."""
    mixing: Mixing | None = None  # how the images are mixed, or None
    lengths: Tensor | None = None
    """Bytes of each JPEG file that the device still has to decode, int64 [b + x], on the CPU; or None."""
    recorded: Recorded | None = None  # the teacher's recorded outputs, or None
    label_weights: Tensor | None = None
    """Weight of each sample in a loss of labels, float32 [b]: 0 without a label, else the step's images divided by those with a label. So
    the mean over the step's images, in whatever micro-batches, is the mean over those with a label. None where all have one."""


_copying: deque[tuple[torch.cuda.Event, Tensor]] = deque()
"""Memory of loader processes, with the event after which no GPU copies out of it any more."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to `device` without waiting for the copy, until whose end its memory is kept."""
    if device.type != "cuda":
        return tensor.to(device, non_blocking=True)
    # Only from page-locked memory does a copy to a GPU run beside the host; from other memory the host would wait for it.
    if not tensor.is_pinned():
        return tensor.pin_memory().to(device, non_blocking=True)  # torch keeps what it has page-locked itself
    sent = tensor.to(device, non_blocking=True)
    keep_until_copied(tensor)
    return sent


def keep_until_copied(tensor: Tensor) -> None:
    """Keep page-locked memory until the work that the current stream has now is done."""
    while _copying and _copying[0][0].query():
        _copying.popleft()
    event = torch.cuda.Event()
    event.record()
    _copying.append((event, tensor))


def wait_for_copies() -> None:
    """Wait until nothing is copied out of the memory of loader processes."""
    while _copying:
        _copying.popleft()[0].synchronize()


CACHED_BYTES = 2**20
"""Size of a slice's pixels in float32, which a CPU's cache holds. A step over a whole batch goes through memory, several times slower where
that is the limit; on a Zen 3 sizes from a quarter of this to the whole batch of 32 views differ by less than the measurement."""


def cache_sized_slices(views: Tensor) -> Iterator[slice]:
    """Yield the rows of `views` [B, 3, V, V] to work on together: a few on the CPU, all of them on another device."""
    count = len(views)
    together = max(1, CACHED_BYTES // (4 * 3 * views.shape[-1] ** 2) if views.device.type == "cpu" else count)
    for start in range(0, count, together):
        yield slice(start, min(start + together, count))


# ---- JPEG files that a GPU decodes (nvJPEG), a batch at a time
#
# By TorchCodec, in whose favor torchvision's own call of nvJPEG is deprecated. The loader then only gathers the files' bytes. The pixels
# differ slightly from those of libjpeg-turbo, so recorded teacher outputs name the decoder.


def check_gpu_decoding(encoded: bytes | memoryview, *, on_device: bool) -> None:
    """Make sure that a GPU can decode the stored images, of which `encoded` is one; a `SettingsError` if it cannot, and why."""
    if not torch.cuda.is_available():
        raise SettingsError(f"data.decode_on is cuda, but torch finds no GPU on this machine; {_BACK}")
    if not on_device:
        raise SettingsError(
            "data.decode_on is cuda, but data.views_on is cpu, and images would have to come back; "
            f"set data.views_on=device, or {_BACK}"
        )
    if not is_jpeg(encoded):
        raise SettingsError(
            f"data.decode_on is cuda, which decodes JPEG only, but the stored images are none; {_BACK}, or prepare with "
            "data.encoding=jpeg or fast-jpeg"
        )


def join_files(files: Sequence[memoryview]) -> tuple[Tensor, Tensor]:
    """Concatenate B files: their bytes, uint8 [bytes], and the length of each, int64 [B]."""
    return torch.frombuffer(bytearray().join(files), dtype=torch.uint8), torch.tensor([len(file) for file in files])


def decode_jpegs(joined: Tensor, lengths: Tensor, device: torch.device) -> Tensor:
    """Decode JPEG files of equal size, as `join_files` gives them, on a GPU: uint8 [B, 3, S, S], RGB; a `DataError` if one is damaged."""
    from torchcodec.decoders import decode_jpeg  # here, because few need it

    try:
        images = decode_jpeg(list(joined.split(lengths.tolist())), mode="RGB", device=device)
    except RuntimeError as error:
        raise DataError(
            f"a batch of {len(lengths)} images cannot be decoded on the GPU: {error}; {_BACK} to see which, or prepare the data set again"
        ) from error
    return torch.stack(list(images))
