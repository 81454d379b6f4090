"""Accelerators of XLA, through torch_xla: Trainium, and the CPU that stands in for one in tests.

Imported only where such a device is asked for. The native Neuron device, torch's own, would be a module beside this one.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch_xla
import torch_xla.distributed.xla_backend  # noqa: F401  # makes the backend "xla" known
from torch import Tensor, nn
from torch_xla import runtime
from torch_xla.core import xla_model
from torch_xla.distributed import parallel_loader
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

from trainer.config import Compile
from trainer.devices.device import Device, Item, RowShardedOptimizer
from trainer.io.errors import SettingsError

_RUNTIME = "PJRT_DEVICE"  # environment variable that names the runtime
_AHEAD = 2  # batches that wait on the host, and on the device
_NEVER = 2**62  # batches after which torch_xla's loader would dispatch by itself


@dataclass(frozen=True, kw_only=True)
class XlaDevice(Device):
    """A core of an accelerator, or the CPU through XLA."""

    @classmethod
    def choose(cls) -> Self:
        """This process's device; the runtime does not begin before `open`, for Neuron's has to know of all processes then."""
        is_accelerator = os.environ.get(_RUNTIME) != "CPU"
        return cls(
            kind="xla",
            torch_device=torch.device("xla", 0),
            backend="xla",
            has_bf16=is_accelerator,  # by autocast; XLA_USE_BF16 and XLA_DOWNCAST_BF16 would change the weights too
            compiles=False,
            is_lazy=True,
        )

    def open(self) -> Self:
        try:
            torch_xla.device()
        except RuntimeError as error:
            raise SettingsError(
                f"run.device is xla, but the runtime {os.environ.get(_RUNTIME) or f'that {_RUNTIME} should name'} finds no device: "
                f"{str(error).splitlines()[0]}; set {_RUNTIME}=NEURON on Trainium, or run.device=auto"
            ) from error
        return self

    def compiles_with(self, setting: Compile) -> bool:
        if setting in ("on", "max"):
            raise SettingsError(f"compile={setting}: XLA compiles whole steps by itself; set compile=auto")
        return False

    def inference(self) -> AbstractContextManager[object]:
        # Torch's inference mode cannot make views of weights that were made outside of it, on this device.
        return torch.no_grad()

    def seed(self, seed: int) -> None:
        super().seed(seed)
        xla_model.set_rng_state(seed, str(self.torch_device))

    def synchronize(self) -> None:
        self.dispatch()
        xla_model.wait_device_ops()

    def dispatch(self) -> None:
        """Hand what was noted to the device as one graph, which is compiled if it was never seen; the host does not wait for the result."""
        torch_xla.sync()
        InFlight.dispatches += 1

    def is_out_of_memory(self, error: RuntimeError) -> bool:
        return "RESOURCE_EXHAUSTED" in str(error)  # no type of error says so

    def send_ahead(self, items: Iterable[Item]) -> Generator[Item]:
        loader = parallel_loader.ParallelLoader(
            _outcomes(items),
            [self.torch_device],
            batches_per_execution=_NEVER,
            loader_prefetch_size=_AHEAD,
            device_prefetch_size=_AHEAD,
        )
        try:
            for item, failure in loader.per_device_loader(self.torch_device):
                if failure.error is not None:
                    raise failure.error
                yield item
        finally:
            loader.close()

    def host_copies(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        copies: list[Tensor] = torch_xla._XLAC._xla_get_cpu_tensors(list(tensors))  # by one transfer
        return copies

    @property
    def place(self) -> tuple[int, int]:
        return runtime.global_ordinal(), runtime.world_size()

    def share_weights(self, model: nn.Module) -> bool:
        xla_model.broadcast_master_param(model)
        self.dispatch()
        return True

    def sum_gradients(self, parameters: Sequence[nn.Parameter], *, world_size: int, bf16: bool) -> None:
        if world_size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sent = [gradient.bfloat16() for gradient in gradients] if bf16 else gradients
        xla_model.all_reduce(xla_model.REDUCE_SUM, sent, scale=1 / world_size)
        if bf16:
            for gradient, mean in zip(gradients, sent, strict=True):
                gradient.copy_(mean)

    def average(self, tensors: Sequence[Tensor], *, world_size: int) -> None:
        xla_model.all_reduce(xla_model.REDUCE_SUM, [*tensors], scale=1 / world_size)

    @property
    def adamw_options(self) -> dict[str, Any]:
        # The number of steps is on the device, or it would be a constant of the graph; XLA fuses what it is given.
        return {"fused": False, "foreach": False, "capturable": True}

    def sharded_adamw(
        self, groups: list[dict[str, Any]], options: Mapping[str, Any], *, clip_norm: float
    ) -> torch.optim.Optimizer:
        return ShardedAdamW(groups, options, clip_norm=clip_norm)

    def make_adamw_state(self, optimizer: torch.optim.Optimizer) -> None:
        # Made in the first step it would make that another graph than those that follow.
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            optimizer.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(weight, memory_format=torch.preserve_format),
            }

    def numbers(self, values: Sequence[float]) -> Sequence[Tensor]:
        # On the device: else 0 and 1 would be constants of the graph, and others decide which operations it is made of.
        return list(torch.tensor(values, dtype=torch.float32).to(self.torch_device))


class ShardedAdamW(ZeroRedundancyOptimizer, RowShardedOptimizer):  # type: ignore[misc]  # torch_xla has no types
    """torch_xla's ZeRO-1 around AdamW; the weights of its rows are the ones that are trained."""

    def __init__(self, groups: list[dict[str, Any]], options: Mapping[str, Any], *, clip_norm: float) -> None:
        ZeroRedundancyOptimizer.__init__(
            self,
            groups,
            torch.optim.AdamW,
            grad_clipping=bool(clip_norm),
            max_norm=clip_norm or None,
            pin_layout=False,
            save_master_weights=True,  # else it warns: it is our checkpoints that keep the weights
            **options,
        )
        self._sync_param_groups(self.base_optimizer.param_groups, self.param_groups)


class InFlight:
    """Tensors that are being computed: read without waiting once the graph after theirs was handed over."""

    dispatches = 0
    """How many graphs this process has handed over; a device executes one after the other."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._due = tensors, self.dispatches + 2

    @property
    def arrived(self) -> bool:
        """Whether they are known to be computed; the same on all processes that hand over equally often."""
        return self.dispatches >= self._due

    def wait(self) -> Sequence[Tensor]:
        copies: list[Tensor] = torch_xla._XLAC._xla_get_cpu_tensors(list(self._tensors))
        return copies


class _ThreadError:
    """An error, or none; torch_xla's threads would drop one that they meet."""

    __slots__ = ("error",)  # what has a dictionary, torch_xla looks through for tensors

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def _outcomes(items: Iterable[Item]) -> Iterator[tuple[Item | None, _ThreadError]]:
    try:
        for item in items:
            yield item, _ThreadError()
    except Exception as error:  # noqa: BLE001  # it is raised where the item is taken
        yield None, _ThreadError(error)
