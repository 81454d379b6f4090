"""Recorded outputs before anything was recorded: files of the right size and shape that hold zeros, to measure how fast they are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from trainer.distillation import shards
from trainer.distillation.recording import Description, Recording


def blank_recording(directory: Path, description: Description) -> Recording:
    """One view of each sample, in files that take no room on the disk.

    Args:
        directory: where to make them.
        description: of what the stage reinforce would record.
    """
    one = dataclasses.replace(description, views=1)
    (directory / shards.FOLDER).mkdir(parents=True)
    for unit in shards.units(one.views, samples=one.samples, size=one.block):
        with (directory / unit.name).open("wb") as file:
            file.truncate(shards.HEADER_BYTES + unit.count * one.record.itemsize)
    return Recording(directory, one, fingerprint="")
