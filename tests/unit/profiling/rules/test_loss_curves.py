"""Rules on the curves of the losses, on both sides of their thresholds; evidence is synthetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.learning import case_of, curve_of, measured
from tests.unit.profiling.rules.synthetic import steps_of
from trainer.profiling.rules.loss_curves import loss_not_falling, overfitting
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged

FALLING = np.linspace(2.0, 1.0, 40)


def fall(values: Any, **arguments: Any) -> Any:
    return loss_not_falling.judge(case_of(metrics={"loss": curve_of(values)}, **arguments))


# -- the training loss


@pytest.mark.parametrize(("last", "fires"), [(1.96, True), (1.93, False)])
def test_a_loss_that_does_not_fall(last: float, fires: bool) -> None:
    outcome = fall([2.0] * 10 + [last] * 30)
    assert isinstance(outcome, Finding if fires else Healthy)
    if isinstance(outcome, Finding):
        assert outcome.text.startswith("The loss is 1.96 in the last 30% of the training and was 2 at its start")
        assert outcome.saving is not None
        assert 85 < outcome.saving.seconds < 90  # it was known after a third of 40 seconds


@pytest.mark.parametrize(("last", "fires"), [(1.45, False), (1.55, True)])
def test_a_loss_that_rises_again(last: float, fires: bool) -> None:
    outcome = fall([*FALLING, *[1.0] * 20, *[last] * 10])
    assert isinstance(outcome, Finding if fires else Healthy)
    if isinstance(outcome, Finding):
        assert "rose again to 1.55" in outcome.text
        assert outcome.steps is not None
        assert 400 < outcome.steps[0] < 600


def test_a_loss_that_stays_where_it_came_to_is_healthy() -> None:
    assert isinstance(fall([*FALLING, *[1.0] * 60]), Healthy)
    noise = np.random.default_rng(0).normal(scale=0.1, size=100)
    assert isinstance(fall(np.concatenate([FALLING, np.ones(60)]) + noise), Healthy)


def test_a_short_curve_is_not_judged() -> None:
    assert isinstance(fall([2.0] * 9), NotJudged)
    assert isinstance(loss_not_falling.judge(case_of()), NotJudged)


def test_the_end_of_a_training_that_went_on_from_a_checkpoint_is_not_judged() -> None:
    steps = steps_of()
    assert isinstance(fall([2.0] * 40, steps=steps | {"step": steps["step"] + 500}), NotJudged)


def test_what_says_more_goes_before() -> None:
    tensors = measured(gradient_mean_abs=1e-9)
    outcome = fall([2.0] * 40, tensors=tensors)
    assert isinstance(outcome, NotJudged)
    assert outcome.reason.endswith("vanishing_gradients")
    assert isinstance(fall([2.0] * 40, tensors=tensors, rules={"vanishing_gradients": {"enabled": False}}), Finding)


@pytest.mark.parametrize(("total", "judged"), [(300, True), (400, False), (None, False)])
def test_a_running_training_is_judged_after_a_share_of_its_steps(total: int | None, judged: bool) -> None:
    outcome = fall([2.0] * 40, live=True, context={"total_steps": total})
    assert isinstance(outcome, Finding if judged else NotJudged)


# -- the validation loss


def overfit(train: Any, losses: Any, accuracies: Any, *, name: str = "finetune", images: int | None = 10_000) -> Any:
    curves = {
        "loss": curve_of(train),
        "val_loss": curve_of(losses, every=100),
        "val_top1": curve_of(accuracies, every=100),
    }
    if name == "distill":
        curves["label"] = curves.pop("loss")
    return overfitting.judge(case_of(name=name, metrics=curves, context={"val_samples": images}))


LEARNED = np.linspace(2.0, 0.1, 40)


@pytest.mark.parametrize("name", ["finetune", "distill"])
@pytest.mark.parametrize(("last", "fires"), [(1.09, False), (1.11, True)])
def test_a_validation_loss_that_rises(name: str, last: float, fires: bool) -> None:
    outcome = overfit(LEARNED, [1.5, 1.0, 1.05, last], [0.5, 0.7, 0.7, 0.7], name=name)
    assert isinstance(outcome, Finding if fires else Healthy)
    if isinstance(outcome, Finding):
        assert outcome.text.startswith("Since step 200 the training learns its images by heart")
        assert outcome.saving is not None
        assert outcome.saving.seconds == 98


@pytest.mark.parametrize(
    ("train", "losses", "accuracies", "images"),
    [
        pytest.param(
            LEARNED, [1.5, 1.0, 1.0, 1.5], [0.5, 0.7, 0.75, 0.76], 10_000, id="the accuracy rises: only surer"
        ),
        pytest.param(
            np.linspace(2.0, 1.4, 40),
            [1.5, 1.0, 1.0, 1.5],
            [0.5, 0.7, 0.7, 0.7],
            10_000,
            id="regularised training loss",
        ),
        pytest.param(
            np.linspace(0.1, 0.2, 40),
            [1.5, 1.0, 1.0, 1.5],
            [0.5, 0.7, 0.7, 0.7],
            10_000,
            id="the training loss rises too",
        ),
        pytest.param(LEARNED, [1.5, 1.3, 1.2, 1.1], [0.5, 0.6, 0.7, 0.7], 10_000, id="falls"),
    ],
)
def test_no_overfitting(train: Any, losses: Any, accuracies: Any, images: int) -> None:
    assert isinstance(overfit(train, losses, accuracies, images=images), Healthy)


def test_an_accuracy_that_rises_within_its_noise_has_not_risen() -> None:
    assert isinstance(overfit(LEARNED, [1.5, 1.0, 1.0, 1.5], [0.5, 0.70, 0.7, 0.72], images=200), Finding)


def test_two_measurements_or_none_tell_nothing() -> None:
    outcome = overfit(LEARNED, [1.0, 2.0], [0.7, 0.7])
    assert isinstance(outcome, NotJudged)
    assert "2 measurements" in outcome.reason
    assert "pretrain.finetune.validate_every_epochs" in outcome.reason
    assert isinstance(overfitting.judge(case_of(name="mae", metrics={"loss": curve_of(LEARNED)})), NotJudged)
