from __future__ import annotations

import numpy as np
import pytest

from trainer.profiling.binning import mean_in_bins, thin_curve


def test_a_signal_is_averaged_by_the_time_that_each_sample_stands_for() -> None:
    ends, values = np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 40.0])
    means = mean_in_bins(ends, values, np.array([0.0, 2.0, 3.0, 4.0]))
    assert means.tolist() == pytest.approx([15, 40, 40])


def test_what_is_unknown_stays_unknown() -> None:
    ends, values = np.array([1.0, 2.0, 3.0]), np.array([10.0, np.nan, 30.0])
    means = mean_in_bins(ends, values, np.array([0.0, 1.0, 2.0, 3.0, 5.0]))
    np.testing.assert_allclose(means[[0, 2]], [10, 30])
    assert np.isnan(means[[1, 3]]).all()


def test_many_samples_give_the_mean_of_their_bin() -> None:
    values = np.random.default_rng(0).random(1000)
    means = mean_in_bins(np.arange(1.0, 1001.0), values, np.linspace(0, 1000, 11))
    np.testing.assert_allclose(means, values.reshape(10, 100).mean(axis=1))


def test_a_short_curve_is_drawn_as_it_is_and_a_long_one_by_means() -> None:
    x, y = np.arange(1000.0), np.arange(1000.0) * 2
    assert thin_curve(x, y, 2000)[1] is y
    thin_x, thin_y = thin_curve(x, y, 10)
    np.testing.assert_allclose(thin_y, y.reshape(10, 100).mean(axis=1))
    np.testing.assert_allclose(thin_x, x.reshape(10, 100).mean(axis=1))
