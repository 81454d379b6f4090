"""A GPU without numbers, for machines without one: what is on it has a shape, a type and a place, as torch's FakeTensorMode keeps them.

    with Gpu() as gpu:
        model.to("cuda")                    # parameters are on cuda:0 now; what is on the CPU stays real
        model(images)                       # FakeTensorDeviceMismatchError where a CPU's tensor meets one of the GPU
        gpu.copies                          # how each tensor came to the GPU: from page-locked memory or not
        gpu.waits                           # what made the host wait for the GPU

It keeps the order of streams: a tensor that is used on a stream that has not waited for the stream that wrote it raises `StreamError`, and
so does one that is used beside the stream that it was made on without `record_stream`, as its memory could be given away too early. What is
copied back to the host is ones. torch's own backward pass needs a driver, so it is walked through here, node by node.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.devices import CudaDevice

DEVICE = CudaDevice(
    kind="cuda", torch_device=torch.device("cuda", 0), backend="nccl", has_bf16=True, compiles=False
)  # a compiler would ask the driver
"""The adapter that a training gets for it."""

_CUDA = 1
"""Number of the kind of device among those that torch knows."""
aten = torch.ops.aten


class StreamError(AssertionError):
    """A tensor is used on a stream before that waits for it, or without its memory being kept for it."""


@dataclass(frozen=True)
class Copy:
    """A tensor on its way to the GPU."""

    shape: tuple[int, ...]
    pinned: bool
    """Whether it came from page-locked memory; else the host waits."""
    non_blocking: bool
    place: str
    """The innermost function of the trainer, as `module.py:function`."""


class Stream(torch.Stream):
    """Work in its order; knows how far it has waited for the others."""

    def __new__(cls, number):
        return super().__new__(cls, stream_id=number, device_index=0, device_type=_CUDA)

    def __init__(self, number):
        self.number, self.done, self.seen = number, 0, defaultdict(int)

    def wait_stream(self, other):
        self.wait_event(Event().recorded_on(other))

    def wait_event(self, event):
        for number, done in event.reached.items():
            self.seen[number] = max(self.seen[number], done)

    def synchronize(self):
        pass


class Event:
    """A point in a stream's work, which the GPU has always come to already."""

    def __init__(self, **_options):
        self.reached = {}

    def recorded_on(self, stream):
        self.reached = {**stream.seen, stream.number: stream.done}
        return self

    def record(self, stream=None):
        self.recorded_on(stream or torch.cuda.current_stream())

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, _other):
        return 1.0


@dataclass
class _Memory:
    """One storage on the GPU."""

    reference: StorageWeakRef
    made_on: int
    written_on: int
    written_at: int
    kept_for: set[int] = field(default_factory=set)


class Gpu(TorchDispatchMode):
    """While it is entered there is a GPU, as far as a training looks."""

    def __init__(self):
        super().__init__()
        self.copies: list[Copy] = []
        self.waits: list[str] = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=False)
        self._pinned: dict[int, StorageWeakRef] = {}
        self._locked: dict[int, int] = {}  # address -> bytes
        self._memory: dict[int, _Memory] = {}
        self._numbers = itertools.count()
        self._streams = [Stream(next(self._numbers))]
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        stack = self._stack
        for name, stand_in in {
            "is_available": lambda: True,
            "is_bf16_supported": lambda **_: True,
            "is_current_stream_capturing": lambda: False,
            "manual_seed": lambda _seed: None,
            "synchronize": lambda *_: self.waits.append(f"synchronize in {_place()}"),
            "get_device_name": lambda *_: "stand-in",
            "utilization": lambda *_: 50,
            "mem_get_info": lambda *_: (2**33, 2**34),
            "memory_allocated": lambda *_: 2**33,
            "Stream": lambda *_: Stream(next(self._numbers)),
            "Event": Event,
            "current_stream": lambda *_: self._streams[-1],
            "stream": self._on,
            "cudart": lambda: self,
        }.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(patch.object(torch.accelerator, "is_available", lambda **_: True))
        stack.enter_context(patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        stack.enter_context(patch.object(Tensor, "backward", _backward))
        stack.enter_context(patch.object(FakeTensor, "__deepcopy__", _deepcopy, create=True))
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", True))  # it asks torch.cuda.is_available
        stack.enter_context(self._fake)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._stack.close()

    @contextlib.contextmanager
    def _on(self, stream):
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        if operation is aten.record_stream.default:
            tensor, stream = args
            self._memory_of(tensor).kept_for.add(stream.stream_id)
            return None
        here = [leaf for leaf in leaves if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda"]
        if not here and not any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves):
            return self._on_host(operation, args, kwargs)
        if operation.namespace != "prim":  # a question about the tensor
            self._check_order(operation, here)
        outside = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)]
        returned = self._to_host(operation, args, kwargs)
        if returned is not None:
            return returned
        self._note_copies(operation, outside, kwargs, args)
        with unset_fake_temporarily():
            args, kwargs = tree_map_only(Tensor, self._stand_in, (args, kwargs))
        result = operation(*args, **kwargs)
        # Its weak references would keep `Module.to` from swapping parameters.
        self._fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        self._note_writes(operation, result, args)
        return result

    # On the host

    def _on_host(self, operation, args, kwargs):
        with unset_fake_temporarily():
            if operation in {aten.is_pinned.default, aten._pin_memory.default, aten.pin_memory.default}:
                known = self._is_pinned(args[0])
                if operation is aten.is_pinned.default:
                    return known
                return args[0] if known else self._pin(args[0].clone())
            pinned = kwargs.pop("pin_memory", False)
            result = operation(*args, **kwargs)
            return self._pin(result) if pinned else result

    def cudaHostRegister(self, address, size, _flags):  # noqa: N802  # CUDA's name
        self._locked[address] = size
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802  # CUDA's name
        del self._locked[address]
        return 0

    def _is_pinned(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata in self._pinned:
            return True
        first, beyond = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return any(address <= first and beyond <= address + size for address, size in self._locked.items())

    def _pin(self, tensor):
        reference = StorageWeakRef(tensor.untyped_storage())
        self._pinned[reference.cdata] = reference  # which keeps the number from being given again
        return tensor

    # Between host and GPU

    def _stand_in(self, tensor):
        if isinstance(tensor, FakeTensor):
            return tensor
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(self._fake, shape, tensor.device)

    def _to_host(self, operation, args, kwargs):
        """The copy of something on the GPU, if that is what is wanted: ones."""
        if operation is aten._to_copy.default and torch.device(kwargs.get("device") or "cuda").type == "cpu":
            self.waits.append(f"copy to the host in {_place()}")
            with unset_fake_temporarily():
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if operation in {aten._local_scalar_dense.default, aten.allclose.default}:
            self.waits.append(f"a number to the host in {_place()}")
            return {torch.bool: True, torch.float32: 1.0}.get(args[0].dtype, 1)
        if operation is aten.copy_.default and not isinstance(args[0], FakeTensor):
            if not self._is_pinned(args[0]) or not (len(args) > 2 and args[2]):
                self.waits.append(f"copy to the host in {_place()}")
            with unset_fake_temporarily():
                return args[0].fill_(1)
        return None

    def _note_copies(self, operation, outside, kwargs, args):
        """Single numbers travel with the operation that takes them."""
        to_gpu = operation in {aten._to_copy.default, aten.copy_.default}
        non_blocking = bool(kwargs.get("non_blocking") or (operation is aten.copy_.default and args[2:3] == (True,)))
        for tensor in outside:
            if to_gpu or tensor.dim():
                pinned = self._is_pinned(tensor)
                self.copies.append(Copy(tuple(tensor.shape), pinned, non_blocking, _place()))

    # The order of streams

    def _memory_of(self, tensor):
        storage = tensor.untyped_storage()
        stream = self._streams[-1]
        if storage._cdata not in self._memory:
            self._memory[storage._cdata] = _Memory(
                StorageWeakRef(storage), stream.number, stream.number, stream.done, set()
            )
        return self._memory[storage._cdata]

    def _check_order(self, operation, tensors):
        stream = self._streams[-1]
        for tensor in tensors:
            memory = self._memory_of(tensor)
            if memory.written_on != stream.number and stream.seen[memory.written_on] < memory.written_at:
                reason = "which does not wait for it"
            elif memory.made_on != stream.number and stream.number not in memory.kept_for:
                reason = "for which its memory is not kept (record_stream)"
            else:
                continue
            raise StreamError(
                f"{operation} in {_place()}: {list(tensor.shape)}, made on stream {memory.made_on} and written on {memory.written_on}, "
                f"is used on {stream.number}, {reason}"
            )

    def _note_writes(self, operation, result, args):
        stream = self._streams[-1]
        stream.done += 1
        changed = [
            argument
            for argument, known in zip(args, operation._schema.arguments, strict=False)
            if known.alias_info is not None and known.alias_info.is_write
        ]
        new = [] if operation.is_view else [result]
        for tensor in tree_leaves([changed, new]):
            if isinstance(tensor, FakeTensor) and tensor.device.type == "cuda":
                memory = self._memory_of(tensor)
                memory.written_on, memory.written_at = stream.number, stream.done


def _place():
    frame = sys._getframe(1)
    while frame is not None and not (
        "/trainer/" in frame.f_code.co_filename
        and frame.f_code.co_name
        not in {"<dictcomp>", "<listcomp>", "<setcomp>"}  # functions of their own before Python 3.12
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}" if frame is not None else "outside"


def _deepcopy(tensor, memo):
    if id(tensor) not in memo:
        copied = tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    return memo[id(tensor)]


def _backward(loss):
    """What torch's engine does, in the calling thread."""
    waiting, found = defaultdict(int), [loss.grad_fn]
    for node in found:
        for following, _ in _following(node):
            waiting[following] += 1
            if waiting[following] == 1:
                found.append(following)
    gradients = defaultdict(dict, {loss.grad_fn: {0: torch.ones_like(loss)}})
    ready = [loss.grad_fn]
    with torch.no_grad():
        while ready:
            node = ready.pop()
            for (following, number), gradient in _passed_on(node, gradients.pop(node, {})):
                held = gradients[following]
                held[number] = gradient if number not in held else held[number] + gradient
            for following, _ in _following(node):
                waiting[following] -= 1
                if not waiting[following]:
                    ready.append(following)


def _following(node):
    return [(following, number) for following, number in node.next_functions if following is not None]


def _passed_on(node, incoming):
    """Run a node; each gradient with the input of the node that takes it, as that wants it."""
    outgoing = node(*(incoming.get(number) for number in range(len(node._input_metadata))))
    for edge, gradient in zip(
        node.next_functions, outgoing if isinstance(outgoing, tuple) else [outgoing], strict=True
    ):
        if edge[0] is not None and gradient is not None:
            wanted = edge[0]._input_metadata[edge[1]]
            assert gradient.device == wanted.device, f"{node.name()} gives a gradient on {gradient.device}"
            yield edge, gradient.sum_to_size(wanted.shape).to(wanted.dtype)
