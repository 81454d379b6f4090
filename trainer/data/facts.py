"""What is known of each decoded image, in a file that is mapped into memory, and what is decided from it by DuckDB, out of core.

A set of images is an `ImageFacts`: the numbers of its rows and their splits, 9 bytes an image. It reads as a sequence of candidates.
`quarantine_and_drop` and `take_missing_splits` decide as their namesakes in `curation` do, row for row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.data.curation import Dropped, ImageCandidate, Quarantined, rooms
from trainer.data.dataset_schema import SPLITS, UNLABELED, SplitName
from trainer.io.errors import writing_to

if TYPE_CHECKING:
    import duckdb

_TYPES = {"name": pa.string(), "label": pa.int32(), "split": pa.int8(), "key": pa.string(), "appearance": pa.string()}
_SCHEMA = pa.schema(_TYPES | dict.fromkeys(("width", "height", "gray_peak"), pa.int32()))
_TOGETHER = 4096  # rows that are read at a time
MEMORY_MB, MEMORY_BYTES = (100, 1000), 64
"""Of DuckDB: least and most, and in between so much an image; what it does not hold goes to a folder beside the file."""
_KEPT_BEFORE = [("test", "val", "train", "unlabeled").index(split) for split in SPLITS]
"""Of equal pictures the one whose split has the smallest number is kept."""


class ImageFacts(Sequence[ImageCandidate]):
    """Some of the decoded images, in the order of their rows."""

    def __init__(self, table: pa.Table, rows: npt.NDArray[np.int64], splits: npt.NDArray[np.int8]) -> None:
        self.table, self.rows, self.splits = table, rows, splits

    @classmethod
    def read(cls, file: Path) -> ImageFacts:
        """Open all rows of a file that `FactsWriter` has written."""
        with pa.memory_map(str(file)) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        return cls(table, np.arange(len(table)), table["split"].to_numpy().astype(np.int8))

    def of(self, split: str) -> ImageFacts:
        """Return those of one split."""
        return self.where(self.splits == SPLITS.index(split))

    def where(self, chosen: npt.NDArray[np.bool_]) -> ImageFacts:
        """Return those that are chosen, [N]."""
        return ImageFacts(self.table, self.rows[chosen], self.splits[chosen])

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of numbers, [N]."""
        values: npt.NDArray[Any] = self.table[name].to_numpy()[self.rows]
        return values

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ImageCandidate]:
        start = 0
        # Batch by batch, since to take rows from a column of many chunks copies all of it.
        for batch in self.table.to_batches(max_chunksize=_TOGETHER):
            here = slice(*np.searchsorted(self.rows, (start, start + len(batch))))
            rows = self.rows[here]
            for row, split, values in zip(
                rows.tolist(), self.splits[here].tolist(), batch.take(rows - start).to_pylist(), strict=True
            ):
                yield ImageCandidate(**values | {"row": row, "split": SPLITS[split]})
            start += len(batch)

    @overload
    def __getitem__(self, place: int) -> ImageCandidate: ...
    @overload
    def __getitem__(self, place: slice) -> ImageFacts: ...
    def __getitem__(self, place: int | slice) -> ImageCandidate | ImageFacts:
        if isinstance(place, slice):
            return ImageFacts(self.table, self.rows[place], self.splits[place])
        row, split = int(self.rows[place]), SPLITS[self.splits[place]]
        (values,) = self.table.slice(row, 1).to_pylist()
        return ImageCandidate(**values | {"row": row, "split": split})


@contextmanager
def writing_facts(file: Path) -> Iterator[Any]:
    """Give a function that appends images to a new file."""
    with writing_to(file), pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:

        def append(images: Sequence[ImageCandidate]) -> None:
            rows = [
                {name: getattr(one, name) for name in _SCHEMA.names} | {"split": SPLITS.index(one.split)}
                for one in images
            ]
            writer.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA))

        yield append


def quarantine_and_drop(
    facts: ImageFacts, label_names: Sequence[str], folder: Path
) -> tuple[ImageFacts, list[Quarantined], list[Dropped]]:
    """Do what `curation.quarantine_contradictions` and then `drop_copies` do to all rows; `folder` is for what exceeds the memory."""
    with _connected(facts, folder) as connection:
        connection.execute(
            f"""CREATE TEMP TABLE keys AS SELECT key, count(*) AS copies, coalesce(min(label) FILTER (label <> {UNLABELED})
                <> max(label) FILTER (label <> {UNLABELED}), false) AS contradicts,
                min((({_case(_KEPT_BEFORE)})::BIGINT << 40) | row) & ((1::BIGINT << 40) - 1) AS kept FROM facts GROUP BY key"""
        )
        rows = connection.execute("SELECT kept FROM keys WHERE NOT contradicts ORDER BY kept").fetchnumpy()["kept"]
        copies = "FROM facts JOIN keys USING (key) WHERE copies > 1 AND"
        labeled: dict[str, list[str]] = {}
        bad = connection.execute(f"SELECT key, name, label {copies} contradicts ORDER BY row").fetchall()
        for key, name, label in bad:
            if label != UNLABELED:
                labeled.setdefault(key, []).append(f"{name} ({label_names[label]})")
        contradicting = [
            Quarantined(name=name, reason=f"contradicting labels of one picture: {', '.join(labeled[key])}")
            for key, name, _ in bad
        ]
        found = connection.execute(
            f"""SELECT copy.name, copy.split, first.name, first.split FROM (SELECT * {copies} NOT contradicts AND row <> kept) copy
                JOIN facts first ON first.row = copy.kept ORDER BY copy.row"""
        ).fetchall()
    dropped = [
        Dropped(name=name, split=SPLITS[split], kept_name=kept, kept_split=SPLITS[kept_split])
        for name, split, kept, kept_split in found
    ]
    rows = np.asarray(rows, dtype=np.int64)
    return ImageFacts(facts.table, rows, facts.splits[rows]), contradicting, dropped


def take_missing_splits(facts: ImageFacts, fractions: Mapping[SplitName, float], seed: int, folder: Path) -> ImageFacts:
    """Do what `curation.take_missing_splits` does where each image of train has one class and none belongs to a group."""
    train = SPLITS.index("train")
    taken = facts.where(facts.splits == train)
    counts = {
        int(label): int(count)
        for label, count in zip(*np.unique(taken.column("label"), return_counts=True), strict=True)
    }
    room = rooms(counts, fractions)
    with _connected(taken, folder) as connection:
        moved = connection.execute(
            f"""SELECT row, number <= test AS is_test FROM
                (SELECT row, label, row_number() OVER (PARTITION BY label ORDER BY
                    ('0x' || substr(sha256('{seed}:' || key), 1, 16))::UBIGINT >> 11, key) AS number FROM facts) placed
                JOIN (SELECT unnest($labels) AS label, unnest($test) AS test, unnest($val) AS val) USING (label)
                WHERE number <= test + val""",
            {"labels": [*counts], **{split: [room[split][label] for label in counts] for split in ("test", "val")}},
        ).fetchnumpy()
    splits = facts.splits.copy()
    places = np.searchsorted(facts.rows, moved["row"])
    splits[places] = np.where(moved["is_test"], SPLITS.index("test"), SPLITS.index("val"))
    return ImageFacts(facts.table, facts.rows, splits)


def _case(ranks: Sequence[int]) -> str:
    return "CASE split " + " ".join(f"WHEN {number} THEN {rank}" for number, rank in enumerate(ranks)) + " END"


@contextmanager
def _connected(facts: ImageFacts, folder: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database with the table `facts`: the columns by which is decided, and the row."""
    import duckdb

    least, most = MEMORY_MB
    memory = f"{min(max(least, len(facts) * MEMORY_BYTES // 10**6), most)}MB"
    with duckdb.connect(
        config={"memory_limit": memory, "temp_directory": str(folder / "duckdb"), "threads": 1}
    ) as connection:
        columns = facts.table.select(["name", "label", "split", "key"])
        chosen = pa.table({"row": facts.rows})
        if len(facts) == len(columns):
            columns = columns.append_column("row", chosen["row"])
            connection.register("facts", columns)
        else:
            numbered = columns.append_column("row", pa.array(np.arange(len(columns))))
            connection.register("numbered", numbered)
            connection.register("chosen", chosen)
            connection.execute("CREATE TEMP VIEW facts AS SELECT * FROM numbered SEMI JOIN chosen USING (row)")
        yield connection
