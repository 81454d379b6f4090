"""Memory that loader processes share with the training process: of decoded images, and of the batches that they hand over.

That of batches is used again and again. The system clears each page of memory before a process first writes to it, and for batches in fresh
memory that took a quarter of a loader process's time.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
import threading
import weakref
from multiprocessing import reduction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from trainer.devices.torch_private import send_tensors

logger = logging.getLogger(__name__)

PIECES = 32
"""Pieces of memory that a loader process uses again: more than the large tensors of the batches that it prefetches and of those that a
training holds at a time. Beyond them each tensor gets memory of its own."""
_PIECE_BYTES = 2**30  # addresses of a piece, not memory: a page of it takes memory when it is first written
_HEADROOM = 1.125  # of a piece that is page-locked, for the next batch, which may have a few images more
_BY_VALUE_BYTES = 2**16  # a tensor of at most so many bytes travels by its numbers


class SharedBytes:
    """Memory that a process being started inherits by its descriptor, without a copy. It is no part of /dev/shm, which containers limit."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Allocate `size` bytes of zeros, or map those of another process."""
        if descriptor is None:
            descriptor = os.memfd_create("images")
            os.ftruncate(descriptor, size)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._map = mmap.mmap(descriptor, size)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)  # uint8 [size]

    def part(self, first: int, size: int) -> Tensor:
        """Return `size` bytes from `first` on as a tensor, uint8 [size], that has a storage of its own: its end can be noticed."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=first)

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (len(self.tensor), reduction.DupFd(self._descriptor))


def _mapped(size: int, sent: Any) -> SharedBytes:
    return SharedBytes(size, sent.detach())


def empty_images(count: int, size: int) -> Tensor:
    """Allocate a batch, uint8 [count, size, size, 3]: channels last, as decoders write it and convolutions read it fastest.

    A loader process gets memory that it shares with the training process; otherwise the batch would be copied there on its way.
    """
    info: Any = get_worker_info()
    memory = info.dataset.memory.allocate(count * size * size * 3) if info is not None else None
    if memory is None:
        return torch.empty(count, size, size, 3, dtype=torch.uint8)
    images: Tensor = memory.view(count, size, size, 3)
    return images


class _Lent:
    """A piece that a loader process writes to; it is the training process's once it was `sent`."""

    def __init__(self, piece: int) -> None:
        self.piece, self.sent = piece, False


class BatchMemory:
    """Pieces of memory for the batches of loader processes, each used again once the training process has no more use for it.

    All processes share the pieces and the table of those in use. Where the training process copies batches to a GPU, it locks the pages of
    a piece when a batch first arrives in it, so that copies run beside the host without another copy before.
    """

    def __init__(self, workers: int, *, page_locked: bool = False) -> None:
        """Share pieces with `workers` loader processes; `page_locked` where a GPU copies out of them."""
        self._pieces = PIECES
        self._bytes = SharedBytes(max(1, workers * PIECES) * _PIECE_BYTES)
        self._in_use = SharedBytes(max(1, workers * PIECES))
        # Of the training process:
        self._locked: dict[int, int] | None = {} if page_locked else None  # piece -> bytes
        self._number = next(_numbers)
        _memories[self._number] = self
        # Of a loader process:
        self._first, self._lent = 0, dict[int, _Lent]()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_locked": None}

    @property
    def addresses(self) -> tuple[int, int]:
        """The first address of the pieces in this process, and the first beyond them."""
        first = self._bytes.tensor.data_ptr()
        return first, first + len(self._bytes.tensor)

    # ---- in a loader process

    def serve(self, worker: int) -> None:
        """Send the batches of this loader process, number `worker`, by these pieces."""
        self._first, self._lock = worker * self._pieces, threading.Lock()  # a thread of its own sends what was made
        send_tensors(self._reduce)

    def allocate(self, size: int) -> Tensor | None:
        """Return a piece, uint8 [size], which is free again when its tensor goes unsent; None if there is none."""
        with self._lock:
            in_use: list[int] = self._in_use.tensor[self._first : self._first + self._pieces].tolist()
            if size > _PIECE_BYTES or all(in_use):
                return None
            lent = _Lent(self._first + in_use.index(0))
            self._in_use.tensor[lent.piece] = 1
            self._lent[lent.piece] = lent
        memory = self._bytes.part(lent.piece * _PIECE_BYTES, size)
        weakref.finalize(memory.untyped_storage(), self._take_back, lent).atexit = False
        return memory

    def _take_back(self, lent: _Lent) -> None:
        if not lent.sent:
            self._in_use.tensor[lent.piece] = 0

    def _reduce(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Pickle a tensor by its numbers or its piece, to which it is copied unless it lies there; None if there is no piece for it."""
        if tensor.nbytes <= _BY_VALUE_BYTES and tensor.dtype is not torch.bfloat16:  # which numpy does not have
            dense = tensor.clone()  # of the same strides, unless elements overlap or leave gaps
            return _by_value, (dense.as_strided((dense.numel(),), (1,)).numpy(), tuple(dense.shape), dense.stride())
        storage, (first, _) = tensor.untyped_storage(), self.addresses
        piece, beyond = divmod(storage.data_ptr() - first, _PIECE_BYTES)
        lent = None if beyond else self._lent.get(piece)
        if lent is None or lent.sent:
            memory = self.allocate(tensor.nbytes)
            if memory is None:
                return None
            # The tensor's own strides, unless its elements overlap or leave gaps.
            strides = torch.empty_like(tensor, device="meta").stride()
            tensor = memory.view(tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)
            storage = memory.untyped_storage()
            lent = self._lent[(storage.data_ptr() - first) // _PIECE_BYTES]
        lent.sent = True
        layout = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        return _received, (self._number, lent.piece, storage.nbytes(), *layout)

    # ---- in the training process

    def receive(self, piece: int, size: int) -> Tensor:
        """Return what a loader process wrote to a piece, uint8 [size]; it may write there again when nobody has a tensor in it any more."""
        if self._locked is not None and size > self._locked.get(piece, 0):
            self._lock_pages(piece, size)
        memory = self._bytes.part(piece * _PIECE_BYTES, size)
        weakref.finalize(memory.untyped_storage(), self._in_use.tensor.__setitem__, piece, 0).atexit = False
        return memory

    def _lock_pages(self, piece: int, size: int) -> None:
        assert self._locked is not None
        address = self.addresses[0] + piece * _PIECE_BYTES
        runtime: Any = torch.cuda.cudart()
        if self._locked.pop(piece, 0):
            runtime.cudaHostUnregister(address)
        size = min(_PIECE_BYTES, math.ceil(_HEADROOM * size / mmap.PAGESIZE) * mmap.PAGESIZE)
        code = int(runtime.cudaHostRegister(address, size, 0))
        if code:
            text = "memory of batches cannot be page-locked (cudaHostRegister: error %d), so each is copied once more on its way to the GPU"
            logger.warning(text, code)
            self._locked = None
        else:
            self._locked[piece] = size

    def unlock_pages(self) -> None:
        """Undo the locking of pages, when no copy out of them is under way."""
        for piece in self._locked or ():
            torch.cuda.cudart().cudaHostUnregister(self.addresses[0] + piece * _PIECE_BYTES)
        self._locked = None


_numbers = itertools.count()
_memories: weakref.WeakValueDictionary[int, BatchMemory] = weakref.WeakValueDictionary()  # those of this process


def _by_value(numbers: npt.NDArray[np.generic], shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Return a small tensor that `BatchMemory._reduce` sent, with its strides: another layout would be computed, and rounded, otherwise."""
    return torch.from_numpy(numbers).as_strided(shape, stride)


def _received(
    number: int,
    piece: int,
    size: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> Tensor:
    """Return a tensor that `BatchMemory._reduce` sent."""
    return _memories[number].receive(piece, size).view(dtype).as_strided(shape, stride, offset)
