"""A batch in parts that a CPU's cache holds."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

CACHED_BYTES = 2**20
"""Size of a part's pixels in float32. A step over a whole batch goes through memory, which makes it several times slower."""


def chunks(views: Tensor) -> Iterator[slice]:
    """Rows of `views` [B, 3, V, V] to work on together: a few on the CPU, all of them on another device."""
    count = len(views)
    together = max(1, CACHED_BYTES // (4 * 3 * views.shape[-1] ** 2) if views.device.type == "cpu" else count)
    for start in range(0, count, together):
        yield slice(start, min(start + together, count))
