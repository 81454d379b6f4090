"""What the stage tune leaves in `tuning.json`: every trial, what was chosen and why, and the forecast. Imports no torch.

And what a distillation takes on every pool where it was tuned, and on other numbers of nodes: `python -m trainer forecast`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from trainer.config import Compile, DistillSettings, Precision, Workers
from trainer.io import artifacts, storage
from trainer.io.base_models import StrictModel, what_is_wrong
from trainer.io.costs import Machines, dollars_text
from trainer.io.errors import ArtifactError
from trainer.io.formatting import aligned, duration
from trainer.report.forecast import Forecast, Measurement, WorkCount, on_nodes

FILE = "tuning.json"


class Candidate(StrictModel):
    """The settings of a distillation that a search may change, named as in `distill`."""

    workers: Workers
    batch_size: int
    accumulation: int
    precision: Precision
    compile: Compile
    teacher: Literal["online", "recorded"]

    @classmethod
    def of(cls, settings: DistillSettings) -> Candidate:
        """Take them from a distillation's settings."""
        values = {name: getattr(settings, name) for name in cls.model_fields}
        return cls.model_validate({name: "auto" if value is None else value for name, value in values.items()})

    def applied(self, settings: DistillSettings) -> DistillSettings:
        return settings.model_copy(update=self.model_dump())

    @property
    def held(self) -> int:
        """Images that all processes together hold in memory at once."""
        return self.batch_size // self.accumulation


class Trial(StrictModel):
    """A candidate, measured."""

    candidate: Candidate
    loads: bool = False  # whether the step waited for its loader, or took batches in memory
    ended: Literal["measured", "out of memory", "not compiled", "not finite"]
    """`not compiled`: nothing was compiled although `compile` asks for it; `not finite`: the weights were not finite at the end."""
    images_per_second: float = 0.0  # median over the laps, of all processes together; 0 where the trial failed
    low: float = 0.0
    high: float = 0.0  # 95 % interval of that median
    steps: int = 0  # steps that were measured, after those that warm up
    startup_s: float = 0.0  # from the beginning of the trial to the end of its first step: model, loader, compilation
    seconds: float  # duration of the trial
    loading_s: float = 0.0  # seconds to load an image on one core of each process, divided by the processes ..
    waiting_s: float = 0.0  # ... and the part of them in which the core waited for storage.
    workers: int = 0  # loader processes beside each training process, as chosen by `auto`
    memory_bytes: int = 0  # peak of a process: of its GPU, or else of the host since the process began
    fixed_bytes: int = 0
    """Memory in use before the first step, which does not grow with the images: on a GPU with the teacher."""

    @property
    def failed(self) -> bool:
        return self.ended != "measured"

    @property
    def noise(self) -> float:
        """Half the width of the interval, as a share of the rate."""
        return (self.high - self.low) / 2 / self.images_per_second


class TriedCandidate(StrictModel):
    """A step of the ladder."""

    trial: Trial
    idea: str  # the change, and its expected benefit
    run_s: float | None  # seconds of the whole distillation at this rate; None for a failed trial
    gain: float | None
    """How many times shorter the distillation is than with the best settings before; none where there were none, or it failed."""
    taken: bool
    verdict: str  # why it was kept or dropped


class Tuning(StrictModel):
    """The trials, the chosen settings, and the forecast."""

    place: Machines
    given: Mapping[str, Any]  # the given section `distill`
    chosen: Mapping[str, Any]  # the section with the changes that were kept
    applied: bool  # whether the distillation uses `chosen` (`tune.apply`)
    tried: tuple[TriedCandidate, ...]  # the trials in order, beginning with the given settings
    untried: Mapping[str, str]  # untried change -> reason
    reasons: tuple[str, ...]  # each change in words, with its gain
    stopped: str  # why the search ended
    search_s: float  # duration of the search
    measurement: Measurement  # of the settings that the distillation uses
    work: WorkCount
    forecast: Forecast  # of the settings that the distillation uses
    alternatives: Mapping[str, Forecast]  # alternative -> its forecast

    @property
    def gain(self) -> float:
        """How many times shorter the distillation is with the settings that were found, by trials with their loader."""
        kept = [tried.run_s for tried in self.tried if tried.taken and tried.trial.loads and tried.run_s]
        return kept[0] / kept[-1] if kept else 1.0

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.chosen if self.applied else self.given

    @property
    def reads_recording(self) -> bool:
        """Whether the stage reinforce has to run before that distillation."""
        return DistillSettings.model_validate(self.settings).reads_recording


def read_tuning(uri: str | Path) -> Tuning:
    """Read and check the tuning of the stage tune."""
    content = (artifacts.read(uri, "tuning").path / FILE).read_bytes()
    try:
        return Tuning.model_validate_json(content)
    except ValidationError as error:
        again = f"{FILE} is not one of this version ({what_is_wrong(error)}); run the stage tune again"
        raise ArtifactError(f"tuning {uri}: {again}") from error


def from_trial(
    measured: Measurement, trial: Trial, settings: DistillSettings, recording_s: float | None
) -> Measurement:
    """Estimate other settings of a measured distillation by their trial; start-up, validation and checkpoints stay as measured.

    If `settings` need the teacher's outputs recorded, that takes `recording_s`.
    """
    images = trial.candidate.batch_size
    return measured.model_copy(
        update={
            "settings": settings.model_dump(mode="json"),
            "batch_size": images,
            "step_s": images / trial.images_per_second,
            "steps": trial.steps,
            "recording_s": recording_s,
        }
    )


# ---- On several pools. One that was not tried is left out: peak figures say little of what a training reaches.

Subject = Mapping[str, object]  # inputs and settings that define the distillation


def read_tunings(places: Iterable[str | Path], like: Subject | None = None) -> list[Tuning]:
    """Read tunings of one distillation (the first one's where `like` is not given), by the URIs of their directories or of their runs."""
    found: list[Tuning] = []
    for place in places:
        inside = storage.join(place, "tuning")
        uri = next((one for one in (inside, str(place)) if artifacts.exists(one)), "")
        if not uri:
            raise ArtifactError(f"{place}: there is no tuning, nor in {inside}; a run has one with tune.enabled=true")
        tuning = read_tuning(uri)
        subject = subject_of(artifacts.manifest(uri, "tuning").parents, tuning.settings)
        like = like or subject
        other = [name for name, value in subject.items() if value != like[name]]
        if other:
            raise ArtifactError(f"tuning {uri}: is of another {' and '.join(other)}; leave it out")
        found.append(tuning)
    return found


def subject_of(parents: Mapping[str, str], settings: Mapping[str, Any]) -> Subject:
    """Return what must be equal in compared tunings, from the fingerprints of their inputs and their section `distill`."""
    return {
        "data set": parents["dataset"],
        "teacher": parents["teacher"],
        "student": settings["student"],
        "number of epochs": settings["epochs"],
        "choice of images (distill.unlabeled)": settings.get("unlabeled", True),
    }


def forecast_table(tunings: Sequence[Tuning], nodes: Sequence[int], *, assumed_efficiency: float) -> list[Forecast]:
    """Forecast one distillation for each pool and number of nodes (those tried if none are given), the cheapest first, unpriced ones last.

    `assumed_efficiency` is the speed-up of twice as many nodes, as a share of 2, where only one number was tried.
    """
    pools: dict[tuple[str, int], list[Tuning]] = {}
    for tuning in tunings:
        pools.setdefault((tuning.place.pool, tuning.measurement.batch_size), []).append(tuning)
    forecasts = [
        on_nodes([one.measurement for one in tried], tried[-1].work, count, assumed_efficiency=assumed_efficiency)
        for tried in pools.values()
        for count in (nodes or sorted({one.place.nodes for one in tried}))
    ]
    return sorted(forecasts, key=lambda one: (one.dollars is None, one.dollars or one.hours))


def table_lines(forecasts: Sequence[Forecast]) -> list[str]:
    """Format the table, with its assumptions below."""
    rows = [
        (
            str(one.place),
            duration(3600 * one.hours),
            dollars_text(one.dollars),
            one.basis,
        )
        for one in forecasts
    ]
    heading = ("where", "time", "dollars", "measured")
    notes = [f"  - {one.place}: {text}" for one in forecasts for text in one.assumptions]
    return [*aligned([heading, *rows], right={1, 2}), *notes]
