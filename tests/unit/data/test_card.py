"""What the data card says, read back from the page."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainer.config import DataSettings
from trainer.data.card import CLASSES, ROWS, STRIPS, TILE, data_card
from trainer.data.curation import Dropped, ImageCandidate, Quarantined
from trainer.data.dataset_schema import SplitName
from trainer.data.near_duplicates import NearDuplicates, NearPair
from trainer.data.sources import Columns, Item, SourceListing
from trainer.io import formatting
from trainer.models.served_student.class_tags import ClassTags

EVIL = '<script>alert("1")</script>'


def square(row: int) -> bytes:
    """A plain picture whose red says its row."""
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (row % 256, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def candidate(row: int, label: int, split: SplitName, *, width: int = 20, height: int = 10) -> ImageCandidate:
    return ImageCandidate(
        row=row, name=f"{row}", label=label, split=split, key=f"{row:064x}", width=width, height=height
    )


def content(
    classes: Sequence[str] = ("apple", EVIL), notes: tuple[str, ...] = ("A note & more.",), **changes: object
) -> dict[str, Any]:
    values: dict[str, object] = {
        "settings": DataSettings(source="imagefolder:/some/where/photos", image_size=16),
        "listing": SourceListing(items=Columns.of(Item, ()), classes=tuple(classes), read=str.encode, notes=notes),
        "splits": {
            "train": [
                candidate(0, 0, "train"),
                candidate(1, 0, "train", width=8),
                candidate(2, 1, "train", height=400),
            ],
            "val": [candidate(3, 0, "val")],
            "test": [candidate(4, 0, "test"), candidate(5, 1, "test")],
            "unlabeled": [candidate(200, -1, "unlabeled")],
        },
        "quarantined": [
            Quarantined(name=EVIL, reason="truncated: at byte 9"),
            Quarantined(name="b", reason="empty file"),
        ],
        "dropped": [
            Dropped(name="c", split="train", kept_name="d", kept_split="train"),
            Dropped(name="e", split="train", kept_name="f", kept_split="test"),
        ],
        "read": square,
    }
    return values | changes


def rows(page: str) -> list[list[str]]:
    return [
        [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", page)
    ]


def test_the_numbers() -> None:
    page = data_card(**content())
    table = rows(page)
    for row in (["train", "3"], ["val", "1"], ["test", "2"], ["unlabeled", "1"], ["quarantined", "2"]):
        assert row in table
    assert ["left out: equal to one that is kept", "1"] in table
    assert ["left out: equal to one of val or test (leakage)", "1"] in table
    assert ["apple", "2", "1", "1", "4"] in table
    assert [EVIL, "1", "0", "1", "2"] in table
    assert ["width, pixels", "8", "8", "20", "20", "20"] in table
    assert ["height, pixels", "10", "10", "10", "10", "400"] in table
    assert "The largest class has 2.0 times as many images as the smallest." in page
    assert "7 of 7 images were enlarged" not in page
    assert "6 of 7 images were enlarged" in page
    assert "No image in val: &lt;script&gt;" in page
    assert "No image in test" not in page
    assert "Fewer than 5 images in val: apple (1). The accuracy" in page
    assert "Fewer than 5 images in test: apple (1), &lt;script&gt;" in page
    enough = [candidate(300 + row, row % 2, "val") for row in range(10)]
    assert "images in val" not in data_card(**content(splits={**content()["splits"], "val": enough}))


def test_what_was_left_out_is_listed_with_reasons() -> None:
    table = rows(data_card(**content()))
    assert [EVIL, "truncated: at byte 9"] in table
    assert ["truncated", "1"] in table
    assert ["c", "train", "d", "train", "copy"] in table
    assert ["e", "train", "f", "test", "leakage"] in table
    assert "Nothing." in data_card(**content(quarantined=[], dropped=[]))


def test_near_duplicates_are_shown_side_by_side_nearest_ones_first() -> None:
    test, val = candidate(4, 0, "test"), candidate(3, 0, "val")
    train = replace(candidate(200, -1, "unlabeled"), name=EVIL)
    pairs = [NearPair(image=train, twin=test, bits=1), *[NearPair(image=val, twin=test, bits=2)] * 30]
    measured: dict[tuple[SplitName, SplitName], int] = {("test", "val"): 1, ("val", "train"): 0}
    near = NearDuplicates(pairs=pairs, measured=measured, skipped=0, complete=True)
    page = data_card(**content(near=near))
    section = page[page.index("<h2>Near-duplicates") :]
    assert "31 images are kept that look like one of a held-out split" in section
    assert ["test", "val", "1"] in rows(section)
    assert ["val", "train", "0"] not in rows(section)
    figures = re.findall(r'src="data:image/jpeg;base64,([^"]+)" alt="([^"]*)"', section)
    assert len(figures) == 24
    strip = np.asarray(Image.open(io.BytesIO(base64.b64decode(figures[0][0]))))
    np.testing.assert_allclose(strip[TILE // 2, [TILE // 2, TILE + TILE // 2], 0], [200, 4], atol=3)
    caption = html.unescape(figures[0][1])
    assert caption == f"unlabeled, unlabeled: {EVIL} | test, {formatting.isolated('apple')}: 4 (1)"
    assert EVIL not in page
    assert "not compared" not in section
    assert "not all of them were compared" not in section
    separated = DataSettings(near_duplicates="separate")
    few = NearDuplicates(pairs=pairs, measured=measured, skipped=2, complete=False)
    page = data_card(**content(near=few, settings=separated))
    assert "31 images were left out that look" in page
    assert "2 images were not compared: an edge is below 32 pixels." in page
    assert "so many images that not all of them were compared" in page
    assert "Near-duplicates" not in data_card(**content(near=replace(near, pairs=[])))


def test_what_is_known_of_the_classes() -> None:
    tags = ClassTags(
        labels=("apple", EVIL),
        attributes={"energy": (12345.67, None), "allergens": ("none", EVIL)},
        parents={"apple": "fruit", EVIL: "drinks", "fruit": "food", "drinks": "food"},
    )
    table = [[html.unescape(cell) for cell in row] for row in rows(data_card(**content(tags=tags)))]
    assert ["apple", formatting.isolated("food / fruit"), "12345.67", "none"] in table
    assert [EVIL, formatting.isolated("food / drinks"), "", EVIL] in table
    assert EVIL not in data_card(**content(tags=tags))
    assert "What is known of the classes" not in data_card(**content())


def test_much_that_is_known_of_many_classes_is_cut() -> None:
    labels = tuple(f"class {number}" for number in range(2000))
    tags = ClassTags(labels=labels, attributes={f"a{number}": ("x" * 1000,) * 2000 for number in range(100)})
    page = data_card(**content(tags=tags))
    assert "1,800 more classes and 90 more attributes are in tags.json." in page
    assert len(page) < 600_000


def test_texts_are_escaped_and_place_free() -> None:
    page = data_card(**content(settings=DataSettings(source=f"imagefolder:/x/{EVIL}"), notes=(EVIL,)))
    assert "<script" not in page
    assert "A note &amp; more." in data_card(**content())
    # The page is equal for equal content and tells no folder.
    assert data_card(**content()) == data_card(**content())
    elsewhere = DataSettings(source="imagefolder:/else/where/photos", image_size=16)
    assert data_card(**content(settings=elsewhere)) == data_card(**content())


def test_the_pictures_are_those_of_the_classes() -> None:
    figures = re.findall(r'src="data:image/jpeg;base64,([^"]+)" alt="([^"]*)"', data_card(**content()))
    strips = {html.unescape(name): Image.open(io.BytesIO(base64.b64decode(data))) for data, name in figures}
    assert list(strips) == ["apple", EVIL, "unlabeled"]
    assert strips["apple"].size == (2 * TILE, TILE)
    middles = np.asarray(strips["apple"])[TILE // 2, [TILE // 2, TILE + TILE // 2], 0]
    np.testing.assert_allclose(middles, [0, 1], atol=3)
    np.testing.assert_allclose(np.asarray(strips["unlabeled"])[..., 0], 200, atol=3)


@pytest.mark.parametrize("classes", [STRIPS, 2 * CLASSES])
def test_large_data_set_stays_below_limit_of_page(classes: int) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    noise.save(buffer, "PNG")
    train = [candidate(row, row % classes, "train") for row in range(4 * classes)]
    quarantined = [
        Quarantined(name=f"{'long/' * 20}{number}.jpg", reason="truncated: " + "x" * 60) for number in range(5000)
    ]
    page = data_card(
        **content(
            classes=[f"class {label} {'x' * 30}" for label in range(classes)],
            splits={
                "train": train,
                "val": [candidate(9, 0, "val")],
                "test": [candidate(9, 0, "test")],
                "unlabeled": [],
            },
            quarantined=quarantined,
            read=lambda row: buffer.getvalue(),
        )
    )
    assert len(page.encode()) < 2_000_000
    assert page.count("data:image/jpeg") == STRIPS
    assert f"{5000 - ROWS:,} more are listed in quarantine.json." in page
    assert (f"The first {CLASSES:,} of {classes:,} classes are listed." in page) == (classes > CLASSES)


def test_the_drawing_has_bars_per_class_and_split() -> None:
    page = data_card(**content())
    heights = [float(value) for value in re.findall(r'<rect [^>]*height="([0-9.]+)"', page)]
    assert heights == pytest.approx([70, 35, 35, 35, 0, 35])
