"""What is measured of layers, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainer.profiling.evidence import INPUT, LAYER_COLUMNS
from trainer.profiling.layer_sampler import LayerStats


def measure(model: nn.Module, *batches: Tensor) -> tuple[LayerStats, dict[str, dict[str, float]]]:
    """The last of several looks, by row and column."""
    stats = LayerStats(model)
    for batch in batches:
        with stats.listening(), torch.no_grad():
            model(batch)
        assert stats.has_heard
        rows = stats.measure()
    return stats, {
        name: dict(zip(LAYER_COLUMNS, row.tolist(), strict=True)) for name, row in zip(stats.names, rows, strict=True)
    }


def test_input_and_layers() -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 2, 5, 5)
    images[0, 1] = 0.5
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(75, 4), nn.Tanh())
    _, rows = measure(model, images)
    assert list(rows) == [f"{INPUT}0", f"{INPUT}1", "1", "4"]
    for channel in (0, 1):
        pixels = images[:, channel].numpy()
        row = rows[f"{INPUT}{channel}"]
        known = [row[name] for name in ("images", "mean", "std", "smallest", "largest")]
        np.testing.assert_allclose(known, [8, pixels.mean(), pixels.std(), pixels.min(), pixels.max()], rtol=1e-5)
    assert (rows[f"{INPUT}0"]["blank"], rows[f"{INPUT}1"]["blank"]) == (0, 1 / 8)
    given = model(images).detach().numpy()
    assert rows["4"]["std"] == pytest.approx(given.std(), rel=1e-5)
    assert (rows["4"]["saturated"], rows["1"]["inactive"]) == (0, 0)
    assert np.isnan([rows["4"]["inactive"], rows["1"]["saturated"], rows["1"]["blank"]]).all()


def test_units_are_channels_wherever_they_stand() -> None:
    """The second of four channels is always 0: a quarter of the units, in each layout."""
    values = torch.ones(3, 4, 6, 6)
    values[:, 1] = -1
    relu = nn.Sequential(nn.ReLU())
    for layout in (values, values.movedim(1, -1), values.flatten(2).transpose(1, 2), values[:, :, 0, 0]):
        assert measure(relu, layout)[1]["0"]["inactive"] == 0.25


def test_a_unit_is_dead_after_looks_in_a_row() -> None:
    relu = nn.Sequential(nn.ReLU())
    off, on = torch.full((2, 4), -1.0), torch.ones(2, 4)
    assert measure(relu, off, off)[1]["0"]["inactive"] == 1
    assert measure(relu, off, on, *[off] * 7)[1]["0"]["inactive"] == 0, "it answered seven looks ago"
    assert measure(relu, off, on, *[off] * 8)[1]["0"]["inactive"] == 1


@pytest.mark.parametrize(("function", "end"), [(nn.Sigmoid, 40), (nn.Tanh, 20), (nn.Hardtanh, 1), (nn.Hardsigmoid, 3)])
def test_slopes_of_bounded_functions(function: type[nn.Module], end: float) -> None:
    values = torch.tensor([[-end, 0.0, end], [-end, 0.1, end]])
    assert measure(nn.Sequential(function()), values)[1]["0"]["saturated"] == pytest.approx(2 / 3)


def test_calls_of_one_module_are_told_apart_and_may_be_missing() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.GELU()

        def forward(self, values: Tensor) -> Tensor:
            once = self.act(values)
            return self.act(-once) if values.sum() > 0 else once

    stats, rows = measure(Twice(), torch.ones(2, 3), -torch.ones(2, 3))
    assert list(rows) == ["act", "act (2)"]
    assert np.isnan(list(rows["act (2)"].values())).all()
    assert stats


def test_what_has_no_layers() -> None:
    assert not LayerStats(nn.Sequential(nn.Embedding(3, 4), nn.LayerNorm(4)))
    assert LayerStats(nn.Linear(3, 4)), "rows of numbers are an input"


def test_no_value_is_read_back() -> None:
    """On a GPU the host would wait for it."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Tanh())
    stats = LayerStats(model)
    with stats.listening():
        model(torch.randn(2, 3, 4, 4))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        stats.measure()
    assert "aten::_local_scalar_dense" not in {event.key for event in profile.key_averages()}
