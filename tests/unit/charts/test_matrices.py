from __future__ import annotations

import re

import numpy as np
import pytest

from trainer.charts import matrices

NAME = "A class with a rather long name {}"


@pytest.mark.parametrize(
    ("classes", "counts", "names"), [(2, True, True), (10, True, True), (81, False, True), (300, False, False)]
)
def test_confusion_matrix_is_drawn_for_few_and_many_classes(classes: int, counts: bool, names: bool) -> None:
    generator = np.random.default_rng(classes)
    matrix = generator.integers(0, 3, (classes, classes)) + 20 * np.eye(classes, dtype=np.int64)
    drawn = matrices.confusion(matrix, [NAME.format(index) for index in range(classes)], "confusion")
    assert len(drawn) < 400_000
    assert ("taken for A class with a rather long name 1: " in drawn) == counts
    assert (f"<title>{NAME.format(classes - 1)}</title>" in drawn) == names
    width, height = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)"', drawn)[0])
    assert 150 < height < 1400
    assert 300 < width < 1400


def test_each_cell_says_its_count_and_share() -> None:
    drawn = matrices.confusion(np.array([[3, 1], [0, 0]]), ["cat", "<dog>"], "confusion")
    assert "<title>cat taken for cat: 3 (75 % of the class)</title>" in drawn
    assert "<title>cat taken for &lt;dog&gt;: 1 (25 % of the class)</title>" in drawn
    assert "&lt;dog&gt; taken for" not in drawn
    assert re.findall(r'opacity="(0\.\d\d)"', drawn) == ["0.75", "0.25"]


def test_of_many_classes_each_row_says_what_it_is_taken_for() -> None:
    matrix = 8 * np.eye(30, dtype=np.int64)
    matrix[3, 7] = 2
    drawn = matrices.confusion(matrix, [f"c{index}" for index in range(30)], "confusion")
    assert "<title>c3: 8 of 10 right, most often taken for c7 (2)</title>" in drawn
    assert "<title>c4: 8 of 8 right</title>" in drawn


def test_a_cell_of_a_small_share_is_drawn_too() -> None:
    matrix = 99 * np.eye(150, dtype=np.int64)
    matrix[149, 0] = 1
    drawn = matrices.confusion(matrix, [""] * 150, "confusion")
    [faint] = re.findall(r'<path class="heat" opacity="0.1"[^>]*d="([^"]*)"', drawn)
    assert faint == f"M0 {149.5 * 800 / 150:g}h1"


def test_only_the_largest_of_very_many_cells_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "MOST_CELLS", 150)
    matrix = 9 * np.eye(150, dtype=np.int64)
    matrix[0, 100:] = 1
    drawn = matrices.confusion(matrix, [""] * 150, "confusion")
    assert sum(map(int, re.findall(r"M\d+ [\d.]+h(\d+)", drawn))) == 150
