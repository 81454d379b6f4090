"""Micro-batches for one training process, in the sampler's order.

Step s takes the positions s x G .. (s + 1) x G - 1 of the sampler (G: `batch_size`). They are sharded over micro-batches: micro-batch a of
process r is shard a x W + r of the step (W processes), so the union over processes does not depend on their number. Any number of
processes can share a step: where G cannot be divided evenly, the lengths of shards differ by one sample.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from trainer.config import DecodeOn, Resident, TrainingSettings, ViewSettings, ViewsOn
from trainer.data.batch import Batch, Recorded, check_gpu_decoding, join_files, to_device, wait_for_copies
from trainer.data.batch_memory import BatchMemory, empty_images
from trainer.data.dataset import Split, Targets, memory_share
from trainer.data.dataset_schema import UNLABELED
from trainer.data.sampler import SHARD, Indices, Mask, SampleSlice, StatelessSampler
from trainer.data.split_rows import FetchedRows
from trainer.data.views.parameters import ViewParameters, draw_views
from trainer.data.views.rendering import crop_sample, draw_mixing, finish_views
from trainer.devices import Device
from trainer.devices.torch_private import (
    batches_ready,
    end_loader_processes,
    loader_processes,
)
from trainer.io.child_processes import SERVED, end_with_parent
from trainer.io.errors import DataError, LostProcessError, SettingsError, TrainerError, TrainingError

Number = TypeVar("Number", bound=np.generic)

_UPLOADED = 1024  # images that are decoded together, on their way to a device that keeps them
_RESIDENT_SHARE = 0.4
"""Of a device's free memory that images take; the rest is for what the steps compute."""
PREFETCHED = 2  # micro-batches that each loader process prefetches
_POLL_S = 0.5  # seconds between two checks of whether a batch takes too long


class RecordedOutputs(Protocol):
    """Recorded outputs of a teacher, as a loader reads them."""

    view_seed: int  # seed of the recorded views
    view_count: int  # views of each sample

    def read(self, indices: Indices, numbers: Indices) -> Recorded:
        """Read the outputs for these samples (indices into the training set) and views."""


class LoaderObserver(Protocol):
    """Is notified about loader processes."""

    def loader_processes(self, pids: Sequence[int]) -> None:
        """Note that they have been started."""

    def batches_ready(self, count: float) -> None:
        """Note how many batches are ready as the training asks for one; NaN where the operating system cannot count them."""

    def batch_made(self, images: int, seconds: float) -> None:
        """Note how long a process took to make a batch."""


class Samples:
    """One or several splits, read as one training set."""

    def __init__(self, splits: Sequence[Split]) -> None:
        """Join `splits`, in this order; a `DataError` if there is no sample in them."""
        self.splits = [split for split in splits if len(split)]
        if not self.splits:
            raise DataError(
                "there are no images to train on; check the data set's card, and prepare it with more images"
            )
        for split in self.splits:
            split.load()  # once, before loader processes are started, which then share the decoded images
        self._ends = np.cumsum([len(split) for split in self.splits]).tolist()
        self.image_size = self.splits[0].image_size
        self.labels = _joined([split.labels for split in self.splits])
        labeled = self.labels != UNLABELED
        self.labeled: Mask | None = None if labeled.all() else labeled  # which samples have a label, [N]; None: all
        self.keys = _joined([split.keys for split in self.splits])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def targets(self) -> Targets | None:
        """Those of the data set (`PreparedDataset.targets`)."""
        return self.splits[0].targets

    @property
    def unlabeled(self) -> int:
        """Number of samples without a label."""
        return 0 if self.labeled is None else int((~self.labeled).sum())

    @property
    def decoded(self) -> bool:
        """Whether a read decodes nothing."""
        return all(split.decoded for split in self.splits)

    def keep_decoded(self, limit: int) -> None:
        """Decode all images now if they have at most `limit` bytes."""
        if self.decoded_bytes <= limit:
            for split in self.splits:
                split.load(limit)

    @property
    def decoded_bytes(self) -> int:
        return len(self) * 3 * self.image_size**2

    def upload(self, device: torch.device) -> Tensor:
        """Bring all stored images to a device, uint8 [N, S, S, 3]."""
        images = torch.empty(len(self), self.image_size, self.image_size, 3, dtype=torch.uint8, device=device)
        for end, split in zip(self._ends, self.splits, strict=True):
            for start in range(0, len(split), _UPLOADED):
                chosen = range(start, min(start + _UPLOADED, len(split)))
                first = end - len(split) + start
                images[first : first + len(chosen)].copy_(to_device(split.read(chosen).permute(0, 2, 3, 1), device))
        return images

    def read(self, indices: Indices) -> Tensor:
        """Read stored images, uint8 [B, 3, S, S], the channels innermost in memory."""
        if len(self.splits) == 1:
            return self.splits[0].read(indices.tolist())
        images = empty_images(len(indices), self.image_size).permute(0, 3, 1, 2)
        for image, index in zip(images, indices.tolist(), strict=True):
            image.copy_(self.picture(index))
        return images

    def picture(self, index: int, *, shrink: int = 1) -> Tensor:
        """Read one stored image, uint8 [3, E, E]; see `Split.picture`."""
        split, place = self._place(index)
        return split.picture(place, shrink=shrink)

    def encoded(self, index: int) -> memoryview:
        """Return the encoded file of one stored image."""
        split, place = self._place(index)
        return split.encoded(place)

    def _place(self, index: int) -> tuple[Split, int]:
        number = bisect_right(self._ends, index)
        split = self.splits[number]
        return split, index - (self._ends[number] - len(split))

    @property
    def fetches(self) -> bool:
        """Whether images are fetched from a store as they are read, which none is that is decoded already."""
        return any(isinstance(split.rows, FetchedRows) and not split.loaded for split in self.splits)

    def files(self, shards: Indices) -> list[tuple[FetchedRows, int]]:
        """Return the files of a store, as rows and number, that have samples of these shards of the sampler, in their order."""
        found: list[tuple[FetchedRows, int]] = []
        for shard in shards.tolist():
            for end, split in zip(self._ends, self.splits, strict=True):
                first = end - len(split)
                start, stop = max(shard * SHARD, first), min((shard + 1) * SHARD, end)
                if isinstance(split.rows, FetchedRows) and start < stop:
                    found += ((split.rows, number) for number in split.rows.numbers(range(start - first, stop - first)))
        return [*dict.fromkeys(found)]  # a file may have samples of two shards

    def names(self, indices: Indices) -> list[str]:
        """Return key and source of each sample, for messages."""
        places = [self._place(index) for index in indices.tolist()]
        sources = [split.sources[place] for split, place in places]
        return [f"{int(self.keys[index]):016x} {source}" for index, source in zip(indices, sources, strict=True)]


def _joined(arrays: Sequence[npt.NDArray[Number]]) -> npt.NDArray[Number]:
    """Join arrays; a single one is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class Views:
    """The views of a training set's samples, batch by batch."""

    def __init__(
        self,
        samples: Samples,
        *,
        size: int,
        seed: int,
        settings: ViewSettings,
        on_device: bool = False,
        decode_on: DecodeOn = "cpu",
        exact: bool = False,
        fused: bool = False,
    ) -> None:
        """Draw views of `size` x `size` pixels from `seed`.

        Args:
            on_device: batches carry stored images, of which the device makes the views (`makes_views_on_device`).
            decode_on: where stored images are decoded, unless they are kept decoded.
            exact: decode at full size even where less would do, so that views are the same wherever they are made.
            fused: a GPU makes its views in compiled kernels (`views.fused`).
        """
        self.samples, self.size, self.seed, self.settings = samples, size, seed, settings
        self._on_device, self._exact, self.fused = on_device, exact, fused
        self.resident: Tensor | None = None
        """All stored images on the device, uint8 [N, S, S, 3], of which a batch's images are then the indices; see `reside`."""
        self._resides = False
        self._encoded = decode_on == "cuda" and not samples.decoded
        if self._encoded:
            check_gpu_decoding(samples.encoded(0), on_device=on_device)
        elif on_device:
            samples.keep_decoded(memory_share())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"resident": None}  # which loader processes have no use for

    def reside(self, device: Device, wanted: Resident) -> bool:
        """Bring all images to the device where that is wanted, and has room for them if `auto`; returns whether it was done.

        Raises:
            SettingsError: they are wanted there, but not their views; or a GPU decodes them.
        """
        if wanted == "on" and (not self._on_device or self._encoded):
            raise SettingsError(
                "data.resident is on, but "
                + (
                    "data.decode_on is cuda"
                    if self._encoded
                    else "views are not made on the training device (data.views_on)"
                )
                + "; set data.resident=auto"
            )
        makes_views = self._on_device and not self._encoded
        fits = self.samples.decoded_bytes <= _RESIDENT_SHARE * device.free_memory
        if wanted == "on" or (wanted == "auto" and makes_views and fits):
            self.resident, self._resides = self.samples.upload(device.torch_device), True
        return self._resides

    def batch(self, taken: SampleSlice) -> Batch:
        """Make the batch of these positions of the sampler."""
        samples, seed, settings = self.samples, self.seed, self.settings
        indices, numbers, partners = taken
        keys, labels = samples.keys[indices], samples.labels[indices]
        mixing, shown, shown_numbers = None, indices, numbers
        if partners is not None:
            shown, shown_numbers, rows = _with_partners(indices, numbers, partners)
            mixing = draw_mixing(keys, numbers, rows, samples.labels[partners], seed=seed, settings=settings)
        drawn = draw_views(samples.keys[shown], shown_numbers, stored=samples.image_size, seed=seed, settings=settings)
        lengths = None
        if self._resides:
            images = torch.from_numpy(shown)
        elif not self._on_device:
            images = self._make(shown, drawn)
        elif not self._encoded:
            images = samples.read(shown)
        else:
            images, lengths = join_files([samples.encoded(index) for index in shown.tolist()])
        return Batch(
            images=images,
            labels=torch.from_numpy(labels),
            keys=torch.from_numpy(keys.view(np.int64)),
            numbers=torch.from_numpy(numbers),
            views=drawn if self._on_device else None,
            mixing=mixing,
            lengths=lengths,
        )

    def _make(self, indices: Indices, parameters: ViewParameters) -> Tensor:
        """Make views, image by image into the batch: uint8 [B, 3, V, V]."""
        views = empty_images(len(indices), self.size).permute(0, 3, 1, 2)
        boxes, mirrors = parameters.box.tolist(), parameters.mirror.tolist()
        for index, box, mirror, view in zip(indices.tolist(), boxes, mirrors, views, strict=True):
            shrink = 1 if self._exact else _shrink(box, self.size)
            picture = self.samples.picture(index, shrink=shrink)
            scale = shrink if picture.shape[-1] < self.samples.image_size else 1
            crop_sample(picture, [edge / scale for edge in box], mirror=mirror, out=view)
        return finish_views(views, parameters, self.settings)


def _shrink(box: Sequence[int], size: int) -> int:
    """Return by how much a JPEG may be shrunk as it is decoded for a view of `size` pixels, so that resizing never enlarges: 1, 2, 4, 8."""
    _, _, width, height = box
    return next((shrink for shrink in (8, 4, 2) if min(width, height) >= shrink * size), 1)


def makes_views_on_device(views_on: ViewsOn, device_kind: str) -> bool:
    """Return whether the training device makes the views, which relieves the loaders where the device is a GPU."""
    return views_on == "device" or (views_on == "auto" and device_kind == "cuda")


def _with_partners(indices: Indices, numbers: Indices, partners: Indices) -> tuple[Indices, Indices, Indices]:
    """Append the partners that a batch lacks to its samples and view numbers, and return the row of each sample's partner too."""
    shown = list(zip(indices.tolist(), numbers.tolist(), strict=True))
    wanted = list(zip(partners.tolist(), numbers.tolist(), strict=True))
    rows = {pair: row for row, pair in enumerate(shown)}
    for pair in wanted:
        if pair not in rows:
            rows[pair] = len(shown)
            shown.append(pair)
    pairs = np.array(shown, dtype=np.int64)
    return pairs[:, 0], pairs[:, 1], np.array([rows[pair] for pair in wanted], dtype=np.int64)


class MicroBatches(TorchDataset[Batch]):
    """Item p is the micro-batch that begins at position p of the sampler."""

    def __init__(
        self,
        views: Views,
        order: StatelessSampler,
        *,
        count: int,
        parts: int = 1,
        teacher_outputs: RecordedOutputs | None = None,
    ) -> None:
        """Cut each step of `count` samples into `parts` micro-batches."""
        self.count = count
        self._parts = parts
        self._views, self._order, self._teacher_outputs = views, order, teacher_outputs

    def __getitem__(self, position: int) -> Batch:
        # The last part of its step that begins at or before the position.
        part = ((position % self.count + 1) * self._parts - 1) // self.count
        taken = self._order.take(position, position + len(_shard(part, self.count, self._parts)))
        batch = self._views.batch(taken)
        labeled = self._views.samples.labeled
        if labeled is not None:  # the weights depend on the whole step
            first = position - position % self.count
            count = labeled[self._order.take(first, first + self.count).indices].sum()
            weights = torch.from_numpy(labeled[taken.indices] * np.float32(self.count / max(1, count)))
            batch = batch._replace(label_weights=weights)
        if self._teacher_outputs is not None:
            batch = batch._replace(recorded=self._teacher_outputs.read(taken.indices, taken.numbers))
        return batch


class StoredImages(TorchDataset[Batch]):
    """Items are the images of a split at some indices, whole as they are stored."""

    def __init__(self, split: Split, device: Device, batch_size: int) -> None:
        self._split, self._device, self._batch_size = split, device, batch_size

    def __getitem__(self, indices: Sequence[int]) -> Batch:
        """Where another number of images would be another graph, the last image fills the batch up."""
        filled = self._device.filled(indices, self._batch_size)
        return Batch(
            images=self._split.read(filled),
            labels=torch.from_numpy(self._split.labels[filled]),
            keys=torch.from_numpy(self._split.keys[filled].view(np.int64)),
            numbers=torch.zeros(len(filled), dtype=torch.int64),
        )


def _shard(part: int, count: int, parts: int) -> range:
    """Return shard `part` of `count` positions in `parts` shards, whose lengths differ by at most one."""
    return range(part * count // parts, (part + 1) * count // parts)


def micro_batch_size(settings: TrainingSettings, world_size: int) -> int:
    """Return the samples of a process's micro-batch (some have one less); a `SettingsError` with fewer samples than micro-batches."""
    parts = world_size * settings.accumulation
    if settings.batch_size < parts:
        raise SettingsError(
            f"batch_size = {settings.batch_size} cannot be divided among {world_size} processes x {settings.accumulation} micro-batches, "
            f"since each needs an image; choose {parts} or more, or less accumulation or fewer processes"
        )
    return -(-settings.batch_size // parts)


def shard_positions(settings: TrainingSettings, *, step: int, rank: int, world_size: int) -> list[range]:
    """Return the positions of each micro-batch of a process in a step."""
    first, parts = step * settings.batch_size, world_size * settings.accumulation
    shards = (_shard(part, settings.batch_size, parts) for part in range(rank, parts, world_size))
    return [range(first + shard.start, first + shard.stop) for shard in shards]


def positions(
    settings: TrainingSettings, *, first_step: int, last_step: int, rank: int, world_size: int
) -> Iterator[int]:
    """Yield the first position of each micro-batch of this process, step by step."""
    for step in range(first_step, last_step):
        yield from (shard.start for shard in shard_positions(settings, step=step, rank=rank, world_size=world_size))


def make_loader(
    batches: TorchDataset[Batch],
    starts: Iterable[Any],
    *,
    workers: int,
    pin_memory: bool,
    timeout_s: float = 0,
    observer: LoaderObserver | None = None,
) -> Generator[Batch]:
    """Yield the micro-batches at `starts`, in this order, prefetched by `workers` processes; without any, each is made when asked for.

    The loader is meant for one whole training. Its processes compute with one thread each, are forked from a server
    (`child_processes.SERVED`), and share the decoded images of the splits.

    Args:
        starts: indices into `batches`, such as positions of the sampler.
        pin_memory: page-lock the memory of the processes' batches, so that copies to a GPU (`batch.to_device`) overlap with its work.
        timeout_s: longest time for a batch of a process; 0: no limit.
        observer: is notified about the processes, if there are any.

    Raises:
        TrainerError: raised in a loader process, when its batch's turn comes.
        TrainingError: a loader process was killed.
        LostProcessError: the processes had no batch within `timeout_s`.
    """
    memory = BatchMemory(workers, page_locked=pin_memory) if workers else None
    loader: DataLoader[_Outcome] = DataLoader(
        _Outcomes(batches, memory),
        batch_size=None,
        sampler=starts,
        num_workers=workers,
        prefetch_factor=PREFETCHED if workers else None,
        multiprocessing_context=SERVED if workers else None,
        worker_init_fn=_begin,
        generator=torch.Generator(),  # torch draws a seed here, which must not move what a step draws after a resume
    )
    outcomes: Any = iter(loader)
    started = loader_processes(outcomes) if workers else []
    if observer is not None and workers:
        observer.loader_processes([process.pid for process in started])
    limit = _Limit(started, timeout_s)
    try:
        while (following := _next(outcomes, observer if workers else None, limit)) is not None:
            outcome, seconds = following
            if isinstance(outcome, TrainerError):
                raise outcome
            if observer is not None and isinstance(outcome, Batch):
                observer.batch_made(len(outcome.labels), seconds)
            yield outcome
            del outcome, following  # its memory is used again
    finally:
        limit.ended.set()
        if started:
            # Now, since an error's traceback would keep the iterator, and so the processes.
            end_loader_processes(outcomes)
        for process in started:
            process.kill()  # the interpreter would wait at its end for one that hangs
        if memory is not None and pin_memory:
            wait_for_copies()
            memory.unlock_pages()
        del outcomes


_Outcome = tuple[Batch | TrainerError, float]
"""A micro-batch, and the seconds that it took."""


class _Outcomes(TorchDataset[_Outcome]):
    """Micro-batches, or errors in their place, since torch would put the traceback of the process into an error's message."""

    def __init__(self, batches: TorchDataset[Batch], memory: BatchMemory | None) -> None:
        self._batches, self.memory = batches, memory  # that loader processes use

    def __getitem__(self, start: Any) -> _Outcome:
        outcome: Batch | TrainerError
        began = time.perf_counter()
        try:
            outcome = self._batches[start]
        except TrainerError as error:
            outcome = error
        return outcome, time.perf_counter() - began


class _Limit:
    """A limit on the time of a batch, also while its process hands it over; 0 seconds: no limit."""

    def __init__(self, processes: Sequence[Any], seconds: float) -> None:
        self.seconds, self.passed = seconds, False
        self.processes, self._since = processes, math.inf
        self.ended = threading.Event()
        if processes and seconds:
            threading.Thread(target=self._watch, name="loader-limit", daemon=True).start()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = math.inf

    def _watch(self) -> None:
        while not self.ended.wait(_POLL_S):
            if time.monotonic() - self._since > self.seconds:
                self.passed = True
                for process in self.processes:
                    process.kill()  # so that the wait for a batch, or for the rest of it, ends with an error
                return


def _next(outcomes: Any, observer: LoaderObserver | None, limit: _Limit) -> _Outcome | None:
    if observer is not None:
        observer.batches_ready(batches_ready(outcomes))
    try:
        with limit:
            following: _Outcome | None = next(outcomes, None)
        return following
    except (RuntimeError, OSError, EOFError) as error:
        if limit.passed:
            raise LostProcessError(
                f"none of {len(limit.processes)} loader processes had a batch within {limit.seconds:g} s, so one of them hangs, probably "
                "where it waits for storage; check that the data set can be read, or set data.workers=0"
            ) from error
        sentinels = [process.sentinel for process in limit.processes]
        if not connection.wait(sentinels, timeout=_POLL_S):  # a process that has ended may be told of a moment later
            raise
        code = next(process.exitcode for process in limit.processes if process.exitcode is not None)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise TrainingError(
            f"one of {len(limit.processes)} loader processes died ({how}), probably for lack of memory; lower "
            "data.workers or batch_size, or give the machine more"
        ) from error


def _begin(worker: int) -> None:
    """Prepare a loader process to end with the training process, and not before it, since its batches may be needed for a last step."""
    os.setpgid(0, 0)  # out of the training process' group, which a launcher asks to end as a whole
    end_with_parent()
    torch.set_num_threads(1)
    info: Any = get_worker_info()
    info.dataset.memory.serve(worker)
