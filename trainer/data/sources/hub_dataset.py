"""Data sets of the Hugging Face Hub, or local folders of one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainer import hub, limits, storage
from trainer.data.dataset_schema import UNLABELED, SplitName
from trainer.data.sources.image_folder import ImageFolder
from trainer.data.sources.source import (
    SPLIT_NAMES,
    ImageSource,
    Item,
    SourceListing,
    UnknownVersionError,
    number_sets,
    read_file,
)
from trainer.errors import DataError


class HubDataset(ImageSource):
    """`hub:NAME[:CONFIG]`: a data set that the package `datasets` loads, with one column of images and one of labels."""

    def listing(self) -> SourceListing:
        import datasets  # type: ignore[import-untyped]  # here, because it takes a second to import

        tables = self._tables()
        columns = next(iter(tables.values())).features
        image_column = self._one_column(columns, datasets.Image, "image")
        if self.multi_label:
            lists = {name: one.feature for name, one in columns.items() if isinstance(one, datasets.List)}
            label_column = self._one_column(lists, datasets.ClassLabel, "labels", of="lists of ")
            kind = lists[label_column]
        else:
            label_column = self._one_column(columns, datasets.ClassLabel, "label")
            kind = columns[label_column]
        classes = tuple(map(limits.printable_name, kind.names))
        labels: dict[str, Sequence[Any]] = {}  # split of the data set -> label of each image
        notes: list[str] = []
        for name, table in tables.items():
            if name.lower() not in SPLIT_NAMES:
                notes.append(
                    f"Split {name} ({len(table)} images) is none of train, val, test and unlabeled, and was not used."
                )
            else:
                labels[name] = table[label_column][:]
        sets = self._number_sets(labels, len(classes)) if self.multi_label else None
        items = [
            item for name, of_split in labels.items() for item in self._items(name, SPLIT_NAMES[name.lower()], of_split)
        ]
        raw = {name: table.cast_column(image_column, datasets.Image(decode=False)) for name, table in tables.items()}
        columns_of = {name: table.select_columns([image_column]) for name, table in raw.items()}
        read = partial(_read_row, tables=columns_of, column=image_column, folders=self._folders())
        return SourceListing(
            items=items,
            classes=classes,
            label_sets=None if sets is None else (*sets,),
            read=read,
            notes=tuple(notes),
        )

    def _number_sets(self, labels: dict[str, Sequence[Any]], classes: int) -> dict[tuple[int, ...], int]:
        """Number the sets of classes that images have, and put these numbers in the place of the lists, in each split."""
        for name, of_split in labels.items():
            labels[name] = [
                None if one is None or min(one, default=0) < 0 else tuple(sorted({*one})) for one in of_split
            ]
        every = (one for of_split in labels.values() for one in of_split if one is not None)
        sets = number_sets(every, classes, f"hub data set {self.name}")
        for name, of_split in labels.items():
            labels[name] = [None if one is None else sets[one] for one in of_split]
        return sets

    def version(self) -> str:
        name = self.name.partition(":")[0]
        if Path(name).is_dir():
            return ImageFolder(name, self.outside).version()
        revision = hub.dataset_revision(name)
        if revision is None:
            raise UnknownVersionError("neither the Hub nor this machine's cache gives its revision")
        return revision

    def _tables(self) -> dict[str, Any]:
        """Load the table of each split, from the Hub or a local folder (saved by `save_to_disk`, or files that `load_dataset` takes)."""
        import datasets

        name, _, config = self.name.partition(":")
        saved = any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))
        try:
            loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config or None)
        except Exception as error:  # the Hub's client and its file readers raise many kinds
            raise DataError(
                f"hub data set {self.name}: cannot be loaded ({error}); check its name and configuration, the network, and HF_TOKEN"
            ) from error
        return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}

    def _one_column(self, columns: Mapping[str, Any], kind: type, usual: str, *, of: str = "") -> str:
        found = [name for name, value in columns.items() if isinstance(value, kind)]
        if len(found) == 1 or usual in found:
            return usual if usual in found else found[0]
        raise DataError(
            f"hub data set {self.name}: needs one column of kind {of}{kind.__name__}, or one of them named {usual}, but has "
            f"{', '.join(found) or 'none'}; rename or cast the columns, save the data set, and give that folder"
        )

    def _items(self, name: str, split: SplitName, labels: Iterable[int | None]) -> list[Item]:
        """List a split; one without any label (as some tests are published) serves as unlabelled images."""
        known = [UNLABELED if label is None or label < 0 else label for label in labels]
        without = known.count(UNLABELED)
        if 0 < without < len(known) and split in ("val", "test"):
            raise DataError(
                f"hub data set {self.name}: {without} images of split {name} have no label; remove them from it"
            )
        return [
            Item(
                name=f"{name}/{index:07d}",
                location=f"{name}/{index}",
                label=UNLABELED if split == "unlabeled" else label,
                split="unlabeled" if label == UNLABELED else split,
            )
            for index, label in enumerate(known)
        ]

    def _folders(self) -> tuple[str, ...]:
        """Return where named images may lie: the data set's own folder, or the caches for what comes from the Hub."""
        import datasets

        if self.outside == "read":
            return ()
        name = self.name.partition(":")[0]
        folders = [name] if Path(name).is_dir() else [datasets.config.HF_DATASETS_CACHE, datasets.config.HF_CACHE_HOME]
        return tuple(os.path.realpath(folder) for folder in folders)


def _read_row(location: str, *, tables: Mapping[str, Any], column: str, folders: tuple[str, ...]) -> bytes:
    """Read the image file of a row; the tables are memory-mapped, so their copy in another process is cheap.

    Args:
        folders: where images may lie that the tables only name; anywhere if empty.
    """
    split, _, index = location.rpartition("/")
    image = tables[split][int(index)][column]
    if image is None:
        return b""
    if image["bytes"] is not None:
        encoded: bytes = image["bytes"]
        return encoded
    path = image["path"]
    real = "" if storage.is_remote(path) else os.path.realpath(path)
    if folders and not any(real.startswith(f"{folder}/") for folder in folders):
        raise PermissionError(errno.EPERM, f"lies outside of {' and '.join(folders)} (data.outside)", path)
    return read_file(path)
