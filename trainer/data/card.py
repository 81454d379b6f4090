"""The data card: a page that says what a prepared data set holds and what was left out of it."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from trainer.config import DataSettings
from trainer.data import near_duplicates
from trainer.data.curation import Dropped, ImageCandidate, Members, Quarantined, count_classes
from trainer.data.dataset_schema import DROPPED, NEAR_DUPLICATES, QUARANTINE, UNLABELED, SplitName
from trainer.data.near_duplicates import NearDuplicates
from trainer.data.sources.source import SourceListing
from trainer.io import formatting, limits
from trainer.models.served_student.class_tags import TAGS, ClassTags
from trainer.report import pages
from trainer.report.charts import stacked_columns
from trainer.report.pages import Block, Figure, Legend, PageSection, Paragraph, Photo, PhotoGrid, Subsection, Table

ROWS = 200  # longest list of files on the page
CHARACTERS = 500  # longest name or reason on the page; the whole one stands in the file that lists them
CLASSES = 1000  # most classes that the page counts one by one
STRIPS = 100  # most classes of which the page shows pictures
TILE = 64  # edge of a picture on the page, in pixels
ATTRIBUTES, CELL = 10, 100  # most attributes of a class on the page, and most characters of a text among them
FEW = 5  # images of a class in val or test below which the card says that they are few
PAIRS = 24  # pairs of near-duplicates of which the page shows pictures
TILES = 4  # pictures of a class
_MOST_KEPT = 1000  # images among which tiles are chosen at a time
Splits: TypeAlias = Mapping[SplitName, Sequence[ImageCandidate]]

_LABELED: tuple[SplitName, ...] = ("train", "val", "test")


def data_card(
    settings: DataSettings,
    listing: SourceListing,
    *,
    splits: Splits,
    quarantined: Sequence[Quarantined],
    dropped: Sequence[Dropped],
    near: NearDuplicates | None = None,
    tags: ClassTags | None = None,
    read: Callable[[int], bytes],
    failure: str = "",
) -> str:
    """Build the page: self-contained HTML below 2 MB, equal for equal content.

    `read` gives the stored picture's file of a row; `failure` is why these images are not prepared.
    """
    classes, of_labels = listing.classes, listing.members
    kind, _, name = settings.source.partition(":")
    # Without the folders above it, which differ between machines.
    source = f"{kind} {PurePosixPath(name).name}" if name and kind != "hub" else settings.source
    lead = (
        f"From {source}: {sum(map(len, splits.values())):,} images of {len(classes):,} classes, "
        f"stored at {settings.image_size} x {settings.image_size} pixels "
        f"({'longer side cropped' if settings.fit == 'crop' else 'stretched'}, {settings.encoding})."
    )
    leaks = sum(drop.is_leakage for drop in dropped)
    rows = [
        *((split, len(members)) for split, members in splits.items()),
        ("quarantined", len(quarantined)),
        ("left out: equal to one that is kept", len(dropped) - leaks),
        ("left out: equal to one of val or test (leakage)", leaks),
    ]
    fitting = [text] if (text := listing.fitting_recipe()) else []
    kinds = Counter(one.reason.split(":")[0] for one in quarantined).most_common()
    copies = [
        (_cut(drop.name), drop.split, _cut(drop.kept_name), drop.kept_split, "leakage" if drop.is_leakage else "copy")
        for drop in sorted(dropped, key=lambda drop: not drop.is_leakage)
    ]
    blocks: list[Block] = []
    if quarantined:
        listed = _listed(["image", "reason"], [(_cut(one.name), _cut(one.reason)) for one in quarantined], QUARANTINE)
        blocks.append(Subsection("Quarantined", [Table(["reason", "images"], kinds), *listed]))
    if dropped:
        listed = _listed(["left out", "of", "kept", "of", ""], copies, DROPPED)
        blocks.append(Subsection("Equal to one that is kept", listed))
    sections = [
        PageSection("Not prepared", [Paragraph(failure, "bad")]) if failure else None,
        PageSection("Images", [Table(["", "images"], rows), *map(Paragraph, [*fitting, *listing.notes])]),
        _samples(classes, of_labels, splits, read),
        _classes(classes, of_labels, splits),
        _known(tags) if tags is not None else None,
        _sizes([*splits.values()], settings.image_size) if any(map(len, splits.values())) else None,
        _near_duplicates(near, settings, listing.label_names, read) if near is not None and near.pairs else None,
        PageSection("Left out", blocks or [Paragraph("Nothing.")]),
    ]
    return pages.render("Data card", lead, sections)


def _classes(classes: Sequence[str], of_labels: Members, splits: Splits) -> PageSection:
    counts: dict[SplitName, list[int]] = {}  # split -> images of each class
    for split in _LABELED:
        found = count_classes(splits[split], of_labels)
        counts[split] = [found[label] for label in range(len(classes))]
    totals = [sum(of_class) for of_class in zip(*counts.values(), strict=True)]
    rows = [(*row, total) for *row, total in zip(classes, *counts.values(), totals, strict=True)]
    note = f"The largest class has {max(totals) / max(min(totals), 1):.1f} times as many images as the smallest."
    if any(len(of_label) != 1 for of_label in of_labels):
        several = [len(of_labels[image.label]) for split in _LABELED for image in splits[split]]
        note += (
            f" An image has {np.mean(several):.2f} labels in the mean and {max(several)} at most; {several.count(0):,} of "
            f"{len(several):,} images are of no class."
        )
    cut = f"The first {CLASSES:,} of {len(rows):,} classes are listed."
    chart = stacked_columns(classes, list(counts.items()), "Images of each class")
    # write a sentence for each split that lacks classes, and one for each that has too few images of some to
    # judge them
    sentences = []
    for split in ("val", "test"):
        named = [(formatting.isolated(name), count) for name, count in zip(classes, counts[split], strict=True)]
        missing = [name for name, count in named if count == 0]
        few = [f"{name} ({count})" for name, count in named if 0 < count < FEW]
        if missing:
            sentences.append(f"No image in {split}: {formatting.listed(missing, 10)}.")
        if few:
            sentences.append(
                f"Fewer than {FEW} images in {split}: {formatting.listed(few, 10)}. The accuracy of such a class is a rough guess; add "
                f"images, or raise data.{split}_fraction where the split is taken from train."
            )
    return PageSection(
        "Classes",
        [
            Legend([("f0", "train"), ("f1", "val"), ("f2", "test")]),
            Figure(chart, "Images of each class, largest first."),
            Paragraph(note),
            *map(Paragraph, sentences),
            Table(["class", *_LABELED, "all"], rows[:CLASSES]),
            Paragraph(cut) if len(rows) > CLASSES else None,
        ],
    )


def _known(tags: ClassTags) -> PageSection:
    """List the groups and the first attributes of the first classes."""
    attributes = dict(itertools.islice(tags.attributes.items(), ATTRIBUTES))
    rows = []
    for index, path in enumerate(tags.paths[:ROWS]):
        groups = [formatting.isolated(limits.cut(" / ".join(path[:-1]), CELL))] if tags.parents else []
        values = (values[index] for values in attributes.values())
        shown = ("" if value is None else limits.cut(formatting.exact(value), CELL) for value in values)
        rows.append((path[-1], *groups, *shown))
    headers = ["class", *(["groups"] if tags.parents else []), *attributes]
    left_out = {"classes": len(tags.labels) - len(rows), "attributes": len(tags.attributes) - len(attributes)}
    more = " and ".join(f"{count:,} more {name}" for name, count in left_out.items() if count)
    note = Paragraph(f"{more} are in {TAGS}.") if more else None
    return PageSection("What is known of the classes", [Table(headers, rows), note])


def _sizes(splits: Sequence[Sequence[ImageCandidate]], image_size: int) -> PageSection:
    width, height = (
        np.fromiter((getattr(one, edge) for members in splits for one in members), dtype=np.int64)
        for edge in ("width", "height")
    )
    shorter, longer = np.minimum(width, height), np.maximum(width, height)
    measures: dict[str, np.typing.NDArray[Any]] = {
        "width, pixels": width,
        "height, pixels": height,
        "shorter edge, pixels": shorter,
        "longer edge / shorter edge": longer / shorter,
    }
    rows = []
    for name, values in measures.items():
        found = np.quantile(values, [0, 0.05, 0.5, 0.95, 1], method="lower" if values.dtype.kind == "i" else "linear")
        rows.append((name, *found.tolist()))
    enlarged = int((shorter < image_size).sum())
    sentence = f"{enlarged:,} of {len(width):,} images were enlarged: their shorter edge was below {image_size} pixels."
    headers = ["", "smallest", "5 %", "median", "95 %", "largest"]
    return PageSection("Original sizes", [Table(headers, rows), Paragraph(sentence)])


def _samples(classes: Sequence[str], of_labels: Members, splits: Splits, read: Callable[[int], bytes]) -> PageSection:
    chosen = np.unique(np.linspace(0, len(classes) - 1, STRIPS).round().astype(int)).tolist()
    of_class: dict[int, list[ImageCandidate]] = {label: [] for label in [*chosen, UNLABELED]}
    for split in ("train", "unlabeled"):
        for member in splits[split]:
            for one in of_labels[member.label] if member.label != UNLABELED else (UNLABELED,):
                if one in of_class:
                    of_class[one].append(member)
                    if len(of_class[one]) > _MOST_KEPT:
                        of_class[one] = _smallest(of_class[one])
    photos = [
        Photo(
            # A few that are not neighbors in the source: those with the smallest content keys.
            _strip(_smallest(members), read),
            classes[label] if label != UNLABELED else "unlabeled",
            media_type="image/jpeg",
        )
        for label, members in of_class.items()
        if members
    ]
    shown = f"{len(chosen)} of {len(classes):,} classes" if len(chosen) < len(classes) else "each class"
    return PageSection("Samples", [Paragraph(f"Training images of {shown}, as stored."), PhotoGrid(photos)])


def _smallest(members: Sequence[ImageCandidate]) -> list[ImageCandidate]:
    return sorted(members, key=lambda member: member.key)[:TILES]


def _strip(members: Sequence[ImageCandidate], read: Callable[[int], bytes]) -> bytes:
    strip = Image.new("RGB", (TILE * len(members), TILE))
    for position, member in enumerate(members):
        with Image.open(io.BytesIO(read(member.row))) as picture:
            method = Image.Resampling.NEAREST if picture.width < TILE else Image.Resampling.BICUBIC
            strip.paste(picture.convert("RGB").resize((TILE, TILE), method), (TILE * position, 0))
    buffer = io.BytesIO()
    strip.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def _near_duplicates(
    near: NearDuplicates, settings: DataSettings, label_names: Sequence[str], read: Callable[[int], bytes]
) -> PageSection:
    photos = []
    for pair in near.pairs[:PAIRS]:
        sides = []
        for one in (pair.image, pair.twin):
            label = formatting.isolated(label_names[one.label]) if one.label != UNLABELED else "unlabeled"
            sides.append(f"{one.split}, {label}: {limits.cut(one.name, CELL)}")
        strip = _strip([pair.image, pair.twin], read)
        photos.append(Photo(strip, f"{' | '.join(sides)} ({pair.bits})", media_type="image/jpeg"))
    are = "were left out" if settings.near_duplicates == "separate" else "are kept"
    text = (
        f"{len(near.pairs):,} images {are} that look like one of a held-out split (test, or val for training images): a model that learned "
        "them is measured too well there. The nearest ones come first; in brackets: in how many of 64 bits their hashes differ, at "
        f"most {near_duplicates.RADIUS}. All are in {NEAR_DUPLICATES}."
    )
    rows = [(split, other, count) for (split, other), count in near.measured.items() if count]
    table = Table(["images of", "that look like one of", "images"], rows)
    small = f"{near.skipped:,} images were not compared: an edge is below {near_duplicates.SMALLEST_EDGE} pixels."
    many = "Of some looks there are so many images that not all of them were compared with one another."
    notes = [Paragraph(small) if near.skipped else None, None if near.complete else Paragraph(many)]
    return PageSection("Near-duplicates", [Paragraph(text), table, PhotoGrid(photos), *notes])


def _cut(text: str) -> str:
    return limits.cut(text, CHARACTERS)


def _listed(headers: Sequence[str], rows: Sequence[Sequence[object]], file: str) -> list[Block]:
    table = Table(headers, rows[:ROWS])
    rest = len(rows) - ROWS
    return [table, Paragraph(f"{rest:,} more are listed in {file}.")] if rest > 0 else [table]
