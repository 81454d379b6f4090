"""The rules on weights that start or end wrong, from the measurements of every tensor, and on a loss that is no number, which they make.

Shapes: L measurements, P tensors. They are the first process's: all processes hold the same weights.
"""

from __future__ import annotations

import math
import re

import numpy as np

from trainer.config import rules
from trainer.profiling.evidence import Curve, TensorSamples
from trainer.profiling.rules.inputs import wrong_input
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, TrainingRule, listed
from trainer.profiling.series import Flags, Series

FEWEST = 3  # fewer measurements show no trend
_ALIKE = 0.999
"""Mean absolute value against root mean square: 1 where all weights have the same size, 0.8 in a normal distribution."""
_USUAL_UPDATE = 0.01  # usual update of the middle matrix, relative to its norm, at the peak learning rate
_SMALL_NORM = 1e-3  # growth from a smaller gradient norm is no explosion
_ROUNDING_S = 1e-3  # rounding may move the start of a range before the end of the previous step
_SMALLEST_SCALE = 1e-3
"""The update of weights with a smaller root mean square (tokens that start near zero) does not show the step's size."""


def _scales(history: TensorSamples) -> Series:
    """Compute the root mean square of the weights, [L, P]."""
    return history.values["weight_norm"] / np.sqrt(history.values["elements"])


def of_matrices(history: TensorSamples) -> Flags:
    """Mark the tensors that multiply a signal, [L, P]: biases and norms have one dimension, tokens and positions three."""
    dimensions = history.values["dimensions"]
    return np.asarray((dimensions >= 2) & (dimensions != 3))


def update_ratios(history: TensorSamples) -> Series:
    """Compute the median matrix's update relative to its weights, [L]; NaN where no matrix is large enough."""
    large = (_scales(history) >= _SMALLEST_SCALE) & of_matrices(history)
    ratios = np.where(large, history.values["update_ratio"], np.nan)
    known = np.isfinite(ratios).any(1)
    medians = np.full(len(ratios), np.nan)
    medians[known] = np.nanmedian(ratios[known], axis=1)
    return medians


def too_few(history: TensorSamples, needed: int) -> NotJudged | None:
    """Return the answer of a rule for which there are too few measurements; None where there are enough."""
    count = len(history.steps)
    reason = f"{count} measurements of the weights were recorded, and {needed} are needed (evidence.tensors_every, evidence.tensors_budget)"
    # The first step is always measured, unless measurements are turned off.
    return None if count >= needed else NotJudged(reason, too_short=count > 0)


def names_of(history: TensorSamples, flags: Flags) -> list[str]:
    """Return the names of the marked tensors."""
    return [name for name, is_chosen in zip(history.tensors, flags, strict=True) if is_chosen]


class PoorInitialization(TrainingRule, rules.PoorInitializationThresholds):
    """Weights that start alike, or far from the usual scale.

    Fires when a matrix has weights of one size only; or stretches a signal more than `largest_gain` times (root mean square x the fourth
    root of its elements); or its root mean square differs more than `largest_ratio` times from that of the same matrix in another block.
    Matrices of a single weight are left out.

    Needs the measurement at the first step, before its update.
    Advises drawing these weights as timm does, or starting from trained ones.
    """

    def judge(self, case: Case) -> Outcome:
        history = case.rank.tensors
        if answer := too_few(history, 1) or case.start_unseen:
            return answer
        # a single weight says nothing of how it was drawn
        compared = of_matrices(history)[0] & (history.values["elements"][0] > 1)
        scales = np.where(compared & np.isfinite(_scales(history)[0]), _scales(history)[0], 0.0)
        alike = (scales > 0) & (history.values["weight_mean_abs"][0] > _ALIKE * scales)
        gains = scales * history.values["elements"][0] ** 0.25
        # among tensors whose names differ in numbers only, the two whose scales are furthest apart
        kinds: dict[str, list[int]] = {}
        for number in np.flatnonzero(scales > 0).tolist():
            kinds.setdefault(re.sub(r"\d+", "N", history.tensors[number]), []).append(number)
        pairs = [(min(kind, key=scales.__getitem__), max(kind, key=scales.__getitem__)) for kind in kinds.values()]
        least, most = max(pairs, key=lambda pair: float(scales[pair[1]] / scales[pair[0]]), default=(0, 0))
        uneven = scales[most] / scales[least] if scales[least] else 1.0
        if alike.any():
            chosen, confidence = alike, 0.95
            what = "start with all weights of the same size, so that their units learn the same thing"
        elif gains.max() > self.largest_gain:
            chosen, confidence = gains > self.largest_gain, 0.9
            gain = f"{gains.max():.3g} times (limit {self.largest_gain:g})"
            what = f"start far too large: they stretch a signal up to {gain}"
        elif uneven > self.largest_ratio:
            chosen, confidence = np.isin(range(len(scales)), (least, most)), 0.8
            what = f"start {uneven:.3g} times apart (limit {self.largest_ratio:g}): {scales[least]:.2g} and {scales[most]:.2g}"
        else:
            return Healthy(
                f"matrices stretch a signal {gains.max():.2g} times at most, and those of a kind differ {uneven:.2g} times at most"
            )
        names = names_of(history, chosen)
        return Finding(
            severity="severe",
            confidence=confidence,
            text=f"{len(names)} of {len(history.tensors)} tensors of weights ({listed(names)}) {what}.",
            advice=(
                "Draw them as timm does (normal, standard deviation 0.02), or start from weights that were trained "
                "(pretrain.weights, pretrain.mae.epochs)."
            ),
            numbers={"tensors": float(len(names))},
            steps=(0, 0),
        )


class ExplodingGradients(TrainingRule, rules.ExplodingGradientsThresholds):
    """Gradients or weights that are not finite, or grow without bound.

    Fires when a gradient or a tensor of weights holds a number that is not finite; or the norm of the whole gradient is in two
    measurements in a row more than `growth` times both its first one and its median before.

    Needs measurements of the weights and gradients; {FEWEST} of them for growth.
    Advises a lower learning rate, a smaller clip_norm, or precision=fp32; continuing from an earlier checkpoint.
    """

    def judge(self, case: Case) -> Outcome:
        history, ended_s = case.rank.tensors, case.record.ended_s
        norms = history.values["gradient_norm"]
        broken = (history.values["gradient_nonfinite"] > 0) | (history.values["weight_nonfinite"] > 0) | np.isinf(norms)
        if broken.any():
            first = int(broken.any(1).argmax())
            if answer := loss_is_lost(case, before=int(history.steps[first])):
                return answer
            names, seconds = names_of(history, broken[first]), float(history.seconds[first])
            return Finding(
                severity="severe",
                confidence=1.0,
                text=(
                    f"At step {history.steps[first] + 1:.0f} {len(names)} of {len(history.tensors)} tensors ({listed(names)}) have "
                    f"gradients or weights that are not finite{_moved(history)}."
                ),
                advice=calmer_steps(case, history, before=int(history.steps[first])),
                saving=case.saving_after(seconds, "nothing is learned"),
                numbers={"tensors": float(len(names))},
                window_s=(seconds, ended_s),
                steps=(int(history.steps[first]), int(history.steps[-1])),
            )
        if answer := too_few(history, FEWEST) or wrong_input(case) or case.first_cause(PoorInitialization):
            return answer
        limit, norms = self.growth, np.sqrt(np.nansum(norms**2, axis=1))
        usual = np.array([max(norms[0], np.median(norms[:index]), _SMALL_NORM) for index in range(1, len(norms))])
        growth = norms[1:] / usual
        lasting = np.minimum(growth[:-1], growth[1:])
        worst = int(lasting.argmax())
        if lasting[worst] <= limit:
            grew = f"the gradient's norm grew {growth.max():.3g} times at most"
            return Healthy(f"all gradients and weights are finite; {grew}")
        seconds = float(history.seconds[worst + 1])
        return Finding(
            severity="severe",
            confidence=0.9,
            text=(
                f"The gradient's norm grew from {usual[worst]:.3g} to {norms[worst + 1]:.3g} at step {history.steps[worst + 1] + 1:.0f} "
                f"and stayed {lasting[worst]:.3g} times as large (limit {limit:g}){_moved(history)}."
            ),
            advice=calmer_steps(case, history, before=int(history.steps[worst + 1])),
            saving=case.saving_after(seconds, "the weights are being destroyed"),
            numbers={"growth": float(lasting[worst])},
            window_s=(seconds, ended_s),
            steps=(int(history.steps[worst + 1]), int(history.steps[-1])),
        )


def _moved(history: TensorSamples) -> str:
    ratio = _largest_update(history)
    return f"; steps moved the middle matrix by up to {ratio:.2g} times its own norm" if ratio else ""


def _largest_update(history: TensorSamples) -> float:
    """Return the largest update of the median matrix relative to its norm; 0 where it is not known."""
    ratios = update_ratios(history)
    return float(ratios[np.isfinite(ratios)].max(initial=0.0))


def calmer_steps(case: Case, history: TensorSamples, *, before: int) -> str:
    """Advise smaller steps, and the checkpoint before a step to continue from."""
    rate, clip = case.settings.get("base_learning_rate"), case.settings.get("clip_norm")
    factor = min(0.1, _USUAL_UPDATE / max(_largest_update(history), _USUAL_UPDATE))
    lower = f" from {rate:g} to {rate * factor:.2g}" if isinstance(rate, int | float) else ""
    limited = f", set {case.setting('clip_norm')}=1" if clip == 0 else ""
    saved = _checkpoint_before(case, before)
    place = "an earlier checkpoint, or start again"
    if saved is not None:
        place = f"the checkpoint written after step {saved + 1}"
    return f"Lower {case.setting('base_learning_rate')}{lower}{limited}, or try precision=fp32; continue from {place}."


class LossNotFinite(TrainingRule, rules.LossNotFiniteThresholds):
    """A training loss that is no number.

    Fires when the last `lasting` points of the loss, or the last one of a training that failed, are not finite. Single ones are a note,
    up to `share` of all points; no other rule counts points of any curve that are not finite.

    Needs a curve named `loss`, or another that ends so and is not of the validation.
    Advises a lower learning rate or precision=fp32, and from which checkpoint to continue.
    """

    def judge(self, case: Case) -> Outcome:
        curve = self._curve(case)
        if curve is None or not len(curve.values):
            return NotJudged("no loss was recorded")
        bad = ~np.isfinite(curve.values)
        if not bad.any():
            return Healthy(f"all {len(bad)} points of the loss are finite")
        if self.since(case) is None:
            first, *_, last = [*curve.steps[bad], *curve.steps[bad][-1:]]
            until = f" and last at step {last + 1:.0f}" if last > first else ""
            return Finding(
                severity="note" if bad.mean() <= self.share else "warning",
                confidence=0.9,
                text=(
                    f"{bad.sum()} of {len(bad)} points of the loss {'is' if bad.sum() == 1 else 'are'} not finite (first at step "
                    f"{first + 1:.0f}{until}); other rules leave such points out."
                ),
                advice="Look at the images of such a step; where it happens again, limit gradients (clip_norm=1) or use precision=fp32.",
                numbers={"points": float(bad.sum())},
                steps=(int(first), int(last)),
            )
        return case.first_cause(PoorInitialization, ExplodingGradients) or self._lost(case, curve, bad)

    def _lost(self, case: Case, curve: Curve, bad: Flags) -> Finding:
        row = _first_lost(curve)
        since, seconds, numbers = int(curve.steps[row]), float(curve.seconds[row]), {"points": float(len(bad) - row)}
        before = "none was finite before"
        if row:
            numbers["last_finite"] = float(curve.values[row - 1])
            before = f"the last finite one was {curve.values[row - 1]:.4g} at step {curve.steps[row - 1] + 1:.0f}"
        return Finding(
            severity="severe",
            confidence=1.0,
            text=f"The loss is not finite from step {since + 1} on; {before}.",
            advice=calmer_steps(case, case.rank.tensors, before=since),
            saving=case.saving_after(seconds, "nothing is learned"),
            numbers=numbers,
            window_s=(seconds, case.record.ended_s),
            steps=(since, int(curve.steps[-1])),
        )

    def since(self, case: Case) -> int | None:
        """Return the step of the first point since which the loss is not finite; None where it is, or came back."""
        curve = self._curve(case)
        if curve is None:
            return None
        row = _first_lost(curve)
        count = len(curve.values) - row
        ended = count > 0 and case.record.failed is not None
        return int(curve.steps[row]) if count >= self.lasting or ended else None

    def _curve(self, case: Case) -> Curve | None:
        metrics = case.training.metrics
        names = [name for name in metrics if name.endswith("loss") and not name.startswith("val")]
        return metrics["loss"] if "loss" in names else metrics[names[0]] if names else None


def loss_is_lost(case: Case, *, before: float = math.inf) -> NotJudged | None:
    """Return the answer of another rule where the loss is not finite since a step before the given one; None where it is, or came back."""
    rule = case.rule(LossNotFinite)
    since = rule.since(case) if rule.enabled else None
    return None if since is None or since >= before else case.explained_by(rule)


def _first_lost(curve: Curve) -> int:
    """Return the row after the last finite value of a curve."""
    return int(np.max(np.flatnonzero(np.isfinite(curve.values)), initial=-1)) + 1


def _checkpoint_before(case: Case, step: int) -> int | None:
    """Return the step after which the last checkpoint before a step was written; None where none was seen."""
    steps, spans = case.rank.steps, case.rank.spans
    begins = spans.start_s[[name == "checkpoint" for name in spans.names]]
    rows = np.searchsorted(steps["start_s"] + steps["seconds"], begins + _ROUNDING_S) - 1
    within = steps["step"][
        steps.get("checkpoint", np.zeros(len(steps["step"]))) > 0
    ]  # in a user's own loop checkpoints lie within steps
    saved = np.append(steps["step"][rows[rows >= 0]], within)
    return int(np.max(saved[saved < step], initial=-1)) if (saved < step).any() else None
