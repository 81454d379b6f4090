"""What a component's body calls: a stage as a KFP task, which ends as `reporting` says.

What a stage makes lies in the task's folder of the pipeline's root, and is handed on as a reference, a text. KFP's own artifacts are what
a person opens: pages, metrics, teacher and student.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from components import launching, references
from components.launching import Placement
from trainer import stages
from trainer.config import DistillSettings, ExportSettings, TuneSettings, WarmUpSettings
from trainer.io import artifacts, limits, storage
from trainer.io.errors import EXIT_CODE, INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, PreemptedError, TrainerError
from trainer.io.host import ended_by_sigterm, ensure_home, escape_what_cannot_be_printed
from trainer.predict import batch_prediction, photo_classifier
from trainer.report import tracking
from trainer.runner.launch import write_termination_message
from trainer.stages.tuning.tuning_schema import read_tuning

if TYPE_CHECKING:
    from kfp import dsl

logger = logging.getLogger(__name__)

DEBUG = "TRAINER_DEBUG"  # environment variable, set to show the traceback of an error that has a message
MOST_CONFUSED_CLASSES = 200
"""Of a confusion matrix in Kubeflow's UI, which keeps it whole in the run's metadata: 40,000 numbers are some 400 kB there."""
RECORDED, ONLINE = "recorded", "online"
"""Where a distillation takes the teacher's outputs from: a recording, or the teacher itself in every step."""


def log_plainly() -> None:
    """Print our own log as plain lines."""
    escape_what_cannot_be_printed()
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(limits.PrintableFormatter("%(message)s"))
    for package in ("trainer", "components"):
        ours = logging.getLogger(package)
        # KFP's executor has put its own prefix on every line of the root logger.
        ours.handlers, ours.propagate = [handler], False
        ours.setLevel(logging.INFO)


@contextmanager
def reporting(name: str) -> Iterator[None]:
    """Show the task's own log as plain lines; a `TrainerError` ends in one reported message and a `SystemExit`, as does an interruption."""
    log_plainly()
    try:
        with ended_by_sigterm():
            ensure_home()
            yield
    except TrainerError as error:
        message = str(error) if str(error).startswith(f"{name}: ") else f"{name}: {error}"
        print(f"error: {message}", file=sys.stderr, flush=True)  # noqa: T201  # the message is what the task says last
        # Argo reads these, and tries a task again unless they begin with `error: ` (manifests/kfp).
        write_termination_message(f"{'for now' if error.is_transient else 'error'}: {message}")
        if os.environ.get(DEBUG):
            traceback.print_exc()
        raise SystemExit(PREEMPTED_EXIT_CODE if isinstance(error, PreemptedError) else EXIT_CODE) from error
    except KeyboardInterrupt as interruption:
        raise SystemExit(INTERRUPTED_EXIT_CODE) from interruption


def run_stage(stage: str, settings: str, inputs: Mapping[str, str], **further: object) -> tuple[str, ...]:
    """Run a stage in this process; returns references to its outputs, in the stage's order. An optional input may be an empty text."""
    with reporting(stage):
        places = _places(stage)
        stages.call(stage, settings, {**references.uris(inputs), **places}, **further)
        return _made(stage, places)


def train(
    stage: str,
    settings: str,
    inputs: Mapping[str, str],
    place: Placement,
    models: Mapping[str, dsl.Model] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Run a training stage as a group of processes, here or on a node pool; else as `run_stage`.

    `models` has the keyword of each output that is one of KFP's artifacts too, which gets kind and fingerprint as metadata.
    """
    with reporting(stage):
        places = _places(stage)
        launching.launch(stage, settings, references.uris(inputs), places, place, record=_place("job"))
        for name, model in models.items():
            kind = stages.STAGES[stage].outputs[name]
            model.metadata.update(kind=kind, fingerprint=artifacts.manifest(places[name], kind).fingerprint)
        return _made(stage, places)


def predict(photos: str, model: str, output: str, top: int, force: bool) -> tuple[int, int]:
    """Predict all photos of a folder, as `vit-distill predict --output`; gives how many there are, and how many are unreadable."""
    with reporting("predict_photos"):
        classifier = photo_classifier.load_model(model, judged=not force)
        logger.info("%s", classifier)
        made = batch_prediction.predict_folder(classifier, photos, output, top=top)
        logger.info("%s", batch_prediction.line(made, output))
        return int(made["photos"]), int(made["unreadable"])


def generation(*, fresh: bool) -> str:
    """Return the generation of cached results that this task's run takes, as `references.generation`."""
    run = os.environ.get("KFP_RUN_ID", "")  # of a run on a cluster, whose cache outlives it
    return references.generation(_place("generation"), run, fresh=fresh) if run else ""


def _places(stage: str) -> dict[str, str]:
    """Return keyword of each output of a stage -> its URI in this task's folder of the pipeline's root."""
    return {name: _place(made.task_folder or name) for name, made in stages.STAGES[stage].makes.items()}


def _place(name: str) -> str:
    from kfp import dsl  # at hand in a task, and nowhere else needed

    return str(dsl.get_uri(name))


def _made(stage: str, places: Mapping[str, str]) -> tuple[str, ...]:
    run = os.environ.get("KFP_RUN_ID", "")  # of a run on a cluster
    return tuple(references.shared(places[name], kind, run) for name, kind in stages.STAGES[stage].outputs.items())


def warm_up(settings: str, inputs: Mapping[str, str], place: Placement) -> tuple[str, ...]:
    """Run the stage warm_up if its section enables it; returns the reference to its report, or an empty text."""
    if not WarmUpSettings.model_validate_json(settings).enabled:
        return ("",)
    return train("warm_up", settings, inputs, place)


class Tuned(NamedTuple):
    """The outputs of the task tune."""

    distill: str  # the section of the distillation, as JSON
    distill_teacher: str  # `recorded` if reinforce has to run before distill, `online` if not
    tuning_uri: str  # the reference to the tuning; empty where nothing was measured


def tune(settings: str, inputs: Mapping[str, str], place: Placement) -> Tuned:
    """Run the stage tune if its section enables it, and return the settings for distill."""
    section = TuneSettings.model_validate_json(settings)
    if not section.enabled:
        return _tuned(section.distill or DistillSettings())
    (made,) = train("tune", settings, inputs, place)
    found = read_tuning(references.uri_of(made))
    return _tuned(DistillSettings.model_validate(found.settings), made)


def _tuned(settings: DistillSettings, made: str = "") -> Tuned:
    text = artifacts.canonical_json(settings.model_dump(mode="json"))
    return Tuned(text, RECORDED if settings.reads_recording else ONLINE, made)


def reinforce(
    settings: str, distill_teacher: str, inputs: Mapping[str, str], place: Placement, recording: dsl.HTML
) -> tuple[str, ...]:
    """Run the stage reinforce if the distillation reads recorded outputs; returns the reference to them, or an empty text."""
    if distill_teacher != RECORDED:
        return ("",)
    (made,) = train("reinforce", settings, inputs, place)
    show_page(made, "report.html", recording)
    return (made,)


def export(settings: str, inputs: Mapping[str, str], variants: dsl.HTML) -> tuple[str, ...]:
    """Run the stage export if its section enables it; returns the reference to its output, or an empty text."""
    if not ExportSettings.model_validate_json(settings).enabled:
        return ("",)
    (made,) = run_stage("export", settings, inputs)
    show_page(made, "export.html", variants)
    return (made,)


def show_page(made: str, file: str, page: dsl.HTML) -> None:
    """Show a page of a stage's output in Kubeflow's UI."""
    Path(page.path).write_bytes(_content(made, file))


def show_evaluation(made: str, page: dsl.HTML, metrics: dsl.Metrics, confusion: dsl.ClassificationMetrics) -> None:
    """Show an evaluation in Kubeflow's UI: its page, its numbers, `{"student": {"top1": 0.9}}` as `student.top1`, and the student's errors.

    Numbers and errors are written to the artifacts' files too: KFP's local cache takes an artifact without a file for lost.
    """
    show_page(made, "report.html", page)
    figures = artifacts.manifest(references.uri_of(made), "evaluation").figures
    numbers = {name.replace("/", "."): value for name, value in tracking.numbers(figures).items()}
    for name, value in numbers.items():
        metrics.log_metric(name, value)
    Path(metrics.path).write_text(json.dumps(numbers, indent=2), encoding="utf-8")
    if "map" in figures["student"]["test"]:  # images that may have several labels have no such matrix
        Path(confusion.path).write_text("{}", encoding="utf-8")
        return
    content = _content(made, "confusion.json")
    Path(confusion.path).write_bytes(content)
    found = json.loads(content)
    if (classes := len(found["labels"])) > MOST_CONFUSED_CLASSES:  # the page has the worst ones
        return
    matrix = [[0] * classes for _ in range(classes)]
    for truth, predicted, count in found["pairs"]:
        matrix[truth][predicted] = count
    confusion.log_confusion_matrix(found["labels"], matrix)


def _content(made: str, file: str) -> bytes:
    return storage.read_bytes(storage.join(references.uri_of(made), file))
