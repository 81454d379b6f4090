"""Each thing that torch does not document still does what it is used for, with the torch that is installed."""

import functools
import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from trainer.devices import torch_private


@pytest.fixture
def shared(tmp_path):
    """A model that DistributedDataParallel shares, in a group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(64, 64))
    dist.destroy_process_group()


def test_ddp_times_its_backward_passes(shared):
    assert torch_private.ddp_timings(shared) is None
    iterations = []
    for _ in range(5):
        shared(torch.ones(2, 64)).sum().backward()
        timings = torch_private.ddp_timings(shared)
        iterations += [] if timings is None else [timings.iteration]
    assert iterations == sorted(set(iterations))
    assert len(iterations) >= 3
    assert min(timings.backward, timings.exchange) > 0
    assert timings.hidden >= 0


def test_the_compiler_calls_back_and_takes_a_backend():
    calls = []
    hooks = torch_private.CompileHooks(lambda: calls.append("started"), lambda: calls.append("ended"))

    def double(x):
        return x * 2 + 1

    def halve(x):
        return x / 2 - 1

    backend = torch_private.compiler_backend("eager")
    torch.compiler.reset()  # which also forgets all hooks, so before they are added
    hooks.add()
    assert torch.compile(double, backend=backend)(torch.ones(3)).tolist() == [3, 3, 3]
    hooks.remove()
    assert torch.compile(halve, backend=backend)(torch.ones(3)).tolist() == [-0.5, -0.5, -0.5]
    assert calls == ["started", "ended"]


def test_the_compilers_options_hold_for_the_graphs_of_its_backend():
    import torch._inductor.config as inductor

    seen, kept = [], inductor.max_autotune_gemm

    def spy(graph, _inputs):
        seen.append(inductor.max_autotune_gemm)
        return graph.forward

    backend = torch_private.compiler_backend("inductor", {"max_autotune_gemm": not kept})
    torch.compiler.reset()
    compiled = torch.compile(
        torch.sin, backend=functools.partial(backend, inner_compile=lambda graph, *a, **_: spy(graph, a))
    )
    assert torch.allclose(compiled(torch.ones(3)), torch.ones(3).sin())
    assert seen == [not kept]
    assert inductor.max_autotune_gemm == kept


def test_the_compiler_can_choose_without_timing():
    import torch._inductor.config as inductor

    before = inductor.deterministic
    with torch_private.deterministic_kernels():
        assert inductor.deterministic is True
    assert inductor.deterministic == before


def test_all_tensors_move_as_one_by_one():
    tensors, ends = [torch.randn(5), torch.randn(2, 3)], [torch.randn(5), torch.randn(2, 3)]
    expected = [torch.lerp(tensor, end, 0.3) for tensor, end in zip(tensors, ends, strict=True)]
    torch_private.lerp_all(tensors, ends, 0.3)
    assert all(map(torch.equal, tensors, expected))


def test_all_tensors_are_copied_as_one_by_one():
    sources = [torch.randn(5), torch.tensor(3), torch.randn(2, 3)]
    tensors = [torch.zeros_like(source) for source in sources]
    torch_private.copy_all(tensors, sources)
    assert all(map(torch.equal, tensors, sources))
    torch_private.copy_all([], [])


@pytest.mark.parametrize("order", [1, 2])
def test_all_norms_are_those_of_each(order):
    tensors = [torch.randn(5), torch.randn(2, 3)]
    expected = torch.stack([torch.linalg.vector_norm(tensor, order) for tensor in tensors])
    torch.testing.assert_close(torch_private.norm_all(tensors, order), expected)


def test_processes_of_loader_are_known_counted_and_ended():
    batches = iter(DataLoader(range(8), batch_size=None, num_workers=1, prefetch_factor=2))
    (process,) = torch_private.loader_processes(batches)
    assert process.is_alive()
    next(batches)
    deadline = time.monotonic() + 60
    while not torch_private.batches_ready(batches) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert math.isnan(torch_private.batches_ready(batches)) or torch_private.batches_ready(batches) > 0
    torch_private.end_loader_processes(batches)
    assert not process.is_alive()


class Tensors(Dataset):
    """A tensor of so many bytes."""

    def __getitem__(self, count):
        return torch.full((count,), count % 256, dtype=torch.uint8)


def test_tensors_are_sent_as_is_said_or_by_torchs_shared_memory():
    def by_value(tensor):
        return (torch.from_numpy, (tensor.numpy(),)) if len(tensor) < 3 else None

    batches = DataLoader(
        Tensors(),
        batch_size=None,
        sampler=[1, 2, 3],
        num_workers=1,
        worker_init_fn=lambda _: torch_private.send_tensors(by_value),
    )
    received = list(batches)
    assert [tensor.is_shared() for tensor in received] == [False, False, True]
    assert [tensor.tolist() for tensor in received] == [[1], [2, 2], [3, 3, 3]]
