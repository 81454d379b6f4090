import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from trainer.config import ViewSettings
from trainer.data.views.parameters import OPERATIONS, draw_views
from trainer.models.served_student.preprocessing import Square, to_square


def _smooth(count, size):
    small = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(0)) * 255
    return torch.nn.functional.interpolate(small, size=(size, size), mode="bicubic").clamp(0, 255).byte()


def _noise(count, size):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def _digits(count, size):
    square = Square(fit="crop", size=size, max_pixels=64)
    pictures = [
        to_square(Image.fromarray((digit * 15).astype(np.uint8)).convert("RGB"), square)
        for digit in load_digits().images[:count]
    ]
    return torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2).contiguous()


@pytest.fixture
def images():
    """Makes `count` images of `size` x `size` pixels: smooth ones like photos, noise, or real digits; uint8 [count, 3, size, size]."""
    kinds = {"smooth": _smooth, "noise": _noise, "digits": _digits}
    return lambda count, size, kind="smooth": kinds[kind](count, size)


@pytest.fixture
def draw():
    """Draws `count` views of other samples, view 0 of each."""

    def draw(count, settings, *, stored=32, seed=0):
        numbers = np.zeros(count, dtype=np.int64)
        return draw_views(np.arange(count, dtype=np.uint64), numbers, stored=stored, seed=seed, settings=settings)

    return draw


@pytest.fixture
def operation(draw):
    """Parameters with which each of `count` views has the one operation, every other view in the negative direction."""

    def parameters(name, count):
        return draw(count, ViewSettings())._replace(
            operations=torch.full((count, 1), OPERATIONS.index(name)), negative=torch.arange(count).view(-1, 1) % 2 == 1
        )

    return parameters
