"""Near-duplicates against a slow loop over all pairs, and on pictures that were really changed."""

from __future__ import annotations

import io
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainer.config import DataSettings, resolve
from trainer.data import near_duplicates
from trainer.data.curation import ImageCandidate
from trainer.data.dataset import open_dataset
from trainer.data.dataset_schema import SPLITS, SplitName
from trainer.data.near_duplicates import RADIUS, appearance
from trainer.io.artifacts import Artifact
from trainer.io.errors import DataError, SettingsError
from trainer.stages.prepare import run

LABELED: tuple[SplitName, ...] = ("train", "val", "test")


def picture(seed: int, size: int = 64) -> Image.Image:
    """A few soft spots, as a photo has large shapes."""
    generator = np.random.default_rng(seed)
    spots = generator.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(spots).resize((size, size), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()


def candidate(name: str, look: str, split: SplitName = "train", label: int = 0) -> ImageCandidate:
    return ImageCandidate(name=name, label=label, split=split, key=name, width=64, height=64, appearance=look)


def bits(one: str, other: str) -> int:
    return (int(one[:16], 16) ^ int(other[:16], 16)).bit_count()


def looks_alike(one: str, other: str) -> bool:
    colors = zip(bytes.fromhex(one[16:]), bytes.fromhex(other[16:]), strict=True)
    return bits(one, other) <= RADIUS and sum(abs(a - b) for a, b in colors) / 48 <= 16


def clusters(count: int, seed: int) -> list[str]:
    """Looks around a few centers: hashes 0 to 14 bits away, colors 0 to 30 away; some are equal."""
    generator = random.Random(seed)
    centers = [(generator.getrandbits(64), generator.randrange(40, 200)) for _ in range(6)]
    looks = []
    for _ in range(count):
        number, color = generator.choice(centers)
        for bit in generator.sample(range(64), generator.randrange(8)):
            number ^= 1 << bit
        looks.append(f"{number:016x}" + f"{color + generator.randrange(-15, 16):02x}" * 48)
    return looks


def found(looks: list[str]) -> list[tuple[int, int, int]]:
    search = near_duplicates._Search([candidate(f"{number}", look) for number, look in enumerate(looks)])
    blocks = [np.stack(block, axis=1).tolist() for block in search.pairs()]
    assert search.complete
    return sorted((*sorted(pair[:2]), pair[2]) for pair in itertools.chain(*blocks))


@pytest.mark.parametrize("together", [7, 2**20])
def test_every_pair_within_the_radius_is_found_once(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(near_duplicates, "_TOGETHER", together)
    looks = clusters(300, seed=1)
    slow = [
        (one, other, bits(looks[one], looks[other]))
        for one, other in itertools.combinations(range(len(looks)), 2)
        if looks_alike(looks[one], looks[other])
    ]
    assert {distance for *_, distance in slow} == set(range(RADIUS + 1))
    assert found(looks) == slow


def test_any_seven_bits_may_differ() -> None:
    """Those that a mask could miss: spread over the bands as evenly as they can be."""
    for seed in range(40):
        generator = random.Random(seed)
        number = generator.getrandbits(64)
        other = number
        for band in range(4):
            for bit in generator.sample(range(16), 1 if band == 3 else 2):
                other ^= 1 << 16 * band + bit
        assert (number ^ other).bit_count() == 7
        looks = [f"{one:016x}" + "80" * 48 for one in (number, other)]
        assert len(found(looks)) == 1


@pytest.mark.parametrize("limit", ["_MOST_COMPARED", "_MOST_TWINS"])
def test_pairs_of_many_lookalikes_are_bounded(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(near_duplicates, limit, 5)
    members = [candidate(f"{number}", "00" * 56, LABELED[number % 3]) for number in range(100)]
    result = near_duplicates.find(members)
    assert not result.complete
    assert len(result.pairs) == 67, "each has one, since neighbors are compared"
    assert len(set(near_duplicates.groups(members).values())) == 1


# ---------------------------------------------------------------------------------------------------------------------
# What a picture looks like


def test_the_hash_says_where_brightness_rises() -> None:
    ramp = np.tile(np.repeat(np.arange(9, dtype=np.uint8) * 25, 8), (72, 1))
    ramp[36:] = ramp[36:, ::-1]
    look = appearance(Image.fromarray(ramp).convert("RGB"), 72)
    assert look[:6] == "ffffff"
    assert look[10:16] == "000000"
    assert len(look) == 2 * (8 + 48)


@pytest.mark.parametrize("seed", range(10))
def test_changed_copies_look_same_and_others_do_not(seed: int) -> None:
    original = picture(seed, 200)
    look = appearance(original, 200)
    copies = {
        "jpeg": Image.open(io.BytesIO(encoded(original, format="JPEG", quality=40))).convert("RGB"),
        "half": original.resize((100, 100)),
        "brighter": original.point(lambda value: min(255, round(1.05 * value))),
        "cropped": original.crop((3, 3, 197, 197)),
    }
    assert {name for name, copy in copies.items() if not looks_alike(look, appearance(copy, 200))} == set()
    assert not looks_alike(look, appearance(picture(seed + 100, 200), 200))
    assert not looks_alike(look, appearance(original.transpose(Image.Transpose.FLIP_LEFT_RIGHT), 200))


def test_pictures_of_one_color_are_alike_by_their_color_only() -> None:
    red, brick, blue, black = (
        appearance(Image.new("RGB", (40, 40), color), 40)
        for color in ((200, 30, 30), (190, 35, 30), (30, 30, 200), (0, 0, 0))
    )
    assert red[:16] == brick[:16] == blue[:16] == black[:16]
    members = [candidate(look, look) for look in (red, brick, blue, black)]
    search = near_duplicates._Search(members)
    pairs = [(left.tolist(), right.tolist()) for left, right, _ in search.pairs() if len(left)]
    assert pairs == [([0], [1])]


# ---------------------------------------------------------------------------------------------------------------------
# Across splits


def test_each_image_has_its_nearest_twin() -> None:
    def look(number: int) -> str:
        return f"{number:016x}" + "80" * 48

    members = [
        candidate("train", look(0)),
        candidate("train far", look(0xFF00FF00FF)),
        candidate("val", look(1), "val"),
        candidate("test", look(7), "test"),
        candidate("test too", look(3), "test"),
        candidate("unlabeled", look(0xF), "unlabeled", -1),
    ]
    for order in itertools.islice(itertools.permutations(members), 0, 720, 37):
        result = near_duplicates.find(order)
        assert {(pair.image.name, pair.twin.name, pair.bits) for pair in result.pairs} == {
            ("train", "test too", 2),
            ("val", "test too", 1),
            ("unlabeled", "test", 1),
        }
        assert [pair.bits for pair in result.pairs] == [1, 1, 2]
        assert result.measured == {
            ("val", "train"): 1,
            ("val", "unlabeled"): 1,
            ("test", "train"): 2,
            ("test", "val"): 2,
            ("test", "unlabeled"): 2,
        }


def test_groups_reach_by_way_of_others() -> None:
    chain = [f"{(1 << 6 * number) - 1:016x}" + "80" * 48 for number in range(4)]
    members = [candidate(f"{number}", look) for number, look in enumerate([*chain, "f" * 16 + "80" * 48])]
    numbers = near_duplicates.groups(members)
    assert len({numbers[f"{number}"] for number in range(4)}) == 1
    assert numbers["4"] != numbers["0"]


@pytest.mark.parametrize("together", [7, 2**20])
def test_groups_are_those_of_a_slow_loop(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(near_duplicates, "_TOGETHER", together)
    looks = clusters(120, seed=2)
    numbers = list(range(len(looks)))
    for one, other in itertools.combinations(range(len(looks)), 2):
        if looks_alike(looks[one], looks[other]):
            numbers = [numbers[one] if number == numbers[other] else number for number in numbers]
    found = near_duplicates.groups([candidate(f"{number}", look) for number, look in enumerate(looks)])
    parts = [{key: found[f"{key}"] for key in range(len(looks))}, dict(enumerate(numbers))]
    first, second = ({frozenset(k for k in part if part[k] == value) for value in part.values()} for part in parts)
    assert first == second
    assert 1 < len(first) < 120


def write(root: Path, split: str, label: int, name: str, image: Image.Image, quality: int = 95) -> None:
    path = root / split / f"class {label}" / f"{name}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=quality)


def prepared(source: Path, out: Path, **values: object) -> Artifact:
    given = {"source": f"imagefolder:{source}", "image_size": 64, **values}
    return run(DataSettings.model_validate(given), dataset=out)


def splits_of(out: Path) -> dict[str, SplitName]:
    data = open_dataset(out)
    return {name: split for split in SPLITS for name in data.split(split).sources}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five images of each split and class; the first one of each is also in another split, as another file."""
    root = tmp_path / "photos"
    for (place, split), label, number in itertools.product(enumerate(LABELED), range(2), range(5)):
        write(root, split, label, f"{number}", picture(100 * place + 10 * label + number))
    write(root, "train", 0, "of test", picture(200), quality=50)
    write(root, "train", 1, "of val", picture(110), quality=50)
    write(root, "val", 1, "of test", picture(210), quality=50)
    (root / "unlabeled").mkdir()
    picture(201).save(root / "unlabeled" / "of test.jpg", quality=50)
    return root


TWINS = {
    "train/class 0/of test.jpg": "test/class 0/0.jpg",
    "train/class 1/of val.jpg": "val/class 1/0.jpg",
    "val/class 1/of test.jpg": "test/class 1/0.jpg",
    "unlabeled/of test.jpg": "test/class 0/1.jpg",
}


def test_those_of_a_given_split_are_left_out(photos: Path, tmp_path: Path) -> None:
    artifact = prepared(photos, tmp_path / "out", near_duplicates="separate")
    splits = splits_of(tmp_path / "out")
    assert set(TWINS) & set(splits) == set()
    assert len(splits) == 30
    assert artifact.settings["near_duplicates"] == "separate"
    assert "4 images were left out that look like" in (tmp_path / "out" / "card.html").read_text()


def test_they_are_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        prepared(photos, tmp_path / "out", near_duplicates="refuse")
    assert str(caught.value).startswith("4 images look like one of a held-out split, first ")
    assert str(caught.value).endswith(
        f"All are listed in {tmp_path}/out/near_duplicates.json; remove them, or set data.near_duplicates=separate"
    )
    for name in TWINS:
        (photos / name).unlink()
    artifact = prepared(photos, tmp_path / "out", near_duplicates="refuse")
    assert artifact.figures["near_duplicates"] == 0
    assert not (tmp_path / "out" / "near_duplicates.json").exists(), "the earlier one is gone"


def test_splits_that_are_taken_from_train_share_none(tmp_path: Path) -> None:
    for label, number, shot in itertools.product(range(2), range(20), range(3)):
        write(tmp_path / "photos", "", label, f"{number}-{shot}", picture(100 * label + number), quality=95 - 20 * shot)
    shown = prepared(tmp_path / "photos", tmp_path / "shown", val_fraction=0.2, test_fraction=0.2)
    assert shown.figures["near_duplicates"] > 30
    artifact = prepared(
        tmp_path / "photos", tmp_path / "out", val_fraction=0.2, test_fraction=0.2, near_duplicates="separate"
    )
    splits = splits_of(tmp_path / "out")
    assert len(splits) == 120, "none is lost"
    shots: dict[str, set[str]] = {}
    for name, split in splits.items():
        shots.setdefault(name.split("-")[0], set()).add(split)
    assert all(len(found) == 1 for found in shots.values())
    assert artifact.figures["near_duplicates"] == 0
    assert artifact.figures["test"] == artifact.figures["val"] == 24


def test_where_all_look_same_no_split_can_be_taken(tmp_path: Path) -> None:
    for label, number in itertools.product(range(2), range(10)):
        write(tmp_path / "photos", "", label, f"{number}", picture(1), quality=50 + 4 * number + label)
    with pytest.raises(DataError, match=r"split val is empty: .*; or set data\.near_duplicates=show: images that look"):
        prepared(tmp_path / "photos", tmp_path / "out", near_duplicates="separate")


def test_without_any_data_set_says_nothing_of_them(photos: Path, tmp_path: Path) -> None:
    for name in TWINS:
        (photos / name).unlink()
    artifact = prepared(photos, tmp_path / "out")
    assert "near_duplicates.json" not in artifact.files
    assert "Near-duplicates" not in (tmp_path / "out" / "card.html").read_text()


def test_a_value_that_there_is_not() -> None:
    with pytest.raises(
        SettingsError, match=r"data\.near_duplicates must be 'show', 'separate' or 'refuse', got 'move'"
    ):
        resolve("", "data.near_duplicates=move")
