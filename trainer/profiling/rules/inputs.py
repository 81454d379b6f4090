"""The rules on what a training learns from: the classes, the teacher, its recorded outputs, and how the loss is weighed."""

from __future__ import annotations

import math

import numpy as np

from trainer.profiling.rules.outcomes import (
    Case,
    Finding,
    Healthy,
    NotJudged,
    Outcome,
    accuracy_noise,
    first_cause,
    rule,
    start_unseen,
)

_PARTS = 3
"""A term that vanishes because it was learned had a share in the first part of the training."""
_FEWEST_POINTS = 6
_SOFTENED = ("kl", "dkd")
"""Logit losses that are multiplied by the temperature's square, as is their rounding error."""


@rule(
    kind="training",
    title="Class imbalance",
    needs="The number of training images of each class.",
    fires="The largest class has more than `ratio` times the images of the smallest.",
    advises="More images of the small classes, or fewer of the large ones.",
)
def class_imbalance(case: Case) -> Outcome:
    limit, classes = case.rules.class_imbalance.ratio, case.training.ranks[0].record.context.classes
    if not classes or case.training.name == "mae":
        return NotJudged(
            reason="the training learns from no labels, or did not record how many images its classes have"
        )
    rarest, largest = min(classes, key=classes.__getitem__), max(classes, key=classes.__getitem__)
    ratio = classes[largest] / max(classes[rarest], 1)
    if ratio <= limit:
        return Healthy(text=f"the largest of {len(classes)} classes has {ratio:.3g} times the images of the smallest")
    rare = sum(count * limit < classes[largest] for count in classes.values())
    return Finding(
        severity="warning",
        confidence=0.9,
        text=(
            f"Class {largest!r} has {classes[largest]:,} training images and {rarest!r} has {classes[rarest]:,}: {ratio:.3g} times as many "
            f"(limit {limit:g}); {rare} of {len(classes)} classes are so much smaller than the largest."
        ),
        advice="Add images of the small classes, or remove some of the large ones; check the accuracy of each class in the evaluation.",
        numbers={"ratio": ratio, "small_classes": float(rare)},
    )


@rule(
    kind="training",
    title="Weak teacher",
    needs="The teacher's validation accuracy, which the stage pretrain measures, and the student's.",
    fires=(
        "The teacher is near chance: at most `chance_times` as accurate as always saying the most frequent class, or less than `headroom` "
        "of the way from there to perfection; or the student's accuracy is above its by more than `margin` and two standard errors."
    ),
    advises="A better teacher, or more weight for the labels.",
)
def weak_teacher(case: Case) -> Outcome:
    context = case.training.ranks[0].record.context
    settings = context.settings
    if not settings.get("logit_weight") and not settings.get("feature_weight"):
        return NotJudged(reason="no term of the loss compares with a teacher")
    teacher, limits = context.teacher_val_top1, case.rules.weak_teacher
    if teacher is None:
        return NotJudged(
            reason="the teacher's validation accuracy is not known: it was not trained, or not measured, by the stage pretrain"
        )
    # always saying the most frequent class, on images that are distributed as the training images; 0 if unknown
    images = (context.classes or {}).values()
    guess = max(images, default=0) / max(sum(images), 1)
    near = min(limits.chance_times * guess, guess + limits.headroom * (1 - guess))
    if teacher <= near:
        return _weak(
            f"The teacher's validation accuracy, {teacher:.1%}, is near chance: always saying the most frequent class gives {guess:.1%} "
            f"(limit {near:.1%}).",
            0.95,
        )
    chance = accuracy_noise(case, guess) / math.sqrt(2)  # of one accuracy, not of a difference
    if teacher <= guess + chance:
        return NotJudged(
            reason=f"on {context.val_samples} validation images the teacher's accuracy, {teacher:.1%}, may be chance ({guess:.1%})"
        )
    curve = case.training.metrics.get("val_top1")
    if curve is None or not len(curve.values):
        return NotJudged(reason="the student has not been measured on the validation split yet", too_short=True)
    student, margin = float(curve.values[-1]), limits.margin + accuracy_noise(case, teacher)
    if student - teacher <= margin:
        return Healthy(text=f"the teacher's validation accuracy is {teacher:.1%}, the student's {student:.1%}")
    return _weak(
        f"The student's validation accuracy, {student:.1%}, is above its teacher's, {teacher:.1%}, by more than {margin:.1%}.",
        0.8,
    )


def _weak(text: str, confidence: float) -> Finding:
    return Finding(
        severity="warning",
        confidence=confidence,
        text=text,
        advice=(
            "Train the teacher longer (pretrain.finetune.epochs, pretrain.mae.epochs) or take a better one (pretrain.weights); until then "
            "raise distill.label_weight against distill.logit_weight."
        ),
    )


@rule(
    kind="training",
    title="Low recorded mass",
    needs="The coverage of the teacher's recorded outputs.",
    fires="The recorded classes hold less than `mass` of the teacher's probability in the mean, at the temperature nearest to the loss's.",
    advises="Recording more classes of each view, or asking the teacher in every step.",
)
def low_recorded_mass(case: Case) -> Outcome:
    context, limit = case.training.ranks[0].record.context, case.rules.low_recorded_mass.mass
    if not context.recorded_mass:
        return NotJudged(reason="the training reads no recorded outputs of a teacher")
    wanted = float(context.settings.get("temperature", 1.0))
    temperature = min(context.recorded_mass, key=lambda text: abs(float(text) - wanted))
    mass = context.recorded_mass[temperature]
    seen = f"hold {mass:.1%} of the teacher's probability at temperature {temperature} in the mean"
    if mass >= limit:
        return Healthy(text=f"the recorded outputs {seen}")
    return Finding(
        severity="warning",
        confidence=0.9 if float(temperature) == wanted else 0.7,
        text=f"The recorded outputs {seen} (limit {limit:.0%}); of the other classes only their sum is known.",
        advice="Record more of them (reinforce.top_k=all, or twice the number), lower distill.temperature, or set distill.teacher=online.",
        numbers={"mass": mass},
    )


@rule(
    kind="training",
    title="Vanishing loss term",
    needs=f"{_FEWEST_POINTS} points of each term of the distillation's loss, and their weights.",
    fires=(
        "A term with a weight has less than `share` of the weighted loss in each third of the training; or the temperature is so high that "
        "the rounding of float32, times its square, is larger than the logit term."
    ),
    advises="A larger weight or another temperature; or none, to save the term's work.",
)
def vanishing_loss_term(case: Case) -> Outcome:
    settings, metrics = case.training.ranks[0].record.context.settings, case.training.metrics
    weights = {name: float(settings.get(f"{name}_weight", 0)) for name in ("logit", "feature", "label")}
    terms = {name: metrics[name].values for name, weight in weights.items() if weight and name in metrics}
    if not terms:
        return NotJudged(reason="only a distillation's loss has terms")
    if min(map(len, terms.values())) < _FEWEST_POINTS:
        return NotJudged(reason=f"fewer than {_FEWEST_POINTS} points of the loss were recorded", too_short=True)
    if answer := start_unseen(case) or first_cause(case, weak_teacher):
        return answer
    temperature = float(settings.get("temperature", 1))
    if settings.get("logit_loss") in _SOFTENED and "logit" in terms:
        rounding, term = temperature**2 * float(np.finfo(np.float32).eps), float(np.median(np.abs(terms["logit"])))
        if rounding > term:
            return Finding(
                severity="warning",
                confidence=0.8,
                text=(
                    f"At temperature {temperature:g} the logit term is lost in float32's rounding: that is {rounding:.2g} in each image, "
                    f"and the term {term:.2g}."
                ),
                advice="Choose a distill.temperature between 1 and 10.",
                numbers={"rounding": rounding, "term": term},
            )
    sizes = np.stack([weights[name] * np.abs(values) for name, values in terms.items()])
    shares = sizes / np.maximum(sizes.sum(0), np.finfo(np.float64).tiny)
    largest = np.max([np.median(part, axis=1) for part in np.array_split(shares, _PARTS, axis=1)], axis=0)
    shares = dict(zip(terms, largest.tolist(), strict=True))
    least = min(shares, key=shares.__getitem__)
    if shares[least] >= case.rules.vanishing_loss_term.share:
        return Healthy(
            text="shares of the loss: " + ", ".join(f"{name} up to {share:.0%}" for name, share in shares.items())
        )
    softened = f" (now {weights[least]:g})"
    if least == "logit" and settings.get("temperature"):
        softened += f" or distill.temperature (now {temperature:g})"
    return Finding(
        severity="warning",
        confidence=0.85,
        text=(
            f"The {least} term is never more than {shares[least]:.1e} of the weighted loss (limit "
            f"{case.rules.vanishing_loss_term.share:g}), so it teaches nothing."
        ),
        advice=f"Raise distill.{least}_weight{softened}, or set the weight to 0 and save the term's work.",
        numbers={"share": shares[least]},
    )
