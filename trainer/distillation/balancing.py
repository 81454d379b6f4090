"""PHI-S: pooled features rotated and scaled so that every number of them varies alike, whatever the teacher.

Ranzinger et al. 2024, "PHI-S: Distribution Balancing for Label-Free Multi-Teacher Distillation": the features are turned into their
principal axes and from there by a Hadamard matrix, all of whose entries have the same size, so that each number gets an equal part of
every axis' variance; one factor then makes that variance 1. Nothing is stretched against anything else, unlike by standardisation of each
number, and the errors of a student are equally dear in all directions.

Shapes: N images, D features.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.errors import ModelError

Floats = npt.NDArray[np.float64]

IMAGES = 4096
"""Training images from which the variances are measured, at most."""


class Balance:
    """The transform of one teacher's features."""

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
    doublings: Floats = np.ones((1, 1))
    rest = size
    while True:
        small = np.ones((1, 1)) if rest == 1 else _paley(rest)
        if small is not None:
            return np.kron(doublings, small).astype(np.float64)
        if rest % 2:
            raise ModelError(
                f"a teacher has features of length {size}, for which no Hadamard matrix is built here, so they cannot be balanced with "
                "those of another; set distill.feature_weight=0, or leave the teacher out of distill.further_teachers"
            )
        doublings, rest = np.kron(doublings, [[1, 1], [1, -1]]).astype(np.float64), rest // 2


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
