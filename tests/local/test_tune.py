"""The stage tune as a group of processes, and in a run whose distillation then uses what it found."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tests import groups
from tests.distillations import QUICK
from tests.pathologies import on_rank, together
from trainer import config
from trainer.graph import JobSpec
from trainer.io.errors import LaunchError
from trainer.objectives.distillation.objective import DistillObjective
from trainer.profiling.evidence_files import read_evidence
from trainer.runner import local_run
from trainer.stages import tune
from trainer.stages.tuning import trials
from trainer.stages.tuning.tuning_schema import read_tuning


def section(**settings):
    distill = QUICK | {"batch_size": 16, "checkpoint_every": 100} | settings.pop("distill", {})
    return {"enabled": True, "distill": distill, "minutes": 0.05} | settings


@pytest.mark.long
def test_two_processes_measure_one_distillation_and_take_same_decisions(digits, teacher, tmp_path):
    settings = section(apply=True, distill={"epochs": 20, "zero": True, "gradient_compression": "bf16"})
    inputs, outputs = {"dataset": digits, "teacher": teacher}, {"tuning": str(tmp_path / "tuning")}
    spec = JobSpec(stage="tune", settings=settings, inputs=inputs, outputs=outputs, processes_per_node=2)
    groups.launch(spec)
    made = read_tuning(tmp_path / "tuning")
    assert made.place.processes_per_node == 2
    assert made.tried[0].trial.images_per_second > 0
    assert made.measurement.batch_size == made.chosen["batch_size"]

    over = settings | {"search": False, "budget_hours": 1e-4}
    with pytest.raises(LaunchError, match=r"tune: .*the distillation would take .* but run\.budget_hours=0\.0001"):
        groups.launch(replace(spec, settings=over))


@contextmanager
def small_memory():
    """Steps of more than four images run out of memory."""
    ask = DistillObjective._ask

    def fails(objective, batch):
        if len(batch.images) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ask(objective, batch)

    with patch.object(DistillObjective, "_ask", fails):
        yield


def tune_with_a_fault(values, places):
    """Runs in each process; the second one has less memory than the first."""
    os.environ["TRAINER_DEVICE"] = "cpu"
    with on_rank(1, small_memory), patch.object(trials, "LEAST_S", 0.1), patch.object(trials, "LONGEST_S", 0.2):
        tune.run(config.validate(config.TuneSettings, values), **places)


def test_process_that_runs_out_of_memory_leaves_no_other_waiting(digits, teacher, tmp_path):
    places = {"dataset": digits, "teacher": teacher, "tuning": str(tmp_path / "tuning")}
    together(2, tune_with_a_fault, section(apply=True, minutes=0.01), places)
    made = read_tuning(tmp_path / "tuning")
    assert [tried.trial.ended for tried in made.tried[:2]] == ["out of memory", "measured"]
    assert made.chosen["accumulation"] >= 2


@pytest.mark.long
def test_a_run_distills_with_what_its_tuning_chose(digits, teacher, tmp_path, monkeypatch):
    """Whatever that is: most machines find a larger batch better than one of two images."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "TRAINER_"))]:
        monkeypatch.delenv(name)
    quick = ["evaluate.latency_runs=10", "tracking.enabled=false", "distill.epochs=20", "distill.batch_size=2"]
    given = [f"pretrain.weights={teacher}", "pretrain.mae.epochs=0", "pretrain.finetune.epochs=0"]
    tuned = ["tune.enabled=true", "tune.apply=true", "tune.minutes=0.3"]
    arguments = {"output": str(tmp_path / "run"), "processes": 1}
    summary, _ = local_run.run("digits", [*quick, *given, *tuned], **arguments)
    made = read_tuning(tmp_path / "run" / "tuning")
    size = made.chosen["batch_size"]
    assert size in {tried.trial.candidate.batch_size for tried in made.tried if tried.taken}
    assert summary["settings"]["distill"]["batch_size"] == size
    assert "tune" in summary["stages"]
    (training,) = read_evidence(tmp_path / "run" / "distill-evidence").trainings
    assert training.ranks[0].record.context.settings["batch_size"] == size
    assert training.ranks[0].record.steps.count == made.work.steps
