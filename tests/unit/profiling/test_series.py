from __future__ import annotations

import numpy as np
import pytest

from trainer.profiling.series import ThinnedTable


def filled(rows: int, capacity: int = 64) -> ThinnedTable:
    table = ThinnedTable(["step", "seconds"], capacity)
    for step in range(rows):
        table.append((step, step / 2))
    return table


def test_a_short_series_is_kept_whole() -> None:
    table = filled(64)
    assert table.stride == 1
    assert table.column("step").tolist() == list(range(64))
    assert table.column("seconds").tolist() == [step / 2 for step in range(64)]


@pytest.mark.parametrize("rows", [65, 128, 129, 1000, 100_000])
def test_a_long_series_stays_bounded_and_covers_everything_evenly(rows: int) -> None:
    table = filled(rows)
    steps = table.column("step")
    assert table.appended == rows
    assert 31 <= len(table) <= 64
    assert steps[0] < table.stride
    assert steps[-1] >= rows - 2 * table.stride
    blocks = steps // table.stride
    assert blocks.tolist() == list(range(len(steps))), "each block of `stride` rows is stood for by one row of it"


def test_thinning_does_not_fall_in_with_a_period_of_the_training() -> None:
    table = ThinnedTable(["slow"], 256)
    for step in range(200_000):
        table.append((float(step % 8 == 0),))
    assert table.column("slow").mean() == pytest.approx(1 / 8, abs=0.1)


def test_all_ranks_keep_the_same_rows() -> None:
    np.testing.assert_array_equal(filled(5000).array(), filled(5000).array())


def test_a_new_column_is_zero_in_earlier_rows() -> None:
    table = filled(3)
    table.add_column("late")
    table.append((3, 1.5, 7.0))
    assert table.columns == ["step", "seconds", "late"]
    assert table.column("late").tolist() == [0, 0, 0, 7]
    assert table.column("step").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_a_capacity_that_can_not_be_halved_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity must be even and at least 2, got {capacity}"):
        ThinnedTable(["step"], capacity)
