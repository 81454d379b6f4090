"""The bill of a run: wall time and dollars by stage, split into what the time went for, beside what was forecast.

It is made of what the artifacts and the evidence say. A training is billed from its launch (on a cluster: the start of its first pod) until
its result is complete. Nodes that wait for a pod, or that their owner keeps afterward, cost too, but are not seen here. A stage that
was kept, from KFP's cache or an earlier try, is billed as when it ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from trainer.io.base_models import StrictModel
from trainer.io.costs import Machines, dollars_text, place_here
from trainer.io.formatting import duration
from trainer.report.forecast import Forecast, Seconds

if TYPE_CHECKING:
    from trainer.io.artifacts import Manifest
    from trainer.profiling.evidence import Evidence, RankRecord

PARTS: Mapping[str, str] = {
    "startup": "start-up",
    "compilation": "compilation",
    "training": "training",
    "work": "work",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "recorder": "recorder",
    "lost": "lost work",
    "ending": "ending",
}
"""What a stage's time goes for -> its name in tables. Start-up lasts until a training begins; `work` is of stages that do not train; the
recorder's is what evidence cost; lost work was done again after a failure; `ending` is writing the result."""


class StageBill(StrictModel):
    """The bill of a stage."""

    stage: str
    seconds: Seconds  # wall time
    parts: Mapping[str, Seconds] = {}
    """Each of `PARTS` that there was -> its share of the time; empty where only the total is known."""
    place: Machines | None = None  # None if it was not recorded
    dollars: float | None = None  # None where the price is not known
    iterations_per_second: float | None = None
    """Optimizer steps, while it trained; none for a stage that does not train."""
    images_per_second: float | None = None
    """Over all of the part `training`, between steps too; the report has the rate within steps."""


class Bill(StrictModel):
    """The bill of a run."""

    stages: tuple[StageBill, ...]
    seconds: Seconds  # of all stages
    dollars: float | None  # of the stages with a known price; none where no price is known
    forecast: Forecast | None = None  # what was expected before the distillation
    notes: tuple[str, ...] = ()  # what the total leaves out, and what speaks against a price

    def stage(self, name: str) -> StageBill | None:
        return next((one for one in self.stages if one.stage == name), None)

    @property
    def actual_hours(self) -> float:
        """Hours of the stages that the forecast covers."""
        covered = self.forecast.stages if self.forecast else ()
        return sum(one.seconds for one in self.stages if one.stage in covered) / 3600


def stage_bill(stage: str, manifest: Manifest, evidence: Evidence | None = None) -> StageBill:
    """Bill a stage from the manifest of what it made, and from what its trainings recorded, if it trains."""
    records = [training.ranks[0].record for training in evidence.trainings] if evidence else []
    parts = {}  # of a stage that ran in its task's own process only the total is known
    if records:
        parts = _parts_of_trainings(records, manifest)
    elif manifest.startup_seconds is not None:
        parts = {"startup": manifest.startup_seconds, "work": manifest.seconds}
    seconds = sum(parts.values()) if parts else manifest.seconds
    place = (records[-1].place if records else None) or manifest.place
    trained = [(record, _parts_of_recording(record)["training"]) for record in records if record.steps.count]
    training_s = sum(spent for _, spent in trained)
    images = sum(record.steps.images for record, _ in trained)
    return StageBill(
        stage=stage,
        seconds=seconds,
        parts=parts,
        place=place,
        dollars=place.dollars(seconds) if place else None,
        iterations_per_second=sum(record.steps.count for record, _ in trained) / training_s if training_s else None,
        images_per_second=images / training_s if training_s and images else None,
    )


def bill_here(stage: str, seconds: float) -> StageBill:
    """Bill a stage that runs in this process, when it is nearly at its end."""
    place = place_here()
    return StageBill(stage=stage, seconds=seconds, place=place, dollars=place.dollars(seconds) if place else None)


def _parts_of_trainings(records: Sequence[RankRecord], manifest: Manifest) -> dict[str, float]:
    """Split the time from the launch to the end of the stage, and that of the attempts before."""
    last = records[-1]
    seconds = dict.fromkeys(PARTS, 0.0)
    for record in records:
        for part, spent in _parts_of_recording(record).items():
            seconds[part] += spent
    seconds["ending"] = max(0.0, manifest.created.timestamp() - last.began_unix - last.ended_s)
    seconds["startup"] = max(0.0, (manifest.startup_seconds or 0.0) + manifest.seconds - sum(seconds.values()))
    for attempt, following in (pair for record in records for pair in pairwise(record.attempts)):
        # Of an attempt that failed, the part from which the next one could continue was training; the rest is lost.
        took = max(0.0, attempt.seen_unix - attempt.began_unix)
        kept = min(max(0, following.first_step - attempt.first_step), attempt.steps_seen)
        share = kept / attempt.steps_seen if attempt.steps_seen else 0.0
        seconds["training"] += took * share
        seconds["lost"] += took * (1 - share)
    return {part: spent for part, spent in seconds.items() if spent}


def _parts_of_recording(record: RankRecord) -> dict[str, float]:
    outside = {name: total.seconds for name, total in record.outside.items()}
    compiled = sum(one.seconds for one in record.compilations) or record.startup.get("compile", 0.0)
    evaluation = outside.get("evaluate", 0.0)
    compiled_there = min(record.compile_beside_s, evaluation)
    parts = {
        "compilation": compiled + compiled_there,
        "evaluation": evaluation - compiled_there,
        "checkpoints": outside.get("checkpoint", 0.0),
        "recorder": sum(record.overhead.values()),
    }
    return {**parts, "training": max(0.0, record.ended_s - sum(parts.values()))}


def make_bill(stages: Sequence[StageBill], forecast: Forecast | None = None) -> Bill:
    """Make the bill of a run from its stages' bills, in their order."""
    priced = [one.dollars for one in stages if one.dollars is not None]
    unpriced = [one for one in stages if one.dollars is None]
    doubts = dict.fromkeys(one.place.price.doubt() for one in stages if one.place and one.place.price)
    notes = [doubt for doubt in doubts if doubt]
    if priced and unpriced:
        names, spent = ", ".join(one.stage for one in unpriced), duration(sum(one.seconds for one in unpriced))
        notes.insert(0, f"the dollars are without {names} ({spent}): the price of where they ran is not known")
    return Bill(
        stages=tuple(stages),
        seconds=sum(one.seconds for one in stages),
        dollars=sum(priced) if priced else None,
        forecast=forecast,
        notes=tuple(notes),
    )


def rows(bill: Bill) -> list[tuple[str, ...]]:
    """Return a heading, a row for each stage, and the total: stage, place, time, dollars, parts of the time."""
    shown: list[tuple[str, ...]] = [("stage", "where", "time", "dollars", "for")]
    for one in bill.stages:
        shares = {part: spent / one.seconds for part, spent in one.parts.items() if spent >= 0.005 * one.seconds > 0}
        largest = sorted(shares.items(), key=lambda entry: -entry[1])
        split = ", ".join(f"{PARTS[part]} {share:.0%}" for part, share in largest)
        shown.append((one.stage, str(one.place or ""), duration(one.seconds), dollars_text(one.dollars), split))
    return [*shown, ("total", "", duration(bill.seconds), dollars_text(bill.dollars), "")]


def forecast_text(bill: Bill) -> str:
    """Compare forecast and actual in a sentence; empty where nothing was forecast."""
    expected = bill.forecast
    if expected is None or not bill.actual_hours:
        return ""
    actual = bill.actual_hours
    more = actual / expected.hours - 1 if expected.hours else 0.0
    dollars = [one.dollars for one in bill.stages if one.stage in expected.stages and one.dollars is not None]
    cost = f", {dollars_text(sum(dollars))}" if dollars else ""
    assumed = f"; it assumed that {'; '.join(expected.assumptions)}" if expected.assumptions else ""
    return (
        f"{' and '.join(expected.stages)}: {expected} was forecast, and it took {duration(3600 * actual)}{cost}: "
        f"{abs(more):.1%} {'more' if more >= 0 else 'less'}{assumed}"
    )
