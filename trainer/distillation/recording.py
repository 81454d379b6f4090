"""Recorded teacher outputs: for each view of each training image the largest logits and the sum of the rest, in records of fixed size.

Shapes: N samples, B samples in a batch, K logits a record, C classes, D features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer import artifacts
from trainer.data.batch import Recorded
from trainer.distillation.outputs import TeacherOutputs
from trainer.errors import ArtifactError

DESCRIPTION = "recording.json"


@dataclass(frozen=True, kw_only=True)
class Description:
    """What `recording.json` says: what the outputs depend on, and how a record looks."""

    samples: int
    views: int
    classes: int
    top_k: int
    """Logits a record; at most `classes`."""
    features: int
    """Length of the pooled features; 0 where they were not asked for."""
    seed: int
    """Seed of the views."""
    view_size: int
    """Edge of the views, in pixels."""
    augmentation: Mapping[str, Any]
    """The settings of the views."""
    decoder: str
    """What decodes the stored images."""

    @property
    def record(self) -> np.dtype[np.void]:
        """Layout of a record."""
        index = "<u2" if self.classes <= 2**16 else "<u4"
        return np.dtype(
            [
                ("indices", index, (self.top_k,)),
                ("logits", "<f2", (self.top_k,)),
                ("rest", "<f4", (2,)),
                ("features", "<f2", (self.features,)),
            ]
        )


def summarize(outputs: TeacherOutputs, description: Description) -> npt.NDArray[np.void]:
    """The records of a batch, [B]."""
    values, indices = outputs.logits.topk(description.top_k, dim=1)
    others = outputs.logits.scatter(1, indices, -torch.inf)
    rest = torch.stack([others.logsumexp(1), (others / 2).logsumexp(1)], 1)
    records = np.zeros(len(values), dtype=description.record)
    parts: dict[str, Tensor | None] = {"indices": indices, "logits": values, "rest": rest, "features": outputs.features}
    for name, part in parts.items():
        if part is not None:
            records[name] = part.cpu().numpy()
    return records


class Recording:
    """Recorded outputs, read by sample and view."""

    def __init__(self, path: Path, description: Description, fingerprint: str) -> None:
        self.description, self.fingerprint = description, fingerprint
        self._path = path
        self._views: dict[int, np.memmap[Any, np.dtype[np.void]]] = {}

    def read(self, indices: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> Recorded:
        """The outputs for these samples (indices into the training set) and views, [B] each."""
        records = np.empty(len(indices), dtype=self.description.record)
        for number in np.unique(numbers):
            chosen = numbers == number
            records[chosen] = self._view(int(number))[indices[chosen]]
        features = records["features"].astype(np.float32) if self.description.features else None
        return Recorded(
            indices=torch.from_numpy(records["indices"].astype(np.int64)),
            logits=torch.from_numpy(records["logits"].astype(np.float32)),
            rest=torch.from_numpy(records["rest"].copy()),
            features=None if features is None else torch.from_numpy(features),
        )

    def _view(self, number: int) -> np.memmap[Any, np.dtype[np.void]]:
        if number not in self._views:
            self._views[number] = np.memmap(self._path / shard_name(number), dtype=self.description.record, mode="r")
        return self._views[number]


def shard_name(number: int) -> str:
    """File of a view's records."""
    return f"view-{number:05d}.bin"


def write_description(directory: Path, description: Description) -> None:
    """Write `recording.json` into an artifact in the making."""
    (directory / DESCRIPTION).write_text(json.dumps(asdict(description), indent=2) + "\n")


def open_recording(uri: str | Path) -> Recording:
    """Open and check recorded outputs.

    Raises:
        ArtifactError: they are missing, damaged, of another kind or of another schema version.
    """
    artifact = artifacts.read(uri, "teacher_outputs")
    try:
        description = Description(**json.loads((artifact.path / DESCRIPTION).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(
            f"teacher_outputs {uri}: {DESCRIPTION} does not describe recorded outputs ({error}); record them again"
        ) from error
    return Recording(artifact.path, description, artifact.fingerprint)
