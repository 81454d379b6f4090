"""The rules on what the layers of a network give, from samples of a forward pass.

Shapes: L looks, P layers. They are the first process's.
"""

from __future__ import annotations

import numpy as np

from trainer.config import rules
from trainer.profiling.evidence import INPUT, TensorSamples
from trainer.profiling.rules.inputs import wrong_input
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, TrainingRule, listed, too_short
from trainer.profiling.rules.weights import (
    FEWEST,
    ExplodingGradients,
    PoorInitialization,
    loss_is_lost,
    names_of,
    too_few,
    update_ratios,
)
from trainer.profiling.series import Series


def _before(case: Case) -> NotJudged | None:
    """Return the answer where something nearer to the cause than a layer was found: images, weights, or steps that are too large."""
    if answer := wrong_input(case) or case.first_cause(PoorInitialization, ExplodingGradients) or loss_is_lost(case):
        return answer
    ratios, limits = update_ratios(case.rank.tensors), case.rules.update_ratio
    if limits.enabled and ratios[np.isfinite(ratios)].max(initial=0.0) > limits.largest:
        return NotJudged("what there is to see may come from another finding: update_ratio")
    return None


def _last(case: Case, column: str) -> Series | NotJudged:
    """Return the last look's values of a column, [P], NaN for what it does not apply to; or why a rule cannot judge."""
    history = case.rank.layers
    values = history.values[column]
    if not np.isfinite(values).any():
        return NotJudged("the network has no such layers, or no forward pass was heard (`missing` says why)")
    if len(history.steps) < FEWEST:
        return too_short(f"{len(history.steps)} looks at the layers were recorded, and {FEWEST} are needed")
    last: Series = values[-1]
    return last


class DeadRelu(TrainingRule, rules.DeadReluThresholds):
    """Units of ReLU that never answer, so that nothing behind them learns.

    Fires when more than `share` of a layer's units gave 0 at each sampled place of each sampled image, in eight looks in a row (all, where
    there were fewer).

    Needs layers that are modules of the kind ReLU or ReLU6, and {FEWEST} looks at them.
    Advises a lower learning rate or a longer warm-up, biases that do not start below 0, or GELU.
    """

    title = "Dead ReLU"

    def judge(self, case: Case) -> Outcome:
        shares = _last(case, "inactive")
        if isinstance(shares, NotJudged):
            return shares
        if answer := _before(case):
            return answer
        dead, layers = np.nan_to_num(shares) > self.share, int(np.isfinite(shares).sum())
        worst = float(np.nanmax(shares))
        if not dead.any():
            return Healthy(f"at most {worst:.0%} of the units of {layers} layers of ReLU gave 0 for every image")
        return Finding(
            confidence=0.9,
            text=(
                f"In {dead.sum()} of {layers} layers of ReLU ({listed(names_of(case.rank.layers, dead))}) more than {self.share:.0%} of "
                f"the units gave 0 for every image, up to {worst:.0%}: no gradient passes them."
            ),
            advice=(
                f"Lower {case.setting('base_learning_rate')} or warm up longer, let biases start at 0, or take GELU or LeakyReLU in place "
                "of ReLU; units that are dead stay so, start again."
            ),
            numbers={"layers": float(dead.sum()), "largest_share": worst},
        )


class SaturatedActivation(TrainingRule, rules.SaturatedActivationThresholds):
    """Units of bounded functions that are always at an end of their range, where no gradient passes.

    Fires when more than `share` of a layer's units had a slope below 1e-6 at each sampled place of each sampled image, in eight looks in a
    row (all, where there were fewer).

    Needs layers that are modules of the kind sigmoid, tanh, hard sigmoid, hard tanh or softsign, and {FEWEST} looks at them.
    Advises normalization before them, smaller weights, another function.
    """

    def judge(self, case: Case) -> Outcome:
        shares = _last(case, "saturated")
        if isinstance(shares, NotJudged):
            return shares
        if answer := _before(case):
            return answer
        flat, layers = np.nan_to_num(shares) > self.share, int(np.isfinite(shares).sum())
        worst = float(np.nanmax(shares))
        if not flat.any():
            return Healthy(f"at most {worst:.0%} of the units of {layers} bounded layers were at an end of their range")
        return Finding(
            confidence=0.9,
            text=(
                f"In {flat.sum()} of {layers} bounded layers ({listed(names_of(case.rank.layers, flat))}) more than {self.share:.0%} of "
                f"the units were at an end of their range for every image, up to {worst:.0%}: no gradient passes them."
            ),
            advice=(
                "Normalize what reaches these layers (LayerNorm, BatchNorm), draw the weights before them smaller, or take a function that "
                "is not bounded, such as GELU."
            ),
            numbers={"layers": float(flat.sum()), "largest_share": worst},
        )


class AllZero(TrainingRule, rules.AllZeroThresholds):
    """Tensors that hold nothing but zeros: a gradient, or what a layer gives.

    Fires when all elements of a tensor's gradient were 0 in the last `looks` measurements, or a layer gave 0 only, at each sampled place.

    Needs `looks` measurements of the gradients.
    Advises finding what multiplies by 0 or cuts the graph.
    """

    def judge(self, case: Case) -> Outcome:
        history, layers = case.rank.tensors, case.rank.layers
        if answer := too_few(history, self.looks) or _before(case) or case.first_cause(DeadRelu, SaturatedActivation):
            return answer
        gradients = (history.values["gradient_mean_abs"][-self.looks :] == 0).all(0)
        given = np.zeros(len(layers.tensors), bool)
        if len(layers.steps) >= self.looks:
            recent = {name: layers.values[name][-self.looks :] for name in ("smallest", "largest")}
            given = ((recent["smallest"] == 0) & (recent["largest"] == 0)).all(0)
        if not gradients.any() and not given.any():
            return Healthy(f"no gradient of {len(history.tensors)} tensors, and no layer, was 0 as a whole")
        found = [
            f"the gradient of {gradients.sum()} of {len(history.tensors)} tensors ({listed(names_of(history, gradients))})"
            if gradients.any()
            else "",
            f"what {given.sum()} of {len(given)} layers gave ({listed(names_of(layers, given))})"
            if given.any()
            else "",
        ]
        return Finding(
            confidence=0.9,
            text=f"In the last {self.looks} measurements each element of {' and of '.join(filter(None, found))} was 0: they learn nothing.",
            advice="Look for what multiplies by 0 before or behind them: a mask, a weight of a loss, a scale that starts at 0.",
            numbers={"tensors": float(gradients.sum()), "layers": float(given.sum())},
        )


class TensorVariance(TrainingRule, rules.TensorVarianceThresholds):
    """A signal that fades or grows on its way through the network.

    Fires when the median standard deviation of a layer's output, in the last {FEWEST} looks, is below `smallest` or above `largest`.

    Needs layers of activation that are modules, and {FEWEST} looks at them. Bounded functions are judged by saturated activation.
    Advises normalization, or weights drawn for the layer's width.
    """

    def judge(self, case: Case) -> Outcome:
        spreads = _last(case, "std")
        if isinstance(spreads, NotJudged):
            return spreads
        if answer := _before(case) or case.first_cause(DeadRelu, SaturatedActivation, AllZero):
            return answer
        history = case.rank.layers
        judged = np.array([not name.startswith(INPUT) for name in history.tensors])
        judged &= ~np.isfinite(history.values["saturated"]).any(0) & np.isfinite(_recent(history)).all(0)
        middle = np.where(judged, np.median(_recent(history), axis=0), np.nan)
        if not judged.any():
            return NotJudged("the network has no layers of activation that are modules and not bounded")
        low, high = float(np.nanmin(middle)), float(np.nanmax(middle))
        beyond = judged & ((middle < self.smallest) | (middle > self.largest))
        if not beyond.any():
            return Healthy(f"what {judged.sum()} layers give varies by {low:.2g} to {high:.2g}")
        fades = low < self.smallest
        limit = self.smallest if fades else self.largest
        return Finding(
            confidence=0.85,
            text=(
                f"The signal {'fades' if fades else 'grows'} on its way: what {beyond.sum()} of {judged.sum()} layers give "
                f"({listed(names_of(history, beyond))}) varies by {low if fades else high:.2g} (limit {limit:g})."
            ),
            advice="Normalize between the layers (LayerNorm, BatchNorm), or draw the weights for their width (Kaiming, Xavier).",
            numbers={"smallest": low, "largest": high},
        )


def _recent(history: TensorSamples) -> Series:
    """Return the standard deviations of the last looks."""
    return history.values["std"][-FEWEST:]
