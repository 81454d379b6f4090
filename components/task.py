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
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components import launching, references, sections
from components.launching import Placement
from trainer import config, stages
from trainer.config import DataSettings, DistillSettings
from trainer.graph import STAGES, JobSpec, Stage
from trainer.io import artifacts, commands, limits, storage
from trainer.io.errors import EXIT_CODE, INTERRUPTED_EXIT_CODE, PREEMPTED_EXIT_CODE, PreemptedError, TrainerError
from trainer.io.host import ended_by_sigterm, ensure_home, escape_what_cannot_be_printed
from trainer.predict import batch_prediction, photo_classifier
from trainer.report import tracking
from trainer.runner.launch import write_termination_message
from trainer.stages.searching.search_schema import read_search
from trainer.stages.tuning.tuning_schema import read_tuning

if TYPE_CHECKING:
    from kfp import dsl

logger = logging.getLogger(__name__)

MOST_CONFUSED_CLASSES = 200
"""Of a confusion matrix in Kubeflow's UI, which keeps it whole in the run's metadata: 40,000 numbers are some 400 kB there."""


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
        if os.environ.get(commands.DEBUG):
            traceback.print_exc()
        raise SystemExit(PREEMPTED_EXIT_CODE if isinstance(error, PreemptedError) else EXIT_CODE) from error
    except KeyboardInterrupt as interruption:
        raise SystemExit(INTERRUPTED_EXIT_CODE) from interruption


def configure(
    fresh: bool,
    run_name: str,
    pool: str,
    nodes: int,
    processes_per_node: int,
    prepare_pool: str,
    prepare_nodes: int,
    **named: str,
) -> tuple[object, ...]:
    """Resolve a run's settings from the parameters of `sections.resolve`, and cut them as `sections.configure`."""
    with reporting("configure"):
        place = Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
        run = os.environ.get("KFP_RUN_ID", "")  # of a run on a cluster, whose cache outlives it
        generation = references.generation(_place("generation"), run, fresh=fresh) if run else ""
        preparing = launching.preparing(prepare_pool, prepare_nodes)
        return sections.configure(sections.resolve(**named), place, generation, run_name, preparing=preparing)


def run_stage(name: str, given: Mapping[str, Any]) -> tuple[object, ...]:
    """Run a stage in this process, or, where the stage trains, as a group of processes here or on a node pool.

    Args:
        name: of the stage.
        given: the arguments of its component (`components/kfp_components.py`).

    Returns:
        Its outputs, in the component's order: references, which are empty where the stage is not needed.
    """
    stage, settings = STAGES[name], given["settings"]
    with reporting(name):
        if name == "search" and given["distill"]:  # which tune may have changed
            settings = json.dumps(json.loads(settings) | {"distill": json.loads(given["distill"])})
        if not given.get("needed", True):
            return (*_handed_on(name, settings), *("" for _ in stage.makes))
        inputs = references.uris({key: given[key] for key in stage.all_inputs})
        places = {key: _place(spec.task_folder or key) for key, spec in stage.makes.items()}
        further: dict[str, Any] = {}
        place = _placement(stage, given)
        record = _place("job") if place else ""
        if place and not stage.launches:
            _launch(JobSpec(stage=name, settings=json.loads(settings), inputs=inputs, outputs=places), place, record)
        else:
            if stage.takes_recipe:
                resolved = config.resolve_text(given["resolved"]).model_dump(mode="json")
                further |= {"recipe": given["recipe"], "resolved": resolved}
            if place:
                further["launch"] = lambda spec, stop: launching.launch(
                    spec, place, storage.join(record, spec.part), stop=stop
                )
                further["in_turns"] = not place.pool
            stages.call(name, settings, {**inputs, **places}, **further)
        for key, kind in stage.outputs.items():
            if key in given:  # one of KFP's artifacts too
                given[key].metadata.update(kind=kind, fingerprint=artifacts.manifest(places[key], kind).fingerprint)
        made = next(iter(places.values()))
        for page, file in stage.pages.items():
            Path(given[page].path).write_bytes(storage.read_bytes(storage.join(made, file)))
        if name == "evaluate":
            show_evaluation(made, given["metrics"], given["student_confusion"])
        run = os.environ.get("KFP_RUN_ID", "")
        shared = [references.shared(places[key], kind, run) for key, kind in stage.outputs.items()]
        return (*_handed_on(name, settings, made), *shared)


def _placement(stage: Stage, given: Mapping[str, Any]) -> Placement | None:
    """Return where a stage works, or where its trainings do; None: in this process."""
    if stage.shared:
        return launching.preparing(given["prepare_pool"], given["prepare_nodes"])
    return Placement(**{field.name: given[field.name] for field in fields(Placement)}) if stage.trains else None


def _launch(spec: JobSpec, place: Placement, record: str) -> None:
    launching.launch(spec, place, record)
    if STAGES[spec.stage].shared:  # its other pods were ended amid their work
        from trainer.stages import prepare  # here, since other tasks prepare nothing

        prepare.forget(config.validate(DataSettings, spec.settings, prefix="data"), spec.outputs["dataset"])


def _handed_on(name: str, settings: str, made: str = "") -> tuple[object, ...]:
    """Return what tune and search hand on, chosen or as given: the settings for distill, and of tune whether they need reinforce."""
    if name not in ("tune", "search"):
        return ()
    if made:
        chosen = read_tuning(made).settings if name == "tune" else read_search(made).chosen
    else:
        chosen = json.loads(settings).get("distill") or {}
    distill = DistillSettings.model_validate(chosen)
    handed_on = artifacts.canonical_json(distill.model_dump(mode="json"))
    return (handed_on, distill.reads_recording) if name == "tune" else (handed_on,)


def predict(photos: str, model: str, output: str, top: int, force: bool, share: str) -> tuple[int, int]:
    """Predict all photos of a folder, as `vit-distill predict --output`; gives how many there are, and how many are unreadable."""
    with reporting("predict_photos"):
        classifier = photo_classifier.load_model(model, judged=not force)
        logger.info("%s", classifier)
        made = batch_prediction.predict_folder(classifier, photos, output, top=top, share=commands.share(share))
        logger.info("%s", batch_prediction.line(made, output))
        return int(made["photos"]), int(made["unreadable"])


def _place(name: str) -> str:
    from kfp import dsl  # at hand in a task, and nowhere else needed

    return str(dsl.get_uri(name))


def show_evaluation(made: str, metrics: dsl.Metrics, confusion: dsl.ClassificationMetrics) -> None:
    """Show an evaluation's numbers, `{"student": {"top1": 0.9}}` as `student.top1`, and the student's errors in Kubeflow's UI.

    Both are written to the artifacts' files too: KFP's local cache takes an artifact without a file for lost.
    """
    figures = artifacts.manifest(made, "evaluation").figures
    numbers = {name.replace("/", "."): value for name, value in tracking.numbers(figures).items()}
    for name, value in numbers.items():
        metrics.log_metric(name, value)
    Path(metrics.path).write_text(json.dumps(numbers, indent=2), encoding="utf-8")
    if "map" in figures["student"]["test"]:  # images that may have several labels have no such matrix
        Path(confusion.path).write_text("{}", encoding="utf-8")
        return
    content = storage.read_bytes(storage.join(made, "confusion.json"))
    Path(confusion.path).write_bytes(content)
    found = json.loads(content)
    if (classes := len(found["labels"])) > MOST_CONFUSED_CLASSES:  # the page has the worst ones
        return
    matrix = [[0] * classes for _ in range(classes)]
    for truth, predicted, count in found["pairs"]:
        matrix[truth][predicted] = count
    confusion.log_confusion_matrix(found["labels"], matrix)
