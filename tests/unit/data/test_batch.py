from __future__ import annotations

import numpy as np
import pytest
import simplejpeg
import torch

from trainer.data.batch import CACHED_BYTES, cache_sized_slices, check_gpu_decoding, decode_jpegs, join_files
from trainer.io.errors import DataError, SettingsError


@pytest.mark.parametrize(("count", "size"), [(0, 32), (1, 32), (200, 32), (170, 64), (5, 224), (3, 1024)])
def test_slices_are_all_rows_in_order_and_fit_cache(count, size):
    parts = list(cache_sized_slices(torch.empty(count, 3, size, size, dtype=torch.uint8)))
    assert [row for part in parts for row in range(count)[part]] == list(range(count))
    assert all(part.stop <= count for part in parts)
    bytes_of_one = 4 * 3 * size**2
    assert all((part.stop - part.start) * bytes_of_one <= max(CACHED_BYTES, bytes_of_one) for part in parts)


PNG = b"\x89PNG\r\n\x1a\n"


def files(count: int, size: int = 32) -> list[bytes]:
    """JPEG files of smooth pictures, each its own, of different lengths."""
    rng = np.random.default_rng(0)
    corners = rng.integers(0, 256, (count, 2, 2, 3)).astype(np.float32)
    pictures = torch.nn.functional.interpolate(
        torch.from_numpy(corners).permute(0, 3, 1, 2), size=size, mode="bilinear", align_corners=True
    )
    return [simplejpeg.encode_jpeg(one.permute(1, 2, 0).byte().contiguous().numpy(), quality=95) for one in pictures]


def decoded(device: str, given: list[bytes]) -> torch.Tensor:
    return decode_jpegs(*join_files([memoryview(file) for file in given]), torch.device(device))


def expected(given: list[bytes]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(simplejpeg.decode_jpeg(file)).permute(2, 0, 1) for file in given])


@pytest.mark.gpu
def test_a_gpu_decodes_nearly_the_same_pixels() -> None:
    given = files(64, size=256)
    images = decoded("cuda", given)
    assert images.device.type == "cuda"
    torch.testing.assert_close(images.cpu(), expected(given), rtol=0, atol=3)


def test_files_that_cannot_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = files(2)
    with pytest.raises(DataError, match=r"a batch of 2 images cannot be decoded on the GPU: .*data\.decode_on=cpu"):
        decoded("cpu", [good, bad[:3] + b"\x00" * 40])
    # A machine without a gpu is refused.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"data\.decode_on is cuda, but torch finds no GPU"):
        check_gpu_decoding(files(1)[0], on_device=True)
    # What a gpu cannot decode is refused.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_gpu_decoding(files(1)[0], on_device=True)
    with pytest.raises(SettingsError, match=r"decodes JPEG only.*data\.encoding=jpeg"):
        check_gpu_decoding(PNG, on_device=True)
    with pytest.raises(SettingsError, match=r"data\.views_on is cpu.*set data\.views_on=device"):
        check_gpu_decoding(files(1)[0], on_device=False)
