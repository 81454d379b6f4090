"""evaluate: measure teacher and student on the test split, and judge the student."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from trainer.config import EvaluateSettings
from trainer.config.conflicts import Facts, conflicts
from trainer.data.dataset import PreparedDataset, Split, open_dataset
from trainer.data.dataset_schema import SplitName
from trainer.devices import choose_device
from trainer.devices.process_group import Processes, join_processes
from trainer.evaluation import hierarchy, label_issues, metrics, report, slices
from trainer.evaluation.embeddings import (
    MAX_IMAGES,
    Embeddings,
    collected,
    dealt,
    embed,
    evenly_spaced,
    fit_probe,
    in_batches,
    nearest_neighbors,
)
from trainer.evaluation.label_issues import JudgedLabels
from trainer.evaluation.report import EarlierRun, Measured, MeasuredSets
from trainer.graph import REGISTRATION
from trainer.io import artifacts, storage
from trainer.io.artifacts import Artifact, Draft
from trainer.io.costs import dollars_text
from trainer.io.errors import ArtifactError, DataError, ModelError, SettingsError
from trainer.io.formatting import duration
from trainer.io.host import seconds_since_launch
from trainer.models import networks
from trainer.models.networks import Classifier
from trainer.models.served_student.student import to_probabilities
from trainer.report import scores, tracking
from trainer.report.finished_run import read_run
from trainer.report.tracking.stage_runs import stage_run

METRICS = "metrics.json"
CONFUSION = "confusion.json"
REPORT = "report.html"
LABEL_ISSUES = "label_issues.csv"

_TOP_K = 5
_EXAMPLE_EDGE = 160  # of a picture on the run's page, in pixels
_EARLIER_RUNS = 20  # that the page compares with, at most

logger = logging.getLogger(__name__)

_END_S = 30.0

Logits = npt.NDArray[np.floating]


def run(
    settings: EvaluateSettings, *, dataset: str | Path, teacher: str | Path, student: str | Path, evaluation: str | Path
) -> Artifact | None:
    """Write `metrics.json` (everything), `confusion.json` (the student's confusions), `label_issues.csv` and `report.html`.

    Runs in every process of the job: they share the images, and the first one judges and writes. Where images may have several labels
    there is no matrix, and no label is doubted. Accuracy is measured on the device that `TRAINER_DEVICE` names, in fp32; latency always
    on the CPU, of the first process when the others have ended.

    Returns:
        The evaluation, in the first process.
    """
    values = settings.model_dump(mode="json")
    with join_processes() as processes, stage_run("evaluate", values, active=processes.is_first) as tracker:
        data = open_dataset(dataset)
        split = data.split("test")
        if len(split) == 0 or (split.labels < 0).any():
            raise DataError(
                f"the test split has {len(split)} images, {int((split.labels < 0).sum())} of them without a label; "
                "a student cannot be judged on it, prepare a labeled one (data.test_fraction)"
            )
        subjects = [_subject("teacher", teacher, data), _subject("student", student, data)]
        parents = {"dataset": data.fingerprint, **{subject.name: subject.fingerprint for subject in subjects}}
        with ExitStack() as stack:
            draft: Draft | None = None
            if processes.is_first:
                draft = stack.enter_context(
                    artifacts.create(evaluation, "evaluation", settings=values, parents=parents)
                )
                draft.startup_seconds, draft.device = round(seconds_since_launch(), 3), processes.device.kind
            asked = _ask(settings, data, subjects, processes)
            here = (platform.node(), os.getpid())
            places = processes.collect(here, "the end of evaluate's other processes")
            if draft is None:
                return None
            if processes.local_world_size > 1:  # latency is that of all their threads
                _await_end(pid for node, pid in places if node == here[0] and pid != here[1])
                torch.set_num_threads(torch.get_num_threads() * processes.local_world_size)
            is_here = not storage.is_remote(evaluation)
            earlier = _earlier_runs(storage.local_path(evaluation), data.fingerprint) if is_here else []
            draft.figures.update(_evaluate(settings, data, asked, draft.path, earlier))
        made = artifacts.read(evaluation, "evaluation")
        tracker.metrics(0, tracking.numbers(made.figures))
        for name in made.files:
            tracker.file(made.path / name)
    return made


def _await_end(pids: Iterable[int]) -> None:
    """Wait until these processes have ended, for half a minute at most."""
    until = time.monotonic() + _END_S
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
                time.sleep(0.1)


def _earlier_runs(evaluation: Path, dataset: str) -> list[EarlierRun]:
    """Find the runs beside this run's directory whose evaluation is of the same data set, the latest first."""
    here, found = evaluation.resolve(), []
    for place in here.parent.parent.glob(f"*/{here.name}"):
        if place == here or not artifacts.exists(place):
            continue
        try:
            manifest, cost = artifacts.manifest(place, "evaluation"), ""
            if manifest.parents.get("dataset") != dataset:
                continue
            if artifacts.exists(registration := place.parent / REGISTRATION.folder):
                priced, _ = read_run(registration)
                cost = ", ".join(text for text in (duration(priced.seconds), dollars_text(priced.dollars)) if text)
        except ArtifactError as error:  # of another version, or damaged
            logger.warning("evaluate: the page does not compare with %s: %s", place.parent.name, error)
            continue
        run = EarlierRun(
            name=place.parent.name, teacher=manifest.figures["teacher"], student=manifest.figures["student"], cost=cost
        )
        found.append((manifest.created, run))
    return [run for _, run in sorted(found, key=lambda pair: pair[0], reverse=True)[:_EARLIER_RUNS]]


@dataclass(frozen=True, kw_only=True)
class _Evaluated:
    name: str
    model: Classifier
    size_bytes: int
    fingerprint: str
    knn_top1: float | None = None  # accuracy of its nearest neighbors on the test split, where it was asked for
    probed: bool = False  # whether its head is a linear probe that was fitted here
    embedded: Mapping[str, Embeddings] = field(default_factory=dict)
    """Name of a split -> what was already embedded of it, where the embedding was asked for."""


def _subject(name: str, uri: str | Path, data: PreparedDataset) -> _Evaluated:
    artifact = artifacts.read(uri, "model")
    model = networks.load(artifact)
    if model.card.labels or name == "student":
        networks.check_labels(model, data.classes, f"{name} {artifact.path}", several=data.targets is not None)
    size_bytes = (artifact.path / networks.WEIGHTS).stat().st_size
    return _Evaluated(name=name, model=model, size_bytes=size_bytes, fingerprint=artifact.fingerprint)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the models said of the images; in other processes than the first the numbers are missing."""

    teacher: _Evaluated
    student: _Evaluated
    logits: Mapping[tuple[str, SplitName], Logits]  # of a model on a split

    @property
    def subjects(self) -> list[_Evaluated]:
        return [self.teacher, self.student]


def _ask(
    settings: EvaluateSettings, data: PreparedDataset, subjects: Sequence[_Evaluated], processes: Processes
) -> _Asked:
    """Ask the models of all images that are judged, with all processes."""
    needed: list[tuple[str, SplitName]] = [("teacher", "test"), ("student", "test"), ("student", "val")]
    if data.targets is not None:
        if mistakes := conflicts(Facts(evaluate=settings, multi_label=True)):
            raise SettingsError("\n".join(mistakes))
        for subject in subjects:
            if not subject.model.card.labels:
                raise ModelError(
                    f"{subject.name}: has no head, and none is fitted to images of several labels; train it with one "
                    "(pretrain.head=classes)"
                )
    elif settings.gate.min_knn_accuracy or not all(subject.model.card.labels for subject in subjects):
        subjects = _probed(subjects, data, settings, processes)
    if data.targets is not None or settings.label_issues != "off":
        needed.append(("teacher", "val"))
    teacher, student = subjects
    models = {"teacher": teacher.model, "student": student.model}
    logits = {
        (name, split): predict(models[name], data.split(split), settings.batch_size, name, processes)
        for name, split in needed
    }
    if data.targets is None and settings.label_issues == "all":
        embedded, size = dict(teacher.embedded), settings.batch_size
        for split in ("train", "val"):
            if split not in embedded:
                images = data.split(split)
                chosen = evenly_spaced(len(images), MAX_IMAGES, images.run) if split == "train" else range(len(images))
                embedded[split] = _embed(teacher.model, images, chosen, size, processes)
        teacher = replace(teacher, embedded=embedded)
        teacher.model.cpu()
    return _Asked(teacher=teacher, student=student, logits=logits)


def _embed(
    model: Classifier, split: Split, indices: Sequence[int], batch_size: int, processes: Processes
) -> Embeddings:
    mine, sharing = dealt(indices, processes), processes.local_world_size
    own = embed(model, split, mine, processes.device, batch_size, sharing=sharing)
    return collected(own, len(indices), processes, f"the embeddings of {split.name}")


def _probed(
    subjects: Sequence[_Evaluated], data: PreparedDataset, settings: EvaluateSettings, processes: Processes
) -> list[_Evaluated]:
    """Probe the embeddings: votes of nearest neighbors for all models, and a linear probe as the head of a headless one."""
    train, test = data.split("train"), data.split("test")
    classes, done = len(data.classes), []
    bank = evenly_spaced(len(train), MAX_IMAGES, train.run)
    labels = train.labels[bank]
    for subject in subjects:
        model, size, knn_top1 = subject.model, settings.batch_size, None
        embedded = {"train": _embed(model, train, bank, size, processes)}
        asked = _embed(model, test, range(len(test)), size, processes)
        if processes.is_first:
            votes = nearest_neighbors(embedded["train"], labels, asked, classes)
            knn_top1 = metrics.top_k(votes, test.labels, 1)
        if not model.card.labels:
            val = data.split("val")
            embedded["val"] = _embed(model, val, range(len(val)), size, processes)
            fit = partial(fit_probe, embedded["train"], labels, embedded["val"], val.labels, classes)
            probe = processes.from_first(fit, "the linear probe")
            model = probe.head_of(model, data.classes).eval()
        probed = model is not subject.model
        done.append(replace(subject, model=model.cpu(), knn_top1=knn_top1, probed=probed, embedded=embedded))
    return done


def _evaluate(
    settings: EvaluateSettings,
    data: PreparedDataset,
    asked: _Asked,
    directory: Path,
    earlier: Sequence[EarlierRun],
) -> dict[str, Any]:
    """Measure, judge, write the files; returns the main figures."""
    if data.targets is not None:
        return _evaluate_sets(settings, data, asked, directory, earlier)
    classes, split, val, subjects = data.classes, data.split("test"), data.split("val"), asked.subjects
    logits = {subject.name: asked.logits[subject.name, "test"] for subject in subjects}
    timed = _timed(subjects, split, settings)
    val_logits = asked.logits["student", "val"]
    temperature = metrics.fit_temperature(val_logits, val.labels)
    uncalibrated = metrics.calibration(logits["student"], split.labels, settings.calibration_bins)
    logits["student"] = logits["student"].astype(np.float64) / temperature  # as it is served
    measured = {
        subject.name: _measured(subject, logits[subject.name], split, settings, timed[subject.name])
        for subject in subjects
    }
    ours, theirs = measured["student"].figures, measured["teacher"].figures
    ours["temperature"] = temperature
    ours["test"]["ece_uncalibrated"] = uncalibrated.error
    ours["test"]["agreement"] = metrics.agreement(logits["student"], logits["teacher"])
    if (tags := data.hierarchy) is not None:
        for name, of_model in logits.items():
            measured[name].figures["test"]["levels"] = hierarchy.level_accuracies(tags, of_model, split.labels)
        if settings.answer_risk:
            risk = settings.answer_risk
            threshold = hierarchy.choose_threshold(tags, val_logits / temperature, val.labels, risk)
            answering = tags.answering(risk=risk, threshold=threshold)
            ours["test"]["answers"] = hierarchy.answers(answering, logits["student"], split.labels)
    verdict, machine = _verdict(settings, theirs, ours), metrics.machine(choose_device().kind)
    matrix = measured["student"].matrix
    details: dict[str, Any] = {name: one.details(classes) for name, one in measured.items()}
    judged: JudgedLabels | None = None
    if settings.label_issues != "off":
        judged = _judged_labels(settings, data, asked)
        details["label_issues"] = {name: asdict(count) for name, count in judged.counts.items()}
        label_issues.write(directory / LABEL_ISSUES, judged.issues, classes)
    _write(directory / METRICS, {**details, "machine": asdict(machine), "verdict": verdict})
    pairs = matrix.tocoo()
    rows = np.stack([pairs.row, pairs.col, pairs.data], axis=1).tolist()
    (directory / CONFUSION).write_text(
        json.dumps({"labels": list(classes), "pairs": rows}, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    answers = {name: one.answers for name, one in measured.items()}
    page = report.render(
        classes=classes,
        **measured,
        machine=machine,
        verdict=verdict,
        split=split,
        shown=settings.worst_confusions,
        bins=settings.calibration_bins,
        slicings=slices.compared(split, data.test_edges(), **answers),
        earlier=earlier,
        tags=tags,
        judged=judged,
        student_answers={"val": metrics.answers(val_logits / temperature, val.labels), "test": answers["student"]},
    )
    (directory / REPORT).write_text(page, encoding="utf-8")
    return {
        "teacher": theirs,
        "student": ours,
        "verdict": verdict,
        "examples": _examples(split, answers, classes, directory),
    }


def _examples(
    split: Split, answers: Mapping[str, metrics.Answers], classes: Sequence[str], directory: Path
) -> list[dict[str, Any]]:
    """Write the first test image, and the one of the student's surest mistake, with what both models answer, for the run's page."""
    student, examples = answers["student"], []
    wrong = np.flatnonzero(~student.right)
    chosen = [0, *wrong[np.argsort(-student.confidence[wrong], kind="stable")[:1]].tolist()]
    for number, index in enumerate(dict.fromkeys(chosen), start=1):
        file = f"example-{number}.png"
        (directory / file).write_bytes(report.strip(split.read([index]).numpy(), edge=_EXAMPLE_EDGE))
        given = {
            name: {"answer": classes[one.predicted[index]], "confidence": float(one.confidence[index])}
            for name, one in answers.items()
        }
        label = classes[student.labels[index]]
        examples.append({"picture": file, "source": split.sources[index], "label": label, **given})
    return examples


def _evaluate_sets(
    settings: EvaluateSettings,
    data: PreparedDataset,
    asked: _Asked,
    directory: Path,
    earlier: Sequence[EarlierRun],
) -> dict[str, Any]:
    """Evaluate images that may have several labels, each class by itself: mAP, and F1 above a threshold."""
    classes, split, val = data.classes, data.split("test"), data.split("val")
    timed, measured = _timed(asked.subjects, split, settings), dict[str, MeasuredSets]()
    for subject in asked.subjects:
        logits, val_logits = (asked.logits[subject.name, part.name].astype(np.float64) for part in (split, val))
        temperature = metrics.fit_temperature_by_class(val_logits, val.wanted)
        found, known = (to_probabilities(some / temperature, by_class=True) for some in (logits, val_logits))
        threshold = metrics.choose_threshold(known, val.wanted)
        figures = _about(subject, split, timed[subject.name]) | {"temperature": temperature, "threshold": threshold}
        measured[subject.name] = MeasuredSets(
            figures=figures, probabilities=found, wanted=split.wanted, latencies=timed[subject.name]
        )
    theirs, ours = (one.figures for one in measured.values())
    ours["test"]["agreement"] = metrics.f1(measured["student"].named, measured["teacher"].named)
    verdict, machine = _verdict(settings, theirs, ours), metrics.machine(choose_device().kind)
    details = {name: one.details(classes, settings.calibration_bins) for name, one in measured.items()}
    _write(directory / METRICS, {**details, "machine": asdict(machine), "verdict": verdict})
    shown = settings.worst_confusions
    page = report.render_sets(
        classes, **measured, machine=machine, verdict=verdict, split=split, shown=shown, earlier=earlier
    )
    (directory / REPORT).write_text(page, encoding="utf-8")
    return {"teacher": theirs, "student": ours, "verdict": verdict}


def _verdict(settings: EvaluateSettings, teacher: Mapping[str, Any], student: Mapping[str, Any]) -> dict[str, Any]:
    conditions = metrics.judge(
        settings.gate,
        teacher_score=scores.score(teacher["test"]),
        student_score=scores.score(student["test"]),
        student_knn_top1=student["test"].get("knn_top1"),
        teacher_parameters=teacher["parameters"],
        student_parameters=student["parameters"],
        student_p95_ms=student["latency_ms"]["p95"],
        title=scores.title(student["test"]),
    )
    reasons = [one.reason for one in conditions if one.reason]
    return {"passed": not reasons, "reasons": reasons, "conditions": [asdict(one) for one in conditions]}


def _write(file: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    file.write_text(text + "\n", encoding="utf-8")


def _timed(
    subjects: Sequence[_Evaluated], split: Split, settings: EvaluateSettings
) -> dict[str, list[metrics.Latency]]:
    return metrics.measure_latency(
        {subject.name: subject.model for subject in subjects},
        split.read(range(min(len(split), max(settings.latency_batch_sizes)))),
        batch_sizes=settings.latency_batch_sizes,
        runs=settings.latency_runs,
    )


def _judged_labels(settings: EvaluateSettings, data: PreparedDataset, asked: _Asked) -> JudgedLabels:
    """Find the labels that the teacher contradicts: of val and test, and of train where that is asked for."""
    val, test = data.split("val"), data.split("test")
    logits = np.concatenate([asked.logits["teacher", "val"], asked.logits["teacher", "test"]])
    held_out = label_issues.judge(logits, {split: np.arange(len(split)) for split in (val, test)})
    if settings.label_issues != "all":
        return held_out
    train, embedded = data.split("train"), asked.teacher.embedded
    chosen = np.array(evenly_spaced(len(train), MAX_IMAGES, train.run))
    out_of_fold, is_judged = label_issues.cross_validated(
        embedded["train"], train.labels[chosen], embedded["val"], val.labels, len(data.classes)
    )
    return label_issues.judge(out_of_fold[is_judged], {train: chosen[is_judged]}) + held_out


def predict(model: Classifier, split: Split, batch_size: int, name: str, processes: Processes | None = None) -> Logits:
    """Compute a model's logits on a whole split, fp32 [N, K], or raise a `ModelError` for one not finite; the model ends on the CPU.

    Several processes share the images; the first one gets the logits, the others none.
    """
    processes = processes or Processes(rank=0, world_size=1, local_rank=0, device=choose_device().open())
    model.to(processes.device.torch_device)
    mine, sharing = dealt(range(len(split)), processes), processes.local_world_size
    own = in_batches(model, split, mine, processes.device, batch_size, sharing=sharing)
    model.to("cpu")
    logits = collected(own, len(split), processes, f"the logits of the {name} on {split.name}")
    broken = ~np.isfinite(logits).all(axis=1)
    if broken.any():
        raise ModelError(
            f"{name}: gives logits that are not finite for {int(broken.sum())} of {len(split)} {split.name} images, "
            f"first for image {split.names[int(broken.argmax())]}; train it again with a lower learning rate or in fp32"
        )
    return logits


def _measured(
    subject: _Evaluated, logits: Logits, split: Split, settings: EvaluateSettings, latencies: Sequence[metrics.Latency]
) -> Measured:
    classes = len(subject.model.card.labels)
    calibration = metrics.calibration(logits, split.labels, settings.calibration_bins)
    figures = _about(subject, split, latencies)
    answers = metrics.answers(logits, split.labels)
    figures["test"] = {
        "top1": metrics.top_k(logits, split.labels, 1),
        "top5": metrics.top_k(logits, split.labels, min(_TOP_K, classes)),
        "ece": calibration.error,
        "ece_equal_mass": metrics.equal_mass_calibration(answers, settings.calibration_bins).error,
        "nll": metrics.negative_log_likelihood(logits, split.labels),
    }
    if subject.knn_top1 is not None:
        figures["test"]["knn_top1"] = subject.knn_top1
    if subject.probed:
        figures["head"] = "linear probe"
    matrix = metrics.confusion_matrix(logits.argmax(axis=1), split.labels, classes)
    return Measured(figures=figures, answers=answers, matrix=matrix, calibration=calibration, latencies=latencies)


def _about(subject: _Evaluated, split: Split, latencies: Sequence[metrics.Latency]) -> dict[str, Any]:
    """Return the figures of a model that do not depend on its answers."""
    model = subject.model
    return {
        "architecture": model.card.architecture,
        "title": model.card.title,
        "parameters": networks.parameter_count(model),
        "macs": metrics.multiply_accumulates(model, split.read([0])),
        "size_bytes": subject.size_bytes,
        "latency_ms": {"p50": latencies[0].p50_ms, "p95": latencies[0].p95_ms},
        "throughput": max(timed.images_per_second for timed in latencies),
    }
