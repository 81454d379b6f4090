"""The rules on the curves of the losses."""

from __future__ import annotations

import math

import numpy as np

from trainer.profiling.evidence import Curve
from trainer.profiling.rules.causes import accuracy_noise, first_cause, saving_after, setting, start_unseen
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Rule
from trainer.profiling.rules.training.inputs import VANISHING_LOSS_TERM, WEAK_TEACHER
from trainer.profiling.rules.training.weights import (
    EXPLODING_GRADIENTS,
    POOR_INITIALISATION,
    UNCHANGED_WEIGHTS,
    UPDATE_RATIO,
    VANISHING_GRADIENTS,
)
from trainer.profiling.series import Series

_POINTS = 10
"""Fewer points of a curve show no trend."""
_FIRST = 3
"""Points that are a curve's start."""
_LOST = 0.5
"""Share of what the loss had fallen by, which it may rise again."""
_MEASUREMENTS = 3
"""Fewer measurements on the validation split show no trend."""

_CAUSES = (
    POOR_INITIALISATION,
    EXPLODING_GRADIENTS,
    VANISHING_GRADIENTS,
    UNCHANGED_WEIGHTS,
    UPDATE_RATIO,
    WEAK_TEACHER,
    VANISHING_LOSS_TERM,
)
"""What keeps a loss from falling, and says more than that it does not fall."""


# ---------------------------------------------------------------------------------------------------------------------
# The training loss


def _judge_fall(case: Case) -> Outcome:
    limits, curve = case.rules.loss_not_falling, case.training.metrics.get("loss")
    if curve is None or len(curve.values) < _POINTS:
        return NotJudged(reason=f"fewer than {_POINTS} points of the loss were recorded", too_short=True)
    if answer := start_unseen(case) or _too_early(case) or first_cause(case, *_CAUSES):
        return answer
    middles = np.array([np.median(part) for part in np.array_split(curve.values, _POINTS)])
    start, last = (
        float(np.median(curve.values[:_FIRST])),
        float(np.median(middles[-math.ceil(limits.window * _POINTS) :])),
    )
    if start - last < limits.fall * abs(start):
        return _flat(case, curve, start, last)
    if middles[-1] - middles.min() > _LOST * (start - middles.min()):
        return _risen(case, curve, start, middles)
    return Healthy(text=f"the loss fell from {start:.4g} to {last:.4g}, by {(start - last) / abs(start):.0%}")


def _too_early(case: Case) -> NotJudged | None:
    record, share = case.training.ranks[0].record, case.rules.loss_not_falling.window
    total = record.context.total_steps
    if not case.live or (total and record.steps.count >= share * total):
        return None
    return NotJudged(
        reason=f"judged after {share:.0%} of the steps" if total else "the number of steps is not known yet"
    )


def _flat(case: Case, curve: Curve, start: float, last: float) -> Finding:
    window = case.rules.loss_not_falling.window
    since_s = float(curve.seconds[-1] if case.live else np.quantile(curve.seconds, window))
    return Finding(
        severity="severe",
        confidence=0.8,
        text=(
            f"The loss is {last:.4g} in the last {window:.0%} of the training and was {start:.4g} at its start: it did not fall by "
            f"{case.rules.loss_not_falling.fall:.0%}."
        ),
        advice=(
            "Check whether images and labels belong together (pictures of the views are in the card of the data set), then try "
            f"{setting(case, 'base_learning_rate')} three times as large and a third of it."
        ),
        saving=saving_after(case, since_s, "nothing was learned"),
        numbers={"start": start, "last": last},
    )


def _risen(case: Case, curve: Curve, start: float, middles: Series) -> Finding:
    lowest, last = int(middles.argmin()), float(middles[-1])
    least = float(middles[lowest])
    last_of_part = int(np.array_split(np.arange(len(curve.values)), _POINTS)[lowest][-1])
    step, seconds = int(curve.steps[last_of_part]), float(curve.seconds[last_of_part])
    return Finding(
        severity="severe",
        confidence=0.8,
        text=f"The loss fell from {start:.4g} to {least:.4g} at step {step + 1} and rose again to {last:.4g}.",
        advice=(
            f"Lower {setting(case, 'base_learning_rate')} to a third, or raise warmup_epochs; the best weights are those of about step "
            f"{step + 1}."
        ),
        saving=saving_after(case, seconds, "what was learned is lost again"),
        numbers={"start": start, "lowest": least, "last": last},
        window_s=(seconds, case.training.ranks[0].record.ended_s),
        steps=(step, int(curve.steps[-1])),
    )


LOSS_NOT_FALLING = Rule(
    name="loss_not_falling",
    kind="training",
    title="Loss not falling",
    needs=f"{_POINTS} points of the loss; while the training runs, the share `window` of its steps.",
    fires=(
        f"The middle loss in the last `window` of the training is not below its first {_FIRST} points by `fall`; or the loss has risen "
        f"again by more than {_LOST:.0%} of what it had fallen."
    ),
    advises="Checking whether images and labels belong together; another learning rate.",
    judge=_judge_fall,
)


# ---------------------------------------------------------------------------------------------------------------------
# The validation loss


def _judge_overfitting(case: Case) -> Outcome:
    metrics, limit = case.training.metrics, case.rules.overfitting.ratio
    curve = metrics.get("label" if case.training.name == "distill" else "loss")
    if curve is None or "val_loss" not in metrics:
        return NotJudged(reason="no training loss with labels, or no validation loss, was recorded")
    losses, accuracies = metrics["val_loss"], metrics["val_top1"]
    if len(losses.values) < _MEASUREMENTS:
        return NotJudged(
            reason=(
                f"{len(losses.values)} measurements on the validation split, and {_MEASUREMENTS} are needed "
                f"({setting(case, 'validate_every_epochs')})"
            ),
            too_short=True,
        )
    best, train = int(losses.values.argmin()), _near(curve, losses)
    lowest, last = float(losses.values[best]), float(losses.values[-1])
    rise, gap = last / lowest - 1, last / train[-1] - 1
    seen = f"the validation loss is {last:.3g}, at its lowest it was {lowest:.3g}; the training loss is {train[-1]:.3g}"
    before, after = float(accuracies.values[best]), float(accuracies.values[-1])
    learns = train[-1] >= train[best] or after > before + accuracy_noise(case, before)
    if min(rise, gap) <= limit or learns:
        return Healthy(text=seen)
    step, seconds = int(losses.steps[best]), float(losses.seconds[best])
    return Finding(
        severity="warning",
        confidence=0.8,
        text=(
            f"Since step {step + 1} the training learns its images by heart: {seen}, and the validation accuracy went from "
            f"{before:.1%} to {after:.1%}."
        ),
        advice=(
            "Look for wrong labels; augment more (views.min_scale, mixup, cutmix), raise weight_decay or drop_path, add images, or set "
            f"epochs so that it ends at about step {step + 1}."
        ),
        saving=saving_after(case, seconds, "the validation loss rose"),
        numbers={"rise": rise, "gap": gap},
        window_s=(seconds, case.training.ranks[0].record.ended_s),
        steps=(step, int(losses.steps[-1])),
    )


def _near(curve: Curve, measured: Curve) -> list[float]:
    """Return the median of the last points of a curve at each measurement."""
    ends = np.searchsorted(curve.steps, measured.steps, side="right")
    return [float(np.median(curve.values[max(0, end - _FIRST) : max(1, end)])) for end in ends]


OVERFITTING = Rule(
    name="overfitting",
    kind="training",
    title="Overfitting",
    needs=f"{_MEASUREMENTS} measurements on the validation split, and a training loss with labels (`label_weight` above 0).",
    fires=(
        "The validation loss is above its lowest by more than `ratio`, and above the training loss with labels by as much, which fell "
        "meanwhile, while the validation accuracy did not rise (by two standard errors)."
    ),
    advises="Looking for wrong labels; more augmentation or regularisation, more images, or fewer epochs.",
    judge=_judge_overfitting,
)
