"""Images in a folder per class."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from trainer.data.dataset_schema import SPLITS, UNLABELED, SplitName
from trainer.data.sources.folder_files import FolderFiles, list_files, of_systems, too_many_files
from trainer.data.sources.source import (
    ImageSource,
    Item,
    SourceListing,
    SourceState,
    objects_digest,
    other_kinds,
    read_file,
    size_and_times,
    split_of,
)
from trainer.io import limits, storage
from trainer.io.artifacts import list_json
from trainer.io.errors import DataError
from trainer.io.formatting import listed

Group: TypeAlias = tuple[str, ...]
"""The folders of a class below the split's, as people read them: those of groups, and last its own."""

_TEXTS = frozenset(
    {".txt", ".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".log", ".md"}
    | {".rst", ".htm", ".html", ".pdf", ".py", ".ipynb", ".mat", ".npy", ".npz", ".pkl", ".parquet"}
)  # endings of files that nobody takes for photos: a folder of them alone was not meant to be a class
_SPLIT_WORD = re.compile(
    r"(?:^|[\W\d_])(train|training|val|valid|validation|dev|test|testing)(?:set|data|images?|imgs?|split)?(?:$|[\W\d_])"
)
_PART = re.compile(
    r"(?:batch|part|session|day|week|visit|fold|chunk|shard|roll|camera|cam|burst|run|shoot|upload|import|set|folder)[\W_]*\d+"
    r"|new folder(?: ?\(\d+\))?|untitled folder(?: \d+)?|dcim|\d{3}[a-z_]{5}|(?:19|20)\d\d[-_. ]?(?:0[1-9]|1[0-2])(?:[-_. ]?[0-3]\d)?"
)  # names, in lower case, of folders that tell when or how photos were taken, not what they show


class ImageFolder(ImageSource):
    """`imagefolder:PATH_OR_URI`: the folder of an image is its class, below folders for the splits where there are any."""

    def listing(self) -> SourceListing:
        found = list_files(self.name, self.outside)
        if not found.photos:
            raise DataError(" ".join([f"folder {self.name}: holds no images; check the path.", *found.remarks()]))
        folders = Counter(photo.folder for photo in found.photos)
        has_splits = self._has_splits(folders)
        places = {folder: self._place(folder, has_splits) for folder in folders}
        groups: defaultdict[Group, list[str]] = defaultdict(list)
        for folder, (split, group) in places.items():
            if split != "unlabeled":
                groups[group].append(folder)
        if () in groups:
            stray = [photo.name for photo in found.photos if photo.folder in groups[()]]
            raise DataError(
                f"folder {self.name}: {len(stray):,} of its {len(found.photos):,} images lie in no class's folder, such as {stray[0]}; "
                "move each into the folder of its class, into one named unlabeled, or away"
            )
        self._check_splits_below(groups, has_splits=has_splits)
        self._check_groups(groups, folders)
        aside = self._without_images(found, places, has_splits=has_splits)
        # A class has the name of its last folder where no other class has the same, else of all of them.
        uses = Counter(group[-1] for group in groups)
        names = {group: group[-1] if uses[group[-1]] == 1 else "/".join(group) for group in groups}
        classes = tuple(sorted(set(names.values())))
        above = {names[group]: "/".join(group[:-1]) for group in groups}
        index = {name: number for number, name in enumerate(classes)}
        labels = {
            folder: (UNLABELED if split == "unlabeled" else index[names[group]], SPLITS.index(split))
            for folder, (split, group) in places.items()
        }
        of_photos = np.fromiter((labels[photo.folder] for photo in found.photos), dtype=np.dtype((np.int32, 2)))
        items = found.photos.with_columns(Item, label=of_photos[:, 0], split=of_photos[:, 1].astype(np.int8))
        others = len(found.others)
        # The card has this text, and its bytes are part of the data set's fingerprint.
        notes = (f"Files without an image's extension, which were not looked at: {others}.",) if others else ()
        merged = tuple(_merged(groups, has_splits=has_splits))
        kinds = {
            limits.reading(folder.split("/")[-1])
            for folder, (split, _) in places.items()
            if split == "unlabeled" and "/" in folder
        }
        other = other_kinds(
            (kind for kind in kinds if not _PART.fullmatch(kind.lower()) and not kind.isdigit()), classes
        )
        remarks = (*found.remarks(), *aside, *merged, *_remarks(groups, names, has_splits=has_splits), *other)
        return SourceListing(
            items=items,
            classes=classes,
            read=read_file,
            notes=(*notes, *merged),
            remarks=remarks,
            groups=tuple(above[name] for name in classes),
        )

    def state(self) -> SourceState:
        if storage.is_remote(self.name):
            found = objects_digest(self.name, limits.SOURCE_IMAGES, lambda name: not of_systems(name))
            if found is None:
                raise DataError(too_many_files(self.name))
            if not found.images:
                raise DataError(f"folder {self.name}: does not exist; check data.source")
            return found
        files = list_files(self.name, self.outside).files
        sha256, total = hashlib.sha256(), 0

        def states() -> Iterator[tuple[str, int, int, int]]:
            nonlocal total
            for file in files:
                size, changed, moved = size_and_times(file.location)
                total += max(size, 0)
                yield file.name, size, changed, moved

        for piece in list_json(states()):
            sha256.update(piece.encode())
        return SourceState(sha256.hexdigest(), len(files), total)

    def _has_splits(self, folders: Iterable[str]) -> bool:
        """Whether the topmost folders are splits: all but unlabeled/ are named so, or none is."""
        tops = sorted({folder.split("/")[0] for folder in folders if folder})
        splits = [top for top in tops if split_of(top) not in (None, "unlabeled")]
        others = [top for top in tops if split_of(top) is None]
        if splits and others:
            raise DataError(
                f"folder {self.name}: splits ({_folders(splits)}) lie beside other folders ({_folders(others)}); move folders of classes "
                f"into train/, val/ or test/, images without a class into unlabeled/, others away. If {splits[0]}/ is a class, rename it"
            )
        return bool(splits)

    def _place(self, folder: str, has_splits: bool) -> tuple[SplitName, Group]:
        """Return the split of the images in a folder, and the folders below the split's."""
        parts = folder.split("/") if folder else []
        split = split_of(parts[0]) if parts else None
        if split == "unlabeled":
            return split, ()
        try:
            group = tuple(map(limits.class_name, parts[1:] if has_splits else parts))
        except ValueError as error:
            raise DataError(f"folder {self.name}, {folder}: {error}") from error
        if not all(group):
            raise DataError(f"folder {self.name}: a folder's name is blank, {folder!r}; give it the name of a class")
        return split if has_splits and split else "train", group

    def _check_splits_below(self, groups: Mapping[Group, Sequence[str]], *, has_splits: bool) -> None:
        """Refuse folders named as splits below the topmost ones, since the classes would be parts of splits."""
        below: defaultdict[Group, set[str]] = defaultdict(set)  # folder -> names of the folders in it
        for group in groups:
            for depth, part in enumerate(group):
                below[group[:depth]].add(part)
        for parent, children in below.items():
            words = {child: word for child in children if (word := split_word(child))}
            inner = all((*parent, child) in below for child in words)
            if len(set(words.values())) > 1 and (inner or len(words) == len(children)):
                shown = ["/".join((*parent, child)) for child in sorted(words)]
                raise DataError(
                    f"folder {self.name}: folders are named like splits ({_folders(shown)}); let the topmost folders be train/, val/ and "
                    "test/, with the classes' folders in them. If these are classes, rename them"
                )
        named = {}  # folder that has the name of a split -> whether it holds other folders
        for group, its in groups.items():
            for depth, part in enumerate(group):
                is_last = depth == len(group) - 1
                siblings = below[group[:depth]]
                # A vehicle may be a train: a class among others.
                is_class = is_last and split_of(part) == "train" and any(split_of(one) is None for one in siblings)
                if split_of(part) and not is_class:
                    for folder in its:
                        parts = folder.split("/")
                        named["/".join(parts[: len(parts) - len(group) + depth + 1])] = not is_last
                    break
        if named:
            parents = sorted({folder.rpartition("/")[0] for folder in named})
            hint = (
                "let the topmost folders be train/, val/ and test/, with the classes' folders in them, and unlabeled/"
            )
            if all(named.values()) and (not has_splits or len(parents) == 1):
                hint = (
                    f"give {'the folder that holds' if len(parents) == 1 else 'one of the folders that hold'} them, such as "
                    f"data.source=imagefolder:{storage.join(self.name, parents[0])}"
                )
            raise DataError(
                f"folder {self.name}: folders below the topmost ones have the names of splits ({_folders(sorted(named))}); {hint}. If "
                "these are classes, rename them"
            )

    def _check_groups(self, groups: Mapping[Group, Sequence[str]], folders: Mapping[str, int]) -> None:
        """Refuse layouts in which it is in doubt which of the folders above an image is its class."""
        for group in sorted(groups):
            for depth in range(1, len(group)):
                if (outer := group[:depth]) in groups:
                    within = sorted(folder for one in groups if one[:depth] == outer != one for folder in groups[one])
                    first = groups[outer][0]
                    raise DataError(
                        f"folder {self.name}: {first}/ holds {folders[first]:,} images of its own beside folders with images "
                        f"({_folders(within)}); if all show one class, move them up into {first}/; if they are classes, move the "
                        f"{folders[first]:,} into the folder of theirs"
                    )
        uses = Counter(group[-1] for group in groups)
        parts = []
        for group in sorted(groups):
            # Where it is, any of its folders may be named like a part, else those within the first.
            is_shared = uses[group[-1]] > 1
            names = [name.lower() for name in (group if is_shared else group[1:])]
            if len(group) > 1 and any(_PART.fullmatch(name) or (is_shared and name.isdigit()) for name in names):
                parts.append(groups[group][0])
        if parts:
            raise DataError(
                f"folder {self.name}: the last folder above an image is its class, but some are named like parts of one, by time, batch or "
                f"number ({_folders(parts)}); move their images up into the folder of the class, or list them in a manifest. If these are "
                "classes, give their folders names that say what they show"
            )

    def _without_images(
        self, found: FolderFiles, places: Mapping[str, tuple[SplitName, Group]], *, has_splits: bool
    ) -> tuple[str, ...]:
        """Refuse classes that would be missing since their folders hold no image that is read; name other folders without one."""
        holding = {part for folder in places for part in _prefixes(folder)}
        groups = {group for split, group in places.values() if split != "unlabeled"}
        known = {group[:number] for group in groups for number in range(1, len(group) + 1)}
        endings: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for file in found.others:
            endings[file.folder][file.suffix or "without an ending"] += 1
        lost: list[str] = []
        aside: list[str] = []
        for folder in sorted({*found.empty, *endings} - holding - {""}):
            if not holding.isdisjoint(one for one in _prefixes(folder) if one in places):
                continue  # lies in a class's folder
            is_of_split = split_of(folder.split("/")[0]) is not None
            group = self._place(folder, has_splits)[1] if is_of_split == has_splits else ()
            if group and group not in known and not (endings[folder] and _TEXTS.issuperset(endings[folder])):
                kinds = listed([f"{count:,} {kind}" for kind, count in endings[folder].most_common()], 3)
                lost.append(f"{folder}/ ({kinds or 'empty'})")
            else:
                aside.append(f"{folder}/")
        if lost:
            raise DataError(
                f"folder {self.name}: no image can be read in {listed(lost, 5)}, so {'a class' if len(lost) == 1 else 'classes'} would be "
                "missing; add images with an ending that is read, such as .jpg or .png, or remove the folder"
            )
        return (f"Folders without an image that is read, which are no class: {listed(aside, 8)}.",) if aside else ()


def _merged(groups: Mapping[Group, Sequence[str]], *, has_splits: bool) -> Iterator[str]:
    """Name the folders that are written differently and are one class."""
    spelled = [sorted({"/".join(folder.split("/")[has_splits:]) for folder in its}) for its in groups.values()]
    if merged := sorted(" and ".join(map(ascii, ways)) for ways in spelled if len(ways) > 1):
        yield f"Folders whose names read the same are one class: {listed(merged, 5)}."


def _remarks(groups: Mapping[Group, Sequence[str]], names: Mapping[Group, str], *, has_splits: bool) -> Iterator[str]:
    """Write what the log says of splits and of names of classes that come from several folders."""
    if has_splits:
        tops = {folder.split("/")[0] for its in groups.values() for folder in its}
        for split, count in Counter(map(split_of, tops)).items():
            if count > 1:
                yield f"Folders of one split, {split}: {_folders(sorted(top for top in tops if split_of(top) == split))}."
    if whole := sorted(name for group, name in names.items() if len(group) > 1 and name != group[-1]):
        yield (
            f"Classes that are named with the folders above, since their own have the same names: {listed(whole, 8)}. If these are of one "
            "class, let its images lie in one folder."
        )


def _prefixes(folder: str) -> Iterator[str]:
    """Yield a folder and those above it."""
    parts = folder.split("/")
    return ("/".join(parts[:number]) for number in range(1, len(parts) + 1))


def split_word(name: str) -> SplitName | None:
    """Return the split that a name which is none speaks of, such as `seg_train` or `TestSet`."""
    if split_of(name):
        return None
    found = _SPLIT_WORD.search(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return split_of(found[1]) if found else None


def _folders(names: Sequence[str]) -> str:
    return listed([f"{name}/" for name in names], 4)
