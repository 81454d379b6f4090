"""The handwritten digits that scikit-learn ships: a data set for trying everything without a download."""

from __future__ import annotations

import functools
import importlib.metadata
import io
from typing import Any

from PIL import Image

from trainer.data.sources.source import ImageSource, Item, SourceListing


class BundledDigits(ImageSource):
    """`digits`: 1,797 images of 8 x 8 pixels, without splits."""

    def listing(self) -> SourceListing:
        items = [
            Item(name=f"digit {index:04d}", location=str(index), label=int(target), split="train")
            for index, target in enumerate(_bundled_digits().target)
        ]
        return SourceListing(items=items, classes=tuple(str(digit) for digit in range(10)), read=_read_digit)

    def version(self) -> str:
        return f"scikit-learn {importlib.metadata.version('scikit-learn')}"


@functools.cache
def _bundled_digits() -> Any:
    from sklearn.datasets import load_digits  # here, because it takes a second to import

    return load_digits()


def _read_digit(location: str) -> bytes:
    """Encode a digit as a PNG file; its greys 0..16 are spread over 0..255."""
    greys = (_bundled_digits().images[int(location)] * (255 / 16)).round().astype("uint8")
    buffer = io.BytesIO()
    Image.fromarray(greys).save(buffer, "PNG")
    return buffer.getvalue()
