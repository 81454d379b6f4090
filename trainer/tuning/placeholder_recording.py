"""Recorded outputs before anything was recorded: of the right shape, to measure how fast a student learns from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from trainer.distillation import shards
from trainer.distillation.recording import Recording, RecordingDescription


def placeholder_recording(directory: Path, description: RecordingDescription) -> Recording:
    """One view of each sample, all of the same outputs: a teacher that finds its first classes equally likely.

    All shards are one file under many names, so they take the room of one.

    Args:
        directory: where to make them.
        description: of what the stage reinforce would record.
    """
    one = dataclasses.replace(description, views=1)
    records = np.zeros(one.block, dtype=one.record)
    records["indices"] = np.arange(one.top_k)
    (directory / shards.FOLDER).mkdir(parents=True)
    first, *others = [directory / unit.name for unit in shards.units(one.views, samples=one.samples, size=one.block)]
    first.write_bytes(bytes(shards.HEADER_BYTES) + records.tobytes())
    for name in others:
        name.hardlink_to(first)
    return Recording(directory, one, fingerprint="")
