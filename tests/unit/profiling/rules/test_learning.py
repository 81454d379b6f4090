"""Rules on what is learned from and whether it is, on both sides of their thresholds; evidence is synthetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.learning import case_of, curve_of, measured
from tests.unit.profiling.rules.synthetic import judge_by, steps_of
from trainer.profiling.evidence import Curve
from trainer.profiling.rules import judge
from trainer.profiling.rules.learning import (
    ClassImbalance,
    LossNotFalling,
    LowRecordedMass,
    Overfitting,
    VanishingLossTerm,
    WeakTeacher,
)
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged

# -- classes


@pytest.mark.parametrize(("rare", "fires"), [(10, False), (9, True), (0, True)])
def test_class_imbalance(rare: int, fires: bool) -> None:
    outcome = judge_by(ClassImbalance, case_of(context={"classes": {"apple": 100, "pear": 50, "quince": rare}}))
    assert isinstance(outcome, Finding if fires else Healthy)
    if isinstance(outcome, Finding):
        assert f"'apple' has 100 training images and 'quince' has {rare}" in outcome.text
        assert "1 of 3 classes" in outcome.text


@pytest.mark.parametrize(("name", "classes"), [("mae", {"apple": 100, "quince": 1}), ("finetune", None)])
def test_without_labels_classes_are_not_judged(name: str, classes: Any) -> None:
    assert isinstance(judge_by(ClassImbalance, case_of(name=name, context={"classes": classes})), NotJudged)


# -- the teacher

CLASSES = {"apple": 50, "pear": 50, "plum": 50, "quince": 50}


def teacher(
    top1: float | None, student: float | None, *, images: int | None = None, classes: Any = None, weight: float = 0.9
) -> Any:
    context = {"teacher_val_top1": top1, "val_samples": images, "classes": classes or CLASSES}
    curves = {} if student is None else {"val_top1": curve_of([0.2, student])}
    return judge_by(WeakTeacher, case_of(metrics=curves, context=context | {"settings": {"logit_weight": weight}}))


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


@pytest.mark.parametrize(("labels", "probes"), [(10, True), (50, True), (51, False)])
def test_a_weak_teacher_of_few_labels_is_probed(labels: int, *, probes: bool) -> None:
    outcome = teacher(0.15, 0.25, images=500, classes={f"dish {number}": labels for number in range(10)})
    assert isinstance(outcome, Finding)
    assert ("pretrain.head=probe" in outcome.advice) == probes
    assert ("pretrain.finetune.epochs" in outcome.advice) != probes


def test_teacher_is_judged_where_asked() -> None:
    uneven = {"apple": 940, "quince": 60}
    assert isinstance(teacher(0.96, 0.95, classes=uneven), Healthy)
    assert isinstance(teacher(0.94, 0.93, classes=uneven), Finding)
    # A teacher that no loss asks is not judged.
    assert isinstance(teacher(0.25, 0.8, weight=0.0), NotJudged)
    # More labels an image make the map more certain.
    twice = {name: 2 * images for name, images in PLATES.items()}
    few = {
        "teacher_val_map": 0.8,
        "val_samples": 400,
        "classes": PLATES,
        "labeled": 200,
        "settings": {"logit_weight": 0.9},
    }
    curves = {"val_map": curve_of([0.2, 0.86])}
    assert isinstance(judge_by(WeakTeacher, case_of(metrics=curves, context=few)), Healthy)
    assert isinstance(judge_by(WeakTeacher, case_of(metrics=curves, context=few | {"classes": twice})), Finding)


PLATES = {"rice": 100, "curry": 40, "salad": 20, "bread": 40}


@pytest.mark.parametrize(
    ("score", "student", "images", "kind", "text"),
    [
        pytest.param(
            0.43,
            None,
            None,
            Finding,
            "mAP, 43.0%, is near chance: ranking them at random gives 25.0% (limit 43.8%)",
            id="near",
        ),
        pytest.param(0.44, 0.40, None, Healthy, "mAP is 44.0%, the student's 40.0%", id="knows something"),
        pytest.param(
            0.44,
            0.40,
            18,
            NotJudged,
            "on 18 validation images the teacher's mAP, 44.0%, may be chance (25.0%)",
            id="few images",
        ),
        pytest.param(
            0.80,
            0.82,
            None,
            Finding,
            "82.0%, is above its teacher's, 80.0%, by more than 1.0%",
            id="worse than its student",
        ),
        pytest.param(0.80, 0.86, 200, Healthy, "mAP is 80.0%", id="worse within the noise"),
        pytest.param(0.80, 0.86, 1000, Finding, "by more than 4.6%", id="worse beyond the noise"),
        pytest.param(0.80, None, None, NotJudged, "not been measured", id="student not measured yet"),
    ],
)
def test_teacher_of_several_labels_is_judged_by_its_map(
    score: float, student: float | None, images: int | None, kind: type, text: str
) -> None:
    """200 labels of 200 images: a quarter of the images is of a class in the mean."""
    context = {
        "teacher_val_map": score,
        "val_samples": images,
        "classes": PLATES,
        "labeled": 200,
        "settings": {"logit_weight": 0.9},
    }
    curves = {} if student is None else {"val_map": curve_of([0.2, student])}
    outcome = judge_by(WeakTeacher, case_of(metrics=curves, context=context))
    assert isinstance(outcome, kind)
    assert text in (outcome.reason if isinstance(outcome, NotJudged) else outcome.text)
    if isinstance(outcome, Finding):
        assert "head=probe" not in outcome.advice, "a probe is fitted to images with one label each"


# -- recorded outputs


@pytest.mark.parametrize(
    ("mass", "kind"), [({"1": 0.9, "2": 0.5}, Healthy), ({"1": 0.9, "2": 0.49}, Finding), (None, NotJudged)]
)
def test_low_recorded_mass(mass: Any, kind: type) -> None:
    outcome = judge_by(
        LowRecordedMass,
        case_of(context={"recorded_mass": mass, "settings": {"logit": {"loss": "kl", "temperature": 2.0}}}),
    )
    assert isinstance(outcome, kind)
    if isinstance(outcome, Finding):
        assert "hold 49.0% of the teacher's probability at temperature 2" in outcome.text
        assert "reinforce.top_k=all" in outcome.advice


# -- terms of the loss

LOGIT = {"loss": "kl", "temperature": 2.0}
DISTILL = {"logit_weight": 0.9, "feature_weight": 0.0, "label_weight": 0.1, "logit": LOGIT}


def terms(logit: Any, label: Any, /, **settings: Any) -> Any:
    curves = {"logit": curve_of(logit), "label": curve_of(label)}
    return judge_by(VanishingLossTerm, case_of(metrics=curves, context={"settings": DISTILL | settings}))


@pytest.mark.parametrize(("label", "fires"), [(0.092, False), (0.09, True)])
def test_a_term_without_a_share(label: float, fires: bool) -> None:
    outcome = terms([1.0] * 30, [label] * 30)
    assert isinstance(outcome, Finding if fires else Healthy)
    if isinstance(outcome, Finding):
        assert outcome.text.startswith("The label term is never more than 9.9e-03 of the weighted loss")
        assert outcome.advice.startswith("Raise distill.label_weight (now 0.1), or set the weight to 0")


@pytest.mark.parametrize(("temperature", "fires"), [(2000, False), (3000, True)])
def test_a_temperature_that_rounds_the_term_away(temperature: float, fires: bool) -> None:
    """float32 rounds to 1.2e-7: times 9e6 it is 1.07, and the term 1."""
    softened = {"loss": "kl", "temperature": temperature}
    assert isinstance(terms([1.0] * 30, [1.0] * 30, logit=softened), Finding if fires else Healthy)
    assert isinstance(terms([1.0] * 30, [1.0] * 30, logit={"loss": "hard"}), Healthy)


def test_few_points_or_another_training_are_not_judged() -> None:
    assert isinstance(terms([1.0] * 5, [1e-9] * 5), NotJudged)
    assert isinstance(
        judge_by(VanishingLossTerm, case_of(name="mae", metrics={"loss": curve_of([1.0] * 30)})), NotJudged
    )


def test_teacher_that_guesses_explains_term_without_share() -> None:
    curves = {"logit": curve_of([1e-4] * 30), "label": curve_of([1.0] * 30)}
    context = {"settings": DISTILL, "classes": CLASSES, "teacher_val_top1": 0.25}
    assert isinstance(judge_by(VanishingLossTerm, case_of(metrics=curves, context=context)), NotJudged)


# -- the losses

FALLING = np.linspace(2.0, 1.0, 40)


def fall(values: Any, **arguments: Any) -> Any:
    return judge_by(LossNotFalling, case_of(metrics={"loss": curve_of(values)}, **arguments))


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


def test_loss_curve_is_healthy_or_too_short() -> None:
    assert isinstance(fall([*FALLING, *[1.0] * 60]), Healthy)
    noise = np.random.default_rng(0).normal(scale=0.1, size=100)
    assert isinstance(fall(np.concatenate([FALLING, np.ones(60)]) + noise), Healthy)
    # A short curve is not judged.
    assert isinstance(fall([2.0] * 9), NotJudged)
    assert isinstance(judge_by(LossNotFalling, case_of()), NotJudged)
    # The end of a training that went on from a checkpoint is not judged.
    steps = steps_of()
    assert isinstance(fall([2.0] * 40, steps=steps | {"step": steps["step"] + 500}), NotJudged)
    # What says more goes before.
    tensors = measured(gradient_mean_abs=1e-9)
    outcome = fall([2.0] * 40, tensors=tensors)
    assert isinstance(outcome, NotJudged)
    assert outcome.reason.endswith("vanishing_gradients")
    assert isinstance(fall([2.0] * 40, tensors=tensors, rules={"vanishing_gradients": {"enabled": False}}), Finding)


@pytest.mark.parametrize(("total", "judged"), [(300, True), (400, False), (None, False)])
def test_running_training_is_judged_after_share_of_its_steps(total: int | None, judged: bool) -> None:
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
    return judge_by(Overfitting, case_of(name=name, metrics=curves, context={"val_samples": images}))


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
            id="regularized training loss",
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


def test_overfitting_needs_numbers_beyond_noise() -> None:
    assert isinstance(overfit(LEARNED, [1.5, 1.0, np.nan, np.nan], [0.5, 0.7, 0.7, 0.7]), NotJudged)
    assert isinstance(overfit(LEARNED, [1.5, 1.2, 1.0, np.nan], [0.5, 0.7, 0.7, 0.7]), Healthy)
    assert isinstance(overfit([*LEARNED, *[np.nan] * 3], [1.5, 1.0, 1.2, 1.3, 1.5], [0.5, *[0.7] * 4]), NotJudged)
    # An accuracy that rises within its noise has not risen.
    assert isinstance(overfit(LEARNED, [1.5, 1.0, 1.0, 1.5], [0.5, 0.70, 0.7, 0.72], images=200), Finding)


# -- points that are no numbers

FALLS = np.linspace(2, 1, 30)
TRAININGS = {
    "healthy": {"loss": FALLS, "label": FALLS, "logit": FALLS, "val_loss": FALLS[::3], "val_top1": 1 - FALLS[::3] / 4},
    "does not fall": {"loss": FALLS * 0 + 2, "label": FALLS * 0 + 2},
    "overfits": {"loss": FALLS, "label": FALLS, "val_loss": 1 + FALLS[::-3] ** 2, "val_top1": FALLS[::3] * 0 + 0.5},
    "a term vanishes": {"loss": FALLS, "label": FALLS, "logit": FALLS * 1e-9},
}


@pytest.mark.parametrize("curves", TRAININGS.values(), ids=TRAININGS)
def test_points_that_are_not_finite_change_no_answer(curves: dict[str, Any]) -> None:
    settings = {"settings": {"label_weight": 1.0, "logit_weight": 1.0}}
    known = {name: curve_of(values) for name, values in curves.items()}
    broken = {}
    for name, curve in known.items():
        at = np.arange(0, len(curve.values), 3)  # the first too, and none at the end
        fill = np.resize([np.nan, np.inf, -np.inf], len(at))
        columns = {"steps": curve.steps[at] - 1, "seconds": curve.seconds[at] - 0.5, "values": fill}
        broken[name] = Curve(
            **{column: np.insert(getattr(curve, column), at, given) for column, given in columns.items()}
        )
    answers, others = (
        {rule.name: outcome for rule, outcome in judge(case_of(measured(), metrics=metrics, context=settings)).items()}
        for metrics in (known, broken)
    )
    assert isinstance(answers.pop("loss_not_finite"), Healthy)
    assert isinstance(others.pop("loss_not_finite"), Finding)
    assert others == answers
