"""Records a training: steps, machine, operators, curves, and what is learned."""

from __future__ import annotations

import math
import os
import platform
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import psutil
import torch

from trainer.config import EvidenceSettings
from trainer.devices.torch_private import CompileHooks
from trainer.io.costs import place_here
from trainer.io.host import processor_name, seconds_since_launch, started_unix, usable_cores
from trainer.profiling.evidence import (
    SCHEMA_VERSION,
    AttemptRecord,
    CommunicationRecord,
    CompilationRecord,
    ConfusedRecord,
    ContextRecord,
    Curve,
    OutsideRecord,
    ProcessRecord,
    RankEvidence,
    RankRecord,
    Spans,
    StepRecord,
    TrainingEvidence,
    images_per_second,
    step_images_per_second,
)
from trainer.profiling.evidence_files import write_rank
from trainer.profiling.monitor import Monitor, signals
from trainer.profiling.operator_windows import OperatorWindows
from trainer.profiling.series import ThinnedTable
from trainer.profiling.tensor_sampler import SampledModel, TensorSampler
from trainer.profiling.timeline import PROFILER, CudaClock, HostClock, Timeline, recording_to, seconds_of_a_mark

if TYPE_CHECKING:
    from trainer.profiling.xla_counters import XlaCounters


class Compilations:
    """Counts and times torch's compilations within the steps of a recording, including backward passes."""

    def __init__(self, timeline: Timeline) -> None:
        self.records: dict[int, CompilationRecord] = {}  # by step, of those that compiled something
        self._timeline = timeline
        self._began = 0.0
        hooks = CompileHooks(self._started, self._ended)
        self.start, self.stop = hooks.add, hooks.remove

    def _started(self) -> None:
        self._began = time.perf_counter()

    def _ended(self) -> None:
        if self._timeline.inside_step:
            step, seconds = self._timeline.steps_completed, time.perf_counter() - self._began
            known = self.records.get(step, CompilationRecord(step=step, graphs=0, seconds=0.0))
            graphs, seconds = known.graphs + 1, known.seconds + seconds
            self.records[step] = CompilationRecord(step=step, graphs=graphs, seconds=seconds)


IMPORTED_UNIX = time.time()  # import time of this module, the last to load: torch and the trainer are imported by then


class Startup:
    """Splits the time from the launch of the job, or else the start of the process, to a training's recording into parts."""

    _imports_counted = False

    def __init__(self) -> None:
        """Begin; the first of a process counts its imports too."""
        self._parts: dict[str, float] = {}
        self._began_unix = time.time()
        if not Startup._imports_counted:
            started = started_unix()
            launching = seconds_since_launch() - (time.time() - started)
            # What lies between the imports and here is left out: an interpreter may have waited for a person.
            self._parts = {"launch": max(0.0, launching), "imports": max(0.0, IMPORTED_UNIX - started)}
            Startup._imports_counted = True
        self._counted = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count a block for a part of the start-up, such as `fetch` or `join`."""
        began = time.time()
        yield
        seconds = max(0.0, time.time() - began)
        self._parts[name] = self._parts.get(name, 0.0) + seconds
        self._counted += seconds

    def until(self, recording_unix: float) -> dict[str, float]:
        """Return the seconds of each part before the recording began; the rest is `preparation`."""
        return self._parts | {"preparation": max(0.0, recording_unix - self._began_unix - self._counted)}

    def begin_again(self) -> None:
        """Begin anew after a training, in preparation of the next one."""
        self._parts, self._counted, self._began_unix = {}, 0.0, time.time()


METRIC_POINTS_KEPT = 4096  # points of each metric; a longer curve is thinned evenly


@dataclass
class LoaderStats:
    """The state of a training's loader."""

    workers: int | None = None  # loader processes beside this process; none where nothing is loaded yet
    pids: tuple[int, ...] = ()  # ids of the running loader processes
    ready: float = math.nan  # batches that were ready when the training last asked for one
    made: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=64)
    )  # images and seconds of the last batches

    def loader_processes(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)

    def batches_ready(self, count: float) -> None:
        """Take how many batches are ready as the training asks for one."""
        self.ready = count

    def batch_made(self, images: int, seconds: float) -> None:
        self.made.append((images, seconds))

    @property
    def images_per_second(self) -> float | None:
        """Images a second that the loader can give: all its processes, each as fast as it made its last batches; None before the first."""
        images, seconds = (sum(column) for column in zip(*self.made, strict=True)) if self.made else (0, 0.0)
        return max(1, self.workers or 0) * images / seconds if seconds else None


@dataclass(frozen=True, kw_only=True)
class Sources(SampledModel):
    """The inputs of a recorder beside its timeline and monitor."""

    loader: LoaderStats = field(default_factory=LoaderStats)
    attempts: Callable[[], tuple[AttemptRecord, ...]] = tuple  # all attempts of the training, the last one is this
    communication: Callable[[], CommunicationRecord | None] | None = None  # duration of the gradient exchange
    confused: Callable[[], tuple[ConfusedRecord, ...] | None] = lambda: (
        None
    )  # classes taken for others by the last validation


class Recorder:
    """Records one part of a training in one process: steps, machine, operators and curves.

    with recorder:
        for step in range(first, total):
            with recorder.timeline.step(step, images=batch_size):
                with span("data"): ...
            recorder.metrics(step, {"loss": loss})
    recorder.write(directory)
    """

    def __init__(
        self,
        settings: EvidenceSettings,
        *,
        name: str,
        device: torch.device,
        rank: int,
        world_size: int,
        context: ContextRecord | None = None,
        startup: Startup | None = None,
        sources: Sources | None = None,
    ) -> None:
        """Record the training `name` (`mae`, `finetune` or `distill`) in process `rank`; `startup` splits the time before the recording."""
        sources = sources or Sources()
        self._settings, self._sources = settings, sources
        self.name = name
        self._device = device
        self._rank = rank
        self._world_size = world_size
        on_xla = device.type == "xla"
        watched = () if rank or on_xla else settings.operators_at
        self._windows = OperatorWindows(watched, settings.operators_steps, device)
        if rank:
            self._windows.missing = "recorded by rank 0 only"
        elif on_xla:
            self._windows.missing = "torch.profiler sees how operators are noted for XLA, not what the device computes"
        clock = CudaClock(device) if device.type == "cuda" else HostClock()
        self._counters = _xla_counters() if on_xla else None
        self.timeline = Timeline(
            clock, windows=self._windows, counter=self._counters, queued=lambda: sources.loader.ready
        )
        apart = self._counters.apart if self._counters else nullcontext
        self.tensor_sampler = TensorSampler(settings, self.timeline, self.metrics, sources, apart=apart)
        """Samples of weights, gradients and attention."""
        self._context = context or ContextRecord()
        self._startup = startup
        self._startup_s: dict[str, float] = {}
        self._compilations = self._counters or Compilations(self.timeline)
        columns = ["step", "seconds", "value"]
        self._metrics: dict[str, ThinnedTable] = defaultdict(lambda: ThinnedTable(columns, METRIC_POINTS_KEPT))
        self._costs: dict[str, float] = {}
        self.monitor: Monitor | None = None  # from the beginning of the recording on
        self._began_unix = 0.0
        self._ended_s = 0.0
        self._failed: str | None = None
        self._mark_s: float | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._began_unix = time.time()
        self._startup_s = self._startup.until(self._began_unix) if self._startup else {}
        self.timeline.start()
        machine = int(os.environ.get("LOCAL_RANK", self._rank)) == 0
        self.monitor = Monitor(
            signals(self._device, machine=machine, loaders=lambda: self._sources.loader.pids),
            self._settings.system_interval_s,
            origin_ns=self.timeline.origin_ns,
        )
        if not machine:
            self.monitor.missing["machine"] = "recorded by the first process of the machine only"
        self.monitor.start()
        self._compilations.start()
        self._open.enter_context(recording_to(self.timeline))
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        assert self.monitor is not None
        self._open.close()
        self._compilations.stop()
        self.monitor.stop()
        if error is None:
            self.timeline.finish()
            self.tensor_sampler.finish()
        else:  # the device may never come to what it was given
            self._failed = str(error) or type(error).__name__
        self._windows.finish(self.timeline.totals.steps)
        self._ended_s = self.timeline.now_s()

    def fail(self, why: str) -> None:
        """Record that the training, or a process of it, failed; what was recorded is then read without the other processes."""
        self._failed = self._failed or why

    @property
    def has_begun(self) -> bool:
        return self.monitor is not None

    @property
    def is_compiling(self) -> bool:
        """Whether XLA compiles a graph at this moment; another thread may ask."""
        return self._counters is not None and self._counters.compiling

    def metrics(self, step: int, values: Mapping[str, float], seconds: float | None = None) -> None:
        """Add points to curves, `seconds` since the recording began (now where not given); kept by rank 0, ignored elsewhere."""
        if self._rank:
            return
        seconds = self.timeline.now_s() if seconds is None else seconds
        for name, value in values.items():
            self._metrics[name].append((step, seconds, value))

    def images_per_second(self) -> float | None:
        """Return the rate of the report, over the measured steps so far; None without steps."""
        steps = self.timeline.steps
        return images_per_second({name: steps.column(name) for name in ("profiled", "images", "seconds")})

    def rates_apart(self) -> Mapping[str, float]:
        """Return images a second of all processes' loaders, and of the steps without their waits for data, as far as they are known."""
        loader, steps = self._sources.loader.images_per_second, self.timeline.steps
        rates = {
            "loader": loader and self._world_size * loader,
            "step": step_images_per_second(
                {name: steps.column(name) for name in ("profiled", "images", "seconds", "data")}
            ),
        }
        return {name: rate for name, rate in rates.items() if rate}

    def cost(self, part: str, seconds: float) -> None:
        self._costs[part] = self._costs.get(part, 0.0) + seconds

    def snapshot(self) -> TrainingEvidence:
        """Return this process's evidence so far; for the training's thread, during the recording or afterward."""
        if self.monitor is None:
            raise RuntimeError("nothing was recorded; use `with recorder:` first")
        self.tensor_sampler.take_in()
        steps, samples = self.timeline.steps, self.monitor.samples()
        names, spans = list(self.timeline.outside), self.timeline.spans
        rank = RankEvidence(
            record=self._record(self.monitor),
            steps=dict(zip(steps.columns, steps.array().T, strict=True)),
            spans=Spans(
                names=[names[int(index)] for index in spans.column("range")],
                start_s=spans.column("start_s"),
                seconds=spans.column("seconds"),
            ),
            tensors=self.tensor_sampler.samples(),
            system=dict(zip(self.monitor.columns, samples.T, strict=True)),
            layers=self.tensor_sampler.layer_samples(),
            trace=self._windows.trace,
        )
        curves = {}
        for name, table in self._metrics.items():
            points, seconds, values = table.array().T
            curves[name] = Curve(steps=points, seconds=seconds, values=values)
        return TrainingEvidence(name=self.name, ranks=[rank], metrics=curves)

    def write(self, directory: str | Path) -> None:
        """Write this rank's files below `directory`/NAME, an evidence artifact in the making."""
        write_rank(directory, self.snapshot())

    def _record(self, monitor: Monitor) -> RankRecord:
        timeline, totals, startup = self.timeline, self.timeline.totals, self._startup_s
        if timeline.first_step_s is not None:
            compiling = sum(record.seconds for record in self._compilations.records.values() if record.step == 0)
            parts = {"compile": compiling} if compiling else {}
            startup = startup | parts | {"first_step": max(0.0, timeline.first_step_s - compiling)}
        return RankRecord(
            schema_version=SCHEMA_VERSION,
            name=self.name,
            rank=self._rank,
            world_size=self._world_size,
            device=_device_name(self._device),
            host=platform.node(),
            cores=usable_cores(),
            processor=processor_name(),
            memory_bytes=psutil.virtual_memory().total,
            workers=self._sources.loader.workers,
            loader_images_per_second=self.rates_apart().get("loader"),
            process=ProcessRecord(pid=os.getpid(), started_unix=started_unix(), imported_unix=IMPORTED_UNIX),
            place=place_here(),
            context=self._context,
            startup=startup,
            attempts=self._sources.attempts(),
            confused=self._sources.confused(),
            failed=self._failed,
            compilations=tuple(self._compilations.records.values()),
            compile_beside_s=self._counters.beside_s if self._counters else 0.0,
            transfers=self._counters.transfers if self._counters else None,
            communication=self._sources.communication() if self._sources.communication else None,
            overhead=self._overhead(monitor),
            began_unix=self._began_unix,
            first_step_s=timeline.first_step_s,
            ended_s=self._ended_s or timeline.now_s(),
            settings=self._settings,
            steps=StepRecord(
                count=totals.steps,
                kept_of=timeline.steps.stride,
                lost=totals.lost,
                seconds=totals.seconds,
                images=totals.images,
                ranges=dict(zip(timeline.ranges, totals.ranges, strict=True)),
            ),
            outside={
                name: OutsideRecord(count=total.count, seconds=total.seconds)
                for name, total in timeline.outside.items()
            },
            system_interval_s=monitor.interval_s,
            operators=self._windows.table,
            missing=monitor.missing
            | self.tensor_sampler.missing
            | ({"operators": self._windows.missing} if self._windows.missing else {})
            | ({"trace": self._windows.no_trace} if self._windows.no_trace else {}),
        )

    def _overhead(self, monitor: Monitor) -> dict[str, float]:
        """Return the cost of each part of recording so far, in seconds; marks are timed at the end, since that waits for the device."""
        if self._mark_s is None and self._ended_s:
            clock = HostClock() if self._failed else self.timeline.clock
            self._mark_s = seconds_of_a_mark(clock, _xla_counters() if self._counters else None)
        timeline, totals = self.timeline, self.timeline.totals
        marks = {} if self._mark_s is None else {"marks": self._mark_s * totals.marks}
        # opening and closing the operator windows, and by how much longer their steps took than the others
        windows_s = timeline.outside[PROFILER].seconds if PROFILER in timeline.outside else 0.0
        plain = timeline.steps.column("seconds")[timeline.steps.column("profiled") == 0]
        if len(plain) and totals.profiled:
            windows_s += max(0.0, totals.profiled_seconds - totals.profiled * float(np.median(plain)))
        parts = {"tensors": self.tensor_sampler.spent_s, "monitor": monitor.spent_s, "operators": windows_s}
        return self._costs | marks | parts


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "xla":
        from trainer.profiling.xla_counters import device_name

        return device_name(device)
    return str(device)


def _xla_counters() -> XlaCounters:
    from trainer.profiling.xla_counters import XlaCounters

    return XlaCounters()
