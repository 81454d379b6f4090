"""All that the trainer uses of torch beyond its documented interface, so that a new version of torch is checked against one module.

`tests/unit/devices/test_torch_private.py` calls each function with the torch that is installed. For torch's elastic agent, which launches
processes and trains nothing, that module is `trainer.runner.elastic_private`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.dataloader import _BaseDataLoaderIter

BACKWARD_THREAD = "pt_autograd_{}"
"""What Linux shows as the name of the thread that runs the backward pass of the GPU of this number; on a CPU the calling thread does."""


class DdpTimings(NamedTuple):
    """What DistributedDataParallel has measured of one backward pass, in nanoseconds."""

    iteration: int  # number of the pass, from 1 on
    backward: int
    exchange: int
    hidden: int  # of the exchange, while the backward pass computed


def ddp_timings(model: DistributedDataParallel) -> DdpTimings | None:
    """Return the last timings, None before the first ones; torch times the first ten passes and then every hundredth."""
    data = model._get_ddp_logging_data()
    if "backward_compute_time" not in data:
        return None
    return DdpTimings(
        data["iteration"],
        data["backward_compute_time"],
        data["backward_comm_time"],
        data["backward_compute_comm_overlap_time"],
    )


def compiler_backend(name: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return a backend of torch.compile: from a graph and its inputs to a function; `options` are changes of Inductor's configuration."""
    backend: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return functools.partial(backend, config_patches=dict(options)) if options else backend


def any_number(tensor: Tensor) -> None:
    """Let a graph that is compiled for this tensor serve any size of its first dimension but 1."""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


class CompileHooks:
    """Calls a function before and after each graph that torch compiles, of backward passes too."""

    def __init__(self, started: Callable[[], None], ended: Callable[[], None]) -> None:
        self._started: Callable[[Any], None] = lambda _: started()
        self._ended: Callable[[Any], None] = lambda _: ended()

    def add(self) -> None:
        from torch._dynamo.callback import callback_handler  # takes a second, which only a recording needs

        callback_handler.register_start_callback(self._started)
        callback_handler.register_end_callback(self._ended)

    def remove(self) -> None:
        from torch._dynamo.callback import callback_handler

        callback_handler.remove_start_callback(self._started)
        callback_handler.remove_end_callback(self._ended)


def deterministic_kernels() -> AbstractContextManager[object]:
    """Let the compiler choose kernels by rules; by default it times them, and may choose others each time."""
    import torch._inductor.config  # here, because few need it

    context: AbstractContextManager[object] = torch._inductor.config.patch(deterministic=True)
    return context


def keep_activations(share: float) -> None:
    """Let what is compiled from now on keep this share of its activations' memory between forward and backward pass."""
    import torch._functorch.config  # here, because few need it

    torch._functorch.config.activation_memory_budget = share


def lerp_all(tensors: Sequence[Tensor], ends: Sequence[Tensor], share: float) -> None:
    """Move each tensor toward its end, in place: tensor + share x (end - tensor); few kernels for all of them."""
    torch._foreach_lerp_(list(tensors), list(ends), share)


def copy_all(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its tensor; few kernels for all that are of one type."""
    for dtype in {tensor.dtype for tensor in tensors}:
        pairs = [pair for pair in zip(tensors, sources, strict=True) if pair[0].dtype == dtype]
        torch._foreach_copy_([tensor for tensor, _ in pairs], [source for _, source in pairs])


def norm_all(tensors: Sequence[Tensor], order: float = 2) -> Tensor:
    """Return the norm of each tensor, float32 [T]; few kernels for all of them."""
    return torch.stack(torch._foreach_norm(list(tensors), order)).float()


def loader_processes(batches: Any) -> list[Any]:
    """Return the processes behind the iterator of a `DataLoader` with workers."""
    return list(batches._workers)


def end_loader_processes(batches: Any) -> None:
    """End them now; else they live as long as the iterator, which an error's traceback may keep."""
    batches._shutdown_workers()


def batches_ready(batches: Any) -> float:
    """Return how many batches lie in the iterator's queue or came too early and were put aside; NaN where no system call counts them."""
    waiting: Iterable[Sequence[Any]] = batches._task_info.values()
    try:
        return int(batches._data_queue.qsize()) + sum(len(task) > 1 for task in waiting)
    except NotImplementedError:  # macOS does not count what is in a queue
        return math.nan


def workers_of(batches: Any) -> int:
    """Return the number of processes behind the iterator of a `DataLoader`."""
    return int(batches._num_workers)


def batches_left(batches: Any) -> int | None:
    """Return how many batches the iterator of a `DataLoader` will give; None where it does not know."""
    try:
        return len(batches) - int(batches._num_yielded)
    except TypeError:  # the data set has no length
        return None


@contextmanager
def around_each_batch(get: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """Let `get` give the batches of every `DataLoader`, from its iterator and a function that loads the next one."""
    load = _BaseDataLoaderIter.__next__

    def watched(batches: Any) -> Any:
        return get(batches, lambda: load(batches))

    _BaseDataLoaderIter.__next__ = watched  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        _BaseDataLoaderIter.__next__ = load  # type: ignore[method-assign]


def send_tensors(reduce: Callable[[Tensor], tuple[Any, ...] | None]) -> None:
    """Let this process send tensors as `reduce` pickles them; where that returns None, by torch's own shared memory.

    For each tensor there the two processes exchange messages over a socket, and the one that sends needs the interpreter's lock to answer,
    with which it may be computing.
    """
    ForkingPickler.register(Tensor, lambda tensor: reduce(tensor) or reduce_tensor(tensor))
