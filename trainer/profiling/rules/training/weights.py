"""The rules on weights and gradients, from the measurements of every tensor.

Shapes: L measurements, P tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer.profiling.rules.causes import first_cause, listed, saving_after, setting, start_unseen
from trainer.profiling.rules.outcomes import Case, Finding, Healthy, NotJudged, Outcome, Rule
from trainer.profiling.rules.training.tensor_history import TensorHistory, tensor_history
from trainer.profiling.series import Series

Flags = npt.NDArray[np.bool_]

_FEWEST = 3
"""Fewer measurements show no trend."""
_ALIKE = 0.999
"""Mean absolute value against root mean square: 1 where all weights have the same size, 0.8 in a normal distribution."""
_USUAL_UPDATE = 0.01
"""Of the middle matrix against its own norm, at the peak of a learning rate that serves."""
_SMALL_NORM = 1e-3
"""What grows from a smaller norm of the gradient does not explode."""
_WARM = 0.1
"""Share of the peak learning rate from which on a step is meant to move the weights."""


def _few(history: TensorHistory, needed: int) -> NotJudged | None:
    if len(history) >= needed:
        return None
    return NotJudged(
        reason=(
            f"{len(history)} measurements of the weights were recorded, and {needed} are needed "
            "(evidence.tensors_every, evidence.tensors_budget)"
        ),
        too_short=len(history) > 0,  # the first step is always measured, unless measurements are turned off
    )


def _chosen(history: TensorHistory, flags: Flags) -> list[str]:
    """List the tensors that flags [P] choose."""
    return [name for name, is_chosen in zip(history.names, flags, strict=True) if is_chosen]


# ---------------------------------------------------------------------------------------------------------------------
# Initialisation


def _judge_initialisation(case: Case) -> Outcome:
    limits, history = case.rules.poor_initialisation, tensor_history(case)
    if answer := _few(history, 1) or start_unseen(case):
        return answer
    scales = np.where(history.matrices()[0], history.scales()[0], 0.0)
    alike = (scales > 0) & (history.grid("weight_mean_abs")[0] > _ALIKE * scales)
    gains = scales * history.grid("elements")[0] ** 0.25
    least, most = _most_uneven(history.names, scales)
    uneven = scales[most] / scales[least] if scales[least] else 1.0
    if alike.any():
        return _poor(
            history, alike, "start with all weights of the same size, so that their units learn the same thing", 0.95
        )
    if gains.max() > limits.largest_gain:
        text = (
            f"start far too large: they stretch a signal up to {gains.max():.3g} times (limit {limits.largest_gain:g})"
        )
        return _poor(history, gains > limits.largest_gain, text, 0.9)
    if uneven > limits.largest_ratio:
        text = f"start {uneven:.3g} times apart (limit {limits.largest_ratio:g}): {scales[least]:.2g} and {scales[most]:.2g}"
        return _poor(history, np.isin(range(len(scales)), (least, most)), text, 0.8)
    return Healthy(
        text=f"matrices stretch a signal {gains.max():.2g} times at most, and those of a kind differ {uneven:.2g} times at most"
    )


def _poor(history: TensorHistory, flags: Flags, what: str, confidence: float) -> Finding:
    names = _chosen(history, flags)
    return Finding(
        severity="severe",
        confidence=confidence,
        text=f"{len(names)} of {len(history.names)} tensors of weights ({listed(names)}) {what}.",
        advice=(
            "Draw them as timm does (normal, standard deviation 0.02), or start from weights that were trained "
            "(pretrain.weights, pretrain.mae.epochs)."
        ),
        saving=None,
        numbers={"tensors": float(len(names))},
        steps=(0, 0),
    )


def _most_uneven(names: Sequence[str], scales: Series) -> tuple[int, int]:
    """Find the two tensors, among those whose names differ in numbers only, whose scales are furthest apart, the smaller one first."""
    kinds: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        if scales[number] > 0:
            kinds.setdefault(re.sub(r"\d+", "N", name), []).append(number)
    pairs = [(min(kind, key=scales.__getitem__), max(kind, key=scales.__getitem__)) for kind in kinds.values()]
    return max(pairs, key=lambda pair: float(scales[pair[1]] / scales[pair[0]]), default=(0, 0))


POOR_INITIALISATION = Rule(
    name="poor_initialisation",
    kind="training",
    title="Poor initialisation",
    needs="The measurement at the first step, before its update.",
    fires=(
        "A matrix has weights of one size only; or stretches a signal more than `largest_gain` times (root mean square x the fourth root "
        "of its elements); or its root mean square differs more than `largest_ratio` times from that of the same matrix in another block."
    ),
    advises="Drawing these weights as timm does, or starting from trained ones.",
    judge=_judge_initialisation,
)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def _judge_vanishing(case: Case) -> Outcome:
    limits, history = case.rules.vanishing_gradients, tensor_history(case)
    if answer := _few(history, _FEWEST) or first_cause(case, POOR_INITIALISATION):
        return answer
    sizes = history.grid("gradient_mean_abs")
    seen, small = ~np.isnan(sizes), sizes < limits.mean_abs
    if not seen.any():
        return NotJudged(reason="no tensor had a gradient")
    share, typical = small.sum() / seen.sum(), float(np.nanmedian(sizes))
    if share <= limits.share:
        return Healthy(
            text=f"the middle tensor's mean absolute gradient is {typical:.2g}; {share:.0%} of measurements are below {limits.mean_abs:g}"
        )
    names = _chosen(history, small.mean(0) > limits.share)
    return Finding(
        severity="severe",
        confidence=0.9,
        text=(
            f"Gradients are too small to learn from: {share:.0%} of the measurements of tensors have a mean absolute gradient below "
            f"{limits.mean_abs:g} (the middle one {typical:.2g}), such as those of {listed(names)}."
        ),
        advice=(
            "Look for what shrinks the loss or its gradient: weights of the loss terms near 0, a detached tensor, saturated units; AdamW's "
            "epsilon of 1e-8 swallows such gradients."
        ),
        saving=saving_after(case, float(history.seconds[0]), "little is learned"),
        numbers={"looks_share": float(share), "median_mean_abs": typical},
    )


VANISHING_GRADIENTS = Rule(
    name="vanishing_gradients",
    kind="training",
    title="Vanishing gradients",
    needs=f"{_FEWEST} measurements of the gradients.",
    fires="More than `share` of all measurements of tensors have a mean absolute gradient below `mean_abs`.",
    advises="Finding what shrinks the loss or its gradient: weights of its terms near 0, a detached tensor, saturated units.",
    judge=_judge_vanishing,
)


def _judge_exploding(case: Case) -> Outcome:
    history = tensor_history(case)
    return (
        _not_finite(case, history)
        or _few(history, _FEWEST)
        or first_cause(case, POOR_INITIALISATION)
        or _growth(case, history)
    )


def _not_finite(case: Case, history: TensorHistory) -> Finding | None:
    """Judge whether a gradient or a tensor of weights holds numbers that are not finite."""
    bad = (
        (history.grid("gradient_nonfinite") > 0)
        | (history.grid("weight_nonfinite") > 0)
        | np.isinf(history.grid("gradient_norm"))
    )
    if not bad.any():
        return None
    first = int(bad.any(1).argmax())
    names, seconds = _chosen(history, bad[first]), float(history.seconds[first])
    return Finding(
        severity="severe",
        confidence=1.0,
        text=(
            f"At step {history.steps[first] + 1:.0f} {len(names)} of {len(history.names)} tensors ({listed(names)}) have gradients or "
            f"weights that are not finite{_moved(history)}."
        ),
        advice=_calm(case, history),
        saving=saving_after(case, seconds, "nothing is learned"),
        numbers={"tensors": float(len(names))},
        window_s=(seconds, case.training.ranks[0].record.ended_s),
        steps=(int(history.steps[first]), int(history.steps[-1])),
    )


def _growth(case: Case, history: TensorHistory) -> Outcome:
    """Compare the whole gradient's norm with the larger of its first one and its median before, in two measurements in a row."""
    limit = case.rules.exploding_gradients.growth
    norms = np.sqrt(np.nansum(history.grid("gradient_norm") ** 2, axis=1))
    usual = np.array([max(norms[0], np.median(norms[:index]), _SMALL_NORM) for index in range(1, len(norms))])
    growth = norms[1:] / usual
    lasting = np.minimum(growth[:-1], growth[1:])
    worst = int(lasting.argmax())
    if lasting[worst] <= limit:
        return Healthy(
            text=f"all gradients and weights are finite; the gradient's norm grew {growth.max():.3g} times at most"
        )
    seconds = float(history.seconds[worst + 1])
    return Finding(
        severity="severe",
        confidence=0.9,
        text=(
            f"The gradient's norm grew from {usual[worst]:.3g} to {norms[worst + 1]:.3g} at step {history.steps[worst + 1] + 1:.0f} and "
            f"stayed {lasting[worst]:.3g} times as large (limit {limit:g}){_moved(history)}."
        ),
        advice=_calm(case, history),
        saving=saving_after(case, seconds, "the weights are being destroyed"),
        numbers={"growth": float(lasting[worst])},
        window_s=(seconds, case.training.ranks[0].record.ended_s),
        steps=(int(history.steps[worst + 1]), int(history.steps[-1])),
    )


def _moved(history: TensorHistory) -> str:
    ratio = _largest_update(history)
    return f"; steps moved the middle matrix by up to {ratio:.2g} times its own norm" if ratio else ""


def _largest_update(history: TensorHistory) -> float:
    """Return the largest update of the median matrix relative to its norm; 0 where it is not known."""
    ratios = history.update_ratios()
    return float(ratios[np.isfinite(ratios)].max(initial=0.0))


def _calm(case: Case, history: TensorHistory) -> str:
    settings = case.training.ranks[0].record.context.settings
    rate, clip = settings.get("base_learning_rate"), settings.get("clip_norm")
    factor = min(0.1, _USUAL_UPDATE / max(_largest_update(history), _USUAL_UPDATE))
    lower = f" from {rate:g} to {rate * factor:.2g}" if isinstance(rate, int | float) else ""
    limited = f", set {setting(case, 'clip_norm')}=1" if clip == 0 else ""
    return (
        f"Lower {setting(case, 'base_learning_rate')}{lower}{limited}, or try precision=fp32; continue from an earlier checkpoint, or "
        "start again."
    )


EXPLODING_GRADIENTS = Rule(
    name="exploding_gradients",
    kind="training",
    title="Exploding gradients",
    needs=f"Measurements of the weights and gradients; {_FEWEST} of them for growth.",
    fires=(
        "A gradient or a tensor of weights holds a number that is not finite; or the norm of the whole gradient is in two measurements in "
        "a row more than `growth` times both its first one and its median before."
    ),
    advises="A lower learning rate, a smaller clip_norm, or precision=fp32; continuing from an earlier checkpoint.",
    judge=_judge_exploding,
)


# ---------------------------------------------------------------------------------------------------------------------
# Steps


def _judge_update_ratio(case: Case) -> Outcome:
    history = tensor_history(case)
    if answer := _few(history, 1) or first_cause(case, POOR_INITIALISATION, EXPLODING_GRADIENTS):
        return answer
    ratios = history.update_ratios()
    if not np.isfinite(ratios).any():
        return NotJudged(reason="no matrix was large enough for its update to be compared with it")
    worst = int(np.nanargmax(ratios))
    if ratios[worst] > case.rules.update_ratio.largest:
        return _too_large(case, history, worst)
    return _size_of_warm_steps(case, history)


def _too_large(case: Case, history: TensorHistory, worst: int) -> Finding:
    ratio, limit = float(history.update_ratios()[worst]), case.rules.update_ratio.largest
    return Finding(
        severity="severe",
        confidence=0.9,
        text=(
            f"Step {history.steps[worst] + 1:.0f} moved the middle matrix by {ratio:.3g} times its own norm (limit {limit:g}); "
            "0.001 is usual."
        ),
        advice=_calm(case, history),
        saving=None,
        numbers={"update_ratio": ratio},
        steps=(int(history.steps[worst]), int(history.steps[worst])),
    )


def _size_of_warm_steps(case: Case, history: TensorHistory) -> Outcome:
    """Judge whether the steps near the peak learning rate move the weights."""
    warm = _is_warm(case, history.steps) & np.isfinite(history.update_ratios())
    if warm.sum() < _FEWEST:
        return NotJudged(
            reason=f"{warm.sum()} measurements were at a learning rate near its peak, and {_FEWEST} are needed",
            too_short=True,
        )
    if cause := first_cause(case, VANISHING_GRADIENTS):
        return cause
    ratio, limit = float(history.update_ratios()[warm].max()), case.rules.update_ratio.smallest
    if ratio >= limit:
        return Healthy(text=f"steps move the middle matrix by {ratio:.2g} times its own norm at most")
    if ratio == 0:
        return NotJudged(reason="no step changed the middle matrix at all")
    return Finding(
        severity="severe",
        confidence=0.8,
        text=f"No step moved the middle matrix by more than {ratio:.2g} times its own norm (limit {limit:g}); 0.001 is usual.",
        advice=f"Raise {setting(case, 'base_learning_rate')} a thousand times or more: such steps are lost in the rounding of the weights.",
        saving=saving_after(case, float(history.seconds[0]), "next to nothing changes"),
        numbers={"update_ratio": ratio},
    )


def _is_warm(case: Case, steps: Series) -> Flags:
    """Mark the steps whose learning rate is near its peak; all where it was not recorded."""
    curve = case.training.metrics.get("learning_rate")
    if curve is None or not len(curve.steps):
        return np.ones(len(steps), bool)
    settings = case.training.ranks[0].record.context.settings
    peak = settings.get("base_learning_rate", 0) * settings.get("batch_size", 0) / 256
    return np.asarray(np.interp(steps, curve.steps, curve.values) >= _WARM * max(peak, curve.values.max()))


UPDATE_RATIO = Rule(
    name="update_ratio",
    kind="training",
    title="Update ratio",
    needs=(
        f"Measurements of weights and their updates, and the learning rate; {_FEWEST} of them near the peak learning rate for the lower "
        "limit."
    ),
    fires=(
        "A step's update of the middle matrix (by norm of the update against norm of the weights) is above `largest`, or none near the "
        "peak learning rate is above `smallest`."
    ),
    advises="A lower learning rate, or a higher one.",
    judge=_judge_update_ratio,
)


def _judge_unchanged(case: Case) -> Outcome:
    needed, history = case.rules.unchanged_weights.looks, tensor_history(case)
    if answer := _few(history, needed) or first_cause(case, POOR_INITIALISATION, VANISHING_GRADIENTS):
        return answer
    still = history.grid("unchanged") >= 1
    runs = np.stack([still[start : start + needed].all(0) for start in range(len(history) - needed + 1)])
    frozen: Flags = np.any(runs, axis=0)
    if not frozen.any():
        return Healthy(text=f"each of {len(history.names)} tensors changed at least once in {needed} measurements")
    matrices = history.matrices()[0]
    if frozen[matrices].all():
        return _all_unchanged(case, history, float(history.seconds[int(runs.any(1).argmax())]))
    return first_cause(case, UPDATE_RATIO) or _some_unchanged(case, history, _chosen(history, frozen))


def _all_unchanged(case: Case, history: TensorHistory, since_s: float) -> Finding:
    needed, rate = case.rules.unchanged_weights.looks, setting(case, "base_learning_rate")
    return Finding(
        severity="severe",
        confidence=0.95,
        text=(
            f"No step changed any of {int(history.matrices()[0].sum())} matrices of weights in {needed} measurements in a row: nothing is "
            "learned."
        ),
        advice=f"Raise {rate}: its steps are 0, or lost in the rounding of the weights.",
        saving=saving_after(case, since_s, "nothing changes"),
    )


def _some_unchanged(case: Case, history: TensorHistory, names: Sequence[str]) -> Finding:
    return Finding(
        severity="warning",
        confidence=0.95,
        text=(
            f"{len(names)} of {len(history.names)} tensors of weights ({listed(names)}) did not change in "
            f"{case.rules.unchanged_weights.looks} measurements in a row, while others did."
        ),
        advice="Let them be trained (requires_grad, a learning rate above 0 in their group), or leave them out of the model.",
        saving=None,
        numbers={"tensors": float(len(names))},
    )


UNCHANGED_WEIGHTS = Rule(
    name="unchanged_weights",
    kind="training",
    title="Unchanged weights",
    needs="`looks` measurements of the weights.",
    fires="In `looks` measurements in a row no step changed an element of a tensor.",
    advises="Letting the tensors be trained; a larger learning rate where none of them changes.",
    judge=_judge_unchanged,
)
