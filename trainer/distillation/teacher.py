"""The frozen teacher, made as fast as the device allows without changing what it says."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.config import Precision
from trainer.distillation.outputs import TeacherOutputs
from trainer.models import Classifier
from trainer.training.devices import Device


class FrozenTeacher:
    """Images to the teacher's outputs, without gradients."""

    def __init__(
        self, model: Classifier, device: Device, *, precision: Precision, batch_size: int = 0, features: bool = False
    ) -> None:
        """Freeze `model` and bring it to the device.

        Args:
            model: the teacher; it is changed and must not be used otherwise afterwards.
            device: where it runs.
            precision: of its forward pass.
            batch_size: images a forward pass; 0 chooses by the device.
            features: whether to give pooled features too.
        """
        self._model = model.to(device.torch_device).eval().requires_grad_(False)
        self._device, self._precision = device, precision
        self._batch_size, self._features = batch_size, features

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> TeacherOutputs:
        """The outputs for uint8 images [B, 3, H, W]."""
        with self._device.autocast(self._precision):
            parts = [self._model(part).float() for part in images.split(self._batch_size or len(images))]
        return TeacherOutputs(torch.cat(parts))
