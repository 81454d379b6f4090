"""Rules on weights and gradients, on both sides of their thresholds; evidence is synthetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.learning import TENSORS, case_of, curve_of, measured
from tests.unit.profiling.rules.synthetic import judge_by, steps_of
from trainer.profiling.evidence import Spans
from trainer.profiling.rules import judge
from trainer.profiling.rules.gradients import UnchangedWeights, UpdateRatio, VanishingGradients
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged
from trainer.profiling.rules.weights import (
    ExplodingGradients,
    LossNotFinite,
    PoorInitialization,
)

RULES = (PoorInitialization, ExplodingGradients, VanishingGradients, UpdateRatio, UnchangedWeights)


def found(case: Any) -> dict[str, Finding]:
    outcomes = {rule.name: judge_by(rule, case) for rule in RULES}
    return {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Finding)}


def test_weights_need_measurements() -> None:
    assert {type(judge_by(rule, case_of(measured()))) for rule in RULES} == {Healthy}
    for rule in RULES:
        outcome = judge_by(rule, case_of())
        assert isinstance(outcome, NotJudged)
        assert "0 measurements of the weights were recorded" in outcome.reason


# -- losses

NAN, INF = float("nan"), float("inf")
FALLS = np.linspace(2, 1, 40)
FIVE_CHECKPOINTS = Spans(names=["checkpoint", "evaluate"] * 5, start_s=np.linspace(0.2, 0.9, 10), seconds=np.zeros(10))


def with_losses(*values: float, checkpoints: bool = False, **given: Any) -> Case:
    """A training with a point of the loss at every step, of ten milliseconds."""
    case = case_of(metrics={"loss": curve_of(np.array(values), every=1)}, **given)
    rank = replace(case.rank, spans=FIVE_CHECKPOINTS) if checkpoints else case.rank
    return replace(case, training=replace(case.training, ranks=[rank]))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_loss_that_is_not_finite_from_step_on(bad: float) -> None:
    lost = judge_by(LossNotFinite, with_losses(*FALLS, *[bad] * 20, checkpoints=True))
    assert (lost.severity, lost.steps) == ("severe", (40, 59))
    assert lost.text == "The loss is not finite from step 41 on; the last finite one was 1 at step 40."
    # of the checkpoints after 20, 35, 51, 66 and 82 steps
    assert "continue from the checkpoint written after step 35" in lost.advice
    assert lost.saving is not None
    assert lost.saving.seconds == 100 - 41
    assert "continue from an earlier checkpoint" in judge_by(LossNotFinite, with_losses(*FALLS, *[bad] * 3)).advice


def test_a_loss_that_never_was_a_number() -> None:
    assert "none was finite before" in judge_by(LossNotFinite, with_losses(NAN, INF, NAN)).text
    assert judge_by(LossNotFinite, with_losses(*[NAN] * 2)).severity == "warning"  # it may still come back


@pytest.mark.parametrize(("count", "severity"), [(1, "note"), (2, "note"), (3, "warning")])
def test_single_losses_that_are_not_finite_are_said_mildly(count: int, severity: str) -> None:
    single = judge_by(LossNotFinite, with_losses(*([NAN] * count), *FALLS))
    assert single.severity == severity
    assert f"{count} of {40 + count} points" in single.text
    assert judge_by(LossNotFinite, with_losses(*FALLS)) == Healthy("all 40 points of the loss are finite")


def test_the_loss_counts_by_its_name() -> None:
    lost = curve_of([1.0, NAN, NAN, NAN])
    assert judge_by(LossNotFinite, case_of(metrics={"val_loss": lost, "train_loss": lost})).severity == "severe"
    assert isinstance(judge_by(LossNotFinite, case_of(metrics={"val_loss": lost})), NotJudged)


@pytest.mark.parametrize(("broken_at", "rule"), [(30, "exploding_gradients"), (40, "loss_not_finite")])
def test_what_is_not_finite_first_is_named(broken_at: int, rule: str) -> None:
    """The loss of step 36 is the first that is not finite."""
    nonfinite = np.zeros((5, 3))
    nonfinite[broken_at // 10 :] = 1.0
    lost = {"metrics": {"loss": curve_of([*FALLS[:35], *[NAN] * 6], every=1)}}
    fired = [name for name, found in judged(case_of(measured(gradient_nonfinite=nonfinite), **lost)).items() if found]
    assert fired == [rule]


def judged(case: Any) -> dict[str, bool]:
    return {rule.name: isinstance(outcome, Finding) for rule, outcome in judge(case).items()}


# -- initialization


@pytest.mark.parametrize("weight", [0.3, 30.0])
def test_a_single_weight_has_no_sizes_to_compare(weight: float) -> None:
    single = measured(elements=[1, 4096, 64], weight_norm=[weight, 0.02 * 64, 8], weight_mean_abs=[weight, 0.016, 1])
    assert isinstance(judge_by(PoorInitialization, case_of(single)), Healthy)
    two = measured(elements=[2, 4096, 64], weight_norm=[0.03, 0.02 * 64, 8], weight_mean_abs=[0.03 / 2**0.5, 0.016, 1])
    assert set(found(case_of(two))) == {"poor_initialization"}


@pytest.mark.parametrize(("scale", "fires"), [(1.2, False), (1.3, True)])
def test_weights_that_stretch_a_signal(scale: float, fires: bool) -> None:
    """The fourth root of 4096 elements is 8, and the limit 10."""
    case = case_of(measured(weight_norm=[64 * scale, 64 * scale, 8], weight_mean_abs=[0.8 * scale, 0.8 * scale, 1]))
    assert ("poor_initialization" in found(case)) is fires


@pytest.mark.parametrize(("scale", "fires"), [(0.39, False), (0.41, True)])
def test_a_block_at_another_scale(scale: float, fires: bool) -> None:
    case = case_of(measured(weight_norm=[0.02 * 64, 64 * scale, 8], weight_mean_abs=[0.016, 0.8 * scale, 1]))
    assert ("poor_initialization" in found(case)) is fires


def test_initialization_that_is_meant() -> None:
    assert found(case_of(measured(weight_norm=[0, 0.02 * 64, 8], weight_mean_abs=[0, 0.016, 1]))) == {}
    # A start that was another process s is not judged.
    steps = steps_of()
    outcome = judge_by(
        PoorInitialization, case_of(measured(first_step=500), steps=steps | {"step": steps["step"] + 500})
    )
    assert isinstance(outcome, NotJudged)
    assert "at step 501" in outcome.reason
    # Tokens and positions stretch no signal.
    assert (
        found(
            case_of(measured(weight_norm=[64 * 5, 0.02 * 64, 8], weight_mean_abs=[5, 0.016, 1], dimensions=[3, 2, 1]))
        )
        == {}
    )
    # Weights of one size.
    case = case_of(measured(weight_mean_abs=[0.016, 0.02, 1]))
    assert set(found(case)) == {"poor_initialization"}
    assert TENSORS[1] in found(case)["poor_initialization"].text


# -- gradients


def test_exploding_gradients() -> None:
    nonfinite = np.zeros((5, 3))
    nonfinite[3, 1] = 1e-3
    case = case_of(measured(gradient_nonfinite=nonfinite))
    finding = found(case)["exploding_gradients"]
    assert finding.text.startswith(
        f"At step 31 1 of 3 tensors ({TENSORS[1]}) have gradients or weights that are not finite"
    )
    assert finding.steps == (30, 40)
    assert finding.saving is not None
    assert finding.saving.seconds == 100 - 3
    assert "Lower distill.base_learning_rate from 0.001 to 0.0001" in finding.advice
    # An explosion explains steps that are too large.
    norms = np.array([1, 1, 1, 1e6, 1e6])[:, None]
    case = case_of(measured(gradient_norm=norms, update_ratio=50))
    assert set(found(case)) == {"exploding_gradients"}
    assert "moved the middle matrix by up to 50 times its own norm" in found(case)["exploding_gradients"].text
    without = case_of(measured(gradient_norm=norms, update_ratio=50), rules={"exploding_gradients": {"enabled": False}})
    assert "update_ratio" in {rule.name for rule in RULES if isinstance(judge_by(rule, without), Finding)}


@pytest.mark.parametrize(
    ("norms", "fires"),
    [
        pytest.param([1, 1, 1, 101, 101], True, id="stays"),
        pytest.param([1, 1, 1, 99, 99], False, id="below the limit"),
        pytest.param([1, 1, 1, 1e4, 1], False, id="one spike, which is clipped"),
        pytest.param([1, 1e-4, 1e-4, 1e-4, 50], False, id="large against a loss that is learned"),
        pytest.param([1, 1e-4, 1e-4, 0.5, 0.5], False, id="back to the start"),
        pytest.param([0, 0, 0, 0.05, 0.05], False, id="small, from nothing"),
    ],
)
def test_growth_of_the_gradient(norms: list[float], fires: bool) -> None:
    case = case_of(measured(gradient_norm=np.array(norms)[:, None] * [1, 1, 0]))
    assert set(found(case)) == ({"exploding_gradients"} if fires else set())


@pytest.mark.parametrize(("small", "fires"), [(7, False), (8, True)])
def test_more_than_half_of_measurements_have_next_to_no_gradient(small: int, fires: bool) -> None:
    sizes = np.full(15, 1e-3)
    sizes[:small] = 0.9e-7
    assert set(found(case_of(measured(gradient_mean_abs=sizes.reshape(5, 3))))) == (
        {"vanishing_gradients"} if fires else set()
    )


def test_tensors_without_gradient_do_not_count_as_vanished() -> None:
    gradients = {
        name: np.array([np.nan, np.nan, value]) for name, value in (("gradient_norm", 0.1), ("gradient_mean_abs", 1e-3))
    }
    case = case_of(measured(**gradients, gradient_nonfinite=[np.nan, np.nan, 0], unchanged=[1, 0, 0]))
    assert set(found(case)) == {"unchanged_weights"}


# -- steps


@pytest.mark.parametrize(("ratio", "fires"), [(0.99, False), (1.01, True), (2e-7, False), (0.9e-7, True)])
def test_update_ratio(ratio: float, fires: bool) -> None:
    assert set(found(case_of(measured(update_ratio=ratio)))) == ({"update_ratio"} if fires else set())


def test_steps_of_the_right_size() -> None:
    tensors = measured(
        weight_norm=[1e-6 * 64, 0.02 * 64, 8], weight_mean_abs=[0.8e-6, 0.016, 1], update_ratio=[1e3, 0.01, 0.01]
    )
    assert "update_ratio" not in found(case_of(tensors, rules={"poor_initialization": {"enabled": False}}))
    # Small steps of a warm up are healthy.
    ratios = np.array([1e-9, 1e-9, 1e-3, 1e-3, 1e-3])[:, None]
    assert found(case_of(measured(update_ratio=ratios))) == {}
    early = case_of(measured(3, update_ratio=1e-9), metrics={"learning_rate": curve_of([1e-6, 2e-6, 3e-6])})
    outcome = judge_by(UpdateRatio, early)
    assert isinstance(outcome, NotJudged)
    assert "0 measurements were at a learning rate near its peak" in outcome.reason
    # One step that is too large is enough.
    ratios = np.full((5, 1), 0.01)
    ratios[1] = 3.0
    finding = found(case_of(measured(update_ratio=ratios)))["update_ratio"]
    assert finding.text.startswith("Step 11 moved the middle matrix by 3 times its own norm (limit 1)")
    assert finding.advice.startswith("Lower distill.base_learning_rate from 0.001 to 3.3e-06, ")


def test_frozen_tensors() -> None:
    some = found(case_of(measured(unchanged=[1, 0, 0])))["unchanged_weights"]
    assert some.severity == "warning"
    assert "requires_grad" in some.advice
    assert some.saving is None
    every = found(case_of(measured(unchanged=[1, 1, 0], update_ratio=0)))
    assert set(every) == {"unchanged_weights"}
    assert every["unchanged_weights"].severity == "severe"
    assert every["unchanged_weights"].advice.startswith("Raise distill.base_learning_rate")
    assert every["unchanged_weights"].saving is not None
    # Two measurements without a change are no frozen tensor.
    unchanged = np.zeros((5, 3))
    unchanged[1:3, 0] = 1
    assert found(case_of(measured(unchanged=unchanged))) == {}
    unchanged[3, 0] = 1
    assert set(found(case_of(measured(unchanged=unchanged)))) == {"unchanged_weights"}


def test_running_training_saves_steps_that_are_left() -> None:
    case = case_of(measured(gradient_nonfinite=[0, 0.1, 0]), live=True, context={"total_steps": 330}, ended_s=10.0)
    saving = found(case)["exploding_gradients"].saving
    assert saving is not None
    assert saving.seconds == pytest.approx(10 + 220 * 0.01)
