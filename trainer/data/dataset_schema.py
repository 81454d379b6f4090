"""Files of a prepared data set; `preparation` writes them and `dataset` reads them.

The artifact holds one Arrow data set a split (`train/`, `val/`, `test/`, `unlabeled/`; columns: `features`), `dataset.json`
(`DatasetDescription`), `quarantine.json`, `dropped.json`, and the data card `card.html`; where classes have attributes or a hierarchy
`tags.json` (`ClassTags`), and where splits look like one another `near_duplicates.json` (`near_duplicates.NearPair`). Imports nothing
heavy, because every process that decodes images loads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trainer import limits, storage
from trainer.errors import ArtifactError, StorageError
from trainer.served_student.preprocessing import LARGEST_SQUARE

SplitName = Literal["train", "val", "test", "unlabeled"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)

DESCRIPTION = "dataset.json"
QUARANTINE = "quarantine.json"
DROPPED = "dropped.json"
NEAR_DUPLICATES = "near_duplicates.json"
CARD = "card.html"

UNLABELED = -1
"""The label of an image without one."""


def features() -> Any:
    """Return the `datasets.Features` of a split: encoded image, index of its class, content key, its name in the source.

    The content key is the SHA-256 of the decoded original, as hexadecimal text.
    """
    import datasets  # type: ignore[import-untyped]  # here, because it takes a second to import

    text, number = datasets.Value("string"), datasets.Value("int64")
    return datasets.Features({"image": datasets.Image(), "label": number, "key": text, "source": text})


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """The content of `dataset.json`."""

    classes: tuple[str, ...]
    """Name of each class, in the order of the labels."""
    image_size: int
    """Edge of the stored images, in pixels."""
    images: Mapping[str, int]
    """Split -> number of its images."""

    def write(self, directory: Path) -> None:
        """Write `dataset.json` into an artifact in the making."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (directory / DESCRIPTION).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> DatasetDescription:
        """Read `dataset.json`.

        Raises:
            ArtifactError: it is not the description of a data set.
        """
        try:
            content = limits.parse_json(storage.read_limited(directory / DESCRIPTION, limits.JSON_BYTES))
            found = cls(
                classes=tuple(content["classes"]), image_size=content["image_size"], images=dict(content["images"])
            )
            counts = [*found.images.values(), found.image_size]
            if not (
                all(isinstance(name, str) for name in (*found.classes, *found.images))
                and all(type(count) is int and count >= 0 for count in counts)
                and 0 < found.image_size <= LARGEST_SQUARE
            ):
                raise ValueError("a member is not what it should be")
        except (StorageError, ValueError, TypeError, KeyError) as error:
            raise ArtifactError(
                f"dataset {directory}: {DESCRIPTION} does not describe a data set ({error!r}); prepare it again"
            ) from error
        return found
