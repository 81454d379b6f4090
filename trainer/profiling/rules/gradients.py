"""The rules on gradients and what steps make of them, from the measurements of every tensor.

Shapes: L measurements, P tensors. They are the first process's: all processes hold the same weights.
"""

from __future__ import annotations

import numpy as np

from trainer.config import rules
from trainer.profiling.rules.inputs import wrong_input
from trainer.profiling.rules.layers import AllZero, DeadRelu, SaturatedActivation, TensorVariance
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, TrainingRule, listed, too_short
from trainer.profiling.rules.weights import (
    FEWEST,
    ExplodingGradients,
    PoorInitialization,
    calmer_steps,
    loss_is_lost,
    names_of,
    of_matrices,
    too_few,
    update_ratios,
)
from trainer.profiling.series import Flags, Series

_WARM = 0.1  # share of the peak learning rate above which steps should move the weights
_SIGNALS = (DeadRelu, SaturatedActivation, AllZero, TensorVariance)  # what lets no gradient through


class VanishingGradients(TrainingRule, rules.VanishingGradientsThresholds):
    """Gradients too small to learn from.

    Fires when more than `share` of all measurements of tensors have a mean absolute gradient below `mean_abs`.

    Needs {FEWEST} measurements of the gradients.
    Advises finding what shrinks the loss or its gradient: weights of its terms near 0, a detached tensor, saturated units.
    """

    def judge(self, case: Case) -> Outcome:
        history = case.rank.tensors
        if answer := too_few(history, FEWEST) or wrong_input(case) or case.first_cause(PoorInitialization, *_SIGNALS):
            return answer
        sizes = history.values["gradient_mean_abs"]
        seen, small = ~np.isnan(sizes), sizes < self.mean_abs
        if not seen.any():
            return NotJudged("no tensor had a gradient")
        share, typical = small.sum() / seen.sum(), float(np.nanmedian(sizes))
        if share <= self.share:
            small_ones = f"{share:.0%} of measurements are below {self.mean_abs:g}"
            return Healthy(f"the middle tensor's mean absolute gradient is {typical:.2g}; {small_ones}")
        names = names_of(history, small.mean(0) > self.share)
        return Finding(
            severity="severe",
            confidence=0.9,
            text=(
                f"Gradients are too small to learn from: {share:.0%} of the measurements of tensors have a mean absolute gradient below "
                f"{self.mean_abs:g} (the middle one {typical:.2g}), such as those of {listed(names)}."
            ),
            advice=(
                "Look for what shrinks the loss or its gradient: weights of the loss terms near 0, a detached tensor, saturated units; "
                "AdamW's epsilon of 1e-8 swallows such gradients."
            ),
            saving=case.saving_after(float(history.seconds[0]), "little is learned"),
            numbers={"looks_share": float(share), "median_mean_abs": typical},
        )


class UpdateRatio(TrainingRule, rules.UpdateRatioThresholds):
    """Steps too large or too small for the weights.

    Fires when a step's median relative update (norm of a matrix's update by norm of its weights) is above `largest`, or none near the
    peak learning rate is above `smallest`.

    Needs measurements of weights and their updates, and the learning rate; {FEWEST} of them near the peak learning rate for the lower
    limit.
    Advises a lower learning rate, or a higher one.
    """

    def judge(self, case: Case) -> Outcome:
        history = case.rank.tensors
        if (
            answer := too_few(history, 1)
            or case.first_cause(PoorInitialization, ExplodingGradients)
            or loss_is_lost(case)
        ):
            return answer
        ratios = update_ratios(history)
        if not np.isfinite(ratios).any():
            return NotJudged("no matrix was large enough for its update to be compared with it")
        worst = int(np.nanargmax(ratios))
        largest, step = float(ratios[worst]), int(history.steps[worst])
        if largest > self.largest:
            return Finding(
                severity="severe",
                confidence=0.9,
                text=(
                    f"Step {step + 1} moved the middle matrix by {largest:.3g} times its own norm (limit "
                    f"{self.largest:g}); 0.001 is usual."
                ),
                advice=calmer_steps(case, history, before=step),
                numbers={"update_ratio": largest},
                steps=(step, step),
            )
        warm = _is_warm(case, history.steps) & np.isfinite(ratios)
        if warm.sum() < FEWEST:
            return too_short(
                f"{warm.sum()} measurements were at a learning rate near its peak, and {FEWEST} are needed"
            )
        if cause := case.first_cause(VanishingGradients):
            return cause
        ratio = float(ratios[warm].max())
        if ratio >= self.smallest:
            return Healthy(f"steps move the middle matrix by {ratio:.2g} times its own norm at most")
        if ratio == 0:
            return NotJudged("no step changed the middle matrix at all")
        return Finding(
            severity="severe",
            confidence=0.8,
            text=f"No step moved the middle matrix by more than {ratio:.2g} times its own norm (limit {self.smallest:g}); 0.001 is usual.",
            advice=(
                f"Raise {case.setting('base_learning_rate')} a thousand times or more: such steps are lost in the rounding of the "
                "weights."
            ),
            saving=case.saving_after(float(history.seconds[0]), "next to nothing changes"),
            numbers={"update_ratio": ratio},
        )


def _is_warm(case: Case, steps: Series) -> Flags:
    """Mark the steps with a learning rate near its peak; all if it was not recorded."""
    curve = case.curves.get("learning_rate")
    if curve is None:
        return np.ones(len(steps), bool)
    peak = case.settings.get("base_learning_rate", 0) * case.settings.get("batch_size", 0) / 256
    return np.asarray(np.interp(steps, curve.steps, curve.values) >= _WARM * max(peak, curve.values.max()))


class UnchangedWeights(TrainingRule, rules.UnchangedWeightsThresholds):
    """Weights that no step changes.

    Fires when in `looks` measurements in a row no step changed an element of a tensor.

    Needs `looks` measurements of the weights.
    Advises letting the tensors be trained; a larger learning rate where none of them changes.
    """

    def judge(self, case: Case) -> Outcome:
        needed, history = self.looks, case.rank.tensors
        if answer := too_few(history, needed) or case.first_cause(PoorInitialization, AllZero, VanishingGradients):
            return answer
        still = history.values["unchanged"] >= 1
        runs = np.stack([still[start : start + needed].all(0) for start in range(len(history.steps) - needed + 1)])
        frozen: Flags = np.any(runs, axis=0)
        if not frozen.any():
            return Healthy(f"each of {len(history.tensors)} tensors changed at least once in {needed} measurements")
        matrices = of_matrices(history)[0]
        if frozen[matrices].all():
            return Finding(
                severity="severe",
                confidence=0.95,
                text=(
                    f"No step changed any of {int(matrices.sum())} matrices of weights in {needed} measurements in a row: nothing is "
                    "learned."
                ),
                advice=f"Raise {case.setting('base_learning_rate')}: its steps are 0, or lost in the rounding of the weights.",
                saving=case.saving_after(float(history.seconds[int(runs.any(1).argmax())]), "nothing changes"),
            )
        if answer := case.first_cause(UpdateRatio):
            return answer
        names = names_of(history, frozen)
        return Finding(
            confidence=0.95,
            text=(
                f"{len(names)} of {len(history.tensors)} tensors of weights ({listed(names)}) did not change in {needed} measurements in a "
                "row, while others did."
            ),
            advice="Let them be trained (requires_grad, a learning rate above 0 in their group), or leave them out of the model.",
            numbers={"tensors": float(len(names))},
        )
