"""What a search shows: its page, its figures, and its table for a terminal."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from typing import Any

import optuna

from trainer.config.search_space import Dimension, parse_dimension
from trainer.io.formatting import aligned, duration, percent, short
from trainer.report import pages
from trainer.report.charts import Bar, TrialLine, bars, parallel_coordinates, trial_scores
from trainer.report.pages import BulletList, Figure, PageSection, Table, Tiles
from trainer.stages.searching.search_schema import SearchResult, SearchTrial
from trainer.stages.searching.study import study_of

_LEAST_RANKED = 6
"""Trials from which on it is shown how much each setting matters."""


def figures(found: SearchResult) -> dict[str, Any]:
    """Return the main numbers of a search."""
    means = {one.number: statistics.mean(scores) for one, scores in found.finalists()}
    return {
        "trials": len(found.trials),
        "failed": sum(bool(one.failure) for one in found.trials),
        "best": found.best,
        "val_score": means[found.best],
        "val_score_of_recipe": means[0],
        "gain": means[found.best] - means[0],
        "search_seconds": found.seconds,
        "trainings": found.trainings,
    }


def render(found: SearchResult) -> str:
    """Build the whole page, self-contained."""
    space = {name: parse_dimension(text) for name, text in found.space.items()}
    numbers = figures(found)
    tiles = Tiles(
        [
            (f"{numbers['val_score']:.1%}", "validation score, mean of the seeds"),
            (f"{100 * numbers['gain']:+.2f}", "points above the recipe"),
            (str(numbers["trials"]), "trials"),
            (f"{numbers['trainings']:.1f}", "whole trainings that they cost, without the finalists"),
            (duration(found.seconds), "of all trainings together"),
        ]
    )
    chosen = found.trials[found.best]
    lines = [_line(one, space, chosen) for one in found.trials]
    axes = [(_last(name), *_ends(dimension)) for name, dimension in space.items()]
    settings = [f"{name} = {_shown(value)}" for name, value in chosen.values.items()] if found.best else []
    failed = [f"Trial {one.number} failed: {one.failure}" for one in found.trials if one.failure]
    matters = _importances(found, space)
    return pages.render(
        "Search: " + (f"trial {found.best}" if found.best else "the recipe stays"),
        f"{found.reason[0].upper()}{found.reason[1:]}.",
        [
            PageSection(
                "Choice", [tiles, BulletList(settings) if settings else None, _finalists(found), _front(found)]
            ),
            PageSection(
                "Trials",
                [Figure(trial_scores(lines, "Score of each trial", across="epochs"), _went_on(found)), _table(found)],
            ),
            PageSection(
                "Settings",
                [
                    Figure(
                        parallel_coordinates(axes, lines, "Settings of each trial"),
                        "One line a trial; the chosen one is marked.",
                    ),
                    Figure(matters, "How much of the spread of the scores each setting explains (PED-ANOVA).")
                    if matters
                    else None,
                ],
            )
            if len(space) > 1
            else None,
            PageSection("Failed", [BulletList(failed)]) if failed else None,
        ],
    )


def lines(found: SearchResult) -> list[str]:
    """Format a search as text: what was chosen and why, and the trials, the best first."""
    table = _table(found)
    rows = [tuple(map(str, row)) for row in (table.headers, *table.rows)]
    failed = [f"trial {one.number} failed: {one.failure}" for one in found.trials if one.failure]
    return [
        f"{found.reason[0].upper()}{found.reason[1:]}.",
        "",
        *aligned(rows, right=range(len(table.headers))),
        *failed,
    ]


def storage(found: SearchResult) -> optuna.storages.BaseStorage:
    """Put the trials into a storage of Optuna's, as a study."""
    made = optuna.storages.InMemoryStorage()
    study_of({name: parse_dimension(text) for name, text in found.space.items()}, found.trials, storage=made)
    return made


def _finalists(found: SearchResult) -> Table:
    rows = [
        [
            "the recipe" if one.number == 0 else f"trial {one.number}",
            f"{statistics.mean(scores):.1%}",
            ", ".join(f"{score:.1%}" for score in scores),
            one.costs(found.cost),
        ]
        for one, scores in found.finalists()
    ]
    return Table(["settings", "mean", "each seed", "cost"], rows, "Finalists")


def _front(found: SearchResult) -> Figure | None:
    """Draw the finalists' score against their cost; None where all cost the same."""
    unit, scale = ("ms for one image", 1.0) if found.cost == "latency" else ("million parameters", 1e6)
    lines = [
        TrialLine(
            name=str(one.number),
            points=[(one.cost(found.cost) / scale, statistics.mean(scores))],
            positions=(),
            hint=f"trial {one.number}: {one.costs(found.cost)}, {statistics.mean(scores):.1%}",
            is_best=one.number == found.best,
        )
        for one, scores in found.finalists()
    ]
    if len({one.points[0][0] for one in lines}) < 2:
        return None
    chart = trial_scores(lines, "Score and cost of the finalists", across=unit)
    return Figure(chart, "The finalists: above and to the left is better; the one that was chosen is marked.")


def _went_on(found: SearchResult) -> str:
    reached = [sum(_score(one, epochs) is not None for one in found.trials) for epochs in _rungs(found)]
    return (
        f"{', '.join(map(str, reached))} trials have a score at each rung, the finalists at the last. To train all to the end would have "
        f"cost {len(found.trials)} trainings; the halving cost {found.trainings:.1f}."
    )


def _rungs(found: SearchResult) -> list[float]:
    return sorted({attempt.epochs for one in found.trials for attempt in one.attempts})


def _score(trial: SearchTrial, epochs: float) -> float | None:
    return next((one.score for one in trial.attempts if one.epochs == epochs), None)


def _table(found: SearchResult) -> Table:
    names, rungs = list(found.space), _rungs(found)
    rows = [
        [
            one.number,
            *(_shown(one.values.get(name)) for name in names),
            *("" if (score := _score(one, epochs)) is None else f"{score:.1%}" for epochs in rungs),
            duration(one.seconds),
        ]
        for one in sorted(found.trials, key=lambda one: one.rank, reverse=True)
    ]
    headers = ["trial", *map(_last, names), *(f"{short(epochs)} epochs" for epochs in rungs), "time"]
    return Table(headers, rows, "Trials")


def _importances(found: SearchResult, space: Mapping[str, Dimension]) -> Any:
    """Draw how much each setting matters at the first rung; None where too few trials say so."""
    study = study_of(space, found.trials)
    scores = {one.value for one in study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))}
    if len(scores) < _LEAST_RANKED:
        return None
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    held = optuna.importance.get_param_importances(study, evaluator=evaluator)
    rows = [Bar(name="forward", label=_last(name), value=share, note=percent(share)) for name, share in held.items()]
    return bars(rows, "share", "Importance of each setting")


def _line(trial: SearchTrial, space: Mapping[str, Dimension], chosen: SearchTrial) -> TrialLine:
    named = ", ".join(f"{_last(name)} {_shown(value)}" for name, value in trial.values.items())
    score = f": {trial.attempts[-1].score:.1%}" if trial.attempts else ""
    return TrialLine(
        name=str(trial.number),
        points=[(one.epochs, one.score) for one in trial.attempts],
        positions=[_position(dimension, trial.values.get(name)) for name, dimension in space.items()],
        hint=f"trial {trial.number}{score}; {named}",
        is_best=trial is chosen,
    )


def _position(dimension: Dimension, value: Any) -> float:
    """Return where a value lies between the ends of its axis, from 0 to 1."""
    if dimension.kind == "choice":
        place = dimension.options.index(value) if value in dimension.options else 0
        return place / (len(dimension.options) - 1)
    low, high = dimension.options
    if not isinstance(value, int | float):
        return 0.0
    held = min(max(value, low), high)
    if dimension.kind == "log":
        return (math.log(held) - math.log(low)) / (math.log(high) - math.log(low))
    return float((held - low) / (high - low))


def _ends(dimension: Dimension) -> tuple[str, str]:
    return _shown(dimension.options[0]), _shown(dimension.options[-1])


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return value if isinstance(value, str) else json.dumps(value)


def _last(name: str) -> str:
    return name.removeprefix("distill.")
