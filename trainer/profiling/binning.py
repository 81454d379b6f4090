"""Long series, reduced to bins of time for drawing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainer.profiling.evidence import RankEvidence
from trainer.profiling.series import Series
from trainer.profiling.summary import phase_seconds
from trainer.profiling.timeline import BETWEEN, OTHER, PHASES


def mean_in_bins(ends: Series, values: Series, edges: Series) -> Series:
    """The mean of a signal within each bin.

    Args:
        ends: end of the time that each value stands for, which began at the end of the one before it, [samples].
        values: the signal, NaN where unknown, [samples].
        edges: of the bins, [bins + 1].

    Returns:
        [bins]; NaN where nothing is known.
    """
    spent = np.diff(ends, prepend=0.0)
    known = np.isfinite(values)
    weight = _integral(ends, spent * known, edges)
    total = _integral(ends, spent * np.where(known, values, 0.0), edges)
    return np.where(weight > 1e-9, total / np.maximum(weight, 1e-9), np.nan)


def _integral(ends: Series, amounts: Series, edges: Series) -> Series:
    """What falls into each bin of amounts that are spread evenly over their time."""
    x, y = np.concatenate(([0.0], ends)), np.concatenate(([0.0], np.cumsum(amounts)))
    return np.diff(np.interp(edges, x, y))


def thin_curve(seconds: Series, values: Series, points: int) -> tuple[Series, Series]:
    """A curve as it is where it has few points, and as means of neighbouring ones otherwise."""
    if len(values) <= points:
        return seconds, values
    starts = np.linspace(0, len(values), points + 1)[:-1].astype(int)
    counts = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(seconds, starts) / counts, np.add.reduceat(values, starts) / counts


def phase_shares(rank: RankEvidence, edges: Series) -> Mapping[str, Series]:
    """Share of each bin's time that every phase, and every range outside of steps, took.

    Where the table of steps was thinned, what lies between kept steps is unknown, and the shares are those of the known time.

    Returns:
        Name -> [bins]; together at most 1.
    """
    amounts = _phase_amounts(rank, edges) | _outside_amounts(rank, edges)
    widths = np.diff(edges)
    known = np.sum(list(amounts.values()), axis=0) if amounts else np.zeros(len(widths))
    whole = widths if rank.record.steps.kept_of == 1 else known
    shares = {name: np.divide(amount, np.maximum(np.maximum(whole, known), 1e-12)) for name, amount in amounts.items()}
    if rank.record.steps.kept_of == 1:
        shares[BETWEEN] = np.clip(1 - np.sum(list(shares.values()), axis=0), 0, 1) if shares else np.ones(len(widths))
    order = [*PHASES, OTHER, *(name for name in shares if name not in (*PHASES, OTHER, BETWEEN)), BETWEEN]
    return {name: shares[name] for name in order if name in shares}


def _phase_amounts(rank: RankEvidence, edges: Series) -> dict[str, Series]:
    starts = rank.steps["start_s"]
    if not len(starts):
        return {}
    # On a GPU the device may end a step after the host began the next one.
    following = np.append(starts[1:], np.inf)
    ends = np.minimum(starts + rank.steps["seconds"], following)
    return {name: _spread_over(starts, ends, seconds, edges) for name, seconds in phase_seconds(rank).items()}


def _outside_amounts(rank: RankEvidence, edges: Series) -> dict[str, Series]:
    names = np.asarray(rank.spans.names, dtype=object)
    amounts = {}
    for name in dict.fromkeys(rank.spans.names):
        chosen = names == name
        starts, seconds = rank.spans.start_s[chosen], rank.spans.seconds[chosen]
        amounts[name] = _spread_over(starts, starts + seconds, seconds, edges)
    return amounts


def _spread_over(starts: Series, ends: Series, amounts: Series, edges: Series) -> Series:
    """What falls into each bin of amounts spread evenly from their starts to their ends."""
    x = np.stack([starts, ends], axis=1).ravel()
    after = np.cumsum(amounts)
    y = np.stack([after - amounts, after], axis=1).ravel()
    return np.diff(np.interp(edges, x, y))
