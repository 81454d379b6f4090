"""Checkpoints: what an interrupted training needs to go on.

A checkpoint is an artifact `step-<n>`: the trained weights, the optimiser's state, the average of the weights, and the number of
steps done, which is all that the order of samples, the views and the schedule depend on. It is kept below a folder that is named by the
settings and the fingerprints of the inputs, so a training with other settings or inputs never finds it.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer import artifacts, storage
from trainer.config import CHECKPOINTS_VARIABLE
from trainer.errors import ArtifactError

logger = logging.getLogger(__name__)

KEPT = 2
"""Newest checkpoints that are kept."""
STATE = "state.pt"


def checkpoint_root(output: str | Path) -> str:
    """Where the checkpoints of a training stand, a URI: `TRAINER_CHECKPOINTS`, or else beside its output."""
    return os.environ.get(CHECKPOINTS_VARIABLE) or storage.join(storage.parent(output), "checkpoints")


@dataclass(frozen=True, kw_only=True)
class State:
    """What a checkpoint holds."""

    step: int
    """Optimiser steps done."""
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    average: Mapping[str, Any] | None


class Checkpoints:
    """The checkpoints of one training."""

    def __init__(self, root: str | Path, name: str, *, settings: Mapping[str, Any], parents: Mapping[str, str]) -> None:
        """Below `root`, for the training `name` with these settings and inputs (name -> fingerprint)."""
        self._settings, self._parents = settings, parents
        key = artifacts.digest({"settings": settings, "parents": parents})[:16]
        self.uri = storage.join(root, f"{name}-{key}")

    def save(self, state: State) -> None:
        """Write a checkpoint, then drop all but the newest ones."""
        uri = self._uri(state.step)
        with artifacts.create(uri, "checkpoint", settings=self._settings, parents=self._parents) as draft:
            content = io.BytesIO()  # torch.save into a file hides the reason when the disk is full
            torch.save(vars(state), content)
            (draft.path / STATE).write_bytes(content.getbuffer())
        for step in self._steps()[KEPT:]:
            artifacts.remove(self._uri(step))

    def latest(self) -> State | None:
        """The newest valid checkpoint; a damaged one is named in the log and passed over."""
        for step in self._steps():
            try:
                path = artifacts.read(self._uri(step), "checkpoint").path
            except ArtifactError as error:
                logger.warning("passing over a checkpoint: %s", error)
                continue
            content = torch.load(path / STATE, map_location="cpu", weights_only=True)
            return State(**content)
        return None

    def remove(self) -> None:
        """Drop all checkpoints: the training has ended and its result is kept."""
        storage.remove(self.uri)

    def _uri(self, step: int) -> str:
        return storage.join(self.uri, f"step-{step:08d}")

    def _steps(self) -> list[int]:
        """Steps of all checkpoints, newest first."""
        steps = (name.removeprefix("step-") for name in storage.children(self.uri))
        return sorted((int(step) for step in steps if step.isdecimal()), reverse=True)
