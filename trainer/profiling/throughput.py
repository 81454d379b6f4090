"""How fast a training is: each measure is defined once, and the page, the rules, the log and a comparison share it.

The measured steps are those that torch.profiler did not slow, without the first one, which also warms up. Their times are as they were,
with what other programs and the recorder's samples took of them. Rules on speed set what they find against the undisturbed step instead,
which is without both (`rules.compared_steps.Steps`), and call it so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainer.profiling.evidence import RankEvidence
from trainer.profiling.series import Rows, Series
from trainer.profiling.timeline import OTHER, PHASES


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a quantity is distributed over the steps."""

    p5: float
    p50: float
    p95: float
    mean: float
    max: float


def phase_of(path: str) -> str:
    """The phase or outermost range that a range's path belongs to."""
    return path.split("/", 1)[0]


def is_core(signal: str) -> bool:
    """Whether a signal of the system is how busy one core is."""
    return signal.startswith("cpu") and signal.endswith("_percent")


def measured_rows(profiled: Series) -> Rows:
    """Positions of the rows that are neither the first step nor under the profiler (all rows, if none remain)."""
    rows = np.arange(len(profiled))
    usual = rows[(rows > 0) & (profiled == 0)]
    return usual if len(usual) else rows


def measured_steps(rank: RankEvidence) -> Rows:
    """As `measured_rows`, of a process's step table."""
    return measured_rows(rank.steps["profiled"])


def step_ms(rank: RankEvidence) -> Spread | None:
    """How long the measured steps take; none where there are none."""
    return spread(1000 * rank.steps["seconds"][measured_steps(rank)])


def images_per_second(steps: Mapping[str, Series]) -> float | None:
    """Images of the measured steps, of all processes, by the time of these steps.

    Validation, checkpoints and start-up lie outside of steps and are not counted.

    Args:
        steps: the columns `profiled`, `images` and `seconds` of a process's step table, as far as it has come.

    Returns:
        None where there are no steps, or the training did not record its images.
    """
    rows = measured_rows(steps["profiled"])
    images, seconds = float(steps["images"][rows].sum()), float(steps["seconds"][rows].sum())
    return images / seconds if images and seconds else None


def spread(values: Series) -> Spread | None:
    """Percentiles, mean and maximum; none of no values."""
    if not len(values):
        return None
    p5, p50, p95 = np.percentile(values, [5, 50, 95]).tolist()
    return Spread(p5=p5, p50=p50, p95=p95, mean=float(values.mean()), max=float(values.max()))


def phase_seconds(rank: RankEvidence) -> dict[str, Series]:
    """Seconds of each phase in each step, user-named ranges counted with the phase around them; phases that never ran are left out."""
    sums: dict[str, Series] = {}
    for path in rank.ranges:
        phase = phase_of(path)
        sums[phase] = sums[phase] + rank.steps[path] if phase in sums else rank.steps[path]
    order = [*PHASES, *(name for name in sums if name not in PHASES and name != OTHER), OTHER]
    return {name: sums[name] for name in order if name in sums and sums[name].any()}


def phase_shares(rank: RankEvidence) -> dict[str, float]:
    """Share of the measured steps' time of each phase."""
    measured = measured_steps(rank)
    total = max(float(rank.steps["seconds"][measured].sum()), 1e-12)
    return {name: float(seconds[measured].sum()) / total for name, seconds in phase_seconds(rank).items()}
