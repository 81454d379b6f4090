"""A list of images in a Parquet file reads as the same list in a CSV file, and a file from elsewhere takes no more than it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.data.sources import list_source, parquet_table, source_version
from trainer.io import limits
from trainer.io.errors import DataError

COLUMNS: Mapping[str, Sequence[Any]] = {
    "path": [" 1.jpg", "b/ä.jpg", "3.jpg", "4.jpg"],
    "label": ["Tea", "Milk ", None, "Tea"],
    "split": ["train", "VALID", "", None],
}


def written(file: Path, columns: Mapping[str, Any] = COLUMNS, **options: Any) -> str:
    pq.write_table(pa.table(dict(columns)), file, **options)
    return f"manifest:{file}"


@pytest.mark.parametrize("together", [1, 4096])
def test_it_reads_as_a_csv_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(parquet_table, "_TOGETHER", together)
    lines = "path,label,split\n1.jpg,Tea,train\nb/ä.jpg,Milk,VALID\n3.jpg,,\n4.jpg,Tea,\n"
    (tmp_path / "list.csv").write_text(lines, encoding="utf-8")
    expected = list_source(f"manifest:{tmp_path}/list.csv")
    others = {"embedding": [np.zeros(3)] * 4, "id": [1, 2, 3, 4]}
    for name, options in (("list.parquet", {}), ("LIST.PQ", {"row_group_size": 2, "compression": "zstd"})):
        found = list_source(written(tmp_path / name, {**COLUMNS, **others}, **options))
        assert [*found.items] == [*expected.items]
        assert found.classes == ("Milk", "Tea")
        assert found.notes[0] == "Columns of the list that are not used: 'embedding', 'id'."
    views = {name: pa.array(values, type=pa.string_view()) for name, values in COLUMNS.items()}
    assert [*list_source(written(tmp_path / "views.parquet", views)).items] == [*expected.items]
    nothing = {**COLUMNS, "split": [None] * 4}
    (tmp_path / "nothing.csv").write_text(lines.replace("train", "").replace("VALID", ""), encoding="utf-8")
    empty = list_source(f"manifest:{tmp_path}/nothing.csv")
    assert [*list_source(written(tmp_path / "nothing.parquet", nothing)).items] == [*empty.items]
    dictionary = {name: pa.array(values).dictionary_encode() for name, values in COLUMNS.items()}
    assert [*list_source(written(tmp_path / "coded.parquet", dictionary)).items] == [*expected.items]


def test_labels_may_be_whole_numbers_and_several(tmp_path: Path) -> None:
    numbers = {"path": ["1.jpg", "2.jpg"], "label": [7, 10]}
    assert list_source(written(tmp_path / "list.parquet", numbers)).classes == ("10", "7")
    several = {"path": ["1.jpg", "2.jpg"], "label": ["a|b", "|"]}
    listing = list_source(written(tmp_path / "several.parquet", several), multi_label=True)
    assert listing.label_sets == ((), (0, 1))


def test_its_version_changes_with_it(tmp_path: Path) -> None:
    source = written(tmp_path / "list.parquet")
    version = source_version(source)
    assert source_version(source) == version
    written(tmp_path / "list.parquet", {**COLUMNS, "label": ["Tea", "Milk", None, "Milk"]})
    assert source_version(source) != version


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"file": ["1"], "label": ["x"]}, r"has no column path; its columns must be path,label,split, but is 'file,label'.*to path"),
        ({**COLUMNS, "label": [0.5] * 4}, r"the column 'label' has values of type double; write text in it, with \| between"),
        ({**COLUMNS, "label": [["a"]] * 4}, r"the column 'label' has values of type list<.*>; write text in it"),
        ({**COLUMNS, "path": [b"x"] * 4}, r"the column 'path' has values of type binary; write text in it"),
        ({**COLUMNS, "Path": ["x"] * 4}, r"two columns are named 'path' and 'Path'; rename or remove"),
        ({**COLUMNS, "path": ["1.jpg", None, "", ""]}, r"row 2: needs a path, a label and a split"),
        ({**COLUMNS, "path": ["1.jpg", "2.jpg", "../x.jpg", ""]}, r"row 3: '\.\./x\.jpg' lies outside"),
        ({**COLUMNS, "split": ["train", "hold", "", ""]}, r"row 2: the split 'hold' is not known"),
        ({**COLUMNS, "label": ["a", "b\u200b", None, "a"]}, r"row 2: the name of a class has the character U\+200B"),
        ({**COLUMNS, "path": ["1.jpg", "x" * 200_000, "", ""]}, r"column 'path' has a value of 200,000 bytes, more than 131,072"),
    ],
)  # fmt: skip
def test_lists_that_cannot_be_used(tmp_path: Path, columns: Mapping[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        list_source(written(tmp_path / "list.parquet", columns))


def test_damaged_files(tmp_path: Path) -> None:
    source = written(
        tmp_path / "list.parquet", {**COLUMNS, "path": [f"{one}" * 99 for one in "abcd"]}, compression="none"
    )
    content = (tmp_path / "list.parquet").read_bytes()
    for damaged in (b"", b"PAR1", content[:-9], b"path,label\n1,x\n"):
        (tmp_path / "list.parquet").write_bytes(damaged)
        with pytest.raises(DataError, match=r"list\.parquet: is no whole Parquet file \(.*\); write or copy it again"):
            list_source(source)
    (tmp_path / "list.parquet").write_bytes(content[:4] + b"\xff" * 60 + content[64:])
    with pytest.raises(DataError, match=r"list\.parquet, row 1: cannot be read \(.*\); write the file again"):
        list_source(source)
    (tmp_path / "list.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"is a Parquet file, not text; name it FILE\.parquet"):
        list_source(f"manifest:{tmp_path}/list.csv")
    with pytest.raises(DataError, match=r"none\.parquet: does not exist; check the path"):
        list_source(f"manifest:{tmp_path}/none.parquet")


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million equal values take a hundred bytes in the file."""
    many = {"path": pa.array(["x" * 1000]).take(pa.array([0] * 10**5)), "label": ["a"] * 10**5}
    source = written(tmp_path / "list.parquet", many, use_dictionary=False, compression="zstd")
    assert (tmp_path / "list.parquet").stat().st_size < 10**6
    monkeypatch.setattr(parquet_table, "_GROUP_BYTES", 10**7)
    with pytest.raises(
        DataError,
        match=r"has a row group of 1\d\d,\d\d\d,\d\d\d bytes, more than 10,000,000; write it with",
    ):
        list_source(source)
    monkeypatch.setattr(limits, "CSV_BYTES", 1000)
    with pytest.raises(DataError, match="has more than 1,000 bytes"):
        list_source(source)
