"""What a distillation takes on every pool where it was tried, and on other numbers of nodes: `python -m trainer forecast`.

A pool that was not tried is not in the table: peak figures say little of what a training reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import artifacts, storage
from trainer.costs import dollars_text, duration_text
from trainer.errors import ArtifactError
from trainer.forecast import Forecast, on_nodes
from trainer.summary import aligned
from trainer.tuning.tuning_schema import Tuning, read_tuning

Subject = Mapping[str, object]
"""What is distilled: name -> what distinguishes it from others."""


def read_tunings(places: Iterable[str | Path], like: Subject | None = None) -> list[Tuning]:
    """Tunings of one distillation (that of the first where `like` is not given), by the URIs of their directories or their runs'.

    Raises:
        ArtifactError: one is missing, damaged, or of another distillation.
        StorageError: the store does not answer or refuses.
    """
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
    """What has to be the same in tunings that are compared, by the fingerprints of their inputs and their section `distill`."""
    return {
        "data set": parents["dataset"],
        "teacher": parents["teacher"],
        "student": settings["student"],
        "number of epochs": settings["epochs"],
        "choice of images (distill.unlabeled)": settings.get("unlabeled", True),
    }


def forecast_table(tunings: Sequence[Tuning], nodes: Sequence[int], *, assumed_efficiency: float) -> list[Forecast]:
    """A forecast for each pool and number of nodes, the cheapest first, those without a price last.

    Args:
        tunings: of one distillation.
        nodes: how many; empty: those that were tried.
        assumed_efficiency: speed-up of twice as many nodes, as a share of 2, where only one number was tried.
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


def lines(forecasts: Sequence[Forecast]) -> list[str]:
    """The table, with what was assumed below it."""
    rows = [
        (
            str(one.place),
            duration_text(3600 * one.hours),
            f"{duration_text(3600 * one.hours_low)} to {duration_text(3600 * one.hours_high)}",
            dollars_text(one.dollars),
            "" if one.dollars is None else f"{dollars_text(one.dollars_low)} to {dollars_text(one.dollars_high)}",
        )
        for one in forecasts
    ]
    heading = ("where", "time", "95 % interval", "dollars", "95 % interval")
    notes = [f"  - {one.place}: {text}" for one in forecasts for text in one.assumptions]
    return [*aligned([heading, *rows], right={1, 3}), *notes]
