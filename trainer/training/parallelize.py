"""Make a model ready for training on its device: faster kernels, or torch.compile; and DistributedDataParallel.

The faster kernels compute the same mathematics where torch's own choice is slow. None is chosen by timing: the rules look at the device,
the processor, the precision and the shapes, so that the same training gives the same bits again.
Weights keep their names, so state dicts, copies and averages of a model fit one that was left alone.

Shapes: M rows, K features in, N features out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.config import Precision, TrainingSettings
from trainer.devices import Device
from trainer.devices.process_group import Processes
from trainer.devices.torch_private import DdpTimings, compiler_backend, ddp_timings
from trainer.models.served_student.torch_network import Preprocessing
from trainer.profiling.evidence import CommunicationRecord

logger = logging.getLogger(__name__)

LEAST_ROWS, LEAST_WIDTH = 256, 96
"""Of M, and of K and N: a smaller matrix product is no faster as a convolution."""

WARM_STEPS = 3
"""Steps in which graphs are compiled without a warning."""

_TIMED_FIRST, _TIMED_EVERY = 10, 100
"""Backward passes that torch times: the first 10, then every 100th."""


class ConvolvedLinear(nn.Linear):
    """A linear layer that computes a float32 product of many rows as a 1x1 convolution, which torch gives to oneDNN.

    Torch gives float32 matrix products to MKL; which of the two is faster depends on the processor (`choose_cpu_kernels`). The rows are the
    pixels of one image in channels-last order, so nothing is copied.
    """

    def __init__(self, linear: nn.Linear) -> None:
        """With the weights of `linear`, which are shared."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as nn.Linear names it
        """[..., K] to [..., N]."""
        rows = input.numel() // self.in_features
        if rows < LEAST_ROWS or input.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return F.linear(input, self.weight, self.bias)
        image = input.reshape(1, rows, 1, self.in_features).permute(0, 3, 1, 2)
        # With one thread torch keeps a 1x1 convolution from oneDNN unless it is dilated, which means nothing for a single tap.
        output = F.conv2d(image, self.weight[:, :, None, None], self.bias, dilation=2)
        return output.permute(0, 2, 3, 1).reshape(*input.shape[:-1], self.out_features)


def is_convolutional(model: nn.Module) -> bool:
    """Return whether a model has several convolutions; a transformer has one, of its patches."""
    return sum(isinstance(module, nn.Conv2d) for module in model.modules()) > 1


class CpuKernels(NamedTuple):
    """Which of our kernels take the place of torch's on a CPU."""

    convolved_linear: bool
    """Linear layers are `ConvolvedLinear`, but for narrow ones."""
    explicit_attention: bool
    """Attention is two matrix products and a softmax, not torch's fused one, which was made to save memory."""

    def __str__(self) -> str:
        """Name them for a log."""
        linear = "1x1 convolutions (oneDNN)" if self.convolved_linear else "torch's products"
        return f"linear layers by {linear}, attention {'by products and a softmax' if self.explicit_attention else 'fused by torch'}"


def choose_cpu_kernels(processor: Mapping[str, object], *, bf16: bool) -> CpuKernels:
    """Choose by maker and instruction sets: ours where they were measured to be faster, torch's everywhere else.

    The measurements are in docs/performance.md. Neither maker nor instruction set decides alone: on AMD's processors with AVX-512 oneDNN's
    convolution is 1.5 to 2.1 times as fast as MKL's product, on those with AVX2 alone half as fast. With AMX, which also says that it has
    `avx512_bf16`, nothing was measured.

    Args:
        processor: as `torch.cpu.get_capabilities` describes it.
        bf16: whether the model computes in bf16.
    """
    amd = str(processor.get("cpu_name", "")).startswith("AMD")
    return CpuKernels(
        convolved_linear=amd and not bf16 and bool(processor.get("avx512_f")) and torch.backends.mkldnn.is_available(),
        explicit_attention=amd and bf16 and bool(processor.get("avx512_bf16")),
    )


def use_fast_kernels(model: nn.Module, device: Device, precision: Precision) -> CpuKernels | None:
    """Let a model's layers use the fastest kernels of a CPU, in place, and return which; a model on another device is left alone.

    Images come to a convolutional network with the channels last, and so does what is made of them, which is what oneDNN's kernels compute
    with, whatever the processor.
    """
    # Torch 2.9, the last beside which there is a torch_xla, does not say what a processor can do.
    if device.kind != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return None
    if is_convolutional(model):
        for preprocessing in (module for module in model.modules() if isinstance(module, Preprocessing)):
            preprocessing.memory_format = torch.channels_last
    chosen = choose_cpu_kernels(torch.cpu.get_capabilities(), bf16=device.uses_bf16(precision))
    for parent in list(model.modules()):
        if chosen.explicit_attention and isinstance(parent, Attention):
            parent.fused_attn = False  # type: ignore[misc]  # final for TorchScript, which is not used
        for name, child in parent.named_children() if chosen.convolved_linear else ():
            if type(child) is nn.Linear and min(child.in_features, child.out_features) >= LEAST_WIDTH:
                setattr(parent, name, ConvolvedLinear(child))
    return chosen


class CompileCounter:
    """A backend of torch.compile that counts the graphs that another one compiles for training; a validation may need its own."""

    def __init__(self, backend: str = "inductor") -> None:
        self.count = 0
        self._compile = compiler_backend(backend)
        self._seen = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += torch.is_grad_enabled()
        compiled: Callable[..., Any] = self._compile(graph, inputs)
        return compiled

    def check(self, name: str, steps: int, *, planned: bool = False) -> None:
        """Warn if, `steps` steps after the start of the training `name`, nothing was compiled or, not as `planned`, something again."""
        if steps == WARM_STEPS and not self.count:
            logger.warning("%s  nothing of the model was compiled, so it trains uncompiled; set compile=off", name)
        if steps > WARM_STEPS and self.count > self._seen and not planned:
            text = f"compiled again after {steps} steps ({self.count} graphs by now), which costs time"
            logger.warning("%s  %s", name, text)
        self._seen = self.count


class DdpTimer:
    """Adds up how long gradients travel, as DistributedDataParallel times it in the first ten backward passes and every hundredth."""

    def __init__(self, model: DistributedDataParallel) -> None:
        """Of this model; its first passes are left out, for it is still finding its buckets, and graphs are compiled."""
        self._model = model
        self._calls, self._last = 0, WARM_STEPS
        self._timings: list[DdpTimings] = []

    def read(self) -> None:
        """After each step: read what is new, which is there a step later."""
        self._calls += 1
        if self._calls <= _TIMED_FIRST + 2 or self._calls % _TIMED_EVERY == 1:
            timings = ddp_timings(self._model)
            if timings is not None and timings.iteration > self._last:
                self._last = timings.iteration
                self._timings.append(timings)

    def record(self) -> CommunicationRecord | None:
        """Return the means over the passes that were read; None before the first one was."""
        if not self._timings:
            return None
        count = len(self._timings)
        _, backward, exchange, hidden = (1e-9 * sum(column) / count for column in zip(*self._timings, strict=True))
        hidden = min(hidden, exchange)
        return CommunicationRecord(steps=count, backward_s=backward, exchange_s=exchange, hidden_s=hidden)


def parallelize_model(
    model: nn.Module, settings: TrainingSettings, processes: Processes
) -> tuple[nn.Module, CompileCounter | None]:
    """Make a model, on its device, ready to be trained; its weights stay its own.

    One process compiles the whole model. Several compile its repeated blocks, so that gradients are exchanged while the backward pass goes
    on, block by block.

    Returns:
        What the training calls, and the counter of its graphs where it is compiled.
    """
    graphs = CompileCounter() if processes.device.compiles_with(settings.compile) else None
    if graphs is None:
        kernels = use_fast_kernels(model, processes.device, settings.precision)
        if kernels is not None and processes.is_first:
            logger.info("processor %s  %s", torch.cpu.get_capabilities().get("cpu_name", "not named"), kernels)
    else:
        # What an earlier training of this process compiled would count against the graphs that torch allows this one.
        torch.compiler.reset()
        if processes.world_size == 1:
            whole: Any = torch.compile(model, backend=graphs, dynamic=False)
            return whole, graphs
        compile_blocks(model, graphs)
    if processes.world_size == 1 or processes.device.share_weights(model):
        return model, graphs
    shared = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        # Torch learns a static graph from the first backward pass, and fails an assertion of its own if that is not synchronized.
        static_graph=settings.accumulation == 1,
    )
    if settings.gradient_compression == "bf16":
        shared.register_comm_hook(None, bf16_compress_hook)
    return shared, graphs


def compile_blocks(model: nn.Module, graphs: CompileCounter) -> None:
    """Compile the repeated blocks of a model, in place; all of it in one where nothing repeats."""
    blocks = list(repeated_blocks(model)) or [model]
    for block in blocks:
        # Blocks share graphs where they are alike; with stochastic depth each rate needs its own, and torch would give up after 8. Shapes
        # are static: a training has two at most, and so has a validation.
        block.compile(backend=graphs, dynamic=False, recompile_limit=max(8, 4 * len(blocks)))


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks that a network is a sequence of: the elements of its outermost lists of modules of one kind."""
    for child in model.children():
        kinds = {type(element) for element in child.children()}
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child) > 1 and len(kinds) == 1:
            yield from child
        else:
            yield from repeated_blocks(child)
