"""Recording: views of training images through the teacher into shards, on one process or many.

Work is a list of units (`shards.Unit`). The batches of a unit depend on the unit alone, so its records are the same on whatever
process it is recorded. All batches have one size: a block is cut evenly, and where its last batch is short the block's last sample fills
it up.

Loader processes make views, the device works at a batch while the one before is read back, and a thread writes finished shards. A store
that does not answer or refuses ends in a `StorageError`, a file that cannot be written in an `OutputError`.

Shapes: B samples in a batch, K logits a record, C classes, D features.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from trainer.config import Workers
from trainer.data.batch import Batch
from trainer.data.loader import Views, make_loader
from trainer.data.sampler import Indices, SampleSlice, partners
from trainer.data.views.rendering import mixes
from trainer.devices import ReadBack
from trainer.devices.process_group import Processes
from trainer.graph import SCHEMA_VERSIONS
from trainer.io import artifacts, storage
from trainer.io.child_processes import start_server
from trainer.io.errors import ArtifactError, TrainingError, make_directory, writing_to
from trainer.io.formatting import listed
from trainer.objectives.distillation import recording_report, shards
from trainer.objectives.distillation.frozen_teacher import FrozenTeacher
from trainer.objectives.distillation.losses import TeacherOutputs
from trainer.objectives.distillation.recording import RecordingDescription, Records
from trainer.objectives.distillation.recording_report import Coverage, RecordedWork
from trainer.objectives.distillation.shards import ShardStore, Unit
from trainer.training.loader_workers import measured_workers
from trainer.training.metric_logger import ProgressBar
from trainer.training.prefetch import make_prefetcher

logger = logging.getLogger(__name__)

VIEWS_BETWEEN_SYNCS = 1024
"""Views that a process records at most before it waits for the others: a slow one keeps them waiting for minutes, not for a whole shard."""

_MAX_NAMES = 8  # samples that a message names


# ---------------------------------------------------------------------------------------------------------------------
# Batches


class UnitBatch(NamedTuple):
    """A batch of a unit."""

    unit: Unit
    start: int  # where it begins in the unit


def batch_dividing_block(block: int, batch_size: int) -> int:
    """Return the samples a batch: at most `batch_size`, and so many that the last batch of a block is nearly full."""
    return math.ceil(block / math.ceil(block / batch_size))


def batches_of_units(units: Iterable[Unit], batch: int) -> Iterator[UnitBatch]:
    """Yield the batches of all units, one unit after the other."""
    return (UnitBatch(unit, start) for unit in units for start in range(0, unit.count, batch))


class UnitBatches(TorchDataset[Batch]):
    """Item `UnitBatch` is a full batch of views; where the unit ends before it does, the unit's last sample fills it up."""

    def __init__(self, views: Views, count: int) -> None:
        """`count` samples a batch."""
        self._views, self._count = views, count
        self._partners: tuple[Unit, Indices] | None = None  # of the samples of a unit

    def __getitem__(self, part: UnitBatch) -> Batch:
        unit = part.unit
        rows = np.arange(part.start, part.start + self._count, dtype=np.int64)
        indices = unit.first + np.minimum(rows, unit.count - 1)
        mixed: Indices | None = None
        if mixes(self._views.settings):
            if self._partners is None or self._partners[0] != unit:
                samples, of = self._views.samples, range(unit.first, unit.first + unit.count)
                self._partners = unit, partners(len(samples), self._views.seed, unit.view, samples.labeled, of)
            mixed = self._partners[1][indices - unit.first]
        return self._views.batch(SampleSlice(indices, np.full_like(indices, unit.view), mixed))


# ---------------------------------------------------------------------------------------------------------------------
# Records


def record_batches(
    batches: Iterable[Tensor], teacher: FrozenTeacher, description: RecordingDescription
) -> Iterator[Records]:
    """Yield the records [B] of each batch of views, uint8 [B, 3, V, V] on the teacher's device.

    A batch is read back when the next one is under way, so that the device never waits for the host.
    """
    waiting: ReadBack | None = None
    for images in batches:
        started = ReadBack(summarize(teacher(images), description))
        if waiting is not None:
            yield pack(waiting.wait(), description)
        waiting = started
    if waiting is not None:
        yield pack(waiting.wait(), description)


@torch.no_grad()
def summarize(outputs: TeacherOutputs, description: RecordingDescription) -> dict[str, Tensor]:
    """Compute the parts of records by their names, where the outputs are: the largest logits with the sum of the rest, features, tokens."""
    names, parts = {*(description.record.names or ())}, {}
    if description.top_k:
        values, indices = outputs.logits.topk(description.top_k, dim=1)
        others = outputs.logits.scatter(1, indices, -torch.inf)
        rest = torch.stack([others.logsumexp(1), (others / 2).logsumexp(1)], 1)
        parts = {"indices": indices, "logits": values, "rest": rest}
    for name, step, numbers in (("features", "scale", outputs.features), ("tokens", "token_steps", outputs.tokens)):
        if name in names:
            assert numbers is not None, "the teacher is asked for what is recorded"
            parts |= dict(zip((step, name), quantize(numbers), strict=True)) if step in names else {name: numbers}
    return parts


def pack(parts: Mapping[str, Tensor], description: RecordingDescription) -> Records:
    """Pack the parts, on the host, into records [B]; what half precision cannot hold becomes infinite."""
    records = np.empty(len(next(iter(parts.values()))), dtype=description.record)
    with np.errstate(over="ignore"):
        for name, part in parts.items():
            records[name] = part.numpy()
    return records


def quantize(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of [..., D] to 255 steps from minus to plus its largest number: the steps [..., 1], and their counts, int8 [..., D].

    A number is off by half a step at most. What is not finite leaves a step that is not finite.
    """
    step = numbers.abs().amax(-1, keepdim=True) / 127
    is_usable = step.isfinite() & (step > 0)
    counts = numbers.where(is_usable, 0) / step.where(is_usable, 1)
    return step, counts.round().clamp(-127, 127).to(torch.int8)


def unusable(records: Records) -> npt.NDArray[np.bool_]:
    """Find which records hold a number that is not finite, [B]; where no class is left over, the logarithm of the rest is -inf."""
    names = {*(records.dtype.names or ())}
    bad: npt.NDArray[np.bool_] = np.zeros(len(records), dtype=np.bool_)
    if "rest" in names:
        bad |= (np.isnan(records["rest"]) | np.isposinf(records["rest"])).any(1)
    for name in {"logits", "features", "scale", "tokens", "token_steps"} & names:
        bad |= ~np.isfinite(records[name]).reshape(len(records), -1).all(1)
    return bad


# ---------------------------------------------------------------------------------------------------------------------
# A job


def recording_digest(description: RecordingDescription, parents: Mapping[str, str]) -> str:
    """Compute the SHA-256 of all that the records depend on, as hexadecimal text."""
    version = SCHEMA_VERSIONS["teacher_outputs"]
    return artifacts.digest({"version": version, "description": description.content(), "parents": parents})


@dataclass(frozen=True, kw_only=True)
class Reinforcement:
    """One recording, on one of its processes."""

    views: Views
    teacher: FrozenTeacher
    description: RecordingDescription
    shards: ShardStore
    processes: Processes
    batch_size: int  # largest number of samples in a batch
    workers: Workers  # loader processes beside this process

    @property
    def units(self) -> list[Unit]:
        """All units."""
        description = self.description
        return shards.units(description.views, samples=description.samples, size=description.block)

    def record(self) -> RecordedWork:
        """Record what an earlier job has not, this process its share of it.

        Raises:
            TrainingError: outputs are not finite; the samples are named, and the units that are finished are kept.
        """
        found = self._found()
        missing = [unit for unit in self.units if unit not in found]
        if found and self.processes.is_first:
            logger.info("reinforce  resuming: %d of %d shards are there", len(found), len(self.units))
        start = time.monotonic()
        self._record(missing)
        return RecordedWork(views=sum(unit.count for unit in missing), seconds=time.monotonic() - start)

    def _found(self) -> set[Unit]:
        """Find the units that an earlier job has finished; each process checks its share."""
        names = self.processes.gather(self.shards.names() if self.processes.is_first else set(), "the shards so far")[0]
        there = [unit for unit in self.units if Path(unit.name).name in names]
        whole = []
        for unit in self._share(there):
            try:
                self.shards.get(unit)
                whole.append(unit)
            except ArtifactError as error:
                logger.warning("recording again: %s", error)
        return {unit for units in self.processes.gather(whole, "the whole shards") for unit in units}

    def _share(self, units: Sequence[Unit]) -> Sequence[Unit]:
        return units[self.processes.rank :: self.processes.world_size]

    def _record(self, missing: Sequence[Unit]) -> None:
        mine, world_size = self._share(missing), self.processes.world_size
        batch = batch_dividing_block(self.description.block, self.batch_size)
        total = sum(math.ceil(unit.count / batch) for unit in mine)
        progress = ProgressBar(
            "reinforce",
            first_step=0,
            total_steps=total,
            images_per_step=batch * world_size,
            active=self.processes.is_first and total > 0,
        )
        stream = self._stream(mine, batch, progress)
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="shards") as writer, progress:
            writing: Future[None] | None = None
            for turn in range(math.ceil(len(missing) / world_size)):
                unit = mine[turn] if turn < len(mine) else None
                records = self._collect(unit, stream, batch)
                if writing is not None:
                    writing.result()
                if unit is not None:
                    writing = writer.submit(self.shards.put, unit, records)
            if writing is not None:
                writing.result()

    def _stream(self, units: Sequence[Unit], batch: int, progress: ProgressBar) -> Iterator[Records]:
        """Yield the records of all batches of these units."""
        parts, batches = list(batches_of_units(units, batch)), UnitBatches(self.views, batch)
        loader = make_loader(
            batches, parts, workers=self._loaders(batches, parts), pin_memory=self.processes.device.pins_memory
        )
        records = record_batches(self._images(loader, len(parts)), self.teacher, self.description)
        for step, (part, found) in enumerate(zip(parts, records, strict=True)):
            progress.show(step, {"view": part.unit.view})
            yield found

    def _images(self, batches: Iterator[Batch], count: int) -> Iterator[Tensor]:
        """The images of `count` batches on the device; the next ones are sent when the teacher has been asked about those before."""
        with closing(make_prefetcher(batches, self.views, self.processes.device)) as prefetcher:
            for _ in range(count):
                yield prefetcher.next().images
                prefetcher.preload()

    def _loaders(self, batches: UnitBatches, parts: Sequence[UnitBatch]) -> int:
        """Return how many loader processes: as set, or as many as keep up with the teacher, measured on the first batches."""
        if self.workers != "auto":
            return self.workers
        if not parts:
            return 0

        def teacher_seconds() -> float:
            images = next(self._images(iter([batches[parts[0]]]), 1))
            times = []
            for _ in range(5):
                start = time.perf_counter()
                self.teacher(images)
                self.processes.device.synchronize()
                times.append(time.perf_counter() - start)
            return statistics.median(times[2:])  # not of the first two, because a device may compile it first

        if self.processes.device.kind != "cpu":
            start_server()  # which imports meanwhile
        chosen = measured_workers("reinforce", batches, cycle(parts), teacher_seconds, self.processes)
        if self.processes.is_first:
            logger.info("reinforce  loader processes beside each process: %d (measured)", chosen)
        return chosen

    def _collect(self, unit: Unit | None, stream: Iterator[Records], batch: int) -> Records:
        """The records of a unit, whose batches come next, [count]; none where the others have one more unit than this process.

        All processes meet equally often, so that none runs so far ahead that the wait for the others at the end would exceed its limit.
        """
        count = unit.count if unit is not None else 0
        records = np.empty(count, dtype=self.description.record)
        together = max(1, VIEWS_BETWEEN_SYNCS // batch)
        for number in range(math.ceil(self.description.block / batch)):
            start = number * batch
            if unit is not None and start < count:
                part = next(stream)[: count - start]
                self._check(unit, start, part)
                records[start : start + len(part)] = part
            if (number + 1) % together == 0:
                self.processes.barrier("the recording of a shard")
        self.processes.barrier("the end of a shard")
        return records

    def _check(self, unit: Unit, start: int, records: Records) -> None:
        rows = np.flatnonzero(unusable(records))
        if not len(rows):
            return
        names = listed(self.views.samples.names(unit.first + start + rows), _MAX_NAMES)
        raise TrainingError(
            f"reinforce: the teacher's outputs on view {unit.view} are not finite, or larger than half precision holds (65,504), for "
            f"{names}; look at these samples and at the teacher, or use reinforce.precision=fp32; what is recorded "
            "so far is kept"
        )

    def assemble(self, directory: Path) -> Coverage | None:
        """Bring all shards into the artifact in the making, each process its share, and count what they hold; None without logits.

        Raises:
            ArtifactError: a shard is not there or damaged.
        """
        if self.processes.is_first:
            storage.remove(directory / shards.FOLDER)
        self.processes.barrier("the collection of the shards")
        make_directory(directory / shards.FOLDER)
        labels, classes, counted = self.views.samples.labels, self.description.classes, []
        for unit in self._share(self.units):
            try:
                content, records = self.shards.get(unit)
            except ArtifactError as error:
                raise ArtifactError(
                    f"reinforce: {error}; run it again, it resumes from what is there. Where there are several machines, "
                    "TRAINER_CHECKPOINTS has to name a place that all of them reach, such as s3://BUCKET/NAME"
                ) from error
            with writing_to(directory):
                (directory / unit.name).write_bytes(content)
            if classes:
                of_unit = labels[unit.first : unit.first + unit.count]
                counted.append(recording_report.count(records, of_unit, classes, self.views.samples.targets))
        parts = self.processes.gather(recording_report.total(counted) if counted else None, "the count of the records")
        there = [part for part in parts if part is not None]
        return recording_report.total(there) if there else None
