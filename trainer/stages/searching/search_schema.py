"""What the stage search leaves in `search.json`: every trial, the finalists, and what was chosen and why. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.io import artifacts, storage
from trainer.io.base_models import StrictModel, what_is_wrong
from trainer.io.errors import ArtifactError

FILE, PAGE = "search.json", "search.html"


class Attempt(StrictModel):
    """A training of a trial up to a rung, or to its end."""

    epochs: float
    score: float
    """On the validation split."""
    seconds: float
    """From its launch, or its resumption, to its end."""
    dollars: float | None = None
    """None where the price of the machines is not known."""


class SearchTrial(StrictModel):
    """Settings that were tried; the first trial has the recipe's own."""

    number: int
    values: Mapping[str, Any]
    """Full name of a setting of the space -> value."""
    attempts: tuple[Attempt, ...] = ()
    """One for each rung that it reached."""
    repeats: Mapping[int, Attempt] = {}
    """Further seed -> the whole training with it."""
    failure: str = ""
    """Why it ended, where it failed."""
    parameters: int | None = None
    """Of its student."""
    latency_ms: float | None = None
    """Of its student for one image on a CPU, the median; None where latency is not the cost."""

    def cost(self, kind: str) -> float:
        """Return what its student costs by `search.cost`."""
        return (self.latency_ms if kind == "latency" else self.parameters) or 0

    def costs(self, kind: str) -> str:
        """Return the same as text."""
        return f"{self.latency_ms:.2f} ms" if kind == "latency" else f"{self.parameters:,} parameters"

    @property
    def rank(self) -> tuple[float, float]:
        """The larger, the better: a trial that reached a later rung goes before the others."""
        return (self.attempts[-1].epochs, self.attempts[-1].score) if self.attempts else (0.0, 0.0)

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in (*self.attempts, *self.repeats.values()))

    def scores(self, epochs: float) -> list[float]:
        """Return the scores of its whole trainings, of `epochs` epochs, one a seed."""
        return [one.score for one in (*self.attempts, *self.repeats.values()) if one.epochs >= epochs]


class SearchResult(StrictModel):
    """A search, whole."""

    space: Mapping[str, str]
    """Full name of a setting -> its values, as text."""
    given: Mapping[str, Any]
    """The recipe's own section `distill`."""
    chosen: Mapping[str, Any]
    """The section `distill` to train with."""
    trials: tuple[SearchTrial, ...]
    best: int
    """Number of the trial whose settings are chosen; 0: the recipe's own stay."""
    reason: str
    """Why."""
    cost: str = "parameters"
    """What the page shows as the students' cost: latency where `search.cost` is that, else parameters."""
    trainings: float
    """Whole trainings that the halving cost; what the finalists were trained beyond it is not counted."""
    seconds: float
    """Of all trainings together."""

    @property
    def epochs(self) -> float:
        epochs: float = self.given["epochs"]
        return epochs

    def finalists(self) -> list[tuple[SearchTrial, Sequence[float]]]:
        """Return the trials that were trained to the end with every seed, and their scores; the best mean first."""
        whole = [(one, one.scores(self.epochs)) for one in self.trials]
        seeds = max(len(scores) for _, scores in whole)
        held = [(one, scores) for one, scores in whole if scores and len(scores) == seeds]
        return sorted(held, key=lambda pair: -statistics.mean(pair[1]))


def read_search(uri: str | Path) -> SearchResult:
    """Read what a search has found; an `ArtifactError` where it is of another version."""
    path = artifacts.read(uri, "search").path / FILE
    try:
        return SearchResult.model_validate_json(storage.read_bytes(path))
    except ValidationError as error:
        raise ArtifactError(f"{path}: {what_is_wrong(error)}; search again with this version") from error
