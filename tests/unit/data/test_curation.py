"""Which images are kept and in which split."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace

import pytest

from trainer.config import DataSettings
from trainer.data.curation import (
    Dropped,
    ImageCandidate,
    Quarantined,
    check_classes,
    check_splits,
    drop_copies,
    place,
    quarantine_contradictions,
    take_missing_splits,
)
from trainer.data.dataset_schema import SplitName
from trainer.io.errors import DataError

CLASSES = ("cat", "dog", "eel")
EACH = ((0,), (1,), (2,))
"""The classes of each label: its own."""


def candidate(name: str, label: int = 0, split: SplitName = "train", content: str = "") -> ImageCandidate:
    key = hashlib.sha256((content or name).encode()).hexdigest()
    return ImageCandidate(row=0, name=name, label=label, split=split, key=key, width=9, height=9)


def many(count: int, label: int = 0, start: int = 0) -> list[ImageCandidate]:
    return [candidate(f"{label}/{number}", label) for number in range(start, start + count)]


def splits(candidates: list[ImageCandidate]) -> dict[str, SplitName]:
    return {one.name: one.split for one in candidates}


def test_pictures_with_contradicting_labels_are_all_set_aside() -> None:
    copies = [
        candidate("a", 0, content="same"),
        candidate("b", 1, "test", content="same"),
        candidate("c", -1, "unlabeled", content="same"),
        candidate("d", 0),
        candidate("e", 2, content="twice"),
        candidate("f", 2, content="twice"),
        candidate("g", -1, "unlabeled", content="twice"),
    ]
    good, bad = quarantine_contradictions(copies, CLASSES)
    assert [one.name for one in good] == ["d", "e", "f", "g"]
    reason = "contradicting labels of one picture: a (cat), b (dog)"
    assert bad == [Quarantined(name=name, reason=reason) for name in "abc"]


def test_of_copies_the_one_that_measures_is_kept() -> None:
    copies = [
        candidate("train", content="x"),
        candidate("val", split="val", content="x"),
        candidate("test", split="test", content="x"),
        candidate("test again", split="test", content="x"),
        candidate("unlabeled", -1, "unlabeled", content="x"),
        candidate("alone"),
        candidate("train 1", content="y"),
        candidate("train 2", content="y"),
        candidate("unlabeled y", -1, "unlabeled", content="y"),
    ]
    kept, dropped = drop_copies(copies)
    assert [one.name for one in kept] == ["test", "alone", "train 1"]
    assert [(one.name, one.kept_name, one.is_leakage) for one in dropped] == [
        ("train", "test", True),
        ("val", "test", True),
        ("test again", "test", False),
        ("unlabeled", "test", True),
        ("train 2", "train 1", False),
        ("unlabeled y", "train 1", False),
    ]
    assert dropped[0] == Dropped(name="train", split="train", kept_name="test", kept_split="test")


@pytest.mark.parametrize(("count", "test", "val"), [(2000, 400, 200), (30, 6, 3), (17, 3, 2), (4, 1, 1)])
def test_each_class_has_the_shares_asked_for(count: int, test: int, val: int) -> None:
    settings = DataSettings(test_fraction=0.2, val_fraction=0.1)
    images = [one for label in range(3) for one in many(count, label)]
    assigned = take_missing_splits(images, {"train"}, settings, EACH)
    assert [one.name for one in assigned] == [one.name for one in images]
    for label in range(3):
        counts = Counter(one.split for one in assigned if one.label == label)
        assert counts == {"test": test, "val": val, "train": count - test - val}


def test_smallest_places_are_test_by_seed() -> None:
    settings = DataSettings(test_fraction=0.2, val_fraction=0.1)
    assigned = take_missing_splits(many(30), {"train"}, settings, EACH)
    by_place = [one.split for one in sorted(assigned, key=lambda one: place(one.key, settings.split_seed))]
    assert by_place == ["test"] * 6 + ["val"] * 3 + ["train"] * 21
    # Another seed splits differently.
    images = many(200)
    first, second = (take_missing_splits(images, {"train"}, DataSettings(split_seed=seed), EACH) for seed in (0, 1))
    assert splits(first) != splits(second)


def test_images_stay_in_their_split() -> None:
    settings = DataSettings()
    before = take_missing_splits(many(300), {"train"}, settings, EACH)
    renamed = take_missing_splits(
        [replace(one, name=f"new {one.name}") for one in many(300)], {"train"}, settings, EACH
    )
    assert [one.split for one in renamed] == [one.split for one in before]
    other_class = splits(take_missing_splits(many(300) + many(20, label=1), {"train"}, settings, EACH))
    assert {name: other_class[name] for name in splits(before)} == splits(before)

    before = splits(take_missing_splits(many(3), {"train"}, settings, EACH))
    for count in range(4, 200):
        after = splits(take_missing_splits(many(count), {"train"}, settings, EACH))
        assert sum(after[name] != before[name] for name in before) <= 3
        before = after


@pytest.mark.parametrize("count", [3, 4, 5, 10])
@pytest.mark.parametrize("fraction", [0.01, 0.49])
def test_every_class_has_an_image_in_every_split(count: int, fraction: float) -> None:
    settings = DataSettings(test_fraction=fraction, val_fraction=fraction)
    for label in range(40):
        assigned = take_missing_splits(many(count, label), {"train"}, settings, [(one,) for one in range(40)])
        assert set(splits(assigned).values()) == {"train", "val", "test"}


def test_group_stays_together_within_shares_of_its_classes() -> None:
    settings = DataSettings(test_fraction=0.2, val_fraction=0.1)
    images = [one for label in range(3) for one in many(60, label)]
    numbers = {one.key: index % 40 for index, one in enumerate(images) if index % 7}  # of two classes or three
    numbers |= {one.key: 1000 for one in images[:13]}  # more than test has room for
    for order in (images, images[::-1]):
        assigned = take_missing_splits(order, {"train"}, settings, EACH, numbers)
        groups: dict[int, set[SplitName]] = {}
        for one in assigned:
            groups.setdefault(numbers.get(one.key, -1), set()).add(one.split)
        assert {number for number, found in groups.items() if len(found) > 1} == {-1}
        assert groups[1000] == {"train"}
        counts = Counter((one.split, one.label) for one in assigned)
        assert all(0 < counts["test", label] <= 12 for label in range(3))
        assert all(0 < counts["val", label] <= 6 for label in range(3))
    assert splits(assigned) == splits(take_missing_splits(images, {"train"}, settings, EACH, numbers))


@pytest.mark.parametrize(("given", "taken"), [("val", "test"), ("test", "val")])
def test_only_the_split_that_lacks_is_taken(given: SplitName, taken: SplitName) -> None:
    settings = DataSettings(test_fraction=0.2, val_fraction=0.2)
    own = [candidate(f"own {number}", split=given) for number in range(5)]
    assigned = take_missing_splits([*many(500), *own], {"train", given}, settings, EACH)
    counts = Counter(one.split for one in assigned)
    assert counts[given] == 5
    assert counts[taken] == 100
    assert {one.split for one in assigned[500:]} == {given}


def test_given_splits_and_unlabeled_images_are_left_alone() -> None:
    images = [*many(50), candidate("v", split="val"), candidate("t", split="test"), candidate("u", -1, "unlabeled")]
    assert take_missing_splits(images, {"train", "val", "test", "unlabeled"}, DataSettings(), EACH) == images


def test_classes_that_cannot_be_split() -> None:
    images = [*many(5, 0), *many(2, 1), candidate("u", -1, "unlabeled")]
    with pytest.raises(DataError, match=r"classes 'dog' \(2\), 'eel' \(0\): fewer .* data\.min_images_per_class=3"):
        check_classes(images, CLASSES, DataSettings(), EACH)
    check_classes(images[:7], CLASSES[:2], DataSettings.model_construct(source="x", min_images_per_class=2), EACH)
    names = tuple(str(number) for number in range(8))
    with pytest.raises(DataError, match=r"classes '1' \(0\), .* '5' \(0\) and 2 more: fewer"):
        check_classes(many(5), names, DataSettings(), EACH)
    # An empty split is refused.
    with pytest.raises(DataError, match="split val is empty"):
        check_splits([candidate("a"), candidate("b", split="test")], ("cat",), {0}, EACH)
    # A class without training images is refused.
    images = [candidate("a"), candidate("b", 1, "test"), candidate("c", 1, "val")]
    with pytest.raises(DataError, match=r"class 'dog' \(0\): no training image is left"):
        check_splits(images, CLASSES[:2], {0, 1}, EACH)
    # A class of which the source has images in test only is named as such.
    images = [candidate("a"), candidate("b", split="val"), candidate("c", 1, "test"), candidate("d", 1, "test")]
    with pytest.raises(
        DataError, match=r"class 'dog' \(2\): the source has no training image of it, only images in test"
    ):
        check_splits(images, CLASSES[:2], {0}, EACH)


# ---------------------------------------------------------------------------------------------------------------------
# Several classes an image

SETS = ((), (0,), (0, 1), (1, 2))
"""The classes of each label: none; the cat; cat and dog; dog and eel."""


def test_images_of_several_classes() -> None:
    images = many(40, 1) + many(10, 2) + many(20, 3) + many(30, 0)
    assigned = take_missing_splits(images, {"train"}, DataSettings(val_fraction=0.1, test_fraction=0.2), SETS)
    counts = Counter((one.label, one.split) for one in assigned)
    # Dogs are 30, cats 50, eels 20: a cat with a dog counts as a dog, a dog with an eel as an eel.
    assert {label: (counts[label, "test"], counts[label, "val"]) for label in range(4)} == {
        0: (6, 3),
        1: (8, 4),
        2: (2, 1),
        3: (4, 2),
    }
    # Of each class an image stays in train.
    sets = ((0, 1), (0, 2), (0, 3), (1, 2, 3))
    for seed in range(30):
        images = many(2, 0) + many(2, 1) + many(1, 2) + many(1, 3)
        settings = DataSettings(split_seed=seed)
        assigned = take_missing_splits(images, {"train"}, settings, sets)
        left = {one for image in assigned if image.split == "train" for one in sets[image.label]}
        assert left == {0, 1, 2, 3}
    # A split whose images are of no class is named.
    images = [*many(3, 1), candidate("v", 0, "val"), candidate("t", 1, "test")]
    with pytest.raises(DataError, match="split val has images, but none of any class"):
        check_splits(images, CLASSES[:1], {0}, SETS)
