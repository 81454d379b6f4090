"""The registered student as MLflow loads it: raw images to a probability for each label.

This file travels with the MLflow model and imports nothing of this package, so the model loads wherever torch, timm and MLflow are.
Hence its preprocessing stands here a second time (`models.Classifier`); a test holds both to the same logits.

Shapes: B images, H x W pixels of any size, K labels.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import safetensors.torch
import timm
import torch
import torch.nn.functional as F

_BATCH_SIZE = 128


class ServedStudent:
    """A student with its preprocessing."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.labels: list[str] = config["labels"]
        self._size: int = config["image_size"]
        self._mean = torch.tensor(config["mean"]).view(1, 3, 1, 1) * 255
        self._std = torch.tensor(config["std"]).view(1, 3, 1, 1) * 255
        self._network = timm.create_model(config["architecture"], num_classes=len(self.labels), **config["args"])
        self._network.load_state_dict(safetensors.torch.load_file(directory / "model.safetensors"))
        self._network.eval()

    def predict(self, images: npt.NDArray[np.uint8]) -> pd.DataFrame:
        """Classify raw images.

        Args:
            images: uint8 [B, H, W, 3], RGB.

        Returns:
            The probability of each label: B rows, K columns named by the labels.
        """
        with torch.inference_mode():
            batches = [
                torch.softmax(self._network(self._preprocess(images[start : start + _BATCH_SIZE])), dim=1)
                for start in range(0, len(images), _BATCH_SIZE)
            ]
        return pd.DataFrame(torch.cat(batches).double().numpy(), columns=self.labels)

    def _preprocess(self, images: npt.NDArray[np.uint8]) -> torch.Tensor:
        pixels = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float()
        if pixels.shape[-2:] != (self._size, self._size):
            size = (self._size, self._size)
            pixels = F.interpolate(pixels, size=size, mode="bilinear", antialias=True, align_corners=False)
        return (pixels - self._mean) / self._std


def _load_pyfunc(path: str) -> ServedStudent:
    """MLflow's entry point: `path` is the copied model directory."""
    return ServedStudent(Path(path))
