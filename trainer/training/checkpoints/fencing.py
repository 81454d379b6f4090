"""The attempts at a training, numbered: a later one fences off those before it.

An attempt claims its number by making an object that must not be there yet. An attempt that was thought dead and comes back, from a
network cut or from being stopped, finds a higher number and ends; what it has written meanwhile stands beside what the later one writes,
for the number is part of each checkpoint's name, and the later one counts.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from trainer import storage
from trainer.errors import ObjectNotFoundError, StorageError

_NAME = re.compile(r"(?:generation-|\.?step-\d+-g)(\d+)$")
_CLAIM = "generation-"
_MOST_ATTEMPTS = 100
"""Others that may be faster in claiming a number."""


@dataclass(frozen=True, kw_only=True)
class AttemptClaim:
    """The number of an attempt, and the proof that it is this one's."""

    uri: str
    """Of the training's checkpoints."""
    number: int
    token: bytes

    def standing(self) -> Literal["newest", "superseded", "gone"]:
        """Ask the store for the state of this attempt: no later one has begun, or one has, or there is no claim at all.

        The claims may be gone because a later attempt has ended and removed them, or because the store has lost its objects; the training's
        output shows which.

        Raises:
            StorageError: the store does not answer or refuses.
        """
        names = storage.children(self.uri)
        if _highest(names) > self.number:
            return "superseded"
        try:
            claimed = storage.read_bytes(_marker(self.uri, self.number))
        except ObjectNotFoundError:
            # What is lost is lost with what is older, so a claim that is there was made after the loss.
            return "superseded" if any(name.startswith(_CLAIM) for name in names) else "gone"
        return "newest" if claimed == self.token else "superseded"

    def stake(self) -> bool:
        """Make the claim where its number is free, and return whether it stands.

        Raises:
            StorageError: the store does not answer or refuses.
        """
        return storage.create_bytes(_marker(self.uri, self.number), self.token)


def newest(uri: str) -> int:
    """Return the highest number at a training's checkpoints; 0 where there is none.

    Raises:
        StorageError: the store does not answer or refuses.
    """
    return _highest(storage.children(uri))


def _highest(names: Iterable[str]) -> int:
    matches = map(_NAME.match, names)
    return max((int(match[1]) for match in matches if match), default=0)


def claim(uri: str) -> AttemptClaim:
    """Begin a new attempt at the training with these checkpoints.

    Raises:
        OutputError: the folder cannot be written.
        StorageError: the store does not answer or refuses.
    """
    for _ in range(_MOST_ATTEMPTS):
        generation = AttemptClaim(uri=uri, number=newest(uri) + 1, token=uuid.uuid4().hex.encode())
        if generation.stake():
            return generation
    raise StorageError(
        f"{uri}: {_MOST_ATTEMPTS} other attempts at this training began at the same time; end all but one of them"
    )


def _marker(uri: str, number: int) -> str:
    return storage.join(uri, f"{_CLAIM}{number:03d}")
