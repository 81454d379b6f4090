"""Records a training, and reads the record; what it holds stands in `trainer.profiling.schema`."""

from __future__ import annotations

import io
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil
import pyarrow as pa
import torch

from trainer import artifacts, storage
from trainer.config import EvidenceSettings
from trainer.cores import usable_cores
from trainer.costs import place_here
from trainer.errors import ArtifactError, writing_to
from trainer.profiling.looks import Looks
from trainer.profiling.monitor import Monitor, signals
from trainer.profiling.operators import OperatorWindow
from trainer.profiling.schema import (
    METRIC_COLUMNS,
    SCHEMA_VERSION,
    SPAN_COLUMNS,
    STEP_COLUMNS,
    SYSTEM_COLUMNS,
    TENSOR_COLUMNS,
    ContextRecord,
    OutsideRecord,
    ProcessRecord,
    RankRecord,
    StepRecord,
)
from trainer.profiling.series import Series, ThinnedTable
from trainer.profiling.timeline import Clock, CudaClock, HostClock, Timeline

METRIC_POINTS_KEPT = 4096
"""Points of each metric; a longer curve is thinned evenly."""

_IMPORTED_UNIX = time.time()


class Recorder:
    """Records one part of a training in one process: steps, machine, operators and curves.

    with recorder:
        for step in range(first, total):
            with recorder.timeline.step(step, images=batch_size):
                with recorder.timeline.range("data"): ...
            recorder.metrics(step, {"loss": loss})
    recorder.write(directory)
    """

    def __init__(
        self, settings: EvidenceSettings, *, name: str, device: torch.device, rank: int, world_size: int
    ) -> None:
        self._settings = settings
        self.name = name
        self._device = device
        self._rank = rank
        self._world_size = world_size
        length = settings.operators_steps if rank == 0 else 0
        self._window = OperatorWindow(
            settings.operators_at[0] if settings.operators_at else 0, length if settings.operators_at else 0, device
        )
        if rank:
            self._window.missing = "recorded by rank 0 only"
        clock: Clock[Any] = CudaClock(device) if device.type == "cuda" else HostClock()
        self.timeline = Timeline(clock, window=self._window)
        self.looks = Looks(settings, self.timeline, self.metrics)
        """Looks at weights and attention; `looks.at(model)` says at which."""
        self.context = ContextRecord()
        """What is known of the training."""
        self.workers: int | None = None
        """Loader processes beside this process."""
        self._metrics: dict[str, ThinnedTable] = {}
        self._costs: dict[str, float] = {}
        self._monitor: Monitor | None = None
        self._began_unix = 0.0
        self._ended_s = 0.0

    def __enter__(self) -> Self:
        self._began_unix = time.time()
        self.timeline.start()
        machine = int(os.environ.get("LOCAL_RANK", self._rank)) == 0
        self._monitor = Monitor(
            signals(self._device, machine=machine), self._settings.system_interval_s, origin_ns=self._origin_ns
        )
        if not machine:
            self._monitor.missing["machine"] = "recorded by the first process of the machine only"
        self._monitor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._monitor is not None
        self._monitor.stop()
        if kind is None:
            self.timeline.finish()
            self.looks.finish()
        self._window.finish(self.timeline.totals.steps)
        self._ended_s = self.timeline.now_s()

    @property
    def _origin_ns(self) -> int:
        assert self.timeline.origin_ns is not None
        return self.timeline.origin_ns

    def metrics(self, step: int, values: Mapping[str, float], seconds: float | None = None) -> None:
        """Points of the training curves; kept by rank 0, ignored elsewhere.

        Args:
            step: of the training.
            values: by name.
            seconds: since the recording began; now where not given.
        """
        if self._rank:
            return
        seconds = self.timeline.now_s() if seconds is None else seconds
        for name, value in values.items():
            if name not in self._metrics:
                self._metrics[name] = ThinnedTable(["step", "seconds", "value"], METRIC_POINTS_KEPT)
            self._metrics[name].append((step, seconds, value))

    def cost(self, part: str, seconds: float) -> None:
        """Count what a part of watching has cost."""
        self._costs[part] = self._costs.get(part, 0.0) + seconds

    def write(self, directory: str | Path) -> None:
        """Write this rank's files below `directory`/NAME, an evidence artifact in the making.

        Raises:
            OutputError: the directory can not be written.
        """
        if self._monitor is None:
            raise RuntimeError("nothing was recorded; use `with recorder:` first")
        path = Path(directory) / self.name
        with writing_to(path):
            path.mkdir(parents=True, exist_ok=True)
            prefix = path / f"rank{self._rank}"
            _write_arrow(prefix.with_name(f"{prefix.name}-steps.arrow"), self._step_table())
            _write_arrow(prefix.with_name(f"{prefix.name}-spans.arrow"), self._span_table())
            _write_arrow(prefix.with_name(f"{prefix.name}-tensors.arrow"), self._tensor_table())
            system = _number_table(self._monitor.columns, self._monitor.samples(), exact={"end_s"})
            _write_arrow(prefix.with_name(f"{prefix.name}-system.arrow"), system)
            if self._rank == 0:
                _write_arrow(path / "metrics.arrow", self._metric_table())
            record = self._record(self._monitor).model_dump_json(indent=2)
            storage.write_bytes(prefix.with_suffix(".json"), record.encode())

    def _step_table(self) -> pa.Table:
        steps = self.timeline.steps
        table = _number_table(steps.columns, steps.array(), exact={"start_s"})
        for name, kind in (("step", pa.int64()), ("images", pa.int64()), ("profiled", pa.bool_())):
            column = pa.array(steps.column(name).astype(kind.to_pandas_dtype()))
            table = table.set_column(steps.columns.index(name), name, column)
        return table

    def _span_table(self) -> pa.Table:
        spans = self.timeline.spans
        names = list(self.timeline.outside)
        table = _number_table(spans.columns, spans.array(), exact={"start_s"})
        labels = pa.array([names[int(index)] for index in spans.column("range")], pa.string())
        return table.set_column(0, "range", labels)

    def _tensor_table(self) -> pa.Table:
        moments, values = self.looks.table()
        names = self.looks.tensors
        steps, seconds = np.repeat(moments, len(names), axis=0).T
        return pa.table(
            {
                "step": pa.array(steps.astype(np.int64)),
                "seconds": pa.array(seconds),
                "tensor": pa.array([*names] * len(moments), pa.string()),
            }
            | {
                name: pa.array(values[:, :, index].ravel().astype(np.float32))
                for index, name in enumerate(TENSOR_COLUMNS)
            }
        )

    def _metric_table(self) -> pa.Table:
        rows = [(name, *point) for name, table in self._metrics.items() for point in table.array().tolist()]
        rows.sort(key=lambda row: row[2])
        return pa.table(
            {
                "step": pa.array([int(row[1]) for row in rows], pa.int64()),
                "seconds": pa.array([row[2] for row in rows], pa.float64()),
                "name": pa.array([row[0] for row in rows], pa.string()),
                "value": pa.array([row[3] for row in rows], pa.float64()),
            }
        )

    def _record(self, monitor: Monitor) -> RankRecord:
        timeline, totals, process = self.timeline, self.timeline.totals, psutil.Process()
        first = timeline.first_step_ended_ns
        return RankRecord(
            schema_version=SCHEMA_VERSION,
            name=self.name,
            rank=self._rank,
            world_size=self._world_size,
            device=_device_name(self._device),
            host=platform.node(),
            cores=usable_cores(),
            memory_bytes=psutil.virtual_memory().total,
            workers=self.workers,
            process=ProcessRecord(pid=process.pid, started_unix=process.create_time(), imported_unix=_IMPORTED_UNIX),
            place=place_here(),
            context=self.context,
            began_unix=self._began_unix,
            first_step_s=None if first is None else (first - self._origin_ns) * 1e-9,
            ended_s=self._ended_s,
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
            operators=self._window.table,
            missing=monitor.missing
            | self.looks.missing
            | ({"operators": self._window.missing} if self._window.missing else {}),
        )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def _number_table(columns: list[str], values: Series, *, exact: set[str]) -> pa.Table:
    """Columns as float32, which tells a microsecond in ten seconds; `exact` ones as float64."""
    return pa.table(
        {
            name: pa.array(values[:, index].astype(np.float64 if name in exact else np.float32))
            for index, name in enumerate(columns)
        }
    )


def _write_arrow(path: Path, table: pa.Table) -> None:
    buffer = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(buffer, table.schema, options=options) as writer:
        writer.write_table(table)
    storage.write_bytes(path, buffer.getvalue())


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The points of one metric, in their order."""

    steps: Series
    seconds: Series
    """Since the recording began."""
    values: Series


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Ranges outside of steps, in their order."""

    names: Sequence[str]
    start_s: Series
    seconds: Series


@dataclass(frozen=True, kw_only=True)
class TensorLooks:
    """Looks at tensors of weights, in their order; all of one step stand together."""

    steps: Series
    seconds: Series
    """Since the recording began."""
    tensors: Sequence[str]
    """Names of the tensors."""
    values: Mapping[str, Series]
    """Each of `TENSOR_COLUMNS` -> a value a look."""


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What one process recorded; the columns are described in `trainer.profiling.schema`."""

    record: RankRecord
    steps: Mapping[str, Series]
    """Column -> a value a step."""
    spans: Spans
    tensors: TensorLooks
    system: Mapping[str, Series]
    """Column -> a value a sample."""

    @property
    def ranges(self) -> list[str]:
        """Paths of the ranges, which are columns of `steps`."""
        return [name for name in self.steps if name not in STEP_COLUMNS]


@dataclass(frozen=True, kw_only=True)
class TrainingEvidence:
    """One part of a training."""

    name: str
    ranks: Sequence[RankEvidence]
    """In the order of the ranks; at least rank 0."""
    metrics: Mapping[str, Curve]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The parts of a training, in the order in which they ran; none where nothing was trained."""

    path: Path
    fingerprint: str
    trainings: Sequence[TrainingEvidence]


def read_evidence(uri: str | Path) -> Evidence:
    """Read and check an evidence artifact.

    Raises:
        ArtifactError: it is missing, damaged, of another version, or does not hold what the schema says.
    """
    artifact = artifacts.read(uri, "evidence")
    directories = sorted({path.parent for path in artifact.path.glob("*/rank*.json")})
    trainings = [_read_training(directory) for directory in directories]
    trainings.sort(key=lambda training: training.ranks[0].record.began_unix)
    return Evidence(path=artifact.path, fingerprint=artifact.fingerprint, trainings=trainings)


def _read_training(directory: Path) -> TrainingEvidence:
    records = sorted((_read_record(path) for path in directory.glob("rank*.json")), key=lambda record: record.rank)
    expected = list(range(records[0].world_size))
    if [record.rank for record in records] != expected:
        raise ArtifactError(
            f"evidence {directory}: holds the ranks {[record.rank for record in records]}, but the training had "
            f"{len(expected)} processes; run the training again, with an output that all of them can write to"
        )
    return TrainingEvidence(
        name=directory.name,
        ranks=[_read_rank(directory, record) for record in records],
        metrics=_curves(_read_arrow(directory / "metrics.arrow", METRIC_COLUMNS)),
    )


def _read_record(path: Path) -> RankRecord:
    try:
        content = json.loads(path.read_bytes())
        version = content.get("schema_version") if isinstance(content, dict) else None
        if isinstance(content, dict) and version != SCHEMA_VERSION:
            raise ArtifactError(
                f"evidence {path}: schema version {version}, but this version of the project reads {SCHEMA_VERSION}; "
                "run the training again"
            )
        return RankRecord.model_validate(content)
    except ValueError as error:
        raise ArtifactError(
            f"evidence {path}: is not the record of a process ({error}); run the training again"
        ) from error


def _read_rank(directory: Path, record: RankRecord) -> RankEvidence:
    prefix = f"rank{record.rank}"
    steps = _read_arrow(directory / f"{prefix}-steps.arrow", (*STEP_COLUMNS, *record.steps.ranges))
    spans = _read_arrow(directory / f"{prefix}-spans.arrow", SPAN_COLUMNS)
    tensors = _read_arrow(directory / f"{prefix}-tensors.arrow", ("step", "seconds", "tensor", *TENSOR_COLUMNS))
    system = _read_arrow(directory / f"{prefix}-system.arrow", SYSTEM_COLUMNS)
    return RankEvidence(
        record=record,
        steps=_series(steps),
        spans=Spans(
            names=spans.column("range").to_pylist(),
            start_s=_values(spans, "start_s"),
            seconds=_values(spans, "seconds"),
        ),
        tensors=TensorLooks(
            steps=_values(tensors, "step"),
            seconds=_values(tensors, "seconds"),
            tensors=tensors.column("tensor").to_pylist(),
            values={name: _values(tensors, name) for name in TENSOR_COLUMNS},
        ),
        system=_series(system),
    )


def _read_arrow(path: Path, columns: Sequence[str]) -> pa.Table:
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise ArtifactError(f"evidence {path}: can not be read ({error}); run the training again") from error
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ArtifactError(f"evidence {path}: lacks the columns {', '.join(missing)}; run the training again")
    return table


def _values(table: pa.Table, column: str) -> Series:
    return np.asarray(table.column(column).to_numpy(), dtype=np.float64)


def _series(table: pa.Table) -> dict[str, Series]:
    return {name: _values(table, name) for name in table.column_names}


def _curves(table: pa.Table) -> dict[str, Curve]:
    names = np.asarray(table.column("name").to_pylist(), dtype=object)
    columns = [_values(table, name) for name in ("step", "seconds", "value")]
    curves = {}
    for name in dict.fromkeys(names):
        chosen = names == name
        steps, seconds, values = (column[chosen] for column in columns)
        curves[str(name)] = Curve(steps=steps, seconds=seconds, values=values)
    return curves
