"""Write and read evidence; `evidence_schema` describes what it holds, and `recorder` makes it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from trainer import artifacts, limits, storage
from trainer.errors import ArtifactError, writing_to
from trainer.profiling.evidence_schema import (
    METRIC_COLUMNS,
    SCHEMA_VERSION,
    SPAN_COLUMNS,
    STEP_COLUMNS,
    SYSTEM_COLUMNS,
    TENSOR_COLUMNS,
    RankRecord,
)
from trainer.profiling.series import Series

_EXACT = {"start_s", "end_s", "step", "images"}
"""Columns that need more than float32, which resolves a microsecond in ten seconds."""


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
class TensorSamples:
    """Looks at tensors of weights, in their order; all of one step stand together."""

    steps: Series
    seconds: Series
    """Since the recording began."""
    tensors: Sequence[str]
    """Names of the tensors."""
    values: Mapping[str, Series]
    """Each of `TENSOR_COLUMNS` -> a value a sample."""


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What one process recorded; the columns are described in `trainer.profiling.evidence_schema`."""

    record: RankRecord
    steps: Mapping[str, Series]
    """Column -> a value a step."""
    spans: Spans
    tensors: TensorSamples
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


def write_rank(directory: str | Path, training: TrainingEvidence) -> None:
    """Write what one process recorded below `directory`/NAME, an evidence artifact in the making.

    Args:
        directory: of all trainings.
        training: with the evidence of this process only; the first one writes the curves too.

    Raises:
        OutputError: the directory cannot be written.
    """
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
        samples = {
            "step": pa.array(rank.tensors.steps.astype(np.int64)),
            "seconds": pa.array(rank.tensors.seconds),
            "tensor": pa.array(rank.tensors.tensors, pa.string()),
        }
        _write_arrow(path / f"{prefix}-tensors.arrow", samples | _numbers(rank.tensors.values))
        _write_arrow(path / f"{prefix}-system.arrow", _numbers(rank.system))
        if rank.record.rank == 0:
            _write_arrow(path / "metrics.arrow", _metric_columns(training.metrics))
        storage.write_bytes(path / f"{prefix}.json", rank.record.model_dump_json(indent=2).encode())


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
    if [record.rank for record in records] != expected and records[0].failed is None:
        raise ArtifactError(
            f"evidence {directory}: holds the ranks {[record.rank for record in records]}, but the training had "
            f"{len(expected)} processes; run the training again, with an output that all of them can write to"
        )
    metrics = _read_arrow(directory / "metrics.arrow", METRIC_COLUMNS)
    names = np.asarray(metrics.column("name").to_pylist(), dtype=object)
    columns = [_values(metrics, name) for name in ("step", "seconds", "value")]
    curves = {}
    for name in dict.fromkeys(names):
        steps, seconds, values = (column[names == name] for column in columns)
        curves[str(name)] = Curve(steps=steps, seconds=seconds, values=values)
    return TrainingEvidence(
        name=directory.name,
        ranks=[_read_rank(directory, record) for record in records],
        metrics=curves,
    )


def _read_record(path: Path) -> RankRecord:
    try:
        content = limits.parse_json(storage.read_limited(path, limits.JSON_BYTES))
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
        tensors=TensorSamples(
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
        raise ArtifactError(f"evidence {path}: cannot be read ({error}); run the training again") from error
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ArtifactError(f"evidence {path}: lacks the columns {', '.join(missing)}; run the training again")
    return table


def _values(table: pa.Table, column: str) -> Series:
    return np.asarray(table.column(column).to_numpy(), dtype=np.float64)


def _series(table: pa.Table) -> dict[str, Series]:
    return {name: _values(table, name) for name in table.column_names}
