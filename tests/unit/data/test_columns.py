"""A listing in columns reads as the list that it was made of."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from trainer.data.sources import Columns, Item
from trainer.data.sources.folder_files import SourceFile

BASE = "s3://bucket/photos/"
ITEMS = [
    Item(name="b/2.jpg", location=f"{BASE}b/2.jpg", label=1, split="train", state='12 "ab"'),
    Item(name="/elsewhere/é.jpg", location="/elsewhere/é.jpg", label=0, split="val"),
    Item(name="a/\\x1b.jpg", location=f"{BASE}a/\x1b.jpg", label=-1, split="unlabeled", state="x"),
    Item(name="a/caf\ufffd.jpg", location="/photos/a/caf\udce9.jpg", label=2, split="test"),
    Item(name="b/2.jpg", location="/other/b/2.jpg", label=2**31 - 1, split="train"),
]


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    columns = Columns.of(Item, iter(ITEMS), BASE)
    for read in (columns, columns.mapped(tmp_path / "listing.arrow"), pickle.loads(pickle.dumps(columns))):
        assert [*read] == ITEMS
        assert read[3] == ITEMS[3]
        assert read[-1] == ITEMS[-1]
        assert [*read[1:4]] == ITEMS[1:4]
        assert [*read[4:2]] == []
    assert isinstance(pickle.loads(pickle.dumps(columns[1:3])), list)
    with pytest.raises(IndexError):
        columns[len(ITEMS)]


def test_derived_locations_take_no_memory() -> None:
    columns = Columns.of(
        SourceFile, (SourceFile(f"{number:03}.jpg", f"/photos/{number:03}.jpg") for number in range(999)), "/photos/"
    )
    assert columns.table.nbytes <= 1000 * (len("000.jpg") + 8)
    assert columns[500].location == "/photos/500.jpg"


def test_rows_of_equal_names_stay_in_order() -> None:
    names = ["b", "ä", "a", "\U0001f34e", "b", "\uffff", "Z", ""]
    rows = [SourceFile(name, f"/{number}", str(number)) for number, name in enumerate(names)]
    assert [*Columns.of(SourceFile, rows).in_order()] == sorted(rows, key=lambda row: row.name)


def test_columns_are_replaced_and_rows_chosen() -> None:
    columns = Columns.of(Item, ITEMS, BASE)
    changed = columns.with_columns(Item, label=np.arange(5), split=np.full(5, 2))
    assert [(one.label, one.split) for one in changed] == [(number, "test") for number in range(5)]
    chosen = changed.where(np.array([True, False, False, True, False]))
    assert [(one.name, one.label) for one in chosen] == [(ITEMS[0].name, 0), (ITEMS[3].name, 3)]
    assert chosen.column("label").tolist() == [0, 3]


def test_order_by_hash_depends_on_names_only(tmp_path: Path) -> None:
    rows = [SourceFile(f"a/{number:05}.jpg", f"/{number}", str(number)) for number in range(9000)]
    columns = Columns.of(SourceFile, rows)
    mixed = columns.mapped(tmp_path / "mixed.arrow", columns.hash_order())
    backwards = Columns.of(SourceFile, rows[::-1])
    assert [*backwards.mapped(tmp_path / "backwards.arrow", backwards.hash_order())] == [*mixed]
    assert sorted(mixed, key=lambda row: row.name) == rows
    numbers = np.array([int(row.state) for row in mixed])
    assert abs(np.corrcoef(numbers, np.arange(9000))[0, 1]) < 0.05


def test_nothing_is_listed() -> None:
    empty = Columns.of(Item, ())
    assert not empty
    assert [*empty] == empty.column("label").tolist() == []
