from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
from sklearn.datasets import load_digits

from tests.trained_digits import IMAGES, TAGS, change_labels, write_dataset
from trainer.config import EvaluateSettings, GateSettings
from trainer.data.dataset import open_dataset
from trainer.evaluation import metrics as scores
from trainer.io import artifacts
from trainer.io.errors import DataError, ModelError
from trainer.models import networks
from trainer.stages import evaluate

SETTINGS = EvaluateSettings(latency_runs=10, latency_batch_sizes=(1, 4), gate=GateSettings(max_accuracy_drop=1))


@pytest.fixture(scope="module")
def evaluation(trained_digits, tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluation") / "evaluation"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return run(trained_digits, path)


def run(trained_digits, path: Path, settings: EvaluateSettings = SETTINGS, **changed):
    inputs = {"dataset": trained_digits.dataset, "teacher": trained_digits.teacher, "student": trained_digits.student}
    return evaluate.run(settings, **{**inputs, **changed}, evaluation=path)


def test_figures_are_those_of_the_models_themselves(trained_digits, evaluation):
    teacher, student = networks.load(trained_digits.teacher), networks.load(trained_digits.student)
    with torch.inference_mode():
        guesses = [model(trained_digits.images).argmax(dim=1).numpy() for model in (teacher, student)]
    figures = evaluation.figures
    assert figures["teacher"]["test"]["top1"] == pytest.approx(np.mean(guesses[0] == trained_digits.labels))
    assert figures["student"]["test"]["top1"] == pytest.approx(np.mean(guesses[1] == trained_digits.labels))
    assert figures["student"]["test"]["agreement"] == pytest.approx(np.mean(guesses[0] == guesses[1]))
    assert figures["student"]["test"]["top5"] >= figures["student"]["test"]["top1"] > 0.3
    assert 0 <= figures["student"]["test"]["ece"] <= 1
    assert figures["student"]["parameters"] == sum(weight.numel() for weight in student.parameters())
    assert figures["student"]["size_bytes"] == (trained_digits.student / "model.safetensors").stat().st_size
    assert figures["student"]["macs"] < figures["teacher"]["macs"]
    assert 0 < figures["student"]["latency_ms"]["p50"] <= figures["student"]["latency_ms"]["p95"]
    assert (figures["verdict"]["passed"], figures["verdict"]["reasons"]) == (True, [])
    assert [one["limit"] for one in figures["verdict"]["conditions"]] == ["at most 100.00 points", "at least 2 times"]


def test_the_temperature_is_fitted_and_used_everywhere(trained_digits, evaluation):
    data, model = open_dataset(trained_digits.dataset), networks.load(trained_digits.student)

    def logits(split):
        with torch.inference_mode():
            return model(split.read(range(len(split)))).numpy()

    val, test = data.split("val"), data.split("test")
    temperature = scores.fit_temperature(logits(val), val.labels)
    student = evaluation.figures["student"]
    assert student["temperature"] == pytest.approx(temperature, rel=1e-3)
    assert abs(temperature - 1) > 0.01
    before, after = (scores.calibration(logits(test) / by, test.labels, 15) for by in (1, student["temperature"]))
    assert student["test"]["ece_uncalibrated"] == pytest.approx(before.error, abs=1e-4)
    assert student["test"]["ece"] == pytest.approx(after.error, abs=1e-4)
    kept = json.loads((evaluation.path / "metrics.json").read_text())["student"]["calibration"]
    assert kept["error"] == student["test"]["ece"]
    page = (evaluation.path / "report.html").read_text()
    assert f"{student['test']['ece']:.4f} with it, and {before.error:.4f} without" in page


def test_confusion_matrix_counts_every_test_image(trained_digits, evaluation):
    confusion = json.loads((evaluation.path / "confusion.json").read_text())
    truth, predicted, counts = np.array(confusion["pairs"]).T
    assert confusion["labels"] == list("0123456789")
    assert (counts > 0).all()
    assert np.bincount(truth, weights=counts).tolist() == np.bincount(trained_digits.labels).tolist()
    assert counts[truth == predicted].sum() / counts.sum() == pytest.approx(
        evaluation.figures["student"]["test"]["top1"]
    )


def test_unusable_inputs_are_refused(trained_digits, tmp_path):
    student = relabeled(trained_digits.student, tmp_path / "student", [*"012345678", "nine"])
    with pytest.raises(ModelError, match=r"student .*class 9 is 'nine', but the data set's is '9'"):
        run(trained_digits, tmp_path / "evaluation", student=student)
    assert not artifacts.exists(tmp_path / "evaluation")
    # A test split with an image without a label is refused.
    labels = load_digits().target.copy()
    labels[IMAGES["test"].start] = -1
    write_dataset(tmp_path / "dataset", labels)
    places = {"teacher": trained_digits.teacher, "student": trained_digits.student}
    with pytest.raises(DataError, match="1 of them without a label"):
        evaluate.run(SETTINGS, dataset=tmp_path / "dataset", **places, evaluation=tmp_path / "evaluation")
    assert not (tmp_path / "evaluation").exists()


def relabeled(source: Path, target: Path, labels: list[str]) -> Path:
    config = json.loads((source / "config.json").read_text())
    with artifacts.create(target, "model", settings={}) as draft:
        (draft.path / "config.json").write_text(json.dumps({**config, "labels": labels}))
        (draft.path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return target


def test_logits_that_are_not_finite_are_refused(trained_digits, tmp_path):
    weights = safetensors.torch.load_file(trained_digits.student / "model.safetensors")
    weights["head.bias"][3] = float("nan")
    with artifacts.create(tmp_path / "student", "model", settings={}) as draft:
        (draft.path / "config.json").write_bytes((trained_digits.student / "config.json").read_bytes())
        safetensors.torch.save_file(weights, draft.path / "model.safetensors")
    with pytest.raises(ModelError, match="student: gives logits that are not finite for 300 of 300 test images"):
        run(trained_digits, tmp_path / "evaluation", student=tmp_path / "student")


RISKY = SETTINGS.model_copy(update={"answer_risk": 0.1})


def test_levels_and_answers_of_the_hierarchy(trained_digits, tagged_dataset, evaluation, tmp_path):
    artifact = run(trained_digits, tmp_path / "evaluation", RISKY, dataset=tagged_dataset)
    teacher, student = (artifact.figures[name]["test"] for name in ("teacher", "student"))
    groups = np.array(TAGS.levels[0].of_class)
    with torch.inference_mode():
        guesses = networks.load(trained_digits.student)(trained_digits.images).argmax(dim=1).numpy()
    right = np.mean(groups[guesses] == groups[trained_digits.labels])
    assert student["levels"] == {"1": pytest.approx(right), "2": student["top1"]}
    assert teacher["levels"]["1"] > teacher["levels"]["2"] == teacher["top1"]
    answers = student["answers"]
    assert answers["risk"] == 0.1
    assert 0 < answers["threshold"] < 1
    assert sum(answers["named"].values()) + answers["none"] == pytest.approx(1)
    assert min(answers["named"].values()) > 0.05, "classes and groups are named"
    assert answers["wrong"] < 0.15 < 1 - student["top1"], (
        "a student that errs more often than it may, and says less instead"
    )
    assert "answers" not in teacher
    page = (artifact.path / "report.html").read_text()
    assert "Levels of the hierarchy" in page
    assert "of which it is more than" in page
    assert f"at most 10.0% of all images get a wrong answer; of the test images {answers['wrong']:.1%} do." in page
    assert json.loads((artifact.path / "metrics.json").read_text())["student"]["test"] == student
    # What a data set without a hierarchy has is as it was.
    assert set(evaluation.figures["student"]["test"]) == {
        "top1",
        "top5",
        "ece",
        "ece_equal_mass",
        "ece_uncalibrated",
        "nll",
        "agreement",
    }
    assert "answer_risk" not in evaluation.settings
    assert "Levels of the hierarchy" not in (evaluation.path / "report.html").read_text()


def test_nearest_neighbors_are_measured_where_gate_asks_for_them(trained_digits, evaluation, tmp_path):
    gate = GateSettings(max_accuracy_drop=1, min_knn_accuracy=0.999)
    artifact = run(trained_digits, tmp_path / "evaluation", SETTINGS.model_copy(update={"gate": gate}))
    for name in ("teacher", "student"):
        before, now = (dict(figures[name]["test"]) for figures in (evaluation.figures, artifact.figures))
        assert 0.4 < now.pop("knn_top1") < 0.999
        assert now == before
    (reason,) = artifact.figures["verdict"]["reasons"]
    assert reason.startswith("accuracy: the k-NN top-1 of the student's embeddings is")
    assert "k-NN top-1" not in (evaluation.path / "report.html").read_text()


@pytest.fixture(scope="module")
def mislabeled(tmp_path_factory):
    """The digits with a wrong label for every twentieth one, and which those are."""
    path = tmp_path_factory.mktemp("mislabeled") / "dataset"
    labels, wrong = change_labels(load_digits().target, seed=0)
    write_dataset(path, labels)
    return path, {f"digits/{index}" for index in np.flatnonzero(wrong)}


def read_issues(artifact) -> list[dict[str, str]]:
    with (artifact.path / "label_issues.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_wrong_labels_of_val_and_test_are_found(trained_digits, mislabeled, tmp_path):
    dataset, wrong = mislabeled
    artifact = run(trained_digits, tmp_path / "evaluation", dataset=dataset)
    found = read_issues(artifact)
    assert {row["split"] for row in found} == {"val", "test"}
    there = {f"digits/{index}" for name in ("val", "test") for index in IMAGES[name]} & wrong
    hits = [row for row in found if row["path"] in wrong]
    assert len(hits) / len(there) > 0.8, f"recall; by chance it is {len(found) / 500}"
    assert len(hits) / len(found) > 0.4, "precision; by chance it is 0.05"
    for row in hits:
        assert row["label"] == str(open_dataset(dataset).split(row["split"]).labels[digit(row, row["split"])])
    right = [row["suggested"] == str(load_digits().target[int(row["path"].removeprefix("digits/"))]) for row in hits]
    assert np.mean(right) > 0.7
    margins = [float(row["confidence"]) - float(row["label_confidence"]) for row in found]
    assert margins == sorted(margins, reverse=True)
    counts = json.loads((artifact.path / "metrics.json").read_text())["label_issues"]
    assert {name: count["judged"] for name, count in counts.items()} == {"val": 200, "test": 300}
    assert sum(count["contradicted"] for count in counts.values()) == len(found)
    page = (artifact.path / "report.html").read_text()
    assert "Labels that the teacher contradicts" in page
    assert found[0]["path"] in page
    assert "All are in label_issues.csv." in page
    assert "learned by heart" not in page
    assert "label_issues" not in artifact.settings, "older evaluations stay valid"


def digit(row: dict[str, str], split: str) -> int:
    return int(row["path"].removeprefix("digits/")) - IMAGES[split].start


def test_training_labels_are_judged_by_probe_of_other_folds(trained_digits, mislabeled, tmp_path):
    dataset, wrong = mislabeled
    settings = SETTINGS.model_copy(update={"label_issues": "all"})
    artifact = run(trained_digits, tmp_path / "evaluation", settings, dataset=dataset)
    found = {row["path"] for row in read_issues(artifact) if row["split"] == "train"}
    there = {f"digits/{index}" for index in IMAGES["train"]} & wrong
    assert len(found & there) / len(there) > 0.6, "the teacher has not seen the wrong labels"
    assert len(found & there) / len(found) > 0.4
    assert "those that it has learned by heart" in (artifact.path / "report.html").read_text()
    assert not {row["path"] for row in read_issues(artifact)} & {f"digits/{index}" for index in IMAGES["unlabeled"]}


def test_what_neighbors_have_embedded_is_not_embedded_again(trained_digits, tmp_path, monkeypatch):
    seen, embed = [], evaluate.embed

    def counted(model, split, *arguments, **sharing):
        seen.append((model.network, split.name))
        return embed(model, split, *arguments, **sharing)

    monkeypatch.setattr(evaluate, "embed", counted)
    gate = SETTINGS.gate.model_copy(update={"min_knn_accuracy": 0.1})
    artifact = run(
        trained_digits, tmp_path / "evaluation", SETTINGS.model_copy(update={"label_issues": "all", "gate": gate})
    )
    assert sorted(split for _, split in seen) == ["test", "test", "train", "train", "val"]
    assert len(set(seen)) == len(seen)
    alone = run(trained_digits, tmp_path / "alone", SETTINGS.model_copy(update={"label_issues": "all"}))
    assert read_issues(artifact) == read_issues(alone)


def test_labels_are_not_judged_where_that_is_off(trained_digits, tmp_path):
    artifact = run(trained_digits, tmp_path / "evaluation", SETTINGS.model_copy(update={"label_issues": "off"}))
    assert not (artifact.path / "label_issues.csv").exists()
    assert "label_issues" not in json.loads((artifact.path / "metrics.json").read_text())
    assert "Labels that the teacher" not in (artifact.path / "report.html").read_text()


def test_the_end_of_other_processes_is_waited_for(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"]) as other:
        evaluate._await_end([other.pid])
        assert psutil.Process(other.pid).status() == psutil.STATUS_ZOMBIE, "it has ended, and nobody has asked how"
    evaluate._await_end([other.pid])  # it is gone
    monkeypatch.setattr(evaluate, "_END_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        evaluate._await_end([other.pid])
        assert other.poll() is None, "one that stays is not waited for without end"
        other.kill()
