"""The frozen teacher, as fast as the device allows without changing its outputs.

A headless teacher supplies its embedding and patch tokens, standardized per channel over the training set (UNIC, Sariyildiz et al. 2024,
but measured once beforehand, in its card). Otherwise high-variance channels dominate the loss and the common mean masks differences.

Shapes: B images, D pooled features, C classes, h x w patches; N images of which features are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import Compile, Precision
from trainer.devices import Device, full_float32
from trainer.devices.process_group import Processes
from trainer.io.errors import ModelError
from trainer.models import networks
from trainer.models.networks import Classifier
from trainer.objectives.distillation.losses import TeacherOutputs
from trainer.training.cpu_kernels import is_convolutional, use_fast_kernels
from trainer.training.sharding import repeated_blocks, shard_frozen

CPU_PIXELS = 8 * 224**2
"""Of a forward pass on a CPU; more of them leave its caches, fewer do not fill it. Transformers in bf16 take any number alike.

Convolutional networks are 1.5 (Zen 3 with AVX2) to 2.5 times (Xeon with AMX) as fast in such parts, ViTs in float32 on Zen 3 no slower.
"""
GRAPH_BATCH = 64
"""Up to so many images a forward pass the kernels of a compiled teacher are one CUDA graph: the host is slower than they are."""
BALANCED_IMAGES = 4096  # training images from which the variances of several teachers' features are measured, at most

Floats = npt.NDArray[np.float64]


class FrozenTeacher:
    """Images to the teacher's outputs, without gradients."""

    def __init__(
        self,
        model: Classifier,
        device: Device,
        *,
        precision: Precision,
        batch_size: int = 0,
        features: bool = False,
        tokens: bool = False,
        blocks: Sequence[int] = (),
        compile: Compile = "auto",  # noqa: A002  # as the setting
        sharing: Processes | None = None,
    ) -> None:
        """Freeze `model` and bring it to the device.

        Args:
            model: the teacher; it is changed and must not be used otherwise afterward.
            precision: of its forward pass; with bf16 its weights are bf16 too, but for the head's.
            batch_size: most images a forward pass; 0 is 8 images of 224 pixels on a CPU (but for transformers in bf16), and else the whole
                batch.
            features: and tokens, blocks: whether these are asked for beside logits, of a network that is known to have them
                (`models.feature_size`, `token_shape`, `block_shapes`).
            compile: whether to compile it; auto compiles on GPUs only.
            sharing: processes that each keep a share of its blocks' weights, and call it equally often, a whole batch a forward pass; None:
                this process keeps all.
        """
        self._model = model.eval().requires_grad_(False)
        self._device, self._precision = device, precision
        self._features, self._tokens, self._blocks = features, tokens, blocks
        in_caches = device.kind == "cpu" and (is_convolutional(model) or not device.uses_bf16(precision))
        self._limit = batch_size or (max(1, CPU_PIXELS // model.card.image_size**2) if in_caches else 0)
        if sharing is not None:  # batches of the processes differ by an image, and so might the number of their passes
            self._limit = 0
        self._compiles, self._tunes = device.compiles_with(compile), compile == "max"
        self._compiled: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {}
        if not self._compiles:
            use_fast_kernels(self._model, device, precision)
        self._gives_logits = bool(model.card.labels)
        self._head = networks.head_of_features(self._model) if self._gives_logits else None
        self._embedding, self._token = (
            None
            if known is None
            else [torch.tensor(one, device=device.torch_device) for one in (known.mean, known.std)]
            for known in (model.card.embedding, model.card.tokens)
        )
        self._of_head = set() if self._head is None else {*self._head.modules()}
        if sharing is None:
            self._place(self._model)
        else:
            if self._compiles:
                for block in repeated_blocks(self._model):
                    block.compile(dynamic=False)
                self._compiles = False
            shard_frozen(self._model, "outputs", sharing, self._place)

    def __call__(self, images: Tensor) -> TeacherOutputs:
        """Return the outputs for uint8 images [B, 3, H, W]; of a network without a head there are no logits.

        A batch that is larger than a forward pass is dealt out evenly, the last part filled up: all passes have one shape. The head
        computes in float32, so that rounding does not blur the logits once more.
        """
        parts = math.ceil(len(images) / (self._limit or len(images)))
        size = math.ceil(len(images) / parts)
        with self._device.inference(), self._device.autocast(self._precision):
            forward = self._forward(size)
            # Filled up with black images, and copied, because the next replay of a CUDA graph writes over the outputs of the last one.
            answers = []
            for part in images.split(size):
                filled = part if len(part) == size else F.pad(part, (0, 0, 0, 0, 0, 0, 0, size - len(part)))
                answers.append([answer.to(torch.float32, copy=True) for answer in forward(filled)])
        # Joined out here, because autograd refuses to keep a tensor of the inference mode for its backward pass.
        answer, *further = (torch.cat(pieces)[: len(images)] for pieces in zip(*answers, strict=True))
        logits = pooled = answer
        if not self._gives_logits:
            logits = answer.new_empty(len(answer), 0)
        elif self._head is not None:
            with self._device.autocast("fp32"), full_float32():
                logits = self._head(answer)
        elif self._features:
            pooled = further.pop(0)
        features = _standardized(pooled, self._embedding) if self._features else None
        tokens = _standardized(further.pop(0), self._token) if self._tokens else None
        return TeacherOutputs(logits, features, tokens, tuple(further))

    def _place(self, part: nn.Module) -> None:
        """Bring a part of the network to the device, each layer converted on the way: it never lies there in float32 as well.

        Kept in bf16 is what autocast would convert in every forward pass: the same outputs, bit by bit. Kinds derived from these may
        compute with their weights first, and stay as they are.
        """
        for module in part.modules() if self._device.uses_bf16(self._precision) else ():
            if type(module) in {nn.Linear, nn.Conv2d} and module not in self._of_head:
                module.to(self._device.torch_device, torch.bfloat16)
        part.to(self._device.torch_device)

    def _forward(self, size: int) -> Callable[[Tensor], Sequence[Tensor]]:
        """The network for parts of `size` images: to `_answer`'s tensors."""
        if not self._compiles:
            return self._answer
        mode = "reduce-overhead" if self._device.kind == "cuda" and size <= GRAPH_BATCH else "default"
        if self._tunes:
            mode = "max-autotune-no-cudagraphs" if mode == "default" else "max-autotune"
        if mode not in self._compiled:
            self._compiled[mode] = torch.compile(self._answer, mode=mode, dynamic=False)
        return self._compiled[mode]

    def _answer(self, images: Tensor) -> Sequence[Tensor]:
        """Pooled features [size, D], or where no one head makes the logits of these, logits [size, C] and the features that are asked for;
        then tokens and blocks.
        """
        pooled = self._head is not None or not self._gives_logits
        said = self._model.outputs(
            images, logits=not pooled, features=pooled or self._features, tokens=self._tokens, blocks=self._blocks
        )
        return [part for part in (said.logits, said.features, said.tokens, *said.blocks) if part is not None]


def _standardized(values: Tensor, scale: Sequence[Tensor] | None) -> Tensor:
    """Return (values - mean) / standard deviation of each number of the last dimension, where these are known."""
    return values if scale is None else (values - scale[0]) / scale[1]


# ---------------------------------------------------------------------------------------------------------------------
# Several teachers


class Balance:
    """PHI-S: one teacher's pooled features rotated and scaled so that every number of them varies alike, whatever the teacher.

    Ranzinger et al. 2024, "PHI-S: Distribution Balancing for Label-Free Multi-Teacher Distillation": the features are turned into their
    principal axes and from there by a Hadamard matrix, all of whose entries have the same size, so that each number gets an equal part of
    every axis' variance; one factor then makes that variance 1. Nothing is stretched against anything else, unlike by standardization of
    each number, and the errors of a student are equally dear in all directions.
    """

    def __init__(self, features: npt.NDArray[np.floating], device: torch.device | str = "cpu") -> None:
        """Measure mean and covariance of features [N, D].

        Raises:
            ModelError: they do not vary, or D is a length for which no Hadamard matrix is built here.
        """
        values = features.astype(np.float64)
        mean = values.mean(0)
        variances, axes = np.linalg.eigh(np.cov(values - mean, rowvar=False, bias=True).reshape(len(mean), -1))
        spread = float(np.sqrt(variances.clip(0).mean()))
        if not spread > 0:
            raise ModelError(
                "a teacher's features are the same for all training images; leave it out of distill.further_teachers"
            )
        turned = axes @ hadamard(len(mean)).T / np.sqrt(len(mean))
        self._mean = torch.tensor(mean, dtype=torch.float32, device=device)
        self._matrix = torch.tensor(turned / spread, dtype=torch.float32, device=device)

    def __call__(self, features: Tensor) -> Tensor:
        """Turn and scale features [B, D], in float32."""
        with torch.autocast(features.device.type, enabled=False):
            return (features.float() - self._mean) @ self._matrix


def hadamard(size: int) -> Floats:
    """Build a Hadamard matrix [size, size]: entries 1 and -1, its columns orthogonal.

    By Sylvester's doubling of one of Paley's two constructions (1933), which covers the lengths of common networks (192, 384, 768, 1024,
    1152, 1280, 2048, ...).

    Raises:
        ModelError: for this size they give none.
    """
    doubled, rest = 1, size
    while (small := np.ones((1, 1)) if rest == 1 else _paley(rest)) is None:
        if rest % 2:
            raise ModelError(
                f"a teacher has features of length {size}, for which no Hadamard matrix is built here, so they cannot be balanced with "
                "those of another; set distill.feature_weight=0, or leave the teacher out of distill.further_teachers"
            )
        doubled, rest = 2 * doubled, rest // 2
    return np.kron(scipy.linalg.hadamard(doubled), small).astype(np.float64)


def _paley(size: int) -> Floats | None:
    """Build one of size q + 1 for a prime q = 3 modulo 4, or 2 (q + 1) for a prime q = 1 modulo 4; None for another size."""
    for prime, remainder in ((size - 1, 3), (size // 2 - 1, 1)):
        if prime % 4 != remainder or prime < 3 or any(prime % number == 0 for number in range(2, int(prime**0.5) + 1)):
            continue
        squares = {number * number % prime for number in range(1, prime)}
        residues = np.array([0, *(1 if number in squares else -1 for number in range(1, prime))], dtype=np.float64)
        numbers = np.arange(prime)
        bordered = np.zeros((prime + 1, prime + 1))
        bordered[0, 1:], bordered[1:, 1:] = 1, residues[(numbers[:, None] - numbers) % prime]
        if remainder == 3:
            bordered[1:, 0] = -1
            return bordered + np.eye(prime + 1)
        if size % 2 == 0:
            bordered[1:, 0] = 1
            return np.kron(bordered, [[1, 1], [1, -1]]) + np.kron(np.eye(prime + 1), [[1, -1], [-1, -1]])
    return None
