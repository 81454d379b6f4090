"""The space of a search: which settings of the distillation are tried, and between which limits, as text.

log(1e-4, 1e-2)      a number, its logarithm drawn evenly
uniform(0, 0.4)      a number
int(2, 8)            a whole number
choice(kl, dist)     one of these values
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.io import limits

Kind = Literal["log", "uniform", "int", "choice"]
_FORM = re.compile(r"\s*(log|uniform|int|choice)\((.*)\)\s*", re.DOTALL)
_EXAMPLES = "log(1e-4, 1e-2), uniform(0, 0.4), int(2, 8) or choice(kl, dist)"


@dataclass(frozen=True)
class Dimension:
    """The values of one setting that a search may try."""

    kind: Kind
    options: Sequence[Any]
    """The lowest and the highest value; of `choice` every value."""

    def __str__(self) -> str:
        """Return it as text, as `parse_dimension` reads it."""
        return f"{self.kind}({', '.join(map(limits.toml_value, self.options))})"

    def holds(self, value: object) -> bool:
        """Return whether a value lies within."""
        if self.kind == "choice":
            return value in self.options
        low, high = self.options
        return isinstance(value, int | float) and low <= value <= high


def parse_dimension(text: str) -> Dimension:
    """Parse a dimension; a `ValueError` says what is wrong with it."""
    form = _FORM.fullmatch(text)
    if form is None:
        raise ValueError(f"is {text!r}; write {_EXAMPLES}")
    kind: Kind = form[1]  # type: ignore[assignment]  # the pattern has no other
    options = _options(form[2])
    if kind == "choice":
        if len(options) < 2 or any(one in options[:place] for place, one in enumerate(options)):
            raise ValueError(f"is {text!r}; a choice needs two different values or more")
        return Dimension(kind, options)
    wanted = int if kind == "int" else (int, float)
    if len(options) != 2 or not all(isinstance(one, wanted) and not isinstance(one, bool) for one in options):
        raise ValueError(f"is {text!r}; {kind} has two {'whole ' * (kind == 'int')}numbers, the lowest and the highest")
    low, high = options
    if low >= high:
        raise ValueError(f"is {text!r}; the lowest value has to be below the highest")
    if kind == "log" and low <= 0:
        raise ValueError(f"is {text!r}; a logarithm needs values above 0")
    return Dimension(kind, options if kind == "int" else [float(low), float(high)])


def _options(text: str) -> list[Any]:
    """Read values that are separated by commas: as TOML, where a bare word is a text."""
    try:
        read: list[Any] = limits.parse_toml(f"value = [{text}]")["value"]
    except ValueError:
        return [_value(one.strip()) for one in text.split(",")]
    return read


def _value(text: str) -> Any:
    try:
        return limits.parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text
