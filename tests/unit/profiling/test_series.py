from __future__ import annotations

import numpy as np
import pytest

from trainer.profiling.series import ThinnedTable, mean_in_bins, thin_curve


def filled(rows: int, capacity: int = 64) -> ThinnedTable:
    table = ThinnedTable(["step", "seconds"], capacity)
    for step in range(rows):
        table.append((step, step / 2))
    return table


@pytest.mark.parametrize("rows", [65, 128, 129, 1000, 100_000])
def test_long_series_stays_bounded_and_covers_everything_evenly(rows: int) -> None:
    table = filled(rows)
    steps = table.column("step")
    assert table.appended == rows
    assert 31 <= len(table) <= 64
    assert steps[0] == 0, "the first one tells where the recording began"
    assert steps[-1] >= rows - 2 * table.stride
    assert steps.tolist() == [table.stride * row for row in range(len(steps))]


def test_series_are_averaged() -> None:
    table = filled(3)
    table.add_column("late")
    table.append((3, 1.5, 7.0))
    assert table.columns == ["step", "seconds", "late"]
    assert table.column("late").tolist() == [0, 0, 0, 7]
    assert table.column("step").tolist() == [0, 1, 2, 3]
    # A signal is averaged by the time that each sample stands for.
    ends, values = np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 40.0])
    means = mean_in_bins(ends, values, np.array([0.0, 2.0, 3.0, 4.0]))
    assert means.tolist() == pytest.approx([15, 40, 40])
    # What is unknown stays unknown.
    ends, values = np.array([1.0, 2.0, 3.0]), np.array([10.0, np.nan, 30.0])
    means = mean_in_bins(ends, values, np.array([0.0, 1.0, 2.0, 3.0, 5.0]))
    np.testing.assert_allclose(means[[0, 2]], [10, 30])
    assert np.isnan(means[[1, 3]]).all()
    # Many samples give the mean of their bin.
    values = np.random.default_rng(0).random(1000)
    means = mean_in_bins(np.arange(1.0, 1001.0), values, np.linspace(0, 1000, 11))
    np.testing.assert_allclose(means, values.reshape(10, 100).mean(axis=1))


def test_curves_are_drawn() -> None:
    x, y = np.arange(1000.0), np.arange(1000.0) * 2
    assert thin_curve(x, y, 2000)[1] is y
    thin_x, thin_y = thin_curve(x, y, 10)
    np.testing.assert_allclose(thin_y, y.reshape(10, 100).mean(axis=1))
    np.testing.assert_allclose(thin_x, x.reshape(10, 100).mean(axis=1))
    # A long curve is the mean of what is known.
    y = np.where(np.arange(1000) % 2, np.nan, 3.0)
    y[:100] = np.nan
    np.testing.assert_array_equal(thin_curve(np.arange(1000.0), y, 10)[1], [np.nan, *[3.0] * 9])
    # A short series is kept whole.
    table = filled(64)
    assert table.stride == 1
    assert table.column("step").tolist() == list(range(64))
    assert table.column("seconds").tolist() == [step / 2 for step in range(64)]
