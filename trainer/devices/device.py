"""What differs between devices: a CPU and a GPU; `trainer.devices.xla` has that of an accelerator of XLA."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from trainer.config import Compile, Precision
from trainer.devices.torch_private import deterministic_kernels

Kind = Literal["cpu", "cuda", "xla"]

Item = TypeVar("Item")

_MALLOC_VARIABLES = {"GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
"""With which glibc lets a user say when memory goes back to the kernel."""
_SHORTENED = {"tf32", "bf16"}
"""Values of torch's `fp32_precision` with which float32 products are computed of less."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
"""Parameters of `mallopt`, as glibc's malloc.h numbers them: memory free at the end before it goes back; smallest and most allocations of
their own."""
_LARGE = 128 << 10
"""glibc's own value for both sizes, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a process trains."""

    kind: Kind
    torch_device: torch.device
    backend: str
    """torch.distributed's backend for it."""
    has_bf16: bool
    """Whether `precision=auto` is bf16 here."""
    compiles: bool
    """Whether torch.compile pays for itself here."""
    is_lazy: bool = False
    """Whether operations are only noted until `dispatch`: what is noted has to be the same in each step, and reading a tensor breaks it
    up. Shapes, and numbers that become a part of it, must not change."""
    pins_memory: bool = False
    """Whether transfers from page-locked memory overlap with the device's work."""

    def open(self) -> Self:
        """Make sure that it is there, or raise a `SettingsError`; some runtimes need several processes to have met before."""
        return self

    def uses_bf16(self, precision: Precision) -> bool:
        return precision == "bf16" or (precision == "auto" and self.has_bf16)

    def compiles_with(self, setting: Compile) -> bool:
        return setting in ("on", "max") or (setting == "auto" and self.compiles)

    def autocast(self, precision: Precision) -> AbstractContextManager[object]:
        return torch.autocast(self.kind, dtype=torch.bfloat16, enabled=self.uses_bf16(precision))

    def inference(self) -> AbstractContextManager[object]:
        """Around forward passes that no backward pass follows."""
        return torch.inference_mode()

    def seed(self, seed: int) -> None:
        """Seed what draws here; `torch.manual_seed` asks every kind of device there is, in every step a tenth of a millisecond."""
        torch.default_generator.manual_seed(seed)

    def deterministic(self) -> AbstractContextManager[object]:
        """Around what has to give the same bits each time, where that is not so anyway."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait for all that was given to the device."""

    def dispatch(self) -> None:
        """Hand what was noted to the device, where that does not begin by itself."""

    def send_ahead(self, items: Iterable[Item]) -> Generator[Item]:
        """The same items; where the device traces, lists of tensors in them have been sent to it, ahead of the training."""
        yield from items

    def return_freed_memory(self) -> None:
        """Give back what is freed from now on, where it is kept for what is allocated next."""

    @property
    def free_memory(self) -> int:
        """Bytes that are free on a device with a memory of its own; 0 where it has none, or does not say."""
        return 0

    def is_out_of_memory(self, error: RuntimeError) -> bool:
        """Whether the device's memory was too small."""
        return isinstance(error, torch.OutOfMemoryError)

    def filled(self, indices: Sequence[int], size: int) -> Sequence[int]:
        """The same; where the device traces, and another number would be another graph, the last one repeated to make `size`."""
        return [*indices, *[indices[-1]] * (size - len(indices))] if self.is_lazy else indices

    def host_copies(self, tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:  # noqa: ARG002  # XLA's looks at them
        """The tensors on the host, which waits for them; None where they can be copied one by one without disturbing the device."""
        return None

    # Several processes

    @property
    def place(self) -> tuple[int, int] | None:
        """Rank and number of processes, where the device's runtime has its own word on them."""
        return None

    def share_weights(self, model: nn.Module) -> bool:  # noqa: ARG002  # XLA's sends them
        """Give all processes the first one's weights; False where DistributedDataParallel does it, and exchanges gradients too."""
        return False

    def sum_gradients(self, parameters: Sequence[nn.Parameter], *, world_size: int, bf16: bool) -> None:
        """Replace each gradient by its mean over all processes, where DistributedDataParallel has not; `bf16`: sent as that."""

    def average(self, tensors: Sequence[Tensor], *, world_size: int) -> None:
        together = torch.cat([tensor.flatten() for tensor in tensors]) / world_size
        dist.all_reduce(together)
        for tensor, mean in zip(tensors, together.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    # The update

    @property
    def adamw_options(self) -> dict[str, Any]:
        """How AdamW is computed fastest here."""
        return {"fused": True}

    def sharded_adamw(
        self,
        groups: list[dict[str, Any]],
        options: Mapping[str, Any],
        *,
        clip_norm: float,  # noqa: ARG002  # XLA's clips too
    ) -> torch.optim.Optimizer:
        """AdamW with its state dealt to the processes."""
        return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, **options)

    def make_adamw_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the state of AdamW beforehand, where the first step may not differ from the others."""

    def numbers(self, values: Sequence[float]) -> Sequence[float | Tensor]:
        """Numbers that differ from step to step, as an operation takes them here."""
        return values


class Host(Device):
    """The processor. `auto` is fp32 here: for small models bf16 is slower on any processor."""

    def open(self) -> Self:
        keep_freed_memory()
        return self

    def uses_bf16(self, precision: Precision) -> bool:
        return precision == "bf16" and has_bf16_instructions()  # emulated, it takes 10 to 15 times as long as fp32

    def return_freed_memory(self) -> None:
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt") and not _MALLOC_VARIABLES & os.environ.keys():
            library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
            library.mallopt(_M_MMAP_MAX, 2**16)
            library.mallopt(_M_TRIM_THRESHOLD, _LARGE)
            library.malloc_trim(0)


def keep_freed_memory() -> None:
    """Let the C library of Linux keep what is freed for what is allocated next, unless the environment says how it is to do that.

    Each step frees and allocates the same activations. By default those of more than 32 MiB go back to the kernel each time, which has to
    fill the pages of the next one with zeros: at 224 pixels and 32 images a step that is a sixth of a training's time, or more (measured on
    a Xeon; it is the kernel's work, whatever the processor).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and not _MALLOC_VARIABLES & os.environ.keys():
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)  # never


@contextmanager
def full_float32() -> Iterator[None]:
    """Around float32 products that no flag of torch may shorten to TF32 or bf16.

    torch does so for cuDNN's convolutions by default, NVIDIA's images turn it on for matrix products
    (`TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`), and `torch.set_float32_matmul_precision` also for oneDNN's on a processor with AMX. The flags are
    the process's, so another thread's products are not shortened either in the meantime.
    """
    backends: Any = torch.backends
    products = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    shortened = [(one, one.fp32_precision) for one in products if one.fp32_precision in _SHORTENED]
    for one, _ in shortened:
        one.fp32_precision = "ieee"
    try:
        yield
    finally:
        for one, before in shortened:
            one.fp32_precision = before


@functools.cache
def has_bf16_instructions() -> bool:
    """Return whether the processor multiplies bf16; where torch cannot say, it is taken to."""
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.9, the last beside which there is a torch_xla
        return True
    processor = torch.cpu.get_capabilities()
    # The names of other architectures' instructions are not known here.
    return processor.get("architecture") != "x86_64" or any(processor.get(name) for name in ("avx512_bf16", "amx_bf16"))


HOST = Host(kind="cpu", torch_device=torch.device("cpu"), backend="gloo", has_bf16=False, compiles=False)


@dataclass(frozen=True, kw_only=True)
class CudaDevice(Device):
    """A GPU of NVIDIA."""

    pins_memory: bool = True  # copies from page-locked memory go over a stream of their own

    @property
    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.cuda.manual_seed(seed)

    @contextmanager
    def deterministic(self) -> Iterator[None]:
        """Only operations that add in the same order each time; one that has no such way ends the training with torch's message.

        Convolutions, scattered sums and the backward pass of fused attention then go their deterministic way by themselves.
        """
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # is read at the first matrix product
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads what was never written
        torch.use_deterministic_algorithms(True)
        try:
            with deterministic_kernels():
                yield
        finally:
            torch.use_deterministic_algorithms(False)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


class RowShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of rows, which also exchanges gradients and clips them: for torch_xla's."""

    base_optimizer: torch.optim.Optimizer
    """The optimizer of this process's rows; its groups and weights are in the order of the whole ones."""
    local_rank: int
    local_world_size: int
    """Which rows these are."""
