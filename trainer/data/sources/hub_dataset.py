"""Data sets of the Hugging Face Hub, or local folders of one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainer.data.dataset_schema import UNLABELED, SplitName
from trainer.data.sources.columns import Columns
from trainer.data.sources.image_folder import ImageFolder
from trainer.data.sources.source import (
    ImageSource,
    Item,
    SourceListing,
    SourceState,
    UnknownVersionError,
    read_file,
    split_of,
)
from trainer.io import hub, limits, storage
from trainer.io.errors import DataError
from trainer.io.formatting import listed


class HubDataset(ImageSource):
    """`hub:NAME[:CONFIG]`: a data set that the package `datasets` loads, with one column of images and one of labels."""

    def listing(self) -> SourceListing:
        import datasets  # type: ignore[import-untyped]  # here, because it takes a second to import

        tables = self._tables()
        used = {name: split for name in tables if (split := split_of(name)) is not None}
        first = next((name for name, split in used.items() if split != "unlabeled"), next(iter(tables), ""))
        columns = tables[first].features if tables else {}
        image_column = self._one_column(columns, datasets.Image, "image")
        kinds, usual, of = columns, "label", ""
        if self.multi_label:
            kinds = {name: one.feature for name, one in columns.items() if isinstance(one, datasets.List)}
            usual, of = "labels", "lists of "
        label_column = self._one_column(kinds, datasets.ClassLabel, usual, of=of)
        classes = self._classes(kinds[label_column].names)
        members: dict[str, list[tuple[int, ...] | None]] = {}
        for name, split in used.items():
            table, has_labels = tables[name], split != "unlabeled"
            is_other = has_labels and table.features.get(label_column) != columns[label_column]
            if is_other or not isinstance(table.features.get(image_column), datasets.Image):
                raise DataError(
                    f"hub data set {self.name}: split {name} has other columns or classes than split {first}; give all splits the "
                    "same columns, with the same classes in the same order, save the data set, and give that folder"
                )
            members[name] = (
                self._members(name, table[label_column][:], len(classes)) if has_labels else [None] * len(table)
            )
        every = (one for of_split in members.values() for one in of_split if one is not None)
        numbers = self.number_labels(every, len(classes), f"hub data set {self.name}")
        columns_of = {name: tables[name].select_columns([image_column]) for name in used}
        if not used:
            raise DataError(
                f"hub data set {self.name}: has the splits {listed([*tables], 5)}, but train, val, test and unlabeled are read; rename "
                "them, save the data set, and give that folder"
            )
        raw = {
            name: table.cast_column(image_column, datasets.Image(decode=False)) for name, table in columns_of.items()
        }
        notes = tuple(
            f"Split {name} ({len(table)} images) is none of train, val, test and unlabeled, and was not used."
            for name, table in tables.items()
            if name not in used
        )
        return SourceListing(
            items=Columns.of(
                Item,
                (item for name, split in used.items() for item in self._items(name, split, members[name], numbers)),
            ),
            classes=classes,
            label_sets=(*numbers,) if self.multi_label else None,
            read=partial(_read_row, tables=raw, column=image_column, folders=self._folders()),
            notes=notes,
            remarks=notes,
        )

    def _classes(self, given: Sequence[str]) -> tuple[str, ...]:
        try:
            classes = tuple(map(limits.class_name, given))
        except ValueError as error:
            raise DataError(f"hub data set {self.name}: {error} in the label column's names") from error
        first: dict[str, str] = {}
        for name, text in zip(classes, given, strict=True):
            if first.setdefault(name, text) != text:
                raise DataError(
                    f"hub data set {self.name}: the classes {first[name]!a} and {text!a} read the same; give them one label, "
                    "or different names, save the data set, and give that folder"
                )
        return classes

    def _members(self, name: str, labels: Iterable[Any], classes: int) -> list[tuple[int, ...] | None]:
        """Return the classes of each image of a split, None where they are not known."""
        members: list[tuple[int, ...] | None] = []
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # so that images of equal labels share a tuple
        for given in labels:
            one = given if self.multi_label else [given]
            if one is None or any(label is None or label < 0 for label in one):
                members.append(None)
                continue
            if max(one, default=0) >= classes:
                raise DataError(
                    f"hub data set {self.name}: image {len(members)} of split {name} has the label {max(one)}, but there are {classes} "
                    "classes; mend its label"
                )
            found = tuple(sorted({*one}))
            members.append(known.setdefault(found, found))
        return members

    def state(self) -> SourceState:
        name = self.name.partition(":")[0]
        if Path(name).is_dir():
            return ImageFolder(name, self.outside).state()
        revision = hub.dataset_revision(name)
        if revision is None:
            raise UnknownVersionError("neither the Hub nor this machine's cache gives its revision")
        return SourceState(revision)

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

    def _items(
        self,
        name: str,
        split: SplitName,
        members: Sequence[tuple[int, ...] | None],
        numbers: Mapping[tuple[int, ...], int],
    ) -> Iterator[Item]:
        """List a split; one without any label (as some tests are published) serves as unlabeled images."""
        without = members.count(None)
        if 0 < without < len(members) and split in ("val", "test"):
            raise DataError(
                f"hub data set {self.name}: {without} images of split {name} have no label; remove them from it"
            )
        for index, classes in enumerate(members):
            row = f"{name}/{index:07d}"
            label = UNLABELED if classes is None else numbers[classes]
            yield Item(name=row, location=row, label=label, split="unlabeled" if classes is None else split)

    def _folders(self) -> tuple[str, ...]:
        """Return where named images may lie: the data set's own folder, or the caches for what comes from the Hub."""
        import datasets

        if self.outside == "read":
            return ()
        name = self.name.partition(":")[0]
        folders = [name] if Path(name).is_dir() else [datasets.config.HF_DATASETS_CACHE, datasets.config.HF_CACHE_HOME]
        return tuple(os.path.realpath(folder) for folder in folders)


def _read_row(location: str, *, tables: Mapping[str, Any], column: str, folders: tuple[str, ...]) -> bytes:
    """Read the image file of a row, from any of `folders` where the table only names it; tables are memory-mapped, so copies are cheap."""
    split, _, index = location.rpartition("/")
    image = tables[split][int(index)][column] or {}
    encoded: bytes | None = image.get("bytes")
    path = image.get("path")
    if encoded is not None or path is None:
        return encoded or b""
    real = "" if storage.is_remote(path) else os.path.realpath(path)
    if folders and not any(real.startswith(f"{folder}/") for folder in folders):
        raise PermissionError(errno.EPERM, f"lies outside of {' and '.join(folders)} (data.outside)", path)
    return read_file(path)
