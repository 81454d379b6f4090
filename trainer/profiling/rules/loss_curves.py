"""The rules on the curves of the losses."""

from __future__ import annotations

import math

import numpy as np

from trainer.profiling.rules.inputs import vanishing_loss_term, weak_teacher
from trainer.profiling.rules.outcomes import (
    Case,
    Finding,
    Healthy,
    NotJudged,
    Outcome,
    accuracy_noise,
    first_cause,
    rule,
    saving_after,
    setting,
    start_unseen,
)
from trainer.profiling.rules.weights import (
    exploding_gradients,
    poor_initialisation,
    unchanged_weights,
    update_ratio,
    vanishing_gradients,
)

_POINTS = 10
"""Fewer points of a curve show no trend."""
_FIRST = 3
"""Points that are a curve's start."""
_LOST = 0.5
"""Share of what the loss had fallen by, which it may rise again."""
_MEASUREMENTS = 3
"""Fewer measurements on the validation split show no trend."""

_CAUSES = (
    poor_initialisation,
    exploding_gradients,
    vanishing_gradients,
    unchanged_weights,
    update_ratio,
    weak_teacher,
    vanishing_loss_term,
)
"""What keeps a loss from falling, and says more than that it does not fall."""


@rule(
    kind="training",
    title="Loss not falling",
    needs=f"{_POINTS} points of the loss; while the training runs, the share `window` of its steps.",
    fires=(
        f"The middle loss in the last `window` of the training is not below its first {_FIRST} points by `fall`; or the loss has risen "
        f"again by more than {_LOST:.0%} of what it had fallen."
    ),
    advises="Checking whether images and labels belong together; another learning rate.",
)
def loss_not_falling(case: Case) -> Outcome:
    limits, curve = case.rules.loss_not_falling, case.training.metrics.get("loss")
    if curve is None or len(curve.values) < _POINTS:
        return NotJudged(reason=f"fewer than {_POINTS} points of the loss were recorded", too_short=True)
    if answer := start_unseen(case):
        return answer
    record, window = case.training.ranks[0].record, limits.window
    total = record.context.total_steps
    if case.live and not (total and record.steps.count >= window * total):
        later = f"judged after {window:.0%} of the steps" if total else "the number of steps is not known yet"
        return NotJudged(reason=later)
    if answer := first_cause(case, *_CAUSES):
        return answer
    rate = setting(case, "base_learning_rate")
    middles = np.array([np.median(part) for part in np.array_split(curve.values, _POINTS)])
    start, last = float(np.median(curve.values[:_FIRST])), float(np.median(middles[-math.ceil(window * _POINTS) :]))
    if start - last < limits.fall * abs(start):
        return Finding(
            severity="severe",
            confidence=0.8,
            text=(
                f"The loss is {last:.4g} in the last {window:.0%} of the training and was {start:.4g} at its start: it did not fall by "
                f"{limits.fall:.0%}."
            ),
            advice=(
                "Check whether images and labels belong together (pictures of the views are in the card of the data set), then try "
                f"{rate} three times as large and a third of it."
            ),
            saving=saving_after(
                case,
                float(curve.seconds[-1] if case.live else np.quantile(curve.seconds, window)),
                "nothing was learned",
            ),
            numbers={"start": start, "last": last},
        )
    lowest, end = int(middles.argmin()), float(middles[-1])
    least = float(middles[lowest])
    is_lost = end - least > _LOST * (start - least)
    if not is_lost:
        return Healthy(text=f"the loss fell from {start:.4g} to {last:.4g}, by {(start - last) / abs(start):.0%}")
    last_of_part = int(np.array_split(np.arange(len(curve.values)), _POINTS)[lowest][-1])
    step, seconds = int(curve.steps[last_of_part]), float(curve.seconds[last_of_part])
    return Finding(
        severity="severe",
        confidence=0.8,
        text=f"The loss fell from {start:.4g} to {least:.4g} at step {step + 1} and rose again to {end:.4g}.",
        advice=f"Lower {rate} to a third, or raise warmup_epochs; the best weights are those of about step {step + 1}.",
        saving=saving_after(case, seconds, "what was learned is lost again"),
        numbers={"start": start, "lowest": least, "last": end},
        window_s=(seconds, record.ended_s),
        steps=(step, int(curve.steps[-1])),
    )


@rule(
    kind="training",
    title="Overfitting",
    needs=f"{_MEASUREMENTS} measurements on the validation split, and a training loss with labels (`label_weight` above 0).",
    fires=(
        "The validation loss is above its lowest by more than `ratio`, and above the training loss with labels by as much, which fell "
        "meanwhile, while the validation accuracy did not rise (by two standard errors)."
    ),
    advises="Looking for wrong labels; more augmentation or regularisation, more images, or fewer epochs.",
)
def overfitting(case: Case) -> Outcome:
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
    best = int(losses.values.argmin())
    # the median of the last points of the training loss at each measurement
    ends = np.searchsorted(curve.steps, losses.steps, side="right")
    train = [float(np.median(curve.values[max(0, end - _FIRST) : max(1, end)])) for end in ends]
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
