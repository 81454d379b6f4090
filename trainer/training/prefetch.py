"""Micro-batches on their way to the device, one ahead of the training.

Shapes: b samples in a micro-batch, b + x images, V pixels along the edge of a view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.data.batch import Batch, Mixing, Recorded, decode_jpegs, keep_until_copied, to_device
from trainer.data.loader import Views
from trainer.data.views import fused, rendering
from trainer.devices import Device
from trainer.profiling.timeline import span

Parts = TypeVar("Parts", Mixing, Recorded)


def make_prefetcher(batches: Iterator[Batch], views: Views, device: Device) -> Prefetcher:
    """Choose how these micro-batches come to this device, in their order; `views` says how it makes what the loader left to it."""
    return ThreadedPrefetcher(batches, views, device) if device.is_lazy else Prefetcher(batches, views, device)


class Prefetcher:
    """Sends the next micro-batch to the device while that computes with the present one.

    On a GPU the copy goes over a stream of its own, from page-locked memory, so neither the host nor the computation waits for it; images
    that the loader left encoded are decoded on that stream too. On a CPU nothing is copied; the order of things is the same.
    """

    def __init__(self, batches: Iterator[Batch], views: Views, device: Device) -> None:
        self._batches, self._views, self._device = batches, views, device
        self._stream = torch.cuda.Stream(device.torch_device) if device.kind == "cuda" else None
        self._sent: Batch | None = None

    def next(self) -> Batch:
        """Return the next micro-batch, on the device: views, mixed."""
        if self._sent is None:
            self.preload()
        with span("to_device"):
            batch, self._sent = self._sent, None
            assert batch is not None, "no more is taken than the loader gives"
            if self._stream is not None:
                # The computation waits for the copies, and their memory is kept until it is through with them.
                computing = torch.cuda.current_stream(self._device.torch_device)
                computing.wait_stream(self._stream)

                def keep(tensor: Tensor) -> Tensor:
                    if tensor.is_cuda:
                        tensor.record_stream(computing)
                    return tensor

                _moved(batch, keep)
            return render(batch, self._views)

    def preload(self) -> None:
        """Start to send the next micro-batch, if there is one more; call it when the device has enough to do."""
        with span("data"):
            batch = next(self._batches, None)
        if batch is None:
            return
        place = self._device.torch_device
        with span("to_device"), torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            sent = _moved(batch, lambda tensor: to_device(tensor, place))
            if sent.lengths is not None:  # the loader left the stored images encoded
                sent = sent._replace(images=decode_jpegs(batch.images, sent.lengths, place), lengths=None)
                if self._stream is not None:
                    keep_until_copied(batch.images)
            self._sent = sent

    def drop(self, count: int) -> None:
        """Take so many micro-batches, and send none of them."""
        for _ in range(count):
            next(self._batches, None)

    def close(self) -> None:
        """Take no more."""


class ThreadedPrefetcher(Prefetcher):
    """Threads send the micro-batches while the host notes what the device is to do, and that computes.

    All that is made of the loader's batches is made before, on the host: how many partners are mixed in differs from one to the next.
    """

    def __init__(self, batches: Iterator[Batch], views: Views, device: Device) -> None:
        super().__init__(batches, views, device)
        self._ahead = device.send_ahead(_parted(render(batch, views)) for batch in batches)

    def next(self) -> Batch:
        with span("data"):
            tensors, held = next(self._ahead)
        sent = iter(tensors)
        return _moved(held.batch, lambda _: next(sent))

    def preload(self) -> None:
        """Do nothing: threads send the micro-batches."""

    def drop(self, count: int) -> None:
        """Take so many micro-batches, which are on the device already."""
        for _ in range(count):
            next(self._ahead, None)

    def close(self) -> None:
        self._ahead.close()


class _Held:
    """A batch that stays on the host."""

    __slots__ = ("batch",)  # what has a dictionary, torch_xla looks through for tensors

    def __init__(self, batch: Batch) -> None:
        self.batch = batch


def _parted(batch: Batch) -> tuple[list[Tensor], _Held]:
    """Return what is sent of a batch, and the batch."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    return tensors, _Held(_moved(batch, note))


def render(batch: Batch, views: Views) -> Batch:
    """Return the batch with its views, made where the loader left them to the device, and mixed: uint8 [b, 3, V, V].

    It is on the device, decoded, but for what `Batch` says is on the CPU.
    """
    images, way = batch.images, fused if views.fused else rendering
    if views.resident is not None:
        images = views.resident.index_select(0, images).permute(0, 3, 1, 2)
    if batch.views is not None:
        images = way.make_views(images, batch.views, views.size, views.settings)
    if batch.mixing is not None:
        images = way.mix(images, batch.mixing)
    return batch._replace(images=images, views=None)


def _moved(batch: Batch, move: Callable[[Tensor], Tensor]) -> Batch:
    """Move the parts of a batch that the device computes with."""
    return batch._replace(
        # Files are decoded from the host's memory.
        images=move(batch.images) if batch.lengths is None else batch.images,
        labels=move(batch.labels),
        mixing=batch.mixing and _each(batch.mixing, move),
        recorded=batch.recorded and _each(batch.recorded, move),
        label_weights=None if batch.label_weights is None else move(batch.label_weights),
    )


def _each(parts: Parts, move: Callable[[Tensor], Tensor]) -> Parts:
    """Move each of the parts; one that is not there stays so."""
    moved: dict[str, Any] = {name: move(part) for name, part in parts._asdict().items() if isinstance(part, Tensor)}
    if isinstance(parts, Recorded):
        moved["further"] = tuple(_each(one, move) for one in parts.further)
    return parts._replace(**moved)
