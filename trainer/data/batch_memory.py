"""Memory that loader processes share with the training process: of decoded images, and of the batches that they hand over.

That of batches is used again and again. The system clears each page of memory before a process first writes to it, and for batches in fresh
memory that took a quarter of a loader process's time.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

PIECES = 16
"""Pieces of memory that a loader process uses again: more than the batches that it prefetches and those that a training holds at a time.
Beyond them each batch gets memory of its own."""


class SharedBytes:
    """Memory that a process being started inherits by its descriptor, without a copy. It is no part of /dev/shm, which containers limit."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Allocate `size` bytes of zeros, or map those of another process."""
        if descriptor is None:
            descriptor = os.memfd_create("images")
            os.ftruncate(descriptor, size)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self.tensor = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)  # uint8 [size]

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (len(self.tensor), reduction.DupFd(self._descriptor))


def _mapped(size: int, sent: Any) -> SharedBytes:
    return SharedBytes(size, sent.detach())


def empty_images(count: int, size: int) -> Tensor:
    """Allocate a batch, uint8 [count, size, size, 3]: channels last, as decoders write it and convolutions read it fastest."""
    images = torch.empty(0, dtype=torch.uint8)
    info: Any = get_worker_info()
    if info is not None:
        # A loader process writes into shared memory at once; otherwise the batch would be copied there on its way to the training process.
        images.set_(info.dataset.memory.allocate(info.id, count * size * size * 3))
    return images.resize_(count, size, size, 3)


class BatchMemory:
    """Pieces of shared memory for the batches of loader processes, each used again once the training process has no more use for it.

    Each process has an object of its own; only the table of what is in use is shared.
    """

    def __init__(self, workers: int) -> None:
        self._in_use = torch.zeros(max(1, workers) * PIECES, dtype=torch.bool).share_memory_()  # [W x P]
        # Of this loader process:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._taken: list[int] = []

    def allocate(self, worker: int, size: int) -> torch.UntypedStorage:
        """Return `size` bytes or more of shared memory for the batch that this loader process, `worker`, is making."""
        first = worker * PIECES
        in_use: list[bool] = self._in_use[first : first + PIECES].tolist()
        if all(in_use):
            return _shared(size)
        piece = first + in_use.index(False)
        self._in_use[piece] = True
        self._taken.append(piece)
        if piece not in self._storages or self._storages[piece].nbytes() < size:
            self._storages[piece] = _shared(size)
        return self._storages[piece]

    def taken(self) -> tuple[int, ...]:
        """Return the pieces that were allocated since the last call, which travel with the batch."""
        pieces = tuple(self._taken)
        self._taken.clear()
        return pieces

    def free_with(self, images: Tensor | None, pieces: Sequence[int]) -> None:
        """Let loader processes use pieces again: when nobody has a tensor in the memory of `images` any more, or now if that isn't shared.

        Batches that were copied, into page-locked memory or since they are small, are not shared.
        """
        if images is not None and images.is_shared():
            weakref.finalize(images.untyped_storage(), self._free, pieces).atexit = False
        else:
            self._free(pieces)

    def _free(self, pieces: Sequence[int]) -> None:
        for piece in pieces:
            self._in_use[piece] = False


def _shared(size: int) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = torch.empty(size, dtype=torch.uint8).share_memory_().untyped_storage()
    return storage
