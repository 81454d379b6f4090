"""Which settings to try next: Optuna's samplers, asked for a round at a time, as a pure function of the trials before."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from trainer.config.search_space import Dimension
from trainer.io.artifacts import canonical_json
from trainer.stages.searching.search_schema import SearchTrial

_LEAST_RANDOM, _MOST_RANDOM = 4, 10
"""Trials that are drawn at random before the estimator has enough to learn from: a quarter of all, between these."""


def propose(
    space: Mapping[str, Dimension],
    told: Sequence[SearchTrial],
    count: int,
    *,
    sampler: Literal["tpe", "random"],
    trials: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Return the settings of the next `count` trials, by their full names.

    The sampler is made anew for each round with a seed of the search's and the number of trials told, so an interrupted search that is
    told the same trials goes on with the same proposals.

    Args:
        told: trials that have ended, in their order; failed ones too.
        trials: how many the search has in all.
    """
    study = study_of(space, told, sampler=sampler, trials=trials, seed=seed)
    asked = [study.ask(_distributions(space)).params for _ in range(count)]
    return [{name: _option(space[name], value) for name, value in params.items()} for params in asked]


def study_of(
    space: Mapping[str, Dimension],
    told: Sequence[SearchTrial],
    *,
    sampler: Literal["tpe", "random"] = "tpe",
    trials: int = 0,
    seed: int = 0,
    storage: optuna.storages.BaseStorage | None = None,
) -> optuna.Study:
    """Make a study, in memory unless there is a `storage`, that knows the trials: their settings, and their score at the first rung."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = (seed * 1_000_003 + len(told)) % 2**32
    chosen: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=seed)
    if sampler == "tpe":
        random = min(_MOST_RANDOM, max(_LEAST_RANDOM, trials // 4))
        with (
            warnings.catch_warnings()
        ):  # `multivariate` and `constant_liar` may change in a later version, which our lock file pins
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            chosen = optuna.samplers.TPESampler(
                seed=seed, multivariate=True, constant_liar=True, n_startup_trials=random
            )
    study = optuna.create_study(storage=storage, direction="maximize", sampler=chosen)
    distributions = _distributions(space)
    for trial in told:
        # The recipe's own settings may lie outside of the space.
        if trial.values.keys() != space.keys() or not all(space[name].holds(one) for name, one in trial.values.items()):
            continue
        params = {name: _internal(space[name], value) for name, value in trial.values.items()}
        failed = not trial.attempts
        study.add_trial(
            create_trial(
                state=TrialState.FAIL if failed else TrialState.COMPLETE,
                value=None if failed else trial.attempts[0].score,
                params=params,
                distributions=distributions,
            )
        )
    return study


def _distributions(space: Mapping[str, Dimension]) -> dict[str, BaseDistribution]:
    return {name: _distribution(dimension) for name, dimension in space.items()}


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.kind == "choice":
        return CategoricalDistribution([_internal(dimension, one) for one in dimension.options])
    low, high = dimension.options
    if dimension.kind == "int":
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=dimension.kind == "log")


def _internal(dimension: Dimension, value: Any) -> Any:
    """Return a value as Optuna keeps it: of a choice, which may be a group of settings, the text of the option that equals it."""
    if dimension.kind != "choice":
        return value
    return canonical_json(next(one for one in dimension.options if one == value))  # a recipe's 2.0 is the option 2


def _option(dimension: Dimension, value: Any) -> Any:
    if dimension.kind != "choice":
        return value
    return next(one for one in dimension.options if canonical_json(one) == value)
