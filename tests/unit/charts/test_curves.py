from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest

from trainer.charts import curves
from trainer.charts.curves import ReliabilityCurve

TEACHER = ReliabilityCurve(name="teacher", confidence=[None, 0.75], accuracy=[None, 0.5], counts=[0, 4])
STUDENT = ReliabilityCurve(name="student", confidence=[0.25, 0.75], accuracy=[0.0, 1.0], counts=[1, 3])


def dots(drawn: str) -> list[tuple[str, float, float]]:
    """Hint and place of each."""
    found = re.findall(r'<g><title>([^<]*)</title><circle cx="([\d.]+)" cy="([\d.]+)"', drawn)
    return [(hint, float(x), float(y)) for hint, x, y in found]


def test_reliability_shows_both_models_and_leaves_out_empty_bins() -> None:
    drawn = curves.reliability([TEACHER, STUDENT], "calibration")
    assert dots(drawn) == [
        ("teacher: of 4 images with a confidence of about 75 %, 50 % are right", 315.0, 210.0),
        ("student: of 1 images with a confidence of about 25 %, 0 % are right", 105.0, 420.0),
        ("student: of 3 images with a confidence of about 75 %, 100 % are right", 315.0, 0.0),
    ]
    assert curves.reliability([STUDENT], "calibration") != drawn


def test_recalls_are_sorted_by_the_last_model_and_unknown_ones_are_left_out() -> None:
    given: Mapping[str, np.ndarray] = {"teacher": np.array([1, np.nan, 0.5]), "student": np.array([0.9, 0.2, np.nan])}
    drawn = curves.recalls(given, ["a", "b", "<c>"], "recall")
    assert [hint for hint, *_ in dots(drawn)] == [
        "b: student 20 %",
        "a: teacher 100 %",
        "a: student 90 %",
        "&lt;c&gt;: teacher 50 %",
    ]


def test_recalls_grow_with_the_classes_and_stop_growing() -> None:
    def height(classes: int) -> float:
        values = np.linspace(0, 1, classes)
        values[0] = np.nan
        drawn = curves.recalls({"student": values}, [str(index) for index in range(classes)], "recall")
        return float(re.findall(r'viewBox="\S+ \S+ \S+ (\S+)"', drawn)[0])

    assert height(5) < height(81) < height(100)
    assert height(100) == height(1000)


@pytest.mark.parametrize("most", [0, 4])
def test_outlines_share_one_scale_and_say_their_counts(most: int) -> None:
    drawn = curves.outlines({"a": [0, most], "b": [most // 2, 0]}, ["low", "high"], ["0", "1", "2"], "note", "title")
    lines = re.findall(r'class="line s\d" d="([^"]*)"', drawn)
    if most:
        assert lines == [
            "M0.0 160.0L360.0 160.0L360.0 0.0L720.0 0.0",
            "M0.0 80.0L360.0 80.0L360.0 160.0L720.0 160.0",
        ]
    assert f"<title>high: {most} at a, 0 at b</title>" in drawn
