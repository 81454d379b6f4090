"""An evaluation by several processes, which share the images."""

import json

import pytest

import trainer
from trainer.io import artifacts


@pytest.mark.slow
def test_processes_measure_together_what_one_measures(distillation, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    job = distillation("here").train()
    places = {**job.inputs, "student": job.outputs["student"]}
    overrides = (
        "evaluate.latency_runs=10 evaluate.label_issues=all evaluate.gate.min_knn_accuracy=0.01 evaluate.batch_size=50"
    )
    measured = {}
    for processes in (1, 3):  # 359 images in the test split
        made = trainer.run_stage(
            "evaluate",
            recipe="digits",
            overrides=overrides,
            processes=processes,
            **places,
            evaluation=tmp_path / str(processes),
        )
        assert made["evaluation"].device == "cpu"
        assert made["evaluation"].startup_seconds > 0
        measured[processes] = artifacts.read(tmp_path / str(processes), "evaluation")
    one, three = (json.loads((each.path / "metrics.json").read_text()) for each in measured.values())
    for name in ("teacher", "student"):
        for figure in ("top1", "top5", "knn_top1", "nll", "ece"):
            assert three[name]["test"][figure] == pytest.approx(one[name]["test"][figure], abs=1e-5)
    assert three["label_issues"] == one["label_issues"]
    # Each of three processes computes with its share of the threads, and latency is that of all.
    assert three["machine"]["threads"] == 3 * max(1, one["machine"]["threads"] // 3)
    for file in ("confusion.json", "label_issues.csv"):
        assert (measured[3].path / file).read_text() == (measured[1].path / file).read_text()
