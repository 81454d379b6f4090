"""Which settings a training may be resumed with: all must be those that it began with, but for a few that do not decide what is learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FREE = frozenset(
    {
        # Who loads, and where: a sample's views are a function of the seed, its key and the epoch.
        "workers",
        "views_on",
        "decode_on",
        # What is noted and kept of the training.
        "log_every",
        "checkpoint_every",
        "checkpoint_keep",
        "validate_every_epochs",
        "evidence",
        "watch",
        # How the same mathematics is computed and cut up, as the number of processes is free: rounding differs, and what dropout draws.
        "compile",
        "zero",
        "accumulation",
        "teacher_batch",
        "deterministic",
    }
)
"""Settings, of whatever section, with which a training may resume. `precision` and `gradient_compression` are not among them: they change
every gradient."""
_SHOWN = 10
"""Differences in a message."""
_SHOWN_DIGITS = 12
"""Of a fingerprint."""


def compatible(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide what is learned."""
    return {
        name: compatible(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name not in FREE
    }


def differences(
    was: tuple[Mapping[str, Any], Mapping[str, str]], now: tuple[Mapping[str, Any], Mapping[str, str]], *, section: str
) -> list[str]:
    """List what keeps a training from resuming, each difference in a few words.

    Args:
        was: settings and parents (name -> fingerprint) of a checkpoint.
        now: those of the training that would resume from it.
        section: of the settings, for their full names.
    """
    settings = _changed(*(dict(_flat(compatible(side[0]), section)) for side in (was, now)))
    inputs = _changed(
        *({f"input {name}": value[:_SHOWN_DIGITS] for name, value in side[1].items()} for side in (was, now))
    )
    return settings + inputs


def listed(differing: list[str]) -> str:
    """Join differences into one text."""
    more = len(differing) - _SHOWN
    return ", ".join(differing[:_SHOWN]) + (f", and {more} more" if more > 0 else "")


def _changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = [*now, *(name for name in was if name not in now)]
    return [
        f"{name} was {_shown(was, name)}, is {_shown(now, name)}"
        for name in names
        if name not in was or name not in now or was[name] != now[name]
    ]


def _shown(values: Mapping[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "not there"


def _flat(settings: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        full = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            yield from _flat(value, full)
        else:
            yield full, value
