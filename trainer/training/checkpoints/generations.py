"""The tries of a training, numbered: a later one fences off those before it.

A try claims its number by making an object that must not be there yet. Whoever was thought dead and comes back, from a network cut or from
being stopped, finds a higher number and ends; what it has written meanwhile stands beside what the later one writes, for the number is
part of each checkpoint's name, and the later one counts.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from trainer import storage
from trainer.errors import ObjectNotFoundError, StorageError

_NAME = re.compile(r"(?:generation-|\.?step-\d+-g)(\d+)$")
_MOST_ATTEMPTS = 100
"""Others that may be faster in claiming a number."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The number of a try, and the proof that it is this one's."""

    uri: str
    """Of the training's checkpoints."""
    number: int
    token: bytes

    def is_newest(self) -> bool:
        """Whether no later try has begun, and no one has taken the claim away.

        Raises:
            StorageError: the store does not answer or refuses.
        """
        if newest(self.uri) != self.number:
            return False
        try:
            return storage.read_bytes(_marker(self.uri, self.number)) == self.token
        except ObjectNotFoundError:
            return False


def newest(uri: str) -> int:
    """The highest number at a training's checkpoints; 0 where there is none.

    Raises:
        StorageError: the store does not answer or refuses.
    """
    matches = (_NAME.match(name) for name in storage.children(uri))
    return max((int(match[1]) for match in matches if match), default=0)


def claim(uri: str) -> Generation:
    """Begin a new try of the training with these checkpoints.

    Raises:
        OutputError: the folder can not be written.
        StorageError: the store does not answer or refuses.
    """
    for _ in range(_MOST_ATTEMPTS):
        generation = Generation(uri=uri, number=newest(uri) + 1, token=uuid.uuid4().hex.encode())
        if storage.create_bytes(_marker(uri, generation.number), generation.token):
            return generation
    raise StorageError(
        f"{uri}: {_MOST_ATTEMPTS} other tries of this training began at the same time; end all but one of them"
    )


def _marker(uri: str, number: int) -> str:
    return storage.join(uri, f"generation-{number:03d}")
