"""A prepared data set that someone has made who wants to be believed: manifest and checksums fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.hostile.targets import _find, _make_dataset, sign
from trainer.data.dataset import open_dataset
from trainer.io.errors import ArtifactError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A data set of two classes."""
    _make_dataset(tmp_path)
    return tmp_path


def rewrite(directory: Path, **columns: list[Any]) -> None:
    """Put other columns into the training split, and sign it."""
    file = _find(directory, "train/*.arrow")
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        table = reader.read_all()
    for name, values in columns.items():
        index = table.column_names.index(name)
        table = table.set_column(index, table.schema.field(index), [pa.array(values, table.schema.field(index).type)])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    sign(directory, "dataset")


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"label": [0, 2]}, r"has the labels 0 to 2, but dataset.json names 2 classes"),
        ({"label": [-2, 0]}, r"has the labels -2 to 0"),
        ({"label": [0, None]}, r"cannot be opened \(a row lacks its image, label or key\)"),
        ({"key": ["1" * 64, None]}, r"a row lacks its image, label or key"),
        ({"key": ["1" * 64, "no key"]}, r"cannot be opened \(invalid literal"),
        ({"image": [None, None]}, r"a row lacks its image, label or key"),
        ({"image": [{"bytes": None, "path": "/etc/passwd"}] * 2}, r"cannot be opened \(a row lacks its image\)"),
    ],
)
def test_rows_that_cannot_be_are_refused(directory: Path, columns: dict[str, list[Any]], reason: str) -> None:
    rewrite(directory, **columns)
    with pytest.raises(ArtifactError, match=reason):
        open_dataset(directory).split("train")


def test_offsets_that_lead_out_of_the_file_are_refused(directory: Path) -> None:
    file = _find(directory, "train/*.arrow")
    content = bytearray(file.read_bytes())
    lengths = (64).to_bytes(4, "little") + (128).to_bytes(4, "little")  # the offsets of the two keys' ends
    place = content.index(lengths)
    content[place : place + 8] = (64).to_bytes(4, "little") + (2**30).to_bytes(4, "little")
    file.write_bytes(content)
    sign(directory, "dataset")
    with pytest.raises(ArtifactError, match="split train cannot be opened"):
        open_dataset(directory).split("train")


@pytest.mark.parametrize(
    "changes",
    [
        {"image_size": 0},
        {"image_size": 10**6},
        {"image_size": "16"},
        {"classes": [1, 2]},
        {"images": {"train": -1}},
        {"images": 3},
    ],
)
def test_a_description_that_cannot_be_is_refused(directory: Path, changes: dict[str, Any]) -> None:
    file = directory / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    sign(directory, "dataset")
    with pytest.raises(ArtifactError, match=r"dataset.json does not describe a data set") as caught:
        open_dataset(directory)
    assert "\n" not in str(caught.value)
