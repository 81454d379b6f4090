"""Forecasts of a distillation's hours and dollars, from a short measurement on the machines where it will run.

Only what was measured is forecast. Where a number is assumed, such as the speed-up of nodes without a measurement, the forecast says so.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from trainer.config import DistillSettings, step_schedule
from trainer.io.base_models import StrictModel
from trainer.io.costs import THIS_MACHINE, Machines, dollars_text
from trainer.io.errors import BudgetError
from trainer.io.formatting import duration

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class _Expected(StrictModel):
    @model_validator(mode="before")
    @classmethod
    def _without_intervals(cls, values: Any) -> Any:
        """Drop the bounds that earlier versions wrote."""
        if not isinstance(values, Mapping):
            return values
        bounds = {f"{name}_{bound}" for name in ("hours", "dollars") for bound in ("low", "high")}
        return {name: value for name, value in values.items() if name not in {*bounds, "step_low_s", "step_high_s"}}


class Measurement(_Expected):
    """A short trial of a distillation."""

    place: Machines
    settings: Mapping[str, Any]  # the section `distill` that was measured
    batch_size: Annotated[int, Field(ge=1)]  # images a step, over all processes
    step_s: Seconds  # mean time of a step, with what lies between two steps
    steps: Count
    startup_s: Seconds
    """From the start of the job to the end of the first step (fetch, import, compile), and what is compiled later."""
    compile_s: Seconds = 0.0
    """Part of it in the compiler; a cache of compiled graphs saves it in the distillation itself."""
    validation_s: Seconds  # one pass over the validation split
    checkpoint_s: Seconds  # writing one checkpoint
    window_s: Seconds = 0.0  # time of a window of the operators' profiler
    recording_s: Seconds | None = None
    """Recording the teacher's outputs, where the distillation reads them and they are not recorded yet."""


class WorkCount(StrictModel):
    """How often a distillation does each part of its work."""

    steps: Count
    validations: Count
    checkpoints: Count
    windows: Count = 0  # of the operators' profiler


class Forecast(_Expected):
    """Hours and dollars of a distillation."""

    place: Machines
    hours: float
    dollars: float | None  # None where the price is not known
    basis: str = ""  # what it was measured by
    stages: tuple[str, ...] = ("distill",)
    compile_hours: float = 0.0  # part of `hours` in the compiler
    assumptions: tuple[str, ...] = ()  # what was assumed and not measured, and doubts about the price

    def __str__(self) -> str:
        """Format it: `3.20 h (12.0 min of it compiling), $281.06, by 50 steps of 3.6 s`."""
        compiling = f" ({duration(3600 * self.compile_hours)} of it compiling)" if self.compile_hours else ""
        dollars = "" if self.dollars is None else f", {dollars_text(self.dollars)}"
        return f"{duration(3600 * self.hours)}{compiling}{dollars}{f', by {self.basis}' if self.basis else ''}"


def work_of(settings: DistillSettings, samples: int) -> WorkCount:
    """Count the work of a distillation with these settings on so many training images."""
    steps, evidence = step_schedule.step_count(settings, samples), settings.evidence
    return WorkCount(
        steps=steps,
        validations=step_schedule.validation_count(settings, samples),
        checkpoints=step_schedule.checkpoint_count(settings, samples),
        windows=sum(first < steps for first in evidence.operators_at) if evidence.operators_steps else 0,
    )


def forecast(measurement: Measurement, work: WorkCount, assumptions: Sequence[str] = ()) -> Forecast:
    """Add up the measured time of each part of a whole distillation."""
    beside_s = (
        measurement.startup_s
        + (measurement.recording_s or 0.0)
        + work.validations * measurement.validation_s
        + work.checkpoints * measurement.checkpoint_s
        + work.windows * measurement.window_s
    )
    seconds = beside_s + work.steps * measurement.step_s
    place = measurement.place
    doubt = place.price.doubt() if place.price else ""
    return Forecast(
        place=place,
        hours=seconds / 3600,
        dollars=place.dollars(seconds),
        basis=f"{measurement.steps} steps of {duration(measurement.step_s)}",
        compile_hours=measurement.compile_s / 3600,
        stages=("distill",) if measurement.recording_s is None else ("reinforce", "distill"),
        assumptions=(*assumptions, *([doubt] if doubt else [])),
    )


def on_nodes(
    measurements: Sequence[Measurement], work: WorkCount, nodes: int, *, assumed_efficiency: float = 0.9
) -> Forecast:
    """Forecast the same distillation on another number of nodes of the same pool, from measurements of one batch size.

    The step's time comes from the measurement with the nearest number of nodes; each doubling divides it by twice the efficiency, measured
    if there are several numbers of nodes, else assumed. Start-up, validation and checkpoints stay as measured.
    """
    if len({(one.place.pool, one.batch_size) for one in measurements}) != 1:
        raise ValueError("measurements of one pool and one batch size are needed")
    by_nodes = {one.place.nodes: one for one in measurements}
    nearest = by_nodes[min(by_nodes, key=lambda known: abs(math.log2(known / nodes)))]
    if nearest.place.nodes == nodes:
        return forecast(nearest, work)
    efficiency, source = _efficiency(by_nodes, nodes, assumed_efficiency)
    speedup = (2 * efficiency) ** math.log2(nodes / nearest.place.nodes)
    scaled = nearest.model_copy(
        update={
            "place": nearest.place.model_copy(update={"nodes": nodes}),
            "step_s": nearest.step_s / speedup,
            "recording_s": None if nearest.recording_s is None else nearest.recording_s / speedup,
        }
    )
    assumptions = (source, f"start-up, validation and checkpoints as on {_nodes(nearest.place.nodes)}")
    measured = f"{nearest.steps} steps of {duration(nearest.step_s)} on {_nodes(nearest.place.nodes)}"
    return forecast(scaled, work, assumptions).model_copy(update={"basis": measured})


def _efficiency(by_nodes: Mapping[int, Measurement], nodes: int, assumed: float) -> tuple[float, str]:
    """Return the speed-up of a doubling as a share of 2, and its source: the two measurements nearest to the wanted number of nodes."""
    if len(by_nodes) == 1:
        faster = f"assumed to be {2 * assumed:.3g} times as fast"
        return assumed, f"twice as many nodes are {faster}; only {_nodes(*by_nodes)} measured"
    low, high = sorted(sorted(by_nodes, key=lambda known: abs(math.log2(known / nodes)))[:2])
    speedup = by_nodes[low].step_s / by_nodes[high].step_s
    measured = speedup ** (1 / math.log2(high / low)) / 2
    efficiency = min(1.0, measured)  # a speed-up above the number of machines is luck, and is not extrapolated
    held = "" if low < nodes < high else f", taken to hold for {_nodes(nodes)}"
    source = (
        f"twice as many nodes are {2 * efficiency:.3g} times as fast, as measured from {low} to {_nodes(high)}{held}"
    )
    return efficiency, source


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def check_budget(place: Machines | None, budget_usd: float | None, section: str = "run") -> None:
    """Make sure, before anything is measured, that the price of the machines is known where a section limits dollars."""
    if budget_usd and (place is None or place.price is None):
        where = place or THIS_MACHINE
        raise BudgetError(
            f"{section}.budget_usd={budget_usd:g} cannot be kept, since the price of {where} is not known; give the pool a price in "
            f"pools.toml (this machine: TRAINER_PLACE), or set {section}.budget_hours in its place"
        )


def epochs_that_fit(
    measurement: Measurement,
    settings: DistillSettings,
    samples: int,
    *,
    budget_usd: float | None,
    budget_hours: float | None,
) -> int:
    """Find the most epochs, up to those of the settings, whose forecast is within the budget; 0 where not even one is. 0 sets no limit."""

    def is_over(epochs: int) -> bool:
        expected = forecast(measurement, work_of(settings.model_copy(update={"epochs": epochs}), samples))
        return not _is_within(expected, budget_usd=budget_usd, budget_hours=budget_hours)

    return bisect.bisect(range(1, settings.epochs + 1), False, key=is_over)


def refuse_over_budget(
    expected: Forecast, alternatives: Mapping[str, Forecast], *, budget_usd: float | None, budget_hours: float | None
) -> None:
    """Raise a `BudgetError` if the forecast exceeds the most dollars or hours, of which None or 0 sets no limit.

    `alternatives` maps changes in the user's words (`distill.teacher=recorded`, `pool gpu-a10g`) to their forecasts.
    """
    check_budget(expected.place, budget_usd)
    limits = {"budget_usd": budget_usd, "budget_hours": budget_hours}
    said = " and ".join(f"run.{name}={limit:g}" for name, limit in limits.items() if limit)
    if _is_within(expected, **limits):
        return
    fitting, other = list[str](), list[str]()
    for name, one in alternatives.items():
        text = f"{name} ({duration(3600 * one.hours)}, {dollars_text(one.dollars) or 'price not known'})"
        (fitting if _is_within(one, **limits) else other).append(text)
    assumed = f" (assuming that {'; '.join(expected.assumptions)})" if expected.assumptions else ""
    raise BudgetError(
        f"the distillation would take {expected} on {expected.place}{assumed}, but {said}; it was not started. "
        + (f"What would fit: {'; '.join(fitting)}. " if fitting else "Nothing that was measured would fit. ")
        + (f"Not within it: {'; '.join(other)}. " if other else "")
        + ("Choose one of these, or raise the budget" if fitting else "Raise the budget, or train on less")
    )


def _is_within(one: Forecast, *, budget_usd: float | None, budget_hours: float | None) -> bool:
    """Return whether a forecast is within the budget; unknown dollars are within no budget of dollars."""
    costs_too_much = bool(budget_usd) and (one.dollars is None or one.dollars > (budget_usd or 0.0))
    return not costs_too_much and not (budget_hours and one.hours > budget_hours)
