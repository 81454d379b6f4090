"""What a distillation will take: hours and dollars, from a short measurement on the machines where it will run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from trainer.costs import Place

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Measurement(_Record):
    """A short trial of a distillation."""

    place: Place
    settings: Mapping[str, Any]
    """Section `distill` that was measured."""
    batch_size: Annotated[int, Field(ge=1)]
    """Images a step, over all processes."""
    step_s: Seconds
    """Mean time of a step, with what lies between two steps."""
    step_low_s: Seconds
    step_high_s: Seconds
    """95 % interval of that mean."""
    steps: Count
    """Steps that it is the mean of."""
    startup_s: Seconds
    """From the start of the job to the end of the first step: fetch, import, compile."""
    validation_s: Seconds
    """One pass over the validation split."""
    checkpoint_s: Seconds
    """Writing one checkpoint."""
    recording_s: Seconds | None = None
    """Recording the teacher's outputs, where the distillation reads them and nobody has recorded them yet."""


class Work(_Record):
    """How often a distillation does what."""

    steps: Count
    validations: Count
    checkpoints: Count


class Forecast(_Record):
    """Hours and dollars of a distillation, with the interval that the measurement leaves."""

    place: Place
    hours: float
    hours_low: float
    hours_high: float
    dollars: float | None
    """None where the price is not known; likewise the interval."""
    dollars_low: float | None
    dollars_high: float | None
    assumptions: tuple[str, ...] = ()
    """What was assumed and not measured."""


def forecast(measurement: Measurement, work: Work) -> Forecast:
    """The measured time of each part, as often as it comes.

    Args:
        measurement: the trial.
        work: of the whole distillation.
    """

    def hours(step_s: float) -> float:
        seconds = measurement.startup_s + (measurement.recording_s or 0.0) + work.steps * step_s
        return (
            seconds + work.validations * measurement.validation_s + work.checkpoints * measurement.checkpoint_s
        ) / 3600

    expected, low, high = map(hours, (measurement.step_s, measurement.step_low_s, measurement.step_high_s))
    place = measurement.place
    return Forecast(
        place=place,
        hours=expected,
        hours_low=low,
        hours_high=high,
        dollars=place.dollars(3600 * expected),
        dollars_low=place.dollars(3600 * low),
        dollars_high=place.dollars(3600 * high),
    )
