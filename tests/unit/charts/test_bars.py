from __future__ import annotations

import re

import numpy as np
import pytest

from trainer.charts.bars import BarPart, StackedRow, by_colour, histogram, stacked_bar, stacked_columns, stacked_rows


def widths(drawn: str) -> list[float]:
    return [float(value) for value in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)]


def test_a_stacked_bar_is_divided_by_shares() -> None:
    parts = [BarPart(name="data", label="waiting", share=0.25), BarPart(name="mine", label="<mine>", share=0.75)]
    drawn = stacked_bar(parts, "shares")
    assert widths(drawn) == [259, 779]
    assert "<title>waiting: 25.0 %</title>" in drawn
    assert "<title>&lt;mine&gt;: 75.0 %</title>" in drawn
    assert re.findall(r'class="(f-\w+)"', drawn) == ["f-data", "f-named"]


@pytest.mark.parametrize("rows", [1, 40])
def test_rows_are_on_one_scale_and_many_of_them_have_no_hints(rows: int) -> None:
    given = [
        StackedRow(label=f"rank {row}", parts=[BarPart(name="data", label="waiting", share=10 / (row + 1))], note="")
        for row in range(rows)
    ]
    drawn = stacked_rows(given, "ms", "ranks")
    first, *others = widths(drawn)
    assert others == pytest.approx([(first + 0.5) / (row + 1) - 0.5 for row in range(1, rows)], abs=0.1)
    assert ("<title>waiting: 10 ms</title>" in drawn) == (rows == 1)


def test_rows_without_any_amount_are_drawn() -> None:
    part = BarPart(name="data", label="waiting", share=0.0)
    assert widths(stacked_rows([StackedRow(label="none", parts=[part], note="")], "s", "bill")) == [0]


def test_amounts_without_a_colour_of_their_own_are_summed() -> None:
    assert by_colour({"data": 1.0, "mine": 2.0, "yours": 3.0}) == {"data": 1.0, "named": 5.0}
    assert by_colour({"data": 1.0, "mine": 2.0}) == {"data": 1.0, "mine": 2.0}


def test_a_histogram_counts_every_value() -> None:
    values = np.array([*np.arange(1.0, 100.0), 5000.0])
    drawn = histogram(values, [(50.0, "median")], "ms", "steps", count_label="steps")
    assert sum(int(count) for count in re.findall(r"<title>[^<]* ms: (\d+)</title>", drawn)) == 100


def test_columns_are_sorted_and_say_their_parts() -> None:
    drawn = stacked_columns(["few", "many"], [("train", [1, 1200]), ("test", [2, 300])], "classes")
    assert re.findall(r"<title>([^<]*)</title>", drawn) == ["many: 1,200 train, 300 test", "few: 1 train, 2 test"]
    assert re.findall(r">([\d,]+)</text>", drawn) == ["1,500"]
