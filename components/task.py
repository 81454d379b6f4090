"""What a component's body calls: a stage as a KFP task, with KFP's artifacts as its directories."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from components import launching
from components.launching import Training
from trainer import artifacts, limits, stages, storage, tracking
from trainer.config import DistillSettings, TuneSettings, WarmUpSettings
from trainer.errors import EXIT_CODE, INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, PreemptedError, TrainerError
from trainer.launch import leave_last_words
from trainer.signals import ended_by_sigterm
from trainer.tuning.schema import read_tuning

if TYPE_CHECKING:
    from kfp import dsl

DEBUG = "TRAINER_DEBUG"
"""Environment variable, set to show the traceback of an error that has a message."""
RECORDED, ONLINE = "recorded", "online"
"""Where a distillation takes the teacher's outputs from: a recording, or the teacher itself in every step."""
ERROR_FILE = "TRAINER_ERROR_FILE"
"""Environment variable that names the file for the message, where somebody waits to show it; else it is printed."""


@contextmanager
def reporting(name: str) -> Iterator[None]:
    """Show the task's own log as plain lines, and end it with one message where the user can mend what is wrong.

    Raises:
        SystemExit: in the place of a `TrainerError`, whose message was told, and of an interruption.
    """
    _show_log()
    try:
        with ended_by_sigterm():
            yield
    except TrainerError as error:
        message = str(error) if str(error).startswith(f"{name}: ") else f"{name}: {error}"
        _tell(message)
        # Argo reads these, and tries a task again unless they begin with `error: ` (manifests/kfp).
        leave_last_words(f"{'for now' if error.passing else 'error'}: {message}")
        if os.environ.get(DEBUG):
            traceback.print_exc()
        raise SystemExit(PREEMPTED_EXIT_CODE if isinstance(error, PreemptedError) else EXIT_CODE) from error
    except KeyboardInterrupt as interruption:
        raise SystemExit(INTERRUPTED_EXIT_CODE) from interruption


def _tell(message: str) -> None:
    file = os.environ.get(ERROR_FILE)
    if file:
        Path(file).write_text(message)
    else:
        print(f"error: {message}", file=sys.stderr, flush=True)  # noqa: T201  # the message is what the task says last


def _show_log() -> None:
    """KFP's executor has put its own prefix on every line of the root logger."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(limits.PrintableFormatter("%(message)s"))
    for name in ("trainer", "components"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def run_stage(
    stage: str,
    settings: str,
    *,
    inputs: Mapping[str, dsl.Artifact],
    outputs: Mapping[str, dsl.Artifact],
    **further: object,
) -> None:
    """Run a stage in this process. Each output gets its kind and fingerprint as metadata.

    Args:
        stage: a key of `STAGES`.
        settings: its section of the settings, as a JSON object.
        inputs: keyword of each input -> KFP's artifact.
        outputs: keyword of each output -> KFP's artifact.
        further: what only this stage takes.

    Raises:
        SystemExit: the stage failed with a message, which was told.
    """
    with reporting(stage):
        directories = {name: artifact.path for name, artifact in {**inputs, **outputs}.items()}
        stages.call(stage, settings, directories, **further)
        for name, artifact in outputs.items():
            _describe(artifact, stages.STAGES[stage].outputs[name])


def train(training: Training) -> None:
    """Run a training stage as a group of processes, here or on a node pool. Each output gets its kind and fingerprint as metadata.

    Raises:
        SystemExit: the stage failed with a message, which was told.
    """
    with reporting(training.stage):
        launching.launch(training)
        for name, artifact in training.outputs.items():
            _describe(artifact, stages.STAGES[training.stage].outputs[name])


def warm_up(training: Training) -> str:
    """Run the stage warm_up if its section says so; gives the URI of its report, empty where nothing was run.

    Raises:
        SystemExit: the stage failed with a message, which was told.
    """
    if not WarmUpSettings.model_validate_json(training.settings).enabled:
        return ""
    train(training)
    return str(training.outputs["warmed"].uri)


class Tuned(NamedTuple):
    """What the task tune tells those after it."""

    distill: str
    """The section of the distillation, as JSON."""
    distill_teacher: str
    """`recorded` if reinforce has to run before distill, `online` if not."""
    uri: str
    """Where the tuning is; empty where nothing was measured."""


def tune(training: Training) -> Tuned:
    """Run the stage tune if its section says so, and give the settings that distill then uses.

    Raises:
        SystemExit: the stage failed with a message, which was told.
    """
    section = TuneSettings.model_validate_json(training.settings)
    if not section.enabled:
        return _tuned(section.distill or DistillSettings())
    train(training)
    output = training.outputs["tuning"]
    made = read_tuning(_written(output))
    return _tuned(DistillSettings.model_validate(made.settings), str(output.uri))


def reinforce(training: Training, distill_teacher: str, page: dsl.HTML) -> str:
    """Run the stage reinforce if the distillation reads what it records; gives the URI of that, empty where nothing was recorded.

    Raises:
        SystemExit: the stage failed with a message, which was told.
    """
    if distill_teacher != RECORDED:
        return ""
    train(training)
    made = training.outputs["teacher_outputs"]
    show_page(made, "report.html", page)
    return str(made.uri)


def _tuned(settings: DistillSettings, uri: str = "") -> Tuned:
    text = artifacts.canonical_json(settings.model_dump(mode="json"))
    return Tuned(text, RECORDED if settings.reads_recording else ONLINE, uri)


def _describe(artifact: dsl.Artifact, kind: artifacts.Kind) -> None:
    artifact.metadata.update(kind=kind, fingerprint=artifacts.manifest(_written(artifact), kind).fingerprint)


def _written(artifact: dsl.Artifact) -> str:
    """Where the directory of an output is: on this machine, or at the artifact's URI, to which a job on a cluster writes."""
    return str(artifact.path if artifacts.exists(artifact.path) else artifact.uri)


def show_page(source: dsl.Artifact, file: str, page: dsl.HTML) -> None:
    """Show a page of a stage's directory in the Kubeflow UI."""
    Path(page.path).write_bytes(storage.read_bytes(storage.join(_written(source), file)))


def show_metrics(source: dsl.Artifact, metrics: dsl.Metrics) -> None:
    """Show the numbers among a stage's figures, `{"student": {"top1": 0.9}}` as `student.top1`, in the Kubeflow UI.

    They are written to the artifact's file too: KFP's local cache takes an artifact without a file for lost.
    """
    kind = source.metadata["kind"]
    figures = tracking.numbers(artifacts.read(source.path, kind).figures)
    numbers = {name.replace("/", "."): value for name, value in figures.items()}
    for name, value in numbers.items():
        metrics.log_metric(name, value)
    Path(metrics.path).write_text(json.dumps(numbers, indent=2))


def show_confusion(evaluation: dsl.Artifact, confusion: dsl.ClassificationMetrics) -> None:
    """Show the student's confusion matrix in the Kubeflow UI; its file is kept for the reason given in `show_metrics`."""
    content = (Path(evaluation.path) / "confusion.json").read_text()
    matrix = json.loads(content)
    confusion.log_confusion_matrix(matrix["labels"], matrix["matrix"])
    Path(confusion.path).write_text(content)
