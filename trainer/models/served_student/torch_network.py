"""A student as a network of timm's, in torch: for where there is no ONNX file of it.

Shapes: B images, H x W pixels, S the edge of the network's input, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .onnx_network import Network


class Preprocessing(nn.Module):
    """Turns raw images into a network's input; a module, so that its statistics move to the device with the model that holds it."""

    mean: Tensor
    std: Tensor

    def __init__(self, size: int, mean: Sequence[float], std: Sequence[float], interpolation: str) -> None:
        """Take the arguments from a model's card; `size` is the edge S, mean and std are those of each channel with pixels in [0, 1]."""
        super().__init__()
        self.size = size
        self._interpolation = interpolation
        self.memory_format = torch.preserve_format  # of the network's input, which the layers after it keep to
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1) * 255, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Resize and normalize pixels in 0..255, [B, 3, H, W], to float32 [B, 3, S, S]."""
        pixels = images.float()
        size = (self.size, self.size)
        if images.shape[-2:] != size:
            pixels = F.interpolate(pixels, size=size, mode=self._interpolation, antialias=True, align_corners=False)
        return ((pixels - self.mean) / self.std).to(memory_format=self.memory_format)


def load_network(directory: Path, card: Mapping[str, Any]) -> Network:
    """Load the network of a model directory; `card` is the content of its `config.json`."""
    preprocess = Preprocessing(card["image_size"], card["mean"], card["std"], card["interpolation"])
    network = timm.create_model(card["architecture"], num_classes=len(card["labels"]), **card["args"])
    network.load_state_dict(safetensors.torch.load_file(directory / "model.safetensors"))
    network.eval()

    @torch.inference_mode()
    def logits(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        computed: npt.NDArray[np.float32] = network(preprocess(torch.from_numpy(images).permute(0, 3, 1, 2))).numpy()
        return computed

    return logits
