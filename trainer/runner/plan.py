"""The plan of a run of a given size: hours, dollars, disk and memory of each stage, and the nearest limit, before anything is rented.

Arithmetic alone: what a stage does with each image, times what was measured of one (`RATES`). Disk and memory are counts. Hours carry the
speed of one device over to others, so a stage is refused for its hours only where they are far beyond the limit (`HOURS_DOUBT`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.config import TOP_K, ReinforceSettings, Settings
from trainer.data.sampler import HELD, SHARD, WINDOW
from trainer.io import limits
from trainer.io.costs import Machines, dollars_text
from trainer.io.errors import SettingsError
from trainer.io.formatting import aligned, duration, percent, short, size
from trainer.runner.training_work import TrainingWork

if TYPE_CHECKING:
    from trainer.models.networks import Classifier

HOURS_DOUBT = 2.0
"""Factor by which planned hours may be off: a GPU reaches a fifth to two fifths of its peak, by model and batch."""
PEAK_FLOPS: Mapping[str, float] = {
    "p4d": 312e12,
    "p4de": 312e12,
    "p5": 989e12,
    "p5e": 989e12,
    "g5": 70e12,
    "g6": 121e12,
}
"""Family of AWS's instances -> dense bf16 operations a second of a GPU, from the makers' data sheets."""
EXPORT_PASSES = 4
"""Passes of the student over the photos that its variants are judged by: itself, fp32, int8, and the chosen one on test photos."""


class Rate(NamedTuple):
    """What was measured, or assumed, of one thing."""

    value: float
    unit: str
    source: str


_FEWER_JUDGED = "set smaller data.test_fraction and data.val_fraction"
_PREPARE = "measured: python tests/benchmarks/bench_prepare.py"
_DATA = "measured: python tests/benchmarks/bench_data.py (docs/performance.md)"
_STEP = "measured: python tests/benchmarks/bench_distillation.py (docs/performance.md)"
RATES: Mapping[str, Rate] = {
    "decode small": Rate(4.4e-3, "s of a core for a photo of 46 kB, 500 x 375", _PREPARE),
    "decode medium": Rate(16.9e-3, "s of a core for a photo of 153 kB, 1024 x 768", _PREPARE),
    "decode large": Rate(0.199, "s of a core for a photo of 1,541 kB, 4000 x 3000", _PREPARE),
    "read": Rate(0.03, "s for each photo of a store, one after another in each process", "assumed"),
    "list": Rate(0.03, "s for 1,000 objects of a store, 16 large folders at a time, by configure and by prepare", "assumed"),
    "square": Rate(34e3, "bytes of a stored JPEG of 256 px with data.encoding=jpeg; of others by their area", _PREPARE),
    "fast square": Rate(17.4e3, "the same with data.encoding=fast-jpeg", _DATA),
    "facts": Rate(190, "bytes of memory an image in prepare: its listing, or what is decided by", _PREPARE),
    "lists": Rate(1770, "the same with several labels an image, or data.near_duplicates=separate", _PREPARE),
    "order": Rate(34, "bytes of memory an image in each training and each loader process", "counted: key, label, twice; mask"),
    "process": Rate(1.4 * 2**30, "bytes of memory of a training process", _STEP),
    "utilization": Rate(0.197, "of a GPU's peak: ViT-S/16, bf16, compiled, 256 images, one H100", _STEP),
    "fp32": Rate(1 / 16, "of a GPU's bf16 speed, in which evaluate computes", "data sheets of A100 and H100; A10G has half"),
    "training": Rate(124e9, "operations a second and core in training: ViT-Ti/16, fp32", _STEP),
    "inference": Rate(186e9, "operations a second and core in inference: ViT-B/16, fp32", _STEP),
    "loading": Rate(2211, "views a second and core", _DATA),
    "doubling": Rate(0.9, "of twice the speed on twice the nodes", "assumed, as forecasts do"),
    "disk": Rate(131e6, "bytes a second onto a node's disk", "assumed: that of a gp3 volume; NVMe is faster"),
}  # fmt: skip
_DECODED = {46e3: "decode small", 153e3: "decode medium", 1541e3: "decode large"}  # bytes of a file -> rate


@dataclass(frozen=True, kw_only=True)
class SourceSize:
    """The size of a source."""

    images: int
    file_bytes: float  # of a file, in the mean
    labeled: float = 1.0  # share of them that has a label

    @property
    def decode_s(self) -> float:
        """Seconds of a core to decode a photo, by the bytes of its file."""
        each = [RATES[name].value / count for count, name in _DECODED.items()]
        return self.file_bytes * float(np.interp(self.file_bytes, [*_DECODED], each))


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a pod has."""

    cores: float
    memory: float  # bytes
    disk: float  # bytes for what it fetches or writes
    hours: float = math.inf  # longest time of its work


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run works: the nodes of its trainings, and the pods of its other stages."""

    node: Room
    machines: Machines
    peak_flops: float  # bf16 operations a second of a process's device; 0 on processors
    task: Room
    preparing: tuple[Room, Machines] | None = None  # nodes that prepare the images; None: the pod of the task does


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What a stage takes."""

    stage: str
    work: str
    room: Room
    seconds: Mapping[
        str, float
    ]  # what its time is spent on, at the same time; NaN where a network's operations are not known
    disk: float  # bytes, of each node
    memory: float  # bytes, of each node
    ways: Mapping[str, str]  # limit -> what to do where it is exceeded
    machines: Machines | None = None
    refused: str = ""  # what it refuses, whatever the room

    @property
    def hours(self) -> float:
        return max(self.seconds.values()) / 3600 if not any(map(math.isnan, self.seconds.values())) else math.nan

    @property
    def shares(self) -> Mapping[str, float]:
        """Share of each limit that it takes."""
        hours = 0.0 if math.isnan(self.hours) else self.hours / self.room.hours
        return {"disk": self.disk / self.room.disk, "memory": self.memory / self.room.memory, "hours": hours}

    def too_much(self, doubt: float = HOURS_DOUBT) -> Iterator[str]:
        """Yield a sentence for each limit that it exceeds: the number, the limit, the way out; for its hours by that factor."""
        if self.refused:
            yield f"{self.stage} {self.refused}"
        room = self.room
        numbers = {
            "disk": (f"{size(self.disk)} of disk", size(room.disk)),
            "memory": (f"{size(self.memory)} of memory", size(room.memory)),
            "hours": (f"{self.hours:,.0f} h", f"{room.hours:,.0f} h"),
        }
        for name, (needed, there) in numbers.items():
            if self.shares[name] > (doubt if name == "hours" else 1.0):
                yield f"{self.stage} needs {needed} and has {there}: {self.ways[name]}"

    def row(self) -> tuple[str, ...]:
        known = not math.isnan(self.hours)
        nearest = max(self.shares, key=lambda name: self.shares[name])
        dollars = self.machines.dollars(3600 * self.hours) if self.machines and known else None
        return (
            self.stage,
            self.work,
            duration(3600 * self.hours) if known else "not known",
            max(self.seconds, key=lambda name: self.seconds[name]) if known else "",
            dollars_text(dollars),
            size(self.disk),
            size(self.memory),
            f"{nearest} {percent(self.shares[nearest])}",
        )


def plan(settings: Settings, photos: SourceSize, place: Place) -> list[StagePlan]:
    """Plan the stages whose work grows with the images, in their order; builds the networks on the meta device."""
    run = _Run(settings=settings, photos=photos, place=place)
    return [run.prepare(), *run.trainings(), *run.judging()]


class _Fetch(NamedTuple):
    """What each node of a training fetches, in bytes."""

    before: float  # its first step
    all: float
    held: float  # on its disk, at least


@dataclass(frozen=True, kw_only=True)
class _Run:
    settings: Settings
    photos: SourceSize
    place: Place

    @cached_property
    def work(self) -> TrainingWork:
        data, photos = self.settings.data, self.photos
        taught = photos.labeled * photos.images * (1 - data.val_fraction - data.test_fraction)
        return TrainingWork(settings=self.settings, taught=taught, unlabeled=(1 - photos.labeled) * photos.images)

    @cached_property
    def square(self) -> float:
        """Bytes of a stored image, as `prepare` chooses its encoding where the data set goes to a store."""
        from trainer.data.preparation import REMOTE_RAW_BYTES

        encoding, pixels = self.settings.data.encoding, self.settings.data.image_size**2
        if encoding == "auto":
            encoding = "raw" if 3 * pixels * self.photos.images <= REMOTE_RAW_BYTES else "fast-jpeg"
        rate = {"jpeg": "square", "fast-jpeg": "fast square"}.get(encoding)
        return RATES[rate].value * pixels / 256**2 if rate else 3.0 * pixels

    @cached_property
    def prepared(self) -> float:
        """Bytes of disk that `prepare` needs, which frees decoded images as it writes the largest split, some shards at a time."""
        from trainer.data.preparation import SHARD_BYTES

        largest = max(self.work.taught, self.work.unlabeled)
        room = self.place.preparing[0] if self.place.preparing else self.place.task
        shard = SHARD * self.square if largest > SHARD * WINDOW else SHARD_BYTES
        shards = min(room.cores * shard, largest * self.square)
        return (2 * self.photos.images - largest) * self.square + shards

    @property
    def smaller(self) -> str:
        return f"store smaller images (data.image_size, now {self.settings.data.image_size})"

    def prepare(self) -> StagePlan:
        images, data = self.photos.images, self.settings.data
        room, machines = self.place.preparing or (self.place.task, None)
        nodes = machines.nodes if machines else 1
        seconds = (RATES["read"].value + self.photos.decode_s) / (room.cores * nodes) + 2 * RATES["list"].value / 1000
        if nodes > 1:  # the first node fetches what the others have decoded
            seconds += (nodes - 1) / nodes * self.square / RATES["disk"].value
        return StagePlan(
            stage="prepare",
            work=f"{short(images)} photos of {size(self.photos.file_bytes)}",
            room=room,
            seconds={"reading and decoding": images * seconds},
            disk=self.prepared,
            memory=images * RATES["lists" if data.multi_label or data.near_duplicates == "separate" else "facts"].value,
            ways={
                "disk": f"name a pool with a larger cache for it (PREPARE_POOL), or {self.smaller}",
                "memory": "name a pool with more memory for it (PREPARE_POOL), or give a part of the photos",
                "hours": "take more nodes for it (PREPARE_NODES)",
            },
            machines=machines,
            refused=""
            if images <= limits.SOURCE_IMAGES
            else f"takes at most {limits.SOURCE_IMAGES:,} photos of a source: give a part of them",
        )

    def trainings(self) -> Iterator[StagePlan]:
        work, reinforce = self.work, self.settings.reinforce
        stored = {"pretrain": work.taught + work.unlabeled * bool(self.settings.pretrain.mae.epochs)}
        recorded = 0.0
        if self.settings.distill.reads_recording:
            recorded = work.learned * reinforce.views * _record_bytes(reinforce, work.teacher[0])
        for stage, parts in work.parts().items():
            images = stored.get(stage, work.learned)
            way = self.smaller
            if stage == "distill" and recorded >= images * self.square:
                way = "record less (reinforce.views, reinforce.tokens)"
            seen = sum(seen for _, seen, _ in parts.values())
            fetch = self._fetch(images, seen / max(1, images), recorded if stage != "pretrain" else 0.0)
            yield self._training(stage, list(parts.values()), fetch, way)

    def _fetch(self, images: float, rounds: float, recorded: float) -> _Fetch:
        """Plan how a node comes by images that it reads so often, and by `recorded` bytes: those of a large set some windows before."""
        whole, window = images * self.square, WINDOW * SHARD * self.square
        if whole <= window:
            return _Fetch(before=whole + recorded, all=whole + recorded, held=whole + recorded)
        if whole + recorded <= self.place.node.disk:
            return _Fetch(before=window + recorded, all=whole + recorded, held=whole + recorded)
        held = min(whole, HELD * window) + recorded
        return _Fetch(before=window + recorded, all=math.ceil(rounds) * whole + recorded, held=held)

    def _training(self, stage: str, parts: Sequence[tuple[str, float, float]], fetch: _Fetch, way: str) -> StagePlan:
        """Plan a training of `parts`: text, images that are seen, operations for each."""
        place, node = self.place, self.place.node
        nodes, processes = place.machines.nodes, place.machines.processes_per_node
        speed = processes * place.peak_flops * RATES["utilization"].value or node.cores * RATES["training"].value
        speed *= nodes ** (1 + math.log2(RATES["doubling"].value))
        fetch_s, all_s = (count / RATES["disk"].value for count in (fetch.before, fetch.all))
        loaded_s = sum(seen for _, seen, _ in parts) / (nodes * node.cores * RATES["loading"].value)
        computed_s = sum(seen * operations for _, seen, operations in parts) / speed
        seconds = {"computing": fetch_s + computed_s, "loading": fetch_s + loaded_s, "fetching": all_s}
        hours = max(seconds.values()) / 3600
        limit = "" if math.isnan(hours) else f", or running_minutes = {60 * math.ceil(HOURS_DOUBT * hours)} of the pool"
        return StagePlan(
            stage=stage,
            work=" and ".join(text for text, *_ in parts),
            room=node,
            seconds=seconds,
            disk=fetch.held,
            memory=processes * RATES["process"].value
            + (processes + node.cores) * self.photos.images * RATES["order"].value,
            ways={
                "disk": f"give the pool a cache, and its nodes the disk, with room for that, or {way}",
                "memory": "take a pool whose nodes have more memory, or set data.workers",
                "hours": f"more nodes, fewer epochs{limit}",
            },
            machines=place.machines,
        )

    def judging(self) -> Iterator[StagePlan]:
        settings, data, (teacher, student) = self.settings, self.settings.data, self.work.operations
        labeled = self.photos.labeled * self.photos.images
        test, val = labeled * data.test_fraction, labeled * data.val_fraction
        doubted = {"off": 0.0, "held_out": val, "all": val + self.work.taught}[settings.evaluate.label_issues]
        yield self._evaluation(
            test + doubted, test * (student + teacher) + doubted * teacher, (test + max(val, doubted)) * self.square
        )
        if settings.export.enabled:
            judged = min(settings.export.test_images, val) + min(settings.export.test_images, test)
            yield StagePlan(
                stage="export",
                work=f"{short(judged)} photos",
                room=self.place.task,
                seconds={
                    "computing": EXPORT_PASSES * judged * student / (self.place.task.cores * RATES["inference"].value)
                },
                disk=(test + val) * self.square,
                memory=RATES["process"].value,
                ways={
                    "disk": _FEWER_JUDGED,
                    "memory": "give the task more memory",
                    "hours": "fewer images (export.test_images)",
                },
            )

    def _evaluation(self, seen: float, operations: float, fetched: float) -> StagePlan:
        """Plan the evaluation of images that are seen once or twice; `fetched` are bytes for each node."""
        place, node = self.place, self.place.node
        nodes, processes = place.machines.nodes, place.machines.processes_per_node
        on_gpus = processes * place.peak_flops * RATES["utilization"].value * RATES["fp32"].value
        speed = nodes * (on_gpus or node.cores * RATES["inference"].value)
        fetch_s = fetched / RATES["disk"].value
        return StagePlan(
            stage="evaluate",
            work=f"{short(seen)} photos",
            room=node,
            seconds={
                "computing": fetch_s + operations / speed,
                "loading": fetch_s + seen / (nodes * node.cores * RATES["loading"].value),
            },
            disk=fetched,
            memory=processes * RATES["process"].value,
            ways={
                "disk": _FEWER_JUDGED,
                "memory": "take a pool whose nodes have more memory, or fewer processes on each (PROCESSES)",
                "hours": "more nodes",
            },
            machines=place.machines,
        )


def table(plans: Sequence[StagePlan], place: Place) -> list[str]:
    """Format plans as text: a row for each stage, the sum, what is too much, and the rates."""
    rows = [
        ("stage", "work", "time", "spent on", "dollars", "disk", "memory", "nearest limit"),
        *(one.row() for one in plans),
    ]
    hours = sum(one.hours for one in plans)
    costs = [one.machines.dollars(3600 * one.hours) for one in plans if one.machines]
    dollars = sum(filter(None, costs)) if None not in costs and not math.isnan(hours) else None
    rows.append(
        (
            "together",
            "",
            "not known" if math.isnan(hours) else duration(3600 * hours),
            "",
            dollars_text(dollars),
            "",
            "",
            "",
        )
    )
    task, node = place.task, place.node
    problems = [problem for one in plans for problem in one.too_much(doubt=1.0)]
    head = (
        f"Trainings and evaluation on {place.machines}: each node {node.cores:g} cores, {size(node.memory)} of memory, "
        f"{size(node.disk)} of cache, {node.hours:g} h. Other stages in pods of {task.cores:g} cores, {size(task.memory)} of memory, "
        f"{size(task.disk)} of disk." + (f" Images are prepared on {place.preparing[1]}." if place.preparing else "")
    )
    return [
        head,
        "",
        *aligned(rows, right={4, 5, 6}),
        "",
        *(problems or ["Every stage is within its limits."]),
        "",
        "By these rates:",
        *aligned([(f"  {name}", short(rate.value), rate.unit, rate.source) for name, rate in RATES.items()], right={1}),
    ]


def check(plans: Sequence[StagePlan]) -> None:
    """Raise a `SettingsError` that names all limits that a run exceeds beyond doubt."""
    if problems := [problem for one in plans for problem in one.too_much()]:
        raise SettingsError("the run cannot work at this size: " + ". ".join(problems))


def _record_bytes(reinforce: ReinforceSettings, teacher: Classifier | None) -> float:
    """Return the bytes of a view's record; classes that are not known here count as few, features of a teacher that is not as none."""
    from trainer.models import networks

    kept = 4.0 * (reinforce.top_k if isinstance(reinforce.top_k, int) else TOP_K) + 8
    if teacher is not None and reinforce.features:
        kept += networks.feature_size(teacher) * (2 if reinforce.feature_format == "fp16" else 1)
    if teacher is not None and reinforce.tokens:
        kept += math.prod(networks.token_shape(teacher)) * (2 if reinforce.token_format == "fp16" else 1)
    return kept
