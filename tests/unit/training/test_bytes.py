"""Bytes that a training step moves through memory, as Inductor's scheduler counts them: compiled on this CPU, for kernels of any device.

What is not fused is read and written once for each kernel. Attention and products count with their inputs and outputs.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from trainer.config import ModelSettings
from trainer.models import networks
from trainer.training.gpu_kernels import keep_stream_in_bf16

IMAGES = (2, 6)


def compiled_bytes(architecture, depth, images, *, prepare):
    """Bytes of a student's step in bf16, forward and backward; `prepare` may change it before it is compiled."""
    moved = 0

    def count(graph, inputs, **_):
        nonlocal moved
        with V.set_fake_mode(compile_fx.fake_tensor_prop(graph, inputs)):
            compile_fx._recursive_post_grad_passes(graph, is_inference=False)
            output = next(node for node in graph.graph.nodes if node.op == "output")
            output.meta.setdefault("original_output_strides", [None] * len(output.args[0]))
            lowered = GraphLowering(graph, example_inputs=inputs)
            with V.set_graph_handler(lowered), V.set_debug_handler(DebugContext()):
                lowered.run(*inputs)
                lowered._update_scheduler()
                moved += sum(kernel.get_read_write_buffers_sizes() for kernel in lowered.scheduler.nodes)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = networks.create(
        ModelSettings(architecture=architecture, args={"depth": depth}), [str(n) for n in range(100)]
    )
    prepare(model.train())
    compiled = torch.compile(
        model, backend=functools.partial(compile_fx.compile_fx, inner_compile=count), dynamic=False
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = compiled(torch.randint(0, 256, (images, 3, 224, 224), dtype=torch.uint8))
    F.cross_entropy(logits.float(), torch.zeros(images, dtype=torch.int64)).backward()
    torch._dynamo.reset()
    return moved


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
