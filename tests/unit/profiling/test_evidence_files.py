from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from trainer.config import EvidenceSettings
from trainer.io import artifacts
from trainer.io.errors import ArtifactError, OutputError
from trainer.profiling.evidence import PHASES
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.recorder import Recorder

Change = Callable[[dict[str, Any]], None]


def altered(source: Path, target: Path, name: str, change: Change) -> Path:
    """A copy of an evidence artifact with one record changed and checksums that fit."""
    with artifacts.create(target, "evidence", settings={}) as draft:
        shutil.copytree(source, draft.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        record = json.loads((draft.path / name).read_text())
        change(record)
        (draft.path / name).write_text(json.dumps(record))
    return target


def test_recorded_is_read_back(evidence: Path) -> None:
    read = read_evidence(evidence)
    assert [training.name for training in read.trainings] == ["mae", "distill"]
    mae, distill = read.trainings
    assert [len(mae.ranks), len(distill.ranks)] == [1, 2]
    first = distill.ranks[0]
    assert first.record.steps.count == 40
    assert first.record.steps.images == 40 * 32
    assert first.steps["step"].tolist() == list(range(40))
    assert np.flatnonzero(first.steps["profiled"]).tolist() == [4, 5]
    assert set(PHASES) | {"other", "forward/attention"} == set(first.ranges)
    total = np.sum([first.steps[name] for name in first.ranges], axis=0)
    np.testing.assert_allclose(total, first.steps["seconds"], rtol=1e-4)
    assert first.record.operators is not None
    assert "aten::addmm" in {operator.name for operator in first.record.operators.operators}
    assert first.spans.names.count("evaluate") == 10
    assert (first.system["cpu0_percent"] <= 100).all()
    # Curves are kept by rank 0 only.
    curves = read_evidence(evidence).trainings[1].metrics
    assert set(curves) == {"loss", "learning_rate", "val_top1"}
    assert curves["loss"].steps.tolist() == list(range(40))
    assert curves["val_top1"].steps.tolist() == list(range(3, 40, 4))
    assert (np.diff(curves["loss"].seconds) > 0).all()
    # What is missing has its reason.
    mae, distill = read_evidence(evidence).trainings
    assert mae.ranks[0].record.operators is None
    assert "the training ended after 3 steps" in mae.ranks[0].record.missing["operators"]
    assert distill.ranks[1].record.missing["operators"] == "recorded by rank 0 only"
    assert distill.ranks[0].record.missing["gpu_utilization"] == "the training runs on cpu"


def test_recording_ends_with_its_training(record: Callable[..., Recorder], tmp_path: Path) -> None:
    with artifacts.create(tmp_path, "evidence", settings={}) as draft:
        record(steps=0).write(draft.path)
    training = read_evidence(tmp_path).trainings[0]
    assert training.ranks[0].record.steps.count == 0
    assert training.ranks[0].record.first_step_s is None
    assert training.metrics == {}
    # An exception of the training passes and the monitor ends.
    settings = EvidenceSettings(operators_at=(0,), operators_steps=3)
    recorder = Recorder(settings, name="mae", device=torch.device("cpu"), rank=0, world_size=1)
    with pytest.raises(ZeroDivisionError), recorder, recorder.timeline.step(0):
        raise ZeroDivisionError
    assert "system-monitor" not in {thread.name for thread in threading.enumerate()}


def test_damaged_evidence_is_refused(evidence: Path, tmp_path: Path) -> None:
    path = altered(evidence, tmp_path / "copy", "mae/rank0.json", lambda record: record.update(schema_version=99))
    with pytest.raises(ArtifactError, match=r"rank0\.json: schema version 99, but this version .* reads 3"):
        read_evidence(path)

    path = tmp_path / "one rank"
    # A missing rank is named.
    with artifacts.create(path, "evidence", settings={}) as draft:
        ignored = shutil.ignore_patterns("manifest.json", "rank1*")
        shutil.copytree(evidence, draft.path, dirs_exist_ok=True, ignore=ignored)
    with pytest.raises(ArtifactError, match=r"holds the ranks \[0\], but the training had 2 processes"):
        read_evidence(path)

    path = tmp_path / "cut"
    # A damaged table is refused.
    shutil.copytree(evidence, path)
    table = path / "mae" / "rank0-steps.arrow"
    table.write_bytes(table.read_bytes()[:-10])
    with pytest.raises(ArtifactError, match=r"rank0-steps\.arrow has .* bytes instead of"):
        read_evidence(path)

    path = tmp_path / "no table"
    # A table that was never whole is refused.
    with artifacts.create(path, "evidence", settings={}) as draft:
        shutil.copytree(evidence, draft.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        (draft.path / "mae" / "rank0-steps.arrow").write_bytes(b"ARROW1")
    with pytest.raises(ArtifactError, match=r"rank0-steps\.arrow: cannot be read"):
        read_evidence(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.pop("steps"), "steps"),
        (lambda record: record.update(surprise=1), "surprise"),
        (lambda record: record["steps"].update(count=-1), "count"),
        (lambda record: record["steps"]["ranges"].update(unheard=1.0), "lacks the columns unheard"),
    ],
)
def test_record_that_does_not_fit_schema_is_refused(
    evidence: Path, tmp_path: Path, change: Change, message: str
) -> None:
    path = altered(evidence, tmp_path / "copy", "mae/rank0.json", change)
    with pytest.raises(ArtifactError, match=message):
        read_evidence(path)


def test_wrong_use_of_a_recording(record: Callable[..., Recorder], tmp_path: Path) -> None:
    (tmp_path / "distill").write_text("a file in the way")
    with pytest.raises(OutputError, match="choose another output"):
        record(steps=1).write(tmp_path)
    # Writing before recording is a mistake.
    recorder = Recorder(EvidenceSettings(), name="mae", device=torch.device("cpu"), rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        recorder.write(tmp_path)


def test_tables_are_plain_arrow_files(evidence: Path) -> None:
    with pa.OSFile(str(evidence / "distill" / "rank0-steps.arrow")) as file, pa.ipc.open_file(file) as reader:
        schema = reader.schema
    assert schema.field("step").type == pa.int64()
    assert schema.field("profiled").type == pa.bool_()
    assert schema.field("start_s").type == pa.float64()
    assert schema.field("forward/attention").type == pa.float32()


def test_what_is_recorded_so_far_can_be_read_while_it_records() -> None:
    settings = EvidenceSettings(operators_steps=0, system_interval_s=0.05)
    recorder = Recorder(settings, name="distill", device=torch.device("cpu"), rank=0, world_size=1)
    with recorder:
        for step in range(3):
            with recorder.timeline.step(step, images=4), recorder.timeline.span("forward"):
                torch.ones(64, 64) @ torch.ones(64, 64)
            recorder.metrics(step, {"loss": 1.0 / (step + 1)})
        recorder.cost("rules", 0.25)
        now = recorder.snapshot()
    (rank,) = now.ranks
    assert rank.steps["step"].tolist() == [0, 1, 2]
    assert now.metrics["loss"].values.tolist() == [1.0, 0.5, pytest.approx(1 / 3)]
    assert rank.record.overhead["rules"] == 0.25
    assert 0 < rank.record.ended_s <= recorder.snapshot().ranks[0].record.ended_s


def test_what_watching_costs_stands_in_the_evidence(evidence: Path) -> None:
    record = read_evidence(evidence).trainings[1].ranks[0].record
    assert set(record.overhead) == {"marks", "tensors", "monitor", "operators"}
    assert 0 < record.overhead["marks"] < record.steps.seconds
    assert record.overhead["monitor"] > 0
    assert record.overhead["operators"] >= record.outside["profiler"].seconds > 0


def test_processor_time_of_step_is_separate_from_waiting(tmp_path: Path) -> None:
    recorder = Recorder(
        EvidenceSettings(operators_steps=0), name="distill", device=torch.device("cpu"), rank=0, world_size=1
    )
    with recorder:
        for step in range(2):
            with recorder.timeline.step(step), recorder.timeline.span("data"):
                if step:
                    time.sleep(0.1)
                else:
                    end = time.thread_time() + 0.1
                    while time.thread_time() < end:
                        sum(range(1000))
    steps = recorder.snapshot().ranks[0].steps
    assert (steps["host_data_seconds"] >= 0.1).all()
    assert steps["host_data_cpu_seconds"][0] >= 0.1
    assert steps["host_data_cpu_seconds"][1] < 0.05
    assert (steps["host_cpu_seconds"] >= steps["host_data_cpu_seconds"]).all()
    if Path("/proc/thread-self/schedstat").exists():
        assert (steps["host_delayed_seconds"] >= 0).all()
        assert steps["host_delayed_seconds"][1] < steps["host_seconds"][1]
