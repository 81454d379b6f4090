from __future__ import annotations

import pytest
from markupsafe import Markup

from trainer import formatting, svg
from trainer.profiling.training_summary import PHASE_LABELS


def test_texts_and_attributes_are_escaped_and_elements_are_not() -> None:
    inner = svg.element("tspan", "<b>")
    assert (
        svg.element("text", inner, "&", class_='"x"')
        == '<text class="&#34;x&#34;"><tspan>&lt;b&gt;</tspan>&amp;</text>'
    )
    assert isinstance(inner, Markup)


def test_attributes_are_written_as_svg_has_them() -> None:
    drawn = svg.element("rect", x=1.26, stroke_width=3, viewBox="0 0 1 1", aria_label="a", opacity=None)
    assert drawn == '<rect x="1.3" stroke-width="3" viewBox="0 0 1 1" aria-label="a"></rect>'


def test_a_hint_is_the_elements_title() -> None:
    assert svg.rectangle(0, 0, 1, 1, "bar", "3 < 4") == (
        '<rect x="0.0" y="0.0" width="1.0" height="1.0" class="bar"><title>3 &lt; 4</title></rect>'
    )
    assert "<title>" not in svg.rectangle(0, 0, 1, 1, "bar")


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [(0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, 97, 4, [0, 50]), (3, 3, 4, [3]), (-1, 1, 2, [-1, 0, 1])],
)
def test_ticks_are_round(low: float, high: float, count: int, expected: list[float]) -> None:
    assert svg.ticks(low, high, count) == pytest.approx(expected)


@pytest.mark.parametrize("keep_end", [True, False])
@pytest.mark.parametrize("label", ["x" * 200, "W" * 30, "BLACK BEAR " * 3, "猫" * 40, "قطة صغيرة جدا " * 5, "a猫" * 20])
def test_a_label_that_is_too_long_is_cut_to_what_fits(label: str, keep_end: bool) -> None:
    shown = svg.fitted(label, keep_end=keep_end)
    assert 18 <= formatting.columns(shown) <= 22
    assert label.endswith(shown[1:]) if keep_end else label.startswith(shown[:-1])
    assert svg.fitted("a cat") == "a cat"


@pytest.mark.parametrize("name", PHASE_LABELS.values())
def test_the_labels_of_phases_are_whole(name: str) -> None:
    assert svg.fitted(name) == name


def test_a_label_that_was_cut_is_whole_in_its_hint() -> None:
    label = "a class with a rather long name"
    assert f"<title>{label}</title>" in svg.row_label(0, 0, label)
    assert "<title>" not in svg.row_label(0, 0, "short")


def test_a_chart_with_text_is_scrolled_before_its_text_gets_too_small() -> None:
    assert "--least: 800px" in svg.drawing(10, title="it", width=1000)
    assert "--least: 0px" in svg.drawing(10, title="it", width=1000, shrinks=True)
    assert 'role="img" aria-label="it"' in svg.drawing(10, title="it")
