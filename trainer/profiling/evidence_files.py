"""How the evidence of a training is written and read; `trainer.profiling.evidence` says what it is.

An evidence artifact (version: `graph.SCHEMA_VERSIONS["evidence"]`) holds one directory for each part of the training that ran: `mae`,
`finetune` or `distill`. It holds none where nothing was trained (given weights, zero epochs). Every rank writes its own files:

    NAME/rank0.json             a `RankRecord`
    NAME/rank0-steps.arrow      a row a step: `STEP_COLUMNS`, then seconds of each range by its path (`other`, the phases, what users
                                named); evenly thinned when long
    NAME/rank0-spans.arrow      a row for each range outside of a step: range, start_s, seconds; evenly thinned when long
    NAME/rank0-tensors.arrow    a row for each sample of each tensor of weights: step, seconds, tensor, then `TENSOR_COLUMNS`
    NAME/rank0-layers.arrow     the same of each layer and channel of the input: step, seconds, tensor, then `LAYER_COLUMNS`; only of a
                                process that looked at them
    NAME/rank0-trace.json.gz    the trace of the first window of operators, in Chromium's trace event format; only where one was kept
    NAME/rank0-system.arrow     a row a sample: end_s, then the signals, NaN where a signal stopped; averaged when long
    NAME/rank1.json, ...
    NAME/metrics.arrow          of rank 0: step, seconds, name, value; evenly thinned when long

Arrow files are IPC files. Times ending in `_s` are seconds since the rank's recording began, at `began_unix`. On a GPU `seconds` and the
ranges are times on the device, the `host_` columns times on the host; on a CPU and on XLA `seconds` and `host_seconds` agree.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainer.io import artifacts, storage
from trainer.io.errors import ArtifactError, writing_to
from trainer.profiling.evidence import (
    LATER_COLUMNS,
    LAYER_COLUMNS,
    SCHEMA_VERSION,
    SPAN_COLUMNS,
    STEP_COLUMNS,
    TENSOR_COLUMNS,
    Curve,
    Evidence,
    RankEvidence,
    RankRecord,
    Spans,
    TensorSamples,
    TrainingEvidence,
)
from trainer.profiling.series import Series

_EXACT = {"start_s", "end_s", "step", "images"}
"""Columns that need more than float32, which resolves a microsecond in ten seconds."""


def write_rank(directory: str | Path, training: TrainingEvidence) -> None:
    """Write one process's evidence below `directory`/NAME, an evidence artifact in the making; rank 0 writes the curves too."""
    (rank,) = training.ranks
    path = Path(directory) / training.name
    prefix = f"rank{rank.record.rank}"
    with writing_to(path):
        path.mkdir(parents=True, exist_ok=True)
        kinds = {"step": pa.int64(), "images": pa.int64(), "profiled": pa.bool_()}
        whole = {name: pa.array(rank.steps[name].astype(kind.to_pandas_dtype())) for name, kind in kinds.items()}
        _write_arrow(path / f"{prefix}-steps.arrow", _numbers(rank.steps) | whole)
        spans = {"start_s": rank.spans.start_s, "seconds": rank.spans.seconds}
        names = {"range": pa.array(rank.spans.names, pa.string())}
        _write_arrow(path / f"{prefix}-spans.arrow", names | _numbers(spans))
        _write_arrow(path / f"{prefix}-tensors.arrow", _sample_columns(rank.tensors))
        if rank.layers.tensors:
            _write_arrow(path / f"{prefix}-layers.arrow", _sample_columns(rank.layers))
        if rank.trace:
            storage.write_bytes(path / f"{prefix}-trace.json.gz", rank.trace)
        _write_arrow(path / f"{prefix}-system.arrow", _numbers(rank.system))
        if rank.record.rank == 0:
            _write_arrow(path / "metrics.arrow", _metric_columns(training.metrics))
        storage.write_bytes(path / f"{prefix}.json", rank.record.model_dump_json(indent=2).encode())


def _sample_columns(looks: TensorSamples) -> dict[str, pa.Array]:
    """A row for each look at each tensor."""
    tensors = len(looks.tensors)
    samples = {
        "step": pa.array(np.repeat(looks.steps.astype(np.int64), tensors)),
        "seconds": pa.array(np.repeat(looks.seconds, tensors)),
        "tensor": pa.array([*looks.tensors] * len(looks.steps), pa.string()),
    }
    return samples | _numbers({name: grid.ravel() for name, grid in looks.values.items()})


def _metric_columns(curves: Mapping[str, Curve]) -> dict[str, pa.Array]:
    """All points in the order of time."""
    steps, seconds, values = (
        np.concatenate([np.empty(0), *(getattr(curve, column) for curve in curves.values())])
        for column in ("steps", "seconds", "values")
    )
    names = np.repeat(np.array(list(curves), dtype=object), [len(curve.steps) for curve in curves.values()])
    order = np.argsort(seconds, kind="stable")
    return {
        "step": pa.array(steps[order].astype(np.int64)),
        "seconds": pa.array(seconds[order]),
        "name": pa.array(names[order], pa.string()),
        "value": pa.array(values[order]),
    }


def _numbers(columns: Mapping[str, Series]) -> dict[str, pa.Array]:
    return {
        name: pa.array(values.astype(np.float64 if name in _EXACT else np.float32)) for name, values in columns.items()
    }


def _write_arrow(path: Path, columns: Mapping[str, pa.Array]) -> None:
    table, buffer = pa.table(columns), io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(buffer, table.schema, options=options) as writer:
        writer.write_table(table)
    storage.write_bytes(path, buffer.getvalue())


def read_evidence(uri: str | Path) -> Evidence:
    """Read an evidence artifact; an `ArtifactError` if it is missing, damaged, of another version, or does not fit the schema."""
    artifact = artifacts.read(uri, "evidence")
    directories = sorted({path.parent for path in artifact.path.glob("*/rank*.json")})
    trainings = [_read_training(directory) for directory in directories]
    trainings.sort(key=lambda training: training.ranks[0].record.began_unix)
    return Evidence(path=artifact.path, fingerprint=artifact.fingerprint, trainings=trainings)


def _read_training(directory: Path) -> TrainingEvidence:
    records = sorted((_read_record(path) for path in directory.glob("rank*.json")), key=lambda record: record.rank)
    expected = list(range(records[0].world_size))
    if [record.rank for record in records] != expected and records[0].failed is None:
        raise ArtifactError(
            f"evidence {directory}: holds the ranks {[record.rank for record in records]}, but the training had "
            f"{len(expected)} processes; run the training again, with an output that all of them can write to"
        )
    ranks = []
    for record in records:
        prefix = f"rank{record.rank}"
        needed = [name for name in STEP_COLUMNS if name not in LATER_COLUMNS]
        steps = _read_arrow(directory / f"{prefix}-steps.arrow", (*needed, *record.steps.ranges))
        spans = _read_arrow(directory / f"{prefix}-spans.arrow", SPAN_COLUMNS)
        layers, trace = directory / f"{prefix}-layers.arrow", directory / f"{prefix}-trace.json.gz"
        one = RankEvidence(
            record=record,
            steps=steps,
            spans=Spans(names=spans["range"], start_s=spans["start_s"], seconds=spans["seconds"]),
            tensors=_read_samples(directory / f"{prefix}-tensors.arrow", TENSOR_COLUMNS),
            system=_read_arrow(directory / f"{prefix}-system.arrow", ("end_s",)),
            trace=trace.read_bytes() if trace.exists() else b"",
            layers=_read_samples(layers, LAYER_COLUMNS) if layers.exists() else TensorSamples.none(LAYER_COLUMNS),
        )
        ranks.append(one)
    metrics = _read_arrow(directory / "metrics.arrow", ("step", "seconds", "name", "value"))
    names = np.asarray(metrics["name"], dtype=object)
    curves = {}
    for name in dict.fromkeys(metrics["name"]):
        steps, seconds, values = (metrics[column][names == name] for column in ("step", "seconds", "value"))
        curves[name] = Curve(steps=steps, seconds=seconds, values=values)
    return TrainingEvidence(name=directory.name, ranks=ranks, metrics=curves)


def _read_record(path: Path) -> RankRecord:
    try:
        content = storage.read_json(path)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if isinstance(content, dict) and version != SCHEMA_VERSION:
            raise ArtifactError(
                f"evidence {path}: schema version {version}, but this version of the project reads {SCHEMA_VERSION}; run the training again"
            )
        return RankRecord.model_validate(content)
    except ValueError as error:
        raise ArtifactError(
            f"evidence {path}: is not the record of a process ({error}); run the training again"
        ) from error


def _read_samples(path: Path, columns: Sequence[str]) -> TensorSamples:
    """Arrange the rows by sample and tensor, [L, P], with NaN for missing ones."""
    table = _read_arrow(path, ("step", "seconds", "tensor", *columns))
    tensors = {name: number for number, name in enumerate(dict.fromkeys(table["tensor"]))}
    steps, first, rows = np.unique(table["step"], return_index=True, return_inverse=True)
    place = rows, np.array([tensors[name] for name in table["tensor"]], dtype=np.int64)
    values = {name: np.full((len(steps), len(tensors)), np.nan) for name in columns}
    for name, grid in values.items():
        grid[place] = table[name]
    return TensorSamples(tensors=list(tensors), steps=steps, seconds=table["seconds"][first], values=values)


def _read_arrow(path: Path, columns: Sequence[str]) -> dict[str, Any]:
    """Read the columns of a table, which has at least `columns`: a list of texts, or an array of float64."""
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise ArtifactError(f"evidence {path}: cannot be read ({error}); run the training again") from error
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ArtifactError(f"evidence {path}: lacks the columns {', '.join(missing)}; run the training again")
    return {
        name: column.to_pylist() if column.type == pa.string() else np.asarray(column.to_numpy(), dtype=np.float64)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
