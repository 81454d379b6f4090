"""A whole run on this machine, without kfp: one stage after another, in one directory."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer import config, stages
from trainer.graph import STAGES, Stage
from trainer.io import artifacts, storage
from trainer.io.errors import ArtifactError, OutputError, TrackingError, make_directory, writing_to
from trainer.io.host import environment_variables
from trainer.io.storage.writers import one_writer
from trainer.report import finished_run, tracking
from trainer.report.finished_run import SUMMARY
from trainer.runner import launch, preflight
from trainer.stages.tuning.tuning_schema import read_tuning

logger = logging.getLogger(__name__)

RUNS = Path("runs")  # where runs are kept unless an output is given
LATEST = "latest"
"""Link in `RUNS` to the run that started last, wherever its output is and however it ended."""
IDENTITY = ".run-id"  # name of the file in a run's directory by which MLflow's runs of it are known


def new_directory(recipe: str, output: str | None) -> Path:
    """Make the directory of a run, by default a new `runs/<time>-<recipe>`, and point `runs/latest` to it."""
    directory = storage.local_path(output) if output else _unused_directory(recipe)
    make_directory(directory)
    with writing_to(directory):
        if not os.access(directory, os.W_OK):
            raise OutputError(f"cannot write to {directory}: no permission to write; choose another output")
    with one_writer([directory]):
        _point_latest_to(directory)
    return directory


def only_run_in(directory: Path) -> AbstractContextManager[None]:
    """Hold the output of a run; an `OutputError` where another run, or a stage alone, is writing there."""
    folders = [directory / spec.folder for stage in STAGES.values() for spec in stage.makes.values()]
    return one_writer([directory], beside=folders)


def only_stage_in(outputs: Iterable[str]) -> AbstractContextManager[None]:
    """Hold the outputs of a stage that runs alone; an `OutputError` where another one, or the run that they lie in, is writing there."""
    places = [*outputs]
    return one_writer(places, beside=dict.fromkeys(map(storage.parent, places)))


def _point_latest_to(directory: Path) -> None:
    """Point `runs/latest` to a run; a warning where that cannot be, since the run itself can write its output."""
    runs, target = RUNS.resolve(), directory.resolve()
    link = RUNS / f".{LATEST}.{os.getpid()}"
    try:
        RUNS.mkdir(parents=True, exist_ok=True)
        # Relative below `runs/`, so that the folder can be moved.
        link.symlink_to(target.relative_to(runs) if target.is_relative_to(runs) else target)
        try:
            link.replace(RUNS / LATEST)
        except OSError:
            link.unlink()
            raise
    except OSError as error:  # a read-only folder, a file system without links, a real directory of that name
        logger.warning("%s does not point to this run (%s); name %s instead", RUNS / LATEST, error.strerror, directory)


def _unused_directory(recipe: str) -> Path:
    """Make a directory below `runs/` that no other run has: one that starts in the same second gets a number."""
    make_directory(RUNS)
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{Path(recipe).stem}"
    directory, number = RUNS / name, 1
    while True:
        with writing_to(directory):
            try:
                directory.mkdir()
                return directory
            except FileExistsError:
                number += 1
                directory = RUNS / f"{name}-{number}"


def track_here() -> None:
    """Let this process use the MLflow store of the runs here, if there is one and no other is named."""
    if (store := tracking.local_store(RUNS)).exists():
        os.environ.setdefault(tracking.URI, f"sqlite:///{store}")


def run(
    recipe: str, overrides: str | Iterable[str], *, output: str | None, processes: int
) -> tuple[dict[str, Any], Path]:
    """Run all stages; what an earlier run in the same output completed with the same settings is kept.

    Args:
        recipe: its name or path.
        output: the run's directory; None for a new one below `runs/`.
        processes: how many train; 0: one for each GPU, or else one.

    Returns:
        The content of `summary.json`, and the run's front page.
    """
    settings = config.resolve_run(recipe, overrides)
    processes = processes or launch.processes_here(settings.run.device)
    settings = preflight.checked(settings, trains_here=True, processes=processes)
    directory = new_directory(recipe, output)
    with only_run_in(directory), environment_variables(environment(settings, directory)):
        return _run_all(recipe, settings, directory, processes)


def _run_all(recipe: str, settings: config.Settings, directory: Path, processes: int) -> tuple[dict[str, Any], Path]:
    """Run the stages in the environment of the run; returns what `run` does."""
    resolved = settings.model_dump(mode="json")
    given = {"recipe": recipe, "resolved": resolved}
    tracking.check()
    preflight.warn_of_other_classes(settings)
    tracking.start_parent(resolved, {"recipe": recipe})
    try:
        for stage in STAGES.values():
            if not stage.is_needed(settings):
                continue
            section = settings.for_stage(stage.name)
            directories = {keyword: str(directory / folder) for keyword, folder in folders(stage, settings).items()}
            if stage.kept and _is_complete(stage, section, directories):
                logger.info("%s  kept from an earlier run in the same output", stage.name)
            else:
                logger.info("%s  starts", stage.name)
                start = time.monotonic()
                run_stage(stage, section, directories, processes=processes, given=given)
                logger.info("%s  done in %.1f s", stage.name, time.monotonic() - start)
            if stage.name == "tune":  # it chose the settings of the distillation, or was given them
                chosen = config.DistillSettings.model_validate(read_tuning(directories["tuning"]).settings)
                settings = settings.model_copy(update={"distill": chosen})
    except BaseException as error:  # register ends the parent run otherwise
        try:
            tracking.finish_parent("FAILED" if isinstance(error, Exception) else "KILLED")
        except TrackingError as closing:
            logger.warning("the run stays open in MLflow: %s", closing)
        raise
    summary = (directory / "registration" / SUMMARY).read_bytes()
    storage.write_bytes(directory / SUMMARY, summary)
    content: dict[str, Any] = json.loads(summary)
    return content, finished_run.write_front_page(directory, content)


def folders(stage: Stage, settings: config.Settings) -> dict[str, str]:
    """Return the folder below the run's of each input that is made before the stage starts, and of each output, by keyword."""
    before = itertools.takewhile(lambda one: one.name != stage.name, STAGES.values())
    made = [spec for one in before if one.is_needed(settings) for spec in one.makes.values()]
    inputs = {spec.name: spec.folder for spec in (*stage.reads, *stage.reads_if_made) if spec in made}
    return inputs | {keyword: spec.folder for keyword, spec in stage.makes.items()}


def environment(settings: config.Settings, directory: Path) -> dict[str, str]:
    """Return the environment variables that the stages of a run read."""
    # What distinguishes this directory's run from others of its name, on any machine, is made once and kept there.
    file = directory / IDENTITY
    if not storage.exists(file):
        storage.write_bytes(file, uuid.uuid4().hex.encode())
    identity = storage.read_bytes(file).decode().strip()
    tracked = tracking.environment(
        settings.tracking, directory=directory.parent.resolve(), run=directory.name, identity=identity
    )
    return tracked | {config.DEVICE_VARIABLE: settings.run.device}


def run_stage(
    stage: Stage,
    section: Mapping[str, Any],
    directories: Mapping[str, str],
    *,
    processes: int,
    given: Mapping[str, Any],
) -> None:
    """Run a stage on its inputs and outputs; `given` has the `recipe` and all `resolved` settings, for a stage that takes them."""
    if stage.launched:
        launch.run_here(launch.job_of(stage, section, directories, processes))
    else:
        stages.call(stage.name, json.dumps(section), directories, **(given if stage.takes_recipe else {}))


def _is_complete(stage: Stage, section: Mapping[str, Any], directories: Mapping[str, str]) -> bool:
    """Check whether all outputs are there, whole, made with these settings from these inputs, by a training on this kind of device."""
    from trainer import devices  # here, because it brings in torch

    if not all(artifacts.exists(directories[keyword]) for keyword in stage.outputs):
        return False
    inputs = {
        artifacts.read(directories[keyword], kind).fingerprint
        for keyword, kind in stage.all_inputs.items()
        if keyword in directories
    }
    # The section itself names the commit of timm's weights.
    if version := artifacts.weights_version(section.get("weights", ""), section.get("weights_file", "")):
        inputs.add(version)
    inputs |= {artifacts.manifest(uri, "model").fingerprint for uri in section.get("further_teachers", ())}
    inputs |= {artifacts.manifest(uri, "teacher_outputs").fingerprint for uri in section.get("further_recordings", ())}
    try:
        outputs = [artifacts.read(directories[keyword], kind) for keyword, kind in stage.outputs.items()]
    except ArtifactError as error:
        logger.warning("%s  is done again: %s", stage.name, error)
        return False
    if stage.launched and any(output.device != devices.choose_device().kind for output in outputs):
        logger.info(
            "%s  is done again: it was done on %s", stage.name, outputs[0].device or "a device that is not known"
        )
        return False
    return all(output.settings == section and inputs <= set(output.parents.values()) for output in outputs)
