"""Accuracy and speed of runs against their cost, side by side: `python -m trainer bill RUN RUN ...`.

Time and dollars are those of the distillation from the start of its processes, start-up and compilation included, and of the recording of
the teacher's outputs and the compilation beforehand where there were any. Rates are of the training alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer import limits, storage, tracking
from trainer.billing import Bill
from trainer.costs import Machines, dollars_text, duration_text
from trainer.errors import ArtifactError, ObjectNotFoundError
from trainer.summary import SUMMARY, aligned

STAGES = ("warm_up", "reinforce", "distill")
"""Stages that count as the distillation."""


@dataclass(frozen=True, kw_only=True)
class PricedRun:
    """A run in the table; None for what is not known of it."""

    name: str
    place: Machines | None
    seconds: float
    """Billed wall time."""
    iterations_per_second: float | None = None
    images_per_second: float | None = None
    accuracy: float | None = None
    """As a fraction."""
    epochs: float | None = None

    @property
    def dollars(self) -> float | None:
        """Cost of the time; None without a price."""
        return self.place.dollars(self.seconds) if self.place else None

    @property
    def epoch_s(self) -> float | None:
        """Seconds per epoch."""
        return self.seconds / self.epochs if self.epochs else None


def read_run(run: str | Path) -> tuple[PricedRun, Bill]:
    """Read a run by its directory, by its registration, or by its `summary.json`."""
    path = str(run) if str(run).endswith(".json") else storage.join(run, SUMMARY)
    try:
        content = limits.parse_json(storage.read_limited(path, limits.JSON_BYTES))
        if isinstance(content, dict) and "bill" not in content:
            raise ArtifactError(
                f"{path}: has no bill, as those of an earlier version; register the run again, or leave it out"
            )
        bill = Bill.model_validate(content["bill"])
        accuracy, epochs = content["student"]["test"]["top1"], content["settings"]["distill"]["epochs"]
    except (ObjectNotFoundError, NotADirectoryError) as error:
        raise ArtifactError(
            f"{run}: has no {SUMMARY}; give the directory of a finished run (`python -m trainer run` prints it)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: is not the summary of a run ({error}); give the directory of a run") from error
    # The name of the run's directory, also where its registration or a link to it was given.
    folder = path.rpartition("/")[0] if storage.is_remote(path) else str(storage.local_path(path).resolve().parent)
    name = folder.removesuffix("/registration").rpartition("/")[2]
    return entry(name, bill, accuracy=accuracy, epochs=epochs), bill


def read_experiment(name: str) -> list[PricedRun]:
    """Read the finished runs of an MLflow experiment."""
    runs = tracking.billed_runs(name)
    if not runs:
        raise ArtifactError(
            f"experiment {name}: no run of it has a bill yet; a run has one when its stage register is done"
        )
    return [
        entry(
            run.name,
            Bill.model_validate(run.bill),
            accuracy=run.metrics.get("student/test/top1"),
            epochs=float(run.params["distill.epochs"]) if "distill.epochs" in run.params else None,
        )
        for run in runs
    ]


def entry(name: str, bill: Bill, *, accuracy: float | None, epochs: float | None) -> PricedRun:
    """Make the entry of a run from its bill."""
    distill = bill.stage("distill")
    if distill is None:
        raise ArtifactError(f"{name}: its bill has no distillation; leave it out")
    return PricedRun(
        name=name,
        place=distill.place,
        seconds=sum(one.seconds for one in bill.stages if one.stage in STAGES),
        iterations_per_second=distill.iterations_per_second,
        images_per_second=distill.images_per_second,
        accuracy=accuracy,
        epochs=epochs,
    )


def rows(entries: Sequence[PricedRun]) -> list[tuple[str, ...]]:
    """Return a heading and a row for each run, without columns of which nothing is known.

    Speeds are relative to the first run. The last column names the cheapest, the fastest and the most accurate run.
    """
    first = entries[0]
    known = {
        "cheapest": [(one.dollars, one) for one in entries if one.dollars is not None],
        "fastest": [(one.seconds, one) for one in entries],
        "most accurate": [(-one.accuracy, one) for one in entries if one.accuracy is not None],
    }
    winners = {
        title: min(pairs, key=lambda pair: pair[0])[1]
        for title, pairs in known.items()
        if len({value for value, _ in pairs}) > 1  # where runs differ
    }
    columns: Mapping[str, Callable[[PricedRun], str]] = {
        "run": lambda one: one.name,
        "where": lambda one: str(one.place or ""),
        "it/s": lambda one: _number(one.iterations_per_second, ",.2f"),
        "images/s": lambda one: _number(one.images_per_second, ",.0f"),
        "accuracy": lambda one: _number(one.accuracy, ".2%"),
        "epochs": lambda one: _number(one.epochs, ",g"),
        "an epoch": lambda one: "" if one.epoch_s is None else duration_text(one.epoch_s),
        "epoch speed": lambda one: _number(
            first.epoch_s / one.epoch_s if first.epoch_s and one.epoch_s else None, ".2f", "x"
        ),
        "time": lambda one: duration_text(one.seconds),
        "dollars": lambda one: dollars_text(one.dollars),
        "$/point": lambda one: _number(
            one.dollars / (100 * one.accuracy) if one.dollars is not None and one.accuracy else None, ",.4f"
        ),
        "price of": lambda one: one.place.price.date if one.place and one.place.price else "",
        "": lambda one: ", ".join(title for title, best in winners.items() if one is best),
    }
    shown = {title: [cell(one) for one in entries] for title, cell in columns.items()}
    kept = {title: cells for title, cells in shown.items() if any(cells)}
    return [tuple(kept), *(tuple(cells[index] for cells in kept.values()) for index in range(len(entries)))]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def lines(entries: Sequence[PricedRun]) -> list[str]:
    """Format the table as text, with a note on what it covers and doubts about the prices."""
    doubts = dict.fromkeys(one.place.price.doubt() for one in entries if one.place and one.place.price)
    table = rows(entries)
    text = ("run", "where", "price of", "")
    return [
        *aligned(table, right={index for index, title in enumerate(table[0]) if title not in text}),
        "",
        f"Time and dollars: {', '.join(STAGES)}, with start-up and compilation. Rates: while it trained.",
        *(f"  - {doubt}" for doubt in doubts if doubt),
    ]
