"""Files of a prepared data set; `preparation` writes them and `dataset` reads them.

The artifact holds one Arrow data set a split (`train/`, `val/`, `test/`, `unlabeled/`; columns: `features`), `dataset.json`
(`DatasetDescription`), `quarantine.json`, `dropped.json`, and the data card `card.html`; where classes have attributes or a hierarchy
`tags.json` (`ClassTags`), where splits look like one another `near_duplicates.json` (`near_duplicates.NearPair`), the sizes of the test
images' originals (`TEST_EDGES`), and the first test image as a file of its own (`EXAMPLES`), for a reader that needs an example and not
the split. A large split of images to learn from is fetched in parts (`split_rows`), and so has an index (`INDEXES`).

Imports nothing heavy, because every process that decodes images loads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, TypeAdapter

from trainer.data.sampler import HELD, WINDOW
from trainer.io import limits, storage
from trainer.io.base_models import NonNegative, what_is_wrong
from trainer.io.errors import ArtifactError, StorageError
from trainer.io.storage.transfers import FileRecord
from trainer.models.served_student.preprocessing import LARGEST_SQUARE

SplitName = Literal["train", "val", "test", "unlabeled"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)

DESCRIPTION = "dataset.json"
QUARANTINE = "quarantine.json"
DROPPED = "dropped.json"
NEAR_DUPLICATES = "near_duplicates.json"
CARD = "card.html"
TEST_EDGES = "test_edges.json"
"""The shorter edge of each test image's original, in pixels."""
EXAMPLES = ("example.jpg", "example.png")
"""The first test image as it is stored; one of the two names, after its format."""
INDEXES = "index"
"""Folder with the index of each large split of images to learn from, an Arrow file with the label and the first 8 bytes of the key of each
image, as numbers; the split's own files have so many rows each, the last one perhaps fewer, as its metadata says:"""
ROWS_IN_FILE = b"rows"

UNLABELED = -1  # the label of an image without one


def features() -> Any:
    """Return the `datasets.Features` of a split: encoded image, index of its class or set of classes, content key, name in the source.

    The content key is the SHA-256 of the decoded original, as hexadecimal text.
    """
    import datasets  # type: ignore[import-untyped]  # here, because it takes a second to import

    text, number = datasets.Value("string"), datasets.Value("int64")
    return datasets.Features({"image": datasets.Image(), "label": number, "key": text, "source": text})


def index_file(split: SplitName) -> str:
    """Name the index of a split."""
    return f"{INDEXES}/{split}.arrow"


def needed_bytes(files: Mapping[str, FileRecord], split: SplitName) -> int:
    """Return the bytes of a split, of files as in a manifest, for which a machine that trains on it needs room: of a large one, windows."""
    sizes = sorted(record["size"] for name, record in files.items() if name.startswith(f"{split}/"))
    if index_file(split) not in files:
        return sum(sizes)
    return files[index_file(split)]["size"] + sum(sizes[-HELD * WINDOW :])


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """The content of `dataset.json`."""

    classes: tuple[str, ...]  # name of each class, in the order of the labels
    image_size: Annotated[int, Field(ge=1, le=LARGEST_SQUARE)]  # edge of the stored images, in pixels
    images: Mapping[str, NonNegative]  # split -> number of its images
    raw: bool = False  # whether a stored image is its RGB pixels, row by row, and not a file
    label_sets: tuple[tuple[NonNegative, ...], ...] | None = None
    """Where an image may have several labels: the classes of each set of labels that occurs, in ascending order. An image's label is then
    the index of its set, so that shuffling, mixing and weighting treat it as any other label; None: it is the index of its class."""

    def __post_init__(self) -> None:
        """Check the sets, since the description may come from a file."""
        for members in self.label_sets or ():
            if list(members) != sorted(set(members)) or any(member >= len(self.classes) for member in members):
                raise ValueError(f"{members} is no set of {len(self.classes)} classes")

    def write(self, directory: Path) -> None:
        """Write `dataset.json` into an artifact in the making."""
        content = asdict(self)
        for name in ("label_sets", "raw"):
            if not content[name]:
                del content[name]
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (directory / DESCRIPTION).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> DatasetDescription:
        """Read `dataset.json`; an `ArtifactError` if it is not the description of a data set."""
        try:
            content = storage.read_bytes(directory / DESCRIPTION)
            return TypeAdapter(cls).validate_json(content, strict=True)
        except (StorageError, ValueError) as error:
            what = limits.cut(what_is_wrong(error), 500)
            raise ArtifactError(
                f"dataset {directory}: {DESCRIPTION} does not describe a data set ({what}); prepare it again"
            ) from error
