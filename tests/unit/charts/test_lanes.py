from __future__ import annotations

import re

import numpy as np
import pytest

from trainer.charts import lanes
from trainer.charts.lanes import ChartLine, MarkedTime
from trainer.charts.svg import LEFT, PLOT


def drawn(lane: lanes.Lane) -> str:
    return "".join(lane.content)


def test_a_line_has_a_gap_where_a_value_is_unknown_and_says_its_range() -> None:
    seconds = np.array([0.0, 1, 2, 3, 4])
    curve = ChartLine(style="s0", label="loss", seconds=seconds, values=np.array([2.0, 1.0, np.nan, 0.0, np.nan]))
    lane = lanes.line_lane("Loss", "training", [curve], 4.0, height=100)
    assert f'd="M0.0 0.0h0L{PLOT / 4:.1f} 50.0M{3 * PLOT / 4:.1f} 100.0h0"' in drawn(lane)
    assert "<title>loss: 0 to 2 (training)</title>" in drawn(lane)
    assert lane.labels == []


@pytest.mark.parametrize(
    ("duration_s", "unit"), [(200, "seconds"), (2000, "minutes"), (20_000, "hours"), (2_000_000, "days")]
)
def test_the_axis_is_in_a_unit_that_fits(duration_s: float, unit: str) -> None:
    lane = lanes.window_lane("Findings", "when seen", [], duration_s)
    assert f"time in {unit}</text>" in lanes.over_time([lane], duration_s, "over time")


def test_a_window_is_marked_at_both_ends_but_not_where_it_is_nearly_all() -> None:
    windows = [
        MarkedTime(label="short", style="severe", start_s=25, end_s=50),
        MarkedTime(label="<all>", style="note", start_s=1, end_s=99),
    ]
    chart = lanes.over_time([lanes.window_lane("Findings", "", windows, 100)], 100, "over time", windows=windows)
    [(style, ends)] = re.findall(r'<path class="edge (\S+)" d="([^"]*)"', chart)
    assert style == "e-severe"
    assert [float(x) for x in re.findall(r"M([\d.]+)", ends)] == pytest.approx(
        [LEFT + PLOT / 4, LEFT + PLOT / 2], abs=0.1
    )
    assert "&lt;all&gt;" in chart


def test_shares_are_stacked_and_each_says_what_it_is() -> None:
    shares = {"data": np.array([0.25, 0.0]), "mine": np.array([0.75, 1.0])}
    lane = lanes.stack_lane("Time", "%", shares, {"data": "waiting for data", "mine": "<mine>"})
    found = re.findall(r'<path class="(\S+)".*? d="([^"]*)"><title>([^<]*)</title>', drawn(lane))
    assert found == [
        ("f-data", "M0 0.750h1v0.250h-1z", "waiting for data"),
        ("f-named", "M0 0.000h1v0.750h-1zM1 0.000h1v1.000h-1z", "&lt;mine&gt;"),
    ]


def test_many_rows_of_a_heat_map_are_averaged() -> None:
    lane = lanes.heat_lane("CPU cores", "% busy", np.full((96, 2), 100.0))
    assert lane.unit == "% busy, 2 a row"
    [runs] = re.findall(r'<path class="heat" opacity="1.0"[^>]* d="([^"]*)"', drawn(lane))
    assert runs.count("M") == 48
