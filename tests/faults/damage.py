"""Damage to files that are complete: what a bad disk, a bad copy or a stranger does."""

from __future__ import annotations

import os
import random
from pathlib import Path

from trainer.io import artifacts


def flip_bit(path: Path, chance: random.Random) -> str:
    """Turn one bit round; gives what was done."""
    content = bytearray(path.read_bytes())
    place, bit = chance.randrange(len(content)), chance.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} of {path.name} flipped"


def truncate(path: Path, chance: random.Random) -> str:
    """Cut a file somewhere, perhaps to nothing; gives what was done."""
    size = chance.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} cut to {size} bytes"


def drop(path: Path, _chance: random.Random) -> str:
    """Remove a file; gives what was done."""
    path.unlink()
    return f"{path.name} removed"


WAYS = {"bit flip": flip_bit, "truncation": truncate, "removal": drop}


def files_of(folder: Path, way: str) -> list[Path]:
    """The files of an artifact on this machine that can be damaged so.

    A bit of its manifest is left: the time and the figures in it, which nothing is made from, have no checksum.
    """
    spared = artifacts.MANIFEST if way == "bit flip" else ""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != spared)
