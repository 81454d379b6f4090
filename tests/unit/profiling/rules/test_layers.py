"""Rules on layers, input and validation, on both sides of their thresholds; evidence is synthetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.learning import case_of, curve_of, measured
from tests.unit.profiling.rules.synthetic import judge_by
from trainer.profiling.evidence import LAYER_COLUMNS, ConfusedRecord, TensorSamples
from trainer.profiling.rules.inputs import CheckInputImages
from trainer.profiling.rules.layers import AllZero, DeadRelu, SaturatedActivation, TensorVariance
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged
from trainer.profiling.rules.validation import ConfusedClasses, Overtraining

NAN = float("nan")
LAYERS = ("input/0", "input/1", "relu", "tanh", "gelu")
USUAL: dict[str, Any] = {
    "images": 16,
    "mean": [0.1, -0.1, 0.4, 0, 0.3],
    "std": [1, 1, 0.5, 0.5, 0.5],
    "smallest": [-2, -2, 0, -1, -0.2],
    "largest": [2, 2, 3, 1, 3],
    "blank": [0, 0, NAN, NAN, NAN],
    "inactive": [NAN, NAN, 0.1, NAN, NAN],
    "saturated": [NAN, NAN, NAN, 0.1, NAN],
}


def layers(count: int = 5, **columns: Any) -> TensorSamples:
    values = {
        name: np.broadcast_to(np.asarray((USUAL | columns)[name], float), (count, 5)).copy() for name in LAYER_COLUMNS
    }
    number = np.arange(count, dtype=float)
    return TensorSamples(tensors=LAYERS, steps=50 * number, seconds=number, values=values)


def case(samples: TensorSamples | None = None, **given: Any) -> Case:
    made = case_of(given.pop("tensors", measured()), **given)
    rank = replace(made.rank, layers=samples or layers())
    return replace(made, training=replace(made.training, ranks=[rank]))


def severity(rule: Any, *samples: TensorSamples, **given: Any) -> str:
    """Of the finding; `healthy` or `not judged` where there is none."""
    outcome = judge_by(rule, case(*samples, **given))
    return (
        outcome.severity
        if isinstance(outcome, Finding)
        else "healthy"
        if isinstance(outcome, Healthy)
        else "not judged"
    )


def changed(column: str, row: int, value: float) -> TensorSamples:
    values = [*np.broadcast_to(np.asarray(USUAL[column], float), (5,))]
    values[row] = value
    return layers(**{column: values})


RULES = (CheckInputImages, DeadRelu, SaturatedActivation, AllZero, TensorVariance)


def test_usual_layers_are_healthy() -> None:
    assert {rule.name: severity(rule) for rule in RULES} == dict.fromkeys([rule.name for rule in RULES], "healthy")


@pytest.mark.parametrize("rule", [DeadRelu, SaturatedActivation, TensorVariance, CheckInputImages])
def test_layers_need_looks(rule: Any) -> None:
    assert severity(rule, layers(0)) == "not judged"
    few = judge_by(rule, case(layers(1, images=4) if rule is CheckInputImages else layers(2)))
    assert isinstance(few, NotJudged)
    assert few.too_short


@pytest.mark.parametrize(
    ("rule", "column", "row", "below", "above"),
    [
        (DeadRelu, "inactive", 2, 0.5, 0.51),
        (SaturatedActivation, "saturated", 3, 0.5, 0.51),
        (TensorVariance, "std", 4, 9999.0, 10001.0),
        (TensorVariance, "std", 4, 1.1e-5, 0.9e-5),
        (CheckInputImages, "mean", 1, -2.9, -3.1),
        (CheckInputImages, "std", 0, 3.9, 4.1),
        (CheckInputImages, "std", 0, 0.06, 0.04),
        (CheckInputImages, "blank", 0, 0.25, 0.26),
    ],
)
def test_thresholds(rule: Any, column: str, row: int, below: float, above: float) -> None:
    assert severity(rule, changed(column, row, below)) == "healthy"
    assert severity(rule, changed(column, row, above)) == "warning"


def test_a_bounded_layer_may_hardly_vary() -> None:
    assert severity(TensorVariance, changed("std", 3, 1e-9)) == "healthy"


def test_images_that_hold_nothing_or_are_not_centered() -> None:
    one = judge_by(CheckInputImages, case(changed("std", 1, 0.0)))
    assert (one.severity, one.text[:23]) == ("warning", "Channel 1 of 2 of the i")
    assert severity(CheckInputImages, layers(std=[0, 0, 0.5, 0.5, 0.5])) == "severe"
    assert severity(CheckInputImages, layers(smallest=0, largest=1)) == "note"
    assert severity(CheckInputImages, layers(smallest=-0.1, largest=1)) == "healthy"


def test_all_zero() -> None:
    zeros = np.full((5, 3), 1e-3)
    zeros[-3:, 1] = 0
    assert severity(AllZero, tensors=measured(gradient_mean_abs=zeros)) == "warning"
    zeros[-3, 1] = 1e-3
    assert severity(AllZero, tensors=measured(gradient_mean_abs=zeros)) == "healthy"
    frozen = np.where(np.arange(3) == 1, NAN, 1e-3)
    assert severity(AllZero, tensors=measured(gradient_mean_abs=frozen)) == "healthy", "it has no gradient"
    assert severity(AllZero, layers(smallest=[-2, -2, 0, -1, 0], largest=[2, 2, 3, 1, 0])) == "warning"


def test_one_cause_one_finding() -> None:
    dead = changed("inactive", 2, 0.9)
    assert severity(DeadRelu, dead, tensors=measured(update_ratio=2.0)) == "not judged"
    assert severity(AllZero, dead, tensors=measured(gradient_mean_abs=0.0)) == "not judged"
    empty = layers(std=[0, 0, 0.5, 0.5, 0.5], inactive=[NAN, NAN, 0.9, NAN, NAN])
    assert severity(DeadRelu, empty) == "not judged"
    centered = layers(smallest=0, largest=1, inactive=[NAN, NAN, 0.9, NAN, NAN])
    assert severity(DeadRelu, centered) == "warning", "a note explains nothing"


# -- validation


def validated(losses: list[float], scores: list[float], **given: Any) -> Case:
    """A measurement at every tenth step; the training loss falls all the time."""
    falling = curve_of(np.linspace(2, 1, 10 * len(losses)), every=1)
    metrics = {"loss": falling, "label": falling, "val_loss": curve_of(losses), "val_top1": curve_of(scores)}
    return case_of(measured(), metrics=metrics, **given)


FALL = [1.0, 0.9, 0.8, 0.7, 0.6]


def test_overtraining() -> None:
    flat, best = [0.6] * 6, [0.9] * 11
    outcome = judge_by(Overtraining, validated(FALL + flat, best))
    assert isinstance(outcome, Finding)
    assert outcome.steps == (49, 109)
    assert outcome.saving is not None
    assert outcome.saving.seconds == pytest.approx(95)
    for losses, scores in ((FALL + [0.6] * 4 + [0.59, 0.59], best), (FALL + flat, [*best[:-1], 0.91])):
        assert isinstance(judge_by(Overtraining, validated(losses, scores)), Healthy)
    assert isinstance(judge_by(Overtraining, validated(FALL, best[:5])), NotJudged)
    longer = {"total_steps": 200}
    assert isinstance(judge_by(Overtraining, validated(FALL + flat, best, context=longer)), Healthy)


def test_confused_classes() -> None:
    def judged(images: int, of: int = 10, score: float = 0.8) -> Any:
        record = ConfusedRecord(label="plum", answer="damson", images=images, of=of)
        return judge_by(ConfusedClasses, validated([1.0], [score], confused=(record,)))

    found = judged(6)
    assert isinstance(found, Finding)
    assert "'plum' for 'damson' (6 of 10)" in found.text
    assert isinstance(judged(5), Healthy)
    assert isinstance(judged(9, of=9), Healthy), "too few images"
    assert isinstance(judged(6, score=0.4), NotJudged)
    assert isinstance(judge_by(ConfusedClasses, validated([1.0], [0.8])), NotJudged)
