"""Make a model ready for training on its device: faster kernels, or torch.compile; and DistributedDataParallel, or FSDP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.config import TrainingSettings
from trainer.devices.process_group import Processes
from trainer.devices.torch_private import DdpTimings, compiler_backend, ddp_timings, keep_activations
from trainer.profiling.evidence import CommunicationRecord
from trainer.training.cpu_kernels import use_fast_kernels
from trainer.training.gpu_kernels import use_gpu_kernels
from trainer.training.sharding import is_fsdp, repeated_blocks, shard

logger = logging.getLogger(__name__)

WARM_STEPS = 3
"""Steps in which graphs are compiled without a warning."""

_TIMED_FIRST, _TIMED_EVERY = 10, 100
"""Backward passes that torch times: the first 10, then every 100th."""


class CompileCounter:
    """A backend of torch.compile that counts the graphs that another one compiles for training; a validation may need its own."""

    def __init__(self, backend: str = "inductor", options: Mapping[str, Any] | None = None) -> None:
        self.count = 0
        self._compile = compiler_backend(backend, options)
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
    """Make a model, on its device, ready to be trained; its weights stay its own, or become shares of them on the device.

    One process compiles the whole model. Several compile its repeated blocks, so that gradients are exchanged while the backward pass goes
    on, block by block.

    Returns:
        What the training calls, and the counter of its graphs where it is compiled.
    """
    use_gpu_kernels(model, processes.device, settings.precision)
    graphs = None
    if processes.device.compiles_with(settings.compile):
        graphs = CompileCounter(options=compiler_options(settings, processes))
    if graphs is None:
        kernels = use_fast_kernels(model, processes.device, settings.precision)
        if kernels is not None and processes.is_first:
            logger.info("processor %s  %s", torch.cpu.get_capabilities().get("cpu_name", "not named"), kernels)
    else:
        # What an earlier training of this process compiled would count against the graphs that torch allows this one.
        torch.compiler.reset()
        keep_activations(settings.activation_memory_budget)
        if processes.world_size == 1:
            whole: Any = torch.compile(model, backend=graphs, dynamic=False)
            return whole, graphs
        compile_blocks(model, graphs)
    if is_fsdp(settings, processes):
        shard(model, settings, processes)
        return model, graphs
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


def compiler_options(settings: TrainingSettings, processes: Processes) -> dict[str, Any]:
    """Return Inductor's options for `compile=max`; none otherwise.

    Kernels of matrix products are then timed against one another, with what follows a product in its kernel. A GPU replays each pass as a
    CUDA graph where all steps are alike: a single process, whose micro-batch has one shape and whose gradients do not outlive the step.
    """
    if settings.compile != "max":
        return {}
    alike = processes.world_size == 1 and settings.accumulation == 1 and not settings.low_resolution.image_size
    return {"max_autotune_gemm": True, "triton.cudagraphs": processes.device.kind == "cuda" and alike}


def compile_blocks(model: nn.Module, graphs: CompileCounter) -> None:
    """Compile the repeated blocks of a model, in place; all of it in one where nothing repeats."""
    blocks = list(repeated_blocks(model)) or [model]
    for block in blocks:
        # Blocks share graphs where they are alike; with stochastic depth each rate needs its own, and torch would give up after 8. Shapes
        # are static: a training has two at most, and so has a validation.
        block.compile(backend=graphs, dynamic=False, recompile_limit=max(8, 4 * len(blocks)))
