from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from trainer.evaluation import metrics, plots


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


@pytest.mark.parametrize("classes", [2, 10, 81, 300])
def test_confusion_matrix_is_drawn_for_few_and_many_classes(classes):
    generator = np.random.default_rng(classes)
    matrix = generator.integers(0, 3, (classes, classes)) + 20 * np.eye(classes, dtype=np.int64)
    content = plots.confusion(matrix, [f"A class with a rather long name {index}" for index in range(classes)])
    picture = opened(content)
    assert len(content) < 400_000
    assert min(picture.size) > 300
    assert len(picture.convert("RGB").getcolors(1 << 24)) > 20


def test_reliability_shows_both_models():
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(300, 4)), generator.integers(0, 4, 300)
    one = plots.reliability({"teacher": metrics.calibration(3 * logits, labels, 15)})
    both = plots.reliability(
        {"teacher": metrics.calibration(3 * logits, labels, 15), "student": metrics.calibration(logits, labels, 15)}
    )
    assert opened(both).size[0] > 300
    assert one != both


def test_recalls_grow_with_the_classes_and_stop_growing():
    def height(classes: int) -> int:
        values = np.linspace(0, 1, classes)
        values[0] = np.nan
        return opened(plots.recalls({"student": values}, [str(index) for index in range(classes)])).size[1]

    assert height(5) < height(81) < height(100)
    assert height(100) == height(1000)


def test_strip_keeps_order_and_pixels():
    images = np.zeros((2, 3, 4, 4), dtype=np.uint8)
    images[0, 0], images[1, 2] = 200, 100
    picture = opened(plots.strip(images, edge=40)).convert("RGB")
    assert picture.size == (84, 40)
    assert picture.getpixel((20, 20)) == (200, 0, 0)
    assert picture.getpixel((64, 20)) == (0, 0, 100)
    assert picture.getpixel((42, 20)) == (255, 255, 255)
