"""What a training records of itself, and how it is kept: the evidence schema.

Version 1 (`artifacts.SCHEMA_VERSIONS["evidence"]`). An evidence artifact holds one directory for each part of the training that ran,
`mae`, `finetune` or `distill`; none, where nothing was trained (given weights, zero epochs). Every rank writes its own files there:

    NAME/rank0.json             one object, see below
    NAME/rank0-steps.arrow      a row a step: step, start_s, seconds, images, profiled, host_seconds, host_data_seconds, then
                                seconds of each range by its path (`other`, the phases, what users named); evenly thinned when long
    NAME/rank0-spans.arrow      a row for each range outside of a step: range, start_s, seconds; evenly thinned when long
    NAME/rank0-system.arrow     a row a sample: end_s, then the signals, NaN where a signal stopped; averaged when long
    NAME/rank1.json, ...
    NAME/metrics.arrow          of rank 0: step, seconds, name, value; evenly thinned when long

Times ending in `_s` are seconds since this recording began; ranks are put side by side through `began_unix`. Arrow files are IPC files.
The JSON object of a rank:

    schema_version              1
    name, rank, world_size      the part and the process
    device, host, cores         where it ran; cores that the process may use
    memory_bytes                of the machine
    process                     {"pid", "started_unix"}
    imported_unix               when the modules were loaded
    began_unix                  when the recording began
    first_step_s, ended_s       end of the first step (null without one), end of the recording
    settings                    the EvidenceSettings
    steps                       {"count", "kept_of", "lost", "seconds", "images", "ranges": {path: seconds}}: sums over all steps, also
                                those that the table no longer holds; a row of the table stands for `kept_of` steps
    outside                     {name: {"count", "seconds"}}: ranges outside of steps, and `between` for what no range covers
    system_interval_s           seconds between samples at the end
    operators                   {"steps", "operators": [{"name", "kind", "category", "calls", "self_cpu_ms", "self_device_ms"}]} or null
    missing                     {signal: reason}: what could not be recorded here
"""

from __future__ import annotations

import io
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil
import pyarrow as pa
import torch

from trainer import artifacts
from trainer.config import EvidenceSettings
from trainer.errors import writing_to
from trainer.profiling.monitor import Monitor, signals
from trainer.profiling.operators import OperatorWindow
from trainer.profiling.series import Floats, ThinnedTable
from trainer.profiling.timeline import Clock, CudaClock, HostClock, Timeline

SCHEMA_VERSION = artifacts.SCHEMA_VERSIONS["evidence"]
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
        self._name = name
        self._device = device
        self._rank = rank
        self._world_size = world_size
        length = settings.operators_steps if rank == 0 else 0
        self._window = OperatorWindow(settings.operators_from_step, length, device)
        if rank:
            self._window.missing = "recorded by rank 0 only"
        clock: Clock[Any] = CudaClock(device) if device.type == "cuda" else HostClock()
        self.timeline = Timeline(clock, window=self._window)
        self._metrics: dict[str, ThinnedTable] = {}
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
        self._window.finish(self.timeline.totals.steps)
        self._ended_s = self._now_s()

    @property
    def _origin_ns(self) -> int:
        assert self.timeline.origin_ns is not None
        return self.timeline.origin_ns

    def _now_s(self) -> float:
        return (time.perf_counter_ns() - self._origin_ns) * 1e-9

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Points of the training curves; kept by rank 0, ignored elsewhere."""
        if self._rank:
            return
        seconds = self._now_s()
        for name, value in values.items():
            if name not in self._metrics:
                self._metrics[name] = ThinnedTable(["step", "seconds", "value"], METRIC_POINTS_KEPT)
            self._metrics[name].append((step, seconds, value))

    def write(self, directory: str | Path) -> None:
        """Write this rank's files below `directory`/NAME, an evidence artifact in the making.

        Raises:
            OutputError: the directory can not be written.
        """
        if self._monitor is None:
            raise RuntimeError("nothing was recorded; use `with recorder:` first")
        path = Path(directory) / self._name
        with writing_to(path):
            path.mkdir(parents=True, exist_ok=True)
            prefix = path / f"rank{self._rank}"
            _write_arrow(prefix.with_name(f"{prefix.name}-steps.arrow"), self._step_table())
            _write_arrow(prefix.with_name(f"{prefix.name}-spans.arrow"), self._span_table())
            system = _number_table(self._monitor.columns, self._monitor.samples(), exact={"end_s"})
            _write_arrow(prefix.with_name(f"{prefix.name}-system.arrow"), system)
            if self._rank == 0:
                _write_arrow(path / "metrics.arrow", self._metric_table())
            text = json.dumps(self._description(self._monitor), indent=2, ensure_ascii=False, allow_nan=False)
            artifacts.write_atomically(prefix.with_suffix(".json"), text.encode())

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

    def _description(self, monitor: Monitor) -> dict[str, Any]:
        timeline = self.timeline
        totals = timeline.totals
        first = timeline.first_step_ended_ns
        process = psutil.Process()
        missing = dict(monitor.missing)
        if self._window.missing:
            missing["operators"] = self._window.missing
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self._name,
            "rank": self._rank,
            "world_size": self._world_size,
            "device": _device_name(self._device),
            "host": platform.node(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "process": {"pid": process.pid, "started_unix": process.create_time()},
            "imported_unix": _IMPORTED_UNIX,
            "began_unix": self._began_unix,
            "first_step_s": None if first is None else (first - self._origin_ns) * 1e-9,
            "ended_s": self._ended_s,
            "settings": self._settings.model_dump(mode="json"),
            "steps": {
                "count": totals.steps,
                "kept_of": timeline.steps.stride,
                "lost": totals.lost,
                "seconds": totals.seconds,
                "images": totals.images,
                "ranges": dict(zip(timeline.ranges, totals.ranges, strict=True)),
            },
            "outside": {name: asdict(total) for name, total in timeline.outside.items()},
            "system_interval_s": monitor.interval_s,
            "operators": asdict(self._window.table) if self._window.table else None,
            "missing": missing,
        }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def _number_table(columns: list[str], values: Floats, *, exact: set[str]) -> pa.Table:
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
    artifacts.write_atomically(path, buffer.getvalue())
