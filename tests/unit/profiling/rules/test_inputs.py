"""Rules on what is learned from, on both sides of their thresholds; evidence is synthetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.learning import case_of, curve_of
from trainer.profiling.rules.inputs import (
    class_imbalance,
    low_recorded_mass,
    vanishing_loss_term,
    weak_teacher,
)
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged

# -- classes


@pytest.mark.parametrize(("rare", "fires"), [(10, False), (9, True), (0, True)])
def test_class_imbalance(rare: int, fires: bool) -> None:
    outcome = class_imbalance.judge(case_of(context={"classes": {"apple": 100, "pear": 50, "quince": rare}}))
    assert isinstance(outcome, Finding if fires else Healthy)
    if isinstance(outcome, Finding):
        assert f"'apple' has 100 training images and 'quince' has {rare}" in outcome.text
        assert "1 of 3 classes" in outcome.text


@pytest.mark.parametrize(("name", "classes"), [("mae", {"apple": 100, "quince": 1}), ("finetune", None)])
def test_without_labels_classes_are_not_judged(name: str, classes: Any) -> None:
    assert isinstance(class_imbalance.judge(case_of(name=name, context={"classes": classes})), NotJudged)


# -- the teacher

CLASSES = {"apple": 50, "pear": 50, "plum": 50, "quince": 50}


def teacher(
    top1: float | None, student: float | None, *, images: int | None = None, classes: Any = None, weight: float = 0.9
) -> Any:
    context = {"teacher_val_top1": top1, "val_samples": images, "classes": classes or CLASSES}
    curves = {} if student is None else {"val_top1": curve_of([0.2, student])}
    return weak_teacher.judge(case_of(metrics=curves, context=context | {"settings": {"logit_weight": weight}}))


@pytest.mark.parametrize(
    ("top1", "student", "images", "kind"),
    [
        pytest.param(0.43, None, None, Finding, id="near chance, said before the student is measured"),
        pytest.param(0.45, 0.40, None, Healthy, id="knows something"),
        pytest.param(0.45, 0.40, 12, NotJudged, id="so few images that it may be chance"),
        pytest.param(0.45, 0.40, 25, Healthy, id="enough images to tell it from chance"),
        pytest.param(0.80, 0.805, None, Healthy, id="as good as its student"),
        pytest.param(0.80, 0.815, None, Finding, id="worse than its student"),
        pytest.param(0.80, 0.815, 1000, Healthy, id="worse within the noise"),
        pytest.param(0.80, 0.86, 1000, Finding, id="worse beyond the noise"),
        pytest.param(0.80, None, None, NotJudged, id="student not measured yet"),
        pytest.param(None, 0.80, None, NotJudged, id="teacher not measured"),
    ],
)
def test_weak_teacher(top1: float | None, student: float | None, images: int | None, kind: type) -> None:
    assert isinstance(teacher(top1, student, images=images), kind)


@pytest.mark.parametrize(("top1", "fires"), [(0.29, True), (0.31, False)])
def test_a_teacher_of_ten_classes_within_three_times_chance(top1: float, fires: bool) -> None:
    ten = {f"digit {number}": 100 for number in range(10)}
    outcome = teacher(top1, 0.25, images=188, classes=ten)
    assert isinstance(outcome, Finding if fires else Healthy)
    if isinstance(outcome, Finding):
        assert outcome.text == (
            "The teacher's validation accuracy, 29.0%, is near chance: always saying the most frequent class gives 10.0% (limit 30.0%)."
        )
        assert "pretrain.finetune.epochs" in outcome.advice


def test_a_good_teacher_of_uneven_classes_is_no_guesser() -> None:
    uneven = {"apple": 940, "quince": 60}
    assert isinstance(teacher(0.96, 0.95, classes=uneven), Healthy)
    assert isinstance(teacher(0.94, 0.93, classes=uneven), Finding)


def test_a_teacher_that_no_loss_asks_is_not_judged() -> None:
    assert isinstance(teacher(0.25, 0.8, weight=0.0), NotJudged)


# -- recorded outputs


@pytest.mark.parametrize(
    ("mass", "kind"), [({"1": 0.9, "2": 0.5}, Healthy), ({"1": 0.9, "2": 0.49}, Finding), (None, NotJudged)]
)
def test_low_recorded_mass(mass: Any, kind: type) -> None:
    outcome = low_recorded_mass.judge(case_of(context={"recorded_mass": mass, "settings": {"temperature": 2.0}}))
    assert isinstance(outcome, kind)
    if isinstance(outcome, Finding):
        assert "hold 49.0% of the teacher's probability at temperature 2" in outcome.text
        assert "reinforce.top_k=all" in outcome.advice


def test_the_nearest_recorded_temperature_counts() -> None:
    mass = {"1": 0.9, "2": 0.4}
    cool, hot = ({"recorded_mass": mass, "settings": {"temperature": t}} for t in (1.2, 4.0))
    assert isinstance(low_recorded_mass.judge(case_of(context=cool)), Healthy)
    finding = low_recorded_mass.judge(case_of(context=hot))
    assert isinstance(finding, Finding)
    assert finding.confidence < 0.9


# -- terms of the loss

DISTILL = {"logit_weight": 0.9, "feature_weight": 0.0, "label_weight": 0.1, "temperature": 2.0, "logit_loss": "kl"}


def terms(logit: Any, label: Any, **settings: Any) -> Any:
    curves = {"logit": curve_of(logit), "label": curve_of(label)}
    return vanishing_loss_term.judge(case_of(metrics=curves, context={"settings": DISTILL | settings}))


@pytest.mark.parametrize(("label", "fires"), [(0.092, False), (0.09, True)])
def test_a_term_without_a_share(label: float, fires: bool) -> None:
    outcome = terms([1.0] * 30, [label] * 30)
    assert isinstance(outcome, Finding if fires else Healthy)
    if isinstance(outcome, Finding):
        assert outcome.text.startswith("The label term is never more than 9.9e-03 of the weighted loss")
        assert outcome.advice.startswith("Raise distill.label_weight (now 0.1), or set the weight to 0")


def test_a_term_that_was_learned_is_healthy() -> None:
    assert isinstance(terms(np.geomspace(1, 1e-6, 30), [1.0] * 30), Healthy)


@pytest.mark.parametrize(("temperature", "fires"), [(2000, False), (3000, True)])
def test_a_temperature_that_rounds_the_term_away(temperature: float, fires: bool) -> None:
    """float32 rounds to 1.2e-7: times 9e6 it is 1.07, and the term 1."""
    assert isinstance(terms([1.0] * 30, [1.0] * 30, temperature=temperature), Finding if fires else Healthy)
    assert isinstance(terms([1.0] * 30, [1.0] * 30, temperature=temperature, logit_loss="hard"), Healthy)


def test_few_points_or_another_training_are_not_judged() -> None:
    assert isinstance(terms([1.0] * 5, [1e-9] * 5), NotJudged)
    assert isinstance(vanishing_loss_term.judge(case_of(name="mae", metrics={"loss": curve_of([1.0] * 30)})), NotJudged)


def test_a_teacher_that_guesses_explains_a_term_without_a_share() -> None:
    curves = {"logit": curve_of([1e-4] * 30), "label": curve_of([1.0] * 30)}
    context = {"settings": DISTILL, "classes": CLASSES, "teacher_val_top1": 0.25}
    assert isinstance(vanishing_loss_term.judge(case_of(metrics=curves, context=context)), NotJudged)
