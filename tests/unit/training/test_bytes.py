"""Bytes that a training step moves through memory, as Inductor's scheduler counts them (`tests.inductor`)."""

import pytest
import torch
import torch.nn.functional as F

from tests.inductor import Counts
from trainer.config import ModelSettings
from trainer.models import networks
from trainer.training.gpu_kernels import keep_stream_in_bf16

IMAGES = (2, 6)


def compiled_bytes(architecture, depth, images, *, prepare):
    """Bytes of a student's step in bf16, forward and backward; `prepare` may change it before it is compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = networks.create(
        ModelSettings(architecture=architecture, args={"depth": depth}), [str(n) for n in range(100)]
    )
    prepare(model.train())
    counts = Counts()
    compiled = torch.compile(model, backend=counts.backend, dynamic=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = compiled(torch.randint(0, 256, (images, 3, 224, 224), dtype=torch.uint8))
    F.cross_entropy(logits.float(), torch.zeros(images, dtype=torch.int64)).backward()
    torch._dynamo.reset()
    return counts.bytes


def megabytes(architecture, *, prepare):
    """Bytes an image of twelve blocks, without those of the weights: from few blocks and images, which are compiled sooner."""
    one, three = (
        (most - least) / (IMAGES[1] - IMAGES[0])
        for least, most in (
            [compiled_bytes(architecture, depth, images, prepare=prepare) for images in IMAGES] for depth in (1, 3)
        )
    )
    return (one + 11 * (three - one) / 2) / 1e6


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "most"), [("vit_tiny_patch16_224", 115), ("vit_small_patch16_224", 230)])
def test_the_stream_in_bf16_moves_a_seventh_fewer_bytes(architecture, most):
    """A ViT-Ti moves 136 MB an image without the cast, a ViT-S 271."""
    moved = megabytes(architecture, prepare=keep_stream_in_bf16)
    assert moved <= most
    assert moved < 0.87 * megabytes(architecture, prepare=lambda _: None)
