"""Decisions by DuckDB are those of `curation`, row for row."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

import pytest

from trainer.config import DataSettings
from trainer.data import curation, facts, near_duplicates
from trainer.data.curation import ImageCandidate
from trainer.data.dataset_schema import SPLITS, UNLABELED
from trainer.data.facts import ImageFacts

CLASSES = ("apple", "pear", "fig")


def candidates(count, pictures, seed=0, *, splits=SPLITS):
    """Images of so many pictures, with copies in several splits, some of them with another label or with none."""
    draw, made = random.Random(seed), []
    for row in range(count):
        picture = draw.randrange(pictures)
        split = draw.choice(splits)
        label = draw.randrange(3) if draw.random() < 0.1 else picture % 3
        made.append(
            ImageCandidate(
                row=row,
                name=f"{draw.randrange(10)}/ä {row:05d}.jpg",
                label=UNLABELED if split == "unlabeled" else label,
                split=split,
                key=hashlib.sha256(str(picture).encode()).hexdigest(),
                width=picture,
                height=7,
                gray_peak=picture % 2,
                appearance=f"{picture:0112x}" if picture % 5 else "",
            )
        )
    return made


def written(made, path, together=97):
    with facts.writing_facts(path / "facts.arrow") as append:
        for start in range(0, len(made), together):
            append(made[start : start + together])
    return ImageFacts.read(path / "facts.arrow")


def test_images_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "_TOGETHER", 10)
    made = candidates(250, 100)
    read = written(made, tmp_path)
    assert [*read] == made
    assert read[7] == made[7]
    assert [*read[3:30]] == made[3:30]
    assert [*read.of("val")] == [one for one in made if one.split == "val"]
    assert read.of("val").column("width").tolist() == [one.width for one in made if one.split == "val"]
    assert len(written([], tmp_path)) == 0


@pytest.mark.parametrize(
    ("count", "pictures", "splits"),
    [(0, 1, SPLITS), (900, 500, SPLITS), (900, 500, ("train", "unlabeled")), (400, 40, ("train", "val"))],
)
def test_decisions_are_those_of_curation(tmp_path, count, pictures, splits):
    made = candidates(count, pictures, seed=count, splits=splits)
    good, contradicting = curation.quarantine_contradictions(made, CLASSES)
    kept, dropped = curation.drop_copies(good)
    assert (count < 400) or (contradicting and dropped)
    found, found_contradicting, found_dropped = facts.quarantine_and_drop(written(made, tmp_path), CLASSES, tmp_path)
    assert [*found] == kept
    assert found_contradicting == contradicting
    assert found_dropped == dropped
    given = {*splits}
    for settings in (DataSettings(), DataSettings(val_fraction=0.2, test_fraction=0.3, split_seed=5)):
        taken = curation.take_missing_splits(kept, given, settings, [(0,), (1,), (2,)])
        fractions = curation.missing_fractions(given, settings)
        assert [*facts.take_missing_splits(found, fractions, settings.split_seed, tmp_path)] == taken
        assert len(kept) < 100 or given >= {"val", "test"} or taken != kept
    assert near_duplicates.find(found) == near_duplicates.find(kept)


def test_places_that_are_equal_are_ordered_by_key(tmp_path, monkeypatch):
    """The upper 53 bits of a hash decide first, as in curation; a hash of 64 would order pictures otherwise."""
    made = [replace(one, label=0, split="train") for one in candidates(4000, 10**9)]
    kept, _, _ = facts.quarantine_and_drop(written(made, tmp_path), CLASSES, tmp_path)
    settings = DataSettings(val_fraction=0.49, test_fraction=0.49)
    taken = facts.take_missing_splits(kept, curation.missing_fractions({"train"}, settings), 3, tmp_path)
    order = sorted(made, key=lambda one: (curation.place(one.key, 3), one.key))
    test = {one.key for one in taken if one.split == "test"}
    settings = DataSettings(val_fraction=0.49, test_fraction=0.49, split_seed=3)
    assert test == {one.key for one in order[: len(test)]}
    assert [*taken] == curation.take_missing_splits(made, {"train"}, settings, [(0,)])
