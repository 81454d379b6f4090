"""The image that every component runs on, and the server's: their names and version stand here and nowhere else."""

from __future__ import annotations

from trainer import __version__

NAME = "vit-distillation"
IMAGE = f"{NAME}:{__version__}"
SERVING_IMAGE = f"{NAME}-serving:{__version__}"
"""The image of the server, which has neither torch nor what trains."""
IMAGE_VARIABLE = "TRAINER_IMAGE"
"""Environment variable of a task: the image that it runs on, and its jobs too."""


def tagged(tag: str) -> str:
    """The image under another tag, such as one that stands for the code of this working tree."""
    return f"{NAME}:{tag}"


def neuron(image: str) -> str:
    """The image for Neuron devices that is built beside an image: same registry and tag, `-neuron` after the name."""
    folder, slash, name = image.rpartition("/")
    base, colon, tag = name.partition(":")
    return f"{folder}{slash}{base}-neuron{colon}{tag}"
