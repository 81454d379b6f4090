import pytest
import torch

from trainer.data.batch import CACHED_BYTES, cache_sized_slices


@pytest.mark.parametrize(("count", "size"), [(0, 32), (1, 32), (200, 32), (170, 64), (5, 224), (3, 1024)])
def test_slices_are_all_rows_in_order_and_fit_the_cache(count, size):
    parts = list(cache_sized_slices(torch.empty(count, 3, size, size, dtype=torch.uint8)))
    assert [row for part in parts for row in range(count)[part]] == list(range(count))
    assert all(part.stop <= count for part in parts)
    bytes_of_one = 4 * 3 * size**2
    assert all((part.stop - part.start) * bytes_of_one <= max(CACHED_BYTES, bytes_of_one) for part in parts)


def test_another_device_takes_all_rows_at_once():
    assert list(cache_sized_slices(torch.empty(5, 3, 1024, 1024, device="meta"))) == [slice(0, 5)]
    assert list(cache_sized_slices(torch.empty(0, 3, 8, 8, device="meta"))) == []
