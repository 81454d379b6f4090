"""Charts of all kinds: their marks are where the numbers say."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
from markupsafe import Markup

from trainer.io import formatting
from trainer.profiling.training_summary import PHASE_LABELS
from trainer.report import charts
from trainer.report.charts import (
    LEFT,
    PLOT,
    ChartLine,
    MarkedTime,
    ReliabilityCurve,
    ScatterPoint,
    by_color,
    histogram,
    stacked_bar,
    stacked_columns,
    stacked_rows,
)


def test_texts_and_attributes_are_escaped_and_elements_are_not() -> None:
    inner = charts.element("tspan", "<b>")
    assert (
        charts.element("text", inner, "&", class_='"x"')
        == '<text class="&#34;x&#34;"><tspan>&lt;b&gt;</tspan>&amp;</text>'
    )
    assert isinstance(inner, Markup)


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [(0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 97, 4, [0, 50]), (3, 3, 4, [3]), (-1, 1, 2, [-1, 0, 1])],
)
def test_ticks_are_round(low: float, high: float, count: int, expected: list[float]) -> None:
    assert charts.ticks(low, high, count) == pytest.approx(expected)


@pytest.mark.parametrize("keep_end", [True, False])
@pytest.mark.parametrize("label", ["x" * 200, "W" * 30, "BLACK BEAR " * 3, "猫" * 40, "قطة صغيرة جدا " * 5, "a猫" * 20])
def test_label_that_is_too_long_is_cut_to_what_fits(label: str, keep_end: bool) -> None:
    shown = charts.fitted(label, keep_end=keep_end)
    assert 18 <= formatting.columns(shown) <= 22
    assert label.endswith(shown[1:]) if keep_end else label.startswith(shown[:-1])
    assert charts.fitted("a cat") == "a cat"


@pytest.mark.parametrize("name", PHASE_LABELS.values())
def test_the_labels_of_phases_are_whole(name: str) -> None:
    assert charts.fitted(name) == name


def test_labels_are_cut_and_hinted() -> None:
    label = "a class with a rather long name"
    assert f"<title>{label}</title>" in charts.row_label(0, 0, label)
    assert "<title>" not in charts.row_label(0, 0, "short")
    # A hint is the elements title.
    assert charts.rectangle(0, 0, 1, 1, "bar", "3 < 4") == (
        '<rect x="0.0" y="0.0" width="1.0" height="1.0" class="bar"><title>3 &lt; 4</title></rect>'
    )
    assert "<title>" not in charts.rectangle(0, 0, 1, 1, "bar")
    # A chart with text is scrolled before its text gets too small.
    assert "--least: 800px" in charts.drawing(10, title="it", width=1000)
    assert "--least: 0px" in charts.drawing(10, title="it", width=1000, shrinks=True)
    assert 'role="img" aria-label="it"' in charts.drawing(10, title="it")


def widths(drawn: str) -> list[float]:
    return [float(value) for value in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)]


def test_stacked_bars() -> None:
    names = {"data": "waiting", "mine": "<mine>"}
    drawn = stacked_bar({"data": 0.25, "mine": 0.75}, "shares", spoken=names.__getitem__)
    assert widths(drawn) == [259, 779]
    assert "<title>waiting: 25.0 %</title>" in drawn
    assert "<title>&lt;mine&gt;: 75.0 %</title>" in drawn
    assert re.findall(r'class="(f-\w+)"', drawn) == ["f-data", "f-named"]
    # Amounts without a color of their own are summed.
    assert by_color({"data": 1.0, "mine": 2.0, "yours": 3.0}) == {"data": 1.0, "named": 5.0}
    assert by_color({"data": 1.0, "mine": 2.0}) == {"data": 1.0, "mine": 2.0}


@pytest.mark.parametrize("rows", [1, 40])
def test_rows_share_one_scale(rows: int) -> None:
    given = [(f"rank {row}", {"waiting": 10 / (row + 1)}, "") for row in range(rows)]
    drawn = stacked_rows(given, "ms", "ranks", spoken=str)
    first, *others = widths(drawn)
    assert others == pytest.approx([(first + 0.5) / (row + 1) - 0.5 for row in range(1, rows)], abs=0.1)
    assert ("<title>waiting: 10 ms</title>" in drawn) == (rows == 1)


def test_columns_and_histograms() -> None:
    values = np.array([*np.arange(1.0, 100.0), 5000.0])
    drawn = histogram(values, [(50.0, "median")], "ms", "steps")
    assert sum(int(count) for count in re.findall(r"<title>[^<]* ms: (\d+)</title>", drawn)) == 100
    # Columns are sorted and say their parts.
    drawn = stacked_columns(["few", "many"], [("train", [1, 1200]), ("test", [2, 300])], "classes")
    assert re.findall(r"<title>([^<]*)</title>", drawn) == ["many: 1,200 train, 300 test", "few: 1 train, 2 test"]
    assert re.findall(r">([\d,]+)</text>", drawn) == ["1,500"]


TEACHER = ReliabilityCurve(name="teacher", confidence=[0.75], accuracy=[0.5], intervals=[(0.2, 0.8)], counts=[4])
STUDENT = ReliabilityCurve(
    name="student", confidence=[0.25, 0.75], accuracy=[0.0, 1.0], intervals=[(0.0, 0.7), (0.4, 1.0)], counts=[1, 3]
)


def dots(drawn: str) -> list[tuple[str, float, float]]:
    found = re.findall(r'<g><title>([^<]*)</title><circle cx="([\d.]+)" cy="([\d.]+)"', drawn)
    return [(hint, float(x), float(y)) for hint, x, y in found]


def test_reliability_shows_both_models_with_intervals() -> None:
    drawn = charts.reliability([TEACHER, STUDENT], "calibration")
    assert dots(drawn) == [
        ("teacher: of 4 images with a confidence of about 75 %, 50 % are right (20 % to 80 %)", 315.0, 210.0),
        ("student: of 1 images with a confidence of about 25 %, 0 % are right (0 % to 70 %)", 105.0, 420.0),
        ("student: of 3 images with a confidence of about 75 %, 100 % are right (40 % to 100 %)", 315.0, 0.0),
    ]
    assert (
        'x1="315.0" y1="336.0" x2="315.0" y2="84.0" class="line m0"' in drawn
        or 'x1="315.0" y1="84.0" x2="315.0" y2="336.0"' in drawn
    )
    # Without low values the axes begin higher.
    high = ReliabilityCurve(name="high", confidence=[0.95], accuracy=[0.9], intervals=[(0.82, 0.95)], counts=[9])
    assert dots(charts.reliability([high], "calibration"))[0][1:] == (315.0, 210.0)


def test_scatter_has_a_logarithmic_axis_and_the_main_model_on_top() -> None:
    points = [
        ScatterPoint(label="this, student", x=10.0, share=0.9, interval=(0.88, 0.92), series=1, is_main=True),
        ScatterPoint(label="old, student", x=1.0, share=0.8, interval=(0.77, 0.83), series=1),
        ScatterPoint(label="old, teacher", x=100.0, share=0.95, interval=(0.93, 0.97), series=0),
    ]
    drawn = charts.scatter(points, "ms", "accuracy against time")
    found = dots(drawn)
    assert [hint for hint, *_ in found] == [
        "old, student: 80 % at 1 ms",
        "old, teacher: 95 % at 100 ms",
        "this, student: 90 % at 10 ms",
    ]
    (_, left, low), (_, right, high), (_, middle, _) = found
    assert middle == pytest.approx((left + right) / 2, abs=0.2)
    assert high < low
    assert charts.scatter(points[:1], "ms", "a single model")


def test_recalls() -> None:
    given: Mapping[str, np.ndarray] = {"teacher": np.array([1, np.nan, 0.5]), "student": np.array([0.9, 0.2, np.nan])}
    drawn = charts.recalls(given, ["a", "b", "<c>"], "recall")
    assert [hint for hint, *_ in dots(drawn)] == [
        "b: student 20 %",
        "a: teacher 100 %",
        "a: student 90 %",
        "&lt;c&gt;: teacher 50 %",
    ]

    # Recalls grow with the classes and stop growing.
    def height(classes: int) -> float:
        values = np.linspace(0, 1, classes)
        values[0] = np.nan
        drawn = charts.recalls({"student": values}, [str(index) for index in range(classes)], "recall")
        return float(re.findall(r'viewBox="\S+ \S+ \S+ (\S+)"', drawn)[0])

    assert height(5) < height(20) == height(1000)
    drawn = charts.recalls({"student": np.array([0.5])}, ["a"], "recall", intervals={0: (0.25, 0.75)})
    assert re.search(r'<line x1="299.0" y1="10.0" x2="569.0" y2="10.0" class="whisker">', drawn)


@pytest.mark.parametrize("most", [0, 4])
def test_outlines_share_one_scale_and_say_their_counts(most: int) -> None:
    drawn = charts.outlines({"a": [0, most], "b": [most // 2, 0]}, ["low", "high"], ["0", "1", "2"], "note", "title")
    lines = re.findall(r'class="line s\d" d="([^"]*)"', drawn)
    if most:
        assert lines == ["M0.0 160.0L360.0 160.0L360.0 0.0L720.0 0.0", "M0.0 80.0L360.0 80.0L360.0 160.0L720.0 160.0"]
    assert f"<title>high: {most} at a, 0 at b</title>" in drawn


NAME = "A class with a rather long name {}"


@pytest.mark.parametrize(
    ("classes", "counts", "names"), [(2, True, True), (10, True, True), (81, False, True), (300, False, False)]
)
def test_confusion_matrix_is_drawn_for_few_and_many_classes(classes: int, counts: bool, names: bool) -> None:
    generator = np.random.default_rng(classes)
    matrix = generator.integers(0, 3, (classes, classes)) + 20 * np.eye(classes, dtype=np.int64)
    drawn = charts.confusion(matrix, [NAME.format(index) for index in range(classes)], "confusion")
    assert len(drawn) < 400_000
    assert ("taken for A class with a rather long name 1: " in drawn) == counts
    assert (f"<title>{NAME.format(classes - 1)}</title>" in drawn) == names
    width, height = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)"', drawn)[0])
    assert 150 < height < 1400
    assert 300 < width < 1400


def test_confusions_of_many_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = charts.confusion(np.array([[3, 1], [0, 0]]), ["cat", "<dog>"], "confusion")
    assert "<title>cat taken for cat: 3 (75 % of the class)</title>" in drawn
    assert "<title>cat taken for &lt;dog&gt;: 1 (25 % of the class)</title>" in drawn
    assert "&lt;dog&gt; taken for" not in drawn
    assert re.findall(r'opacity="(0\.\d\d)"', drawn) == ["0.38", "0.12"]
    # Of many classes each row says what it is taken for.
    matrix = 8 * np.eye(30, dtype=np.int64)
    matrix[3, 7] = 2
    drawn = charts.confusion(matrix, [f"c{index}" for index in range(30)], "confusion")
    assert "<title>c3: 8 of 10 right, most often taken for c7 (2)</title>" in drawn
    assert "<title>c4: 8 of 8 right</title>" in drawn
    # Only the largest of very many cells are drawn.
    monkeypatch.setattr(charts, "MOST_CELLS", 150)
    matrix = 9 * np.eye(150, dtype=np.int64)
    matrix[0, 100:] = 1
    drawn = charts.confusion(matrix, [""] * 150, "confusion")
    assert sum(map(int, re.findall(r"M\d+ [\d.]+h(\d+)", drawn))) == 150


def drawn(lane: charts.Lane) -> str:
    return "".join(lane.content)


def test_a_line_has_gaps_and_a_range() -> None:
    seconds = np.array([0.0, 1, 2, 3, 4])
    curve = ChartLine(style="s0", label="loss", seconds=seconds, values=np.array([2.0, 1.0, np.nan, 0.0, np.nan]))
    lane = charts.line_lane("Loss", "training", [curve], 4.0, height=100)
    assert f'd="M0.0 0.0h0L{PLOT / 4:.1f} 50.0M{3 * PLOT / 4:.1f} 100.0h0"' in drawn(lane)
    assert "<title>loss: 0 to 2 (training)</title>" in drawn(lane)
    assert lane.labels == []


@pytest.mark.parametrize(
    ("duration_s", "unit"), [(200, "seconds"), (2000, "minutes"), (20_000, "hours"), (2_000_000, "days")]
)
def test_the_axis_is_in_a_unit_that_fits(duration_s: float, unit: str) -> None:
    lane = charts.window_lane("Findings", "when seen", [], duration_s)
    assert f"time in {unit}</text>" in charts.over_time([lane], duration_s, "over time")


def test_a_window_is_marked_at_both_ends() -> None:
    windows = [
        MarkedTime(label="short", style="severe", start_s=25, end_s=50),
        MarkedTime(label="<all>", style="note", start_s=1, end_s=99),
    ]
    chart = charts.over_time([charts.window_lane("Findings", "", windows, 100)], 100, "over time", windows=windows)
    [(style, ends)] = re.findall(r'<path class="edge (\S+)" d="([^"]*)"', chart)
    assert style == "e-severe"
    assert [float(x) for x in re.findall(r"M([\d.]+)", ends)] == pytest.approx(
        [LEFT + PLOT / 4, LEFT + PLOT / 2], abs=0.1
    )
    assert "&lt;all&gt;" in chart


def test_shares_and_heat_maps() -> None:
    shares = {"data": np.array([0.25, 0.0]), "mine": np.array([0.75, 1.0])}
    lane = charts.stack_lane("Time", "%", shares, {"data": "waiting for data", "mine": "<mine>"})
    found = re.findall(r'<path class="(\S+)".*? d="([^"]*)"><title>([^<]*)</title>', drawn(lane))
    assert found == [
        ("f-data", "M0 0.750h1v0.250h-1z", "waiting for data"),
        ("f-named", "M0 0.000h1v0.750h-1zM1 0.000h1v1.000h-1z", "&lt;mine&gt;"),
    ]
    # Many rows of a heat map are averaged.
    lane = charts.heat_lane("CPU cores", "% busy", np.full((96, 2), 100.0))
    assert lane.unit == "% busy, 2 a row"
    [runs] = re.findall(r'<path class="heat" opacity="1.0"[^>]* d="([^"]*)"', drawn(lane))
    assert runs.count("M") == 48
