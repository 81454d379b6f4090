from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from trainer.profiling.evidence_schema import TENSOR_COLUMNS
from trainer.profiling.tensor_stats import SAMPLED, TensorStats


def looked_at(model: nn.Module, rate: float = 0.1, **options: object) -> dict[str, dict[str, float]]:
    """One step of gradient descent, looked at: name of each tensor -> its columns."""
    statistics = TensorStats(model, **options)
    statistics.before_update()
    with torch.no_grad():
        for weights in model.parameters():
            if weights.grad is not None:
                weights.sub_(rate * weights.grad)
    values = statistics.after_update()
    assert values.shape == (len(statistics.names), len(TENSOR_COLUMNS))
    return {
        name: dict(zip(TENSOR_COLUMNS, row, strict=True))
        for name, row in zip(statistics.names, values.tolist(), strict=True)
    }


def layer(gradient: Tensor | None = None) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(100, 40)
    made.weight.grad = torch.randn(40, 100) if gradient is None else gradient
    made.bias.grad = torch.randn(40)
    return made


def test_what_is_told_of_a_tensor_is_so() -> None:
    model = layer()
    weights, gradient = model.weight.detach().clone(), model.weight.grad.clone()
    seen = looked_at(model)["weight"]
    assert (seen["elements"], seen["dimensions"]) == (4000, 2)
    assert seen["weight_norm"] == pytest.approx(float(weights.norm()), rel=1e-5)
    assert seen["weight_mean_abs"] == pytest.approx(float(weights.abs().mean()), rel=1e-5)
    assert seen["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert seen["gradient_mean_abs"] == pytest.approx(float(gradient.abs().mean()), rel=1e-5)
    assert seen["update_ratio"] == pytest.approx(0.1 * float(gradient.norm() / weights.norm()), rel=0.1), "of a sample"
    assert (seen["weight_nonfinite"], seen["gradient_zeros"], seen["gradient_nonfinite"], seen["unchanged"]) == (0,) * 4


def test_a_tensor_that_a_step_leaves_alone_is_unchanged() -> None:
    seen = looked_at(layer(), rate=0.0)
    assert [seen[name]["unchanged"] for name in ("weight", "bias")] == [1, 1]
    assert [seen[name]["update_ratio"] for name in ("weight", "bias")] == [0, 0]


def test_zeros_are_counted_and_a_change_of_some_elements_is_a_part() -> None:
    gradient = torch.ones(40, 100)
    gradient[:, :50] = 0
    seen = looked_at(layer(gradient))["weight"]
    assert seen["gradient_zeros"] == pytest.approx(0.5, abs=0.05)
    assert seen["unchanged"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [(0, 0), (17, 63), (39, 99)])
def test_a_single_element_that_is_not_finite_is_never_missed(value: float, place: tuple[int, int]) -> None:
    gradient = torch.ones(40, 100)
    gradient[place] = value
    model = layer(gradient)
    seen = looked_at(model)
    assert seen["weight"]["gradient_nonfinite"] >= 1 / 4000
    assert seen["bias"]["gradient_nonfinite"] == 0, "tensors do not spoil one another"
    assert looked_at(model)["weight"]["weight_nonfinite"] >= 1 / 4000


def test_a_tensor_without_gradient_is_there_and_says_nothing_of_it() -> None:
    model = layer()
    model.weight.grad = None
    model.weight.requires_grad_(False)
    seen = looked_at(model)
    missing = [name for name, value in seen["weight"].items() if math.isnan(value)]
    assert missing == ["gradient_norm", "gradient_mean_abs", "gradient_zeros", "gradient_nonfinite"]
    assert seen["weight"]["unchanged"] == 1
    assert not any(math.isnan(value) for value in seen["bias"].values())


def test_a_ratio_to_nothing_is_not_told() -> None:
    model = layer()
    nn.init.zeros_(model.bias)
    assert math.isnan(looked_at(model)["bias"]["update_ratio"])


def test_weights_can_be_left_out() -> None:
    assert list(looked_at(layer(), left_out=["weight"])) == ["bias"]


@pytest.mark.parametrize("width", [7, 64, 96, 192, 210, 768])
def test_a_sample_meets_every_column(width: int) -> None:
    model = nn.Linear(width, 3000, bias=False)
    columns = torch.arange(width).float().expand(3000, width)
    (stride,) = TensorStats(model)._strides
    met = columns.reshape(-1)[::stride]
    assert len(met) <= SAMPLED
    assert len(met.unique()) == width


def test_measuring_leaves_no_trace() -> None:
    model = layer()
    statistics = TensorStats(model)
    before = [tensor.clone() for tensor in (model.weight, model.weight.grad)]
    state = torch.get_rng_state()
    statistics.before_update()
    statistics.after_update()
    assert all(torch.equal(*pair) for pair in zip(before, (model.weight, model.weight.grad), strict=True))
    assert torch.equal(torch.get_rng_state(), state)
