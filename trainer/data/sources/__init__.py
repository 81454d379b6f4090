"""Sources of images: `data.source` becomes a list of items in a fixed order, whose bytes are read one by one.

    digits                    the 1,797 handwritten digits that scikit-learn ships, 8 x 8 pixels
    imagefolder:PATH_OR_URI   a folder per class, also nested, with or without train/, val/, test/ above; unlabeled/ has no classes
    manifest:FILE.csv         columns path, label, split (`table_file`); relative paths start at the file's folder; no label: unlabeled;
    manifest:FILE.parquet     the same columns (`parquet_table`);
                              with `data.multi_label` several labels, separated by |
    tar:FOLDER_OR_URI         the tar files of WebDataset in a folder (`tar_files`)
    hub:NAME[:CONFIG]         a data set of the Hugging Face Hub, or a local folder of one

Local paths and every scheme that `storage` knows (`s3://...`) are read alike. Sources may come from strangers: links and lines that lead
out of a source are refused unless `data.outside` says otherwise, names are made printable, and there are limits (`limits`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import io
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from PIL import Image

from trainer.config import Outside
from trainer.data.dataset_schema import UNLABELED
from trainer.data.sources.columns import Columns
from trainer.data.sources.hub_dataset import HubDataset
from trainer.data.sources.image_folder import ImageFolder
from trainer.data.sources.image_manifest import ImageManifest
from trainer.data.sources.source import ImageSource, Item, SourceListing, SourceState, UnknownVersionError, read_file
from trainer.data.sources.tar_files import TarFiles
from trainer.io import limits
from trainer.io.errors import DataError, SettingsError
from trainer.io.formatting import listed
from trainer.io.local_files import with_home
from trainer.models.served_student.class_tags import NAMED

__all__ = [
    "Columns",
    "ImageSource",
    "Item",
    "SourceListing",
    "SourceState",
    "list_source",
    "read_file",
    "source_state",
    "source_version",
]

logger = logging.getLogger(__name__)


class BundledDigits(ImageSource):
    """`digits`, which scikit-learn ships, for trying everything without a download: 1,797 images of 8 x 8 pixels, without splits."""

    def listing(self) -> SourceListing:
        items = [
            Item(name=f"digit {index:04d}", location=str(index), label=int(target), split="train")
            for index, target in enumerate(_bundled_digits().target)
        ]
        classes = tuple(str(digit) for digit in range(10))
        return SourceListing(items=Columns.of(Item, items), classes=classes, read=_read_digit)

    def state(self) -> SourceState:
        return SourceState(f"scikit-learn {importlib.metadata.version('scikit-learn')}")


@functools.cache
def _bundled_digits() -> Any:
    from sklearn.datasets import load_digits  # here, because it takes a second to import

    return load_digits()


def _read_digit(location: str) -> bytes:
    """Encode a digit as a PNG file; its grays 0..16 are spread over 0..255."""
    grays = (_bundled_digits().images[int(location)] * (255 / 16)).round().astype("uint8")
    buffer = io.BytesIO()
    Image.fromarray(grays).save(buffer, "PNG")
    return buffer.getvalue()


_SOURCES: Mapping[str, type[ImageSource]] = {
    "digits": BundledDigits,
    "imagefolder": ImageFolder,
    "manifest": ImageManifest,
    "tar": TarFiles,
    "hub": HubDataset,
}


def list_source(source: str, *, outside: Outside = "refuse", multi_label: bool = False) -> SourceListing:
    """List the images of `data.source` without reading them; `outside` and `multi_label` are settings.

    Raises:
        SettingsError: the setting names no source.
        DataError: the source is missing, has no images or labels, leads out of itself, or exceeds a limit.
    """
    listing = _open(source, outside, multi_label=multi_label).listing()
    longest = max(listing.classes, key=len, default="")
    if len(longest) > limits.NAME_CHARACTERS:
        raise DataError(
            f"data.source={source}: the name of a class has {len(longest):,} characters, more than {limits.NAME_CHARACTERS}: "
            f"{longest[:40]!r}...; shorten it"
        )
    if not listing.items:
        raise DataError(f"data.source={source}: holds no images; check the path")
    if multi_label and not listing.classes:
        raise DataError(f"data.source={source}: no image is of any class; add labels")
    if multi_label and NAMED in listing.classes:
        raise DataError(
            f"data.source={source}: a class is called {NAMED!r}, as the column of a prediction is; rename it"
        )
    if all(item.label == UNLABELED for item in listing.items):
        raise DataError(
            f"data.source={source}: none of its {len(listing.items)} images has a label; put them into a folder per class, or add labels"
        )
    if alike := [" and ".join(map(repr, names)) for names in limits.look_alikes(listing.classes)]:
        remark = f"Names of classes that read alike: {listed(alike, 5)}. Each is a class of its own; give those one name that are one."
        listing = replace(listing, notes=(*listing.notes, remark), remarks=(*listing.remarks, remark))
    return listing


def source_version(source: str, *, outside: Outside = "refuse") -> str:
    """Return the version in `source_state`."""
    return source_state(source, outside=outside).version


def source_state(source: str, *, outside: Outside = "refuse") -> SourceState:
    """Return what `data.source` holds now, without reading the images; its version is empty if unknown, which is logged.

    Local files are compared by name, size, mtime and ctime, objects of a store by key, size and ETag, a data set of the Hub by its commit.

    Raises:
        SettingsError: the setting names no source.
        DataError: the source is missing or exceeds a limit; a manifest has an unusable line.
    """
    try:
        return _open(source, outside).state()
    except UnknownVersionError as error:
        logger.warning(
            "data.source=%s: no run can know whether its images have changed (%s), so each run prepares them anew",
            source,
            error,
        )
        return SourceState("")


def _open(source: str, outside: Outside, *, multi_label: bool = False) -> ImageSource:
    kind, colon, name = source.partition(":")
    if kind not in _SOURCES or bool(name) == (kind == "digits") or (colon and not name):
        raise SettingsError(
            "data.source must be digits, imagefolder:PATH_OR_URI, manifest:FILE.csv (or .parquet), tar:FOLDER_OR_URI or "
            f"hub:NAME[:CONFIG], got {source!r}"
        )
    return _SOURCES[kind](with_home(name), outside, multi_label=multi_label)
