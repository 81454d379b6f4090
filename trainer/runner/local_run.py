"""A whole run on this machine: one stage after another, in one directory, with the results of earlier runs where they serve."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import shlex
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer import config, stages
from trainer.data import class_tables
from trainer.graph import STAGES, Kind, Stage
from trainer.io import artifacts, notifications, storage
from trainer.io.costs import Machines, local_place
from trainer.io.errors import ArtifactError, OutputError, StorageError, TrackingError, make_directory, writing_to
from trainer.io.formatting import duration, estimated
from trainer.io.host import AHEAD_VARIABLE, environment_variables
from trainer.io.storage.writers import one_writer
from trainer.report import finished_run, tracking
from trainer.report.finished_run import SUMMARY
from trainer.report.tracking import notify_of_end
from trainer.runner import launch, preflight, training_work
from trainer.stages.searching.search_schema import read_search
from trainer.stages.tuning.tuning_schema import read_tuning

logger = logging.getLogger(__name__)

RUNS = Path("runs")  # where runs are kept unless an output is given
LATEST = "latest"  # link in `RUNS` to the run that started last, wherever its output is and however it ended
CHECKPOINTS = ".checkpoints"
"""Folder beside the runs, in which a run finds what an interrupted one with the same settings and inputs left."""
_LOOKED_AT = 20  # earlier runs, for the time that this one may take
_DECIDE_TIME = (
    "pretrain.teacher",
    "pretrain.mae.epochs",
    "pretrain.finetune.epochs",
    "distill.student",
    "distill.epochs",
    "distill.teacher",
)
"""Settings without which an earlier run of the recipe says nothing of this one's time."""
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
    if tracking.local_store(RUNS).exists():
        os.environ.setdefault(tracking.URI, tracking.local_uri(RUNS))


def run(
    recipe: str,
    overrides: str | Iterable[str],
    *,
    output: str | None,
    processes: int,
    start: launch.Start = launch.run_here,
    device: str = "",
    place: Machines | None = None,
) -> tuple[dict[str, Any], Path]:
    """Run all stages, except for those whose results are there: in the output, or with `run.reuse` in an earlier run beside it.

    Args:
        recipe: its name or path.
        overrides: settings that differ from it.
        output: the run's directory; None for a new one below `runs/`.
        processes: how many train; 0: one for each GPU, or else two, which also shows what several do.
        start: runs a launched stage to its end; by default in processes of this machine.
        device: kind of the devices that `start` trains on; empty: those of this machine, as `run.device` says.
        place: the machines that `start` trains on; by default this one.

    Returns:
        The content of `summary.json`, and the run's front page.
    """
    settings = config.resolve_run(recipe, overrides)
    if not processes:
        processes = (launch.gpus() if settings.run.device in {"auto", "cuda"} else 0) or 2
    place = place or local_place(processes)
    if not device:
        preflight.check_budgets(settings, place)
    settings = preflight.checked(settings, trains_here=not device, processes=processes, device=device)
    directory = new_directory(recipe, output)
    with only_run_in(directory), environment_variables(environment(settings, directory)):
        try:
            return _run_all(recipe, settings, directory, processes, start, device, place)
        except KeyboardInterrupt:
            logger.warning("interrupted; to go on, give the same command with --output %s", shlex.quote(str(directory)))
            raise


def _run_all(
    recipe: str,
    settings: config.Settings,
    directory: Path,
    processes: int,
    start: launch.Start,
    device: str,
    place: Machines,
) -> tuple[dict[str, Any], Path]:
    """Run the stages in the environment of the run; returns what `run` does."""
    resolved = settings.model_dump(mode="json")
    given = {"recipe": recipe, "resolved": resolved}
    tracking.check()
    preflight.warn_of_other_classes(settings)
    tracking.start_parent(resolved, {"recipe": recipe})
    reused, needed = [], [stage for stage in STAGES.values() if stage.is_needed(settings)]
    expected = _stage_seconds(recipe, resolved, directory)
    estimate = _Estimate()
    try:
        for number, stage in enumerate(needed, start=1):
            directories = {keyword: str(directory / folder) for keyword, folder in folders(stage, settings).items()}
            if _reuse(stage, settings, directory, device, place):
                reused.append(stage.name)
            else:
                left_s = sum(expected.get(one.name, 0.0) for one in needed[number - 1 :])
                if stage.trains and not left_s and not estimate.work:
                    estimate = _Estimate(_training_work(settings, needed, directory))
                left = (
                    f"; {estimated(left_s)} left, as in the latest run of this recipe"
                    if left_s
                    else estimate.left(stage.name)
                )
                logger.info("%s  starts, stage %d of %d%s", stage.name, number, len(needed), left)
                began = time.monotonic()
                with environment_variables({AHEAD_VARIABLE: json.dumps(estimate.ahead(stage.name))}):
                    run_stage(
                        stage,
                        settings.for_stage(stage.name),
                        directories,
                        processes=processes,
                        given=given,
                        start=start,
                    )
                estimate.took(stage.name, time.monotonic() - began)
                logger.info("%s  done in %s", stage.name, duration(time.monotonic() - began))
            # They choose the settings of the distillation, or were given them.
            if stage.name == "tune":
                settings = settings.with_distill(read_tuning(directories["tuning"]).settings)
            elif stage.name == "search":
                settings = settings.with_distill(read_search(directories["search"]).chosen)
    except BaseException as error:  # register ends the parent run otherwise
        failed = isinstance(error, Exception)
        notify_of_end("FAILED" if failed else "KILLED", f"{type(error).__name__}: {error}")
        try:
            tracking.finish_parent("FAILED" if failed else "KILLED")
        except TrackingError as closing:
            logger.warning("the run stays open in MLflow: %s", closing)
        raise
    content: dict[str, Any] = json.loads((directory / "registration" / SUMMARY).read_text(encoding="utf-8"))
    for name in content["stages"].keys() & reused:
        content["stages"][name]["cached"] = True
    storage.write_bytes(directory / SUMMARY, json.dumps(content, indent=2, ensure_ascii=False).encode())
    gate = "passed the gate" if content["verdict"]["passed"] else "did not pass the gate"
    notify_of_end("FINISHED", f"The student {gate}. {content['profile']['verdict']}".rstrip())
    return content, finished_run.write_front_page(directory, content)


class _Estimate:
    """How long the trainings of a run take, by their operations and the pace of those that are done."""

    def __init__(self, work: Mapping[str, Mapping[str, float]] | None = None) -> None:
        """Begin with the operations of each training, by stage; without any, nothing is estimated."""
        self.work = work or {}
        self._seconds = self._done = 0.0

    def ahead(self, stage: str) -> dict[str, float]:
        """Return for each training of a stage how many times its work the later ones of the run are."""
        if stage not in self.work:
            return {}
        later = sum(sum(one.values()) for one in self._from(stage)) - sum(self.work[stage].values())
        found = {}
        for name, own in reversed([*self.work[stage].items()]):
            found[name] = later / own
            later += own
        return found

    def took(self, stage: str, seconds: float) -> None:
        """Take in what a stage has taken."""
        if stage in self.work:
            self._seconds += seconds
            self._done += sum(self.work[stage].values())

    def left(self, stage: str) -> str:
        """Say how long this stage and the later trainings take; nothing before the first one is done."""
        if stage not in self.work or not self._done:
            return ""
        left_s = self._seconds / self._done * sum(sum(one.values()) for one in self._from(stage))
        return f"; {estimated(left_s)} of trainings left, by their operations and the pace so far"

    def _from(self, stage: str) -> list[Mapping[str, float]]:
        return [*itertools.dropwhile(lambda one: one is not self.work[stage], self.work.values())]


def _training_work(settings: config.Settings, needed: Iterable[Stage], directory: Path) -> dict[str, dict[str, float]]:
    """Count the operations of a run's trainings; none where they are not known, or a stage that trains is limited by time instead."""
    if {"warm_up", "tune", "search"} & {stage.name for stage in needed}:
        return {}
    figures = artifacts.manifest(directory / "dataset", "dataset").figures
    work = training_work.count(settings, taught=figures["train"], unlabeled=figures["unlabeled"])
    known = {stage: {name: one for name, one in trainings.items() if one > 0} for stage, trainings in work.items()}
    is_known = not any(math.isnan(one) for trainings in work.values() for one in trainings.values())
    return {stage: trainings for stage, trainings in known.items() if trainings} if is_known else {}


def _stage_seconds(recipe: str, resolved: Mapping[str, Any], directory: Path) -> dict[str, float]:
    """Return the seconds of each stage in the latest run beside this one with the same recipe, models and epochs; empty without any."""
    files = sorted(directory.resolve().parent.glob(f"*/{SUMMARY}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[:_LOOKED_AT]:
        try:
            content = storage.read_json(file)
            then, is_same = content["settings"], content["recipe"] == recipe
            if is_same and all(_setting(then, name) == _setting(resolved, name) for name in _DECIDE_TIME):
                return {name: float(stage["seconds"]) for name, stage in content["stages"].items()}
        except (StorageError, ValueError, KeyError, TypeError) as error:  # damaged, or of another version
            logger.debug("%s: gives no estimate: %r", file, error)
    return {}


def _setting(settings: Mapping[str, Any], name: str) -> Any:
    return functools.reduce(lambda group, key: group[key], name.split("."), settings)


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
    variables = tracked | {config.DEVICE_VARIABLE: settings.run.device}
    if settings.run.notify:
        variables[notifications.ADDRESSES] = settings.run.notify
    if (
        settings.run.reuse
        and not os.environ.get(artifacts.CHECKPOINTS_VARIABLE)
        and os.access(directory.parent, os.W_OK)
    ):
        variables[artifacts.CHECKPOINTS_VARIABLE] = str(directory.resolve().parent / CHECKPOINTS)
    return variables


def run_stage(
    stage: Stage,
    section: Mapping[str, Any],
    directories: Mapping[str, str],
    *,
    processes: int,
    given: Mapping[str, Any],
    start: launch.Start = launch.run_here,
) -> None:
    """Run a stage on its inputs and outputs.

    Args:
        given: the `recipe` and all `resolved` settings, for a stage that takes them.
        start: runs a launched stage to its end.
    """
    if stage.launched:
        start(launch.job_of(stage, section, directories, processes), None)
        return
    further: dict[str, Any] = dict(given) if stage.takes_recipe else {}
    if stage.launches:
        count = processes or launch.processes_here(os.environ[config.DEVICE_VARIABLE])
        further["launch"] = lambda spec, stop: start(replace(spec, processes_per_node=count), stop)
        further["in_turns"] = start is launch.run_here
    stages.call(stage.name, json.dumps(section), directories, **further)


def _reuse(stage: Stage, settings: config.Settings, directory: Path, device: str, place: Machines) -> bool:
    """Keep a stage's results that are in the output; where it has none, take over those of a run beside it. Returns whether there are any.

    They are whole and made with the same settings from the same inputs, a training's on the same kind of device, what holds for its place
    alone on the same machines, another run's by the same code.
    """
    from trainer import devices  # here, because it brings in torch

    source_version = class_tables.source_version(settings.data) if stage.name == "prepare" else None
    if not stage.kept or source_version == "":
        return False
    section, inputs = settings.deciding(stage.name), _inputs(stage, settings, directory)
    runs, own = [directory], [directory / spec.folder for spec in stage.makes.values()]
    if settings.run.reuse and stage.cached and not any(map(Path.exists, own)):
        beside = (file.parent for file in directory.resolve().parent.glob(f"*/{IDENTITY}"))
        runs = sorted((run for run in beside if not run.is_symlink()), reverse=True)
    for run in runs:
        outputs = {run / spec.folder: spec.kind for spec in stage.makes.values()}
        if not all(map(artifacts.exists, outputs)):
            continue
        fits = run == directory  # another may be of another version
        try:
            made = [artifacts.manifest(output, kind) for output, kind in outputs.items()]
            fits = all(
                config.with_present_names(one.settings, stage.section) == section
                and inputs <= set(one.parents.values())
                and one.source_version == source_version
                and (run == directory or one.code == artifacts.code_version())
                for one in made
            )
            if not fits:
                continue
            on = made[0].device or "a device that is not known"
            if stage.launched and on != (device or devices.choose_device().kind):
                logger.info("%s  is not kept from %s: it was done on %s", stage.name, run, on)
                continue
            there = made[0].place
            if stage.tied_to_place and there != place:
                on = f"{there} (processes a node: {there.processes_per_node})" if there else "another machine"
                if there and there.model_copy(update={"price": place.price}) == place:
                    on = f"{there} at another price"
                logger.info("%s  is not kept from %s: it was done on %s", stage.name, run, on)
                continue
            _take(outputs, directory)
        except ArtifactError as error:
            if fits:
                logger.warning("%s  is not kept from %s: %s", stage.name, run, error)
            continue
        where = "in the same output" if run == directory else f"({run})"
        logger.info("%s  kept from an earlier run %s", stage.name, where)
        return True
    for link in filter(Path.is_symlink, own):  # an earlier version of `make run` linked to other runs' artifacts
        link.unlink()
    return False


def _inputs(stage: Stage, settings: config.Settings, directory: Path) -> set[str]:
    """Return the fingerprints of a stage's inputs: of other stages' artifacts, and of what its settings name."""
    section, places = settings.for_stage(stage.name), folders(stage, settings)
    given = [(directory / places[keyword], kind) for keyword, kind in stage.all_inputs.items() if keyword in places]
    if stage.launches:  # trainings of the distillation that its section holds
        section = section["distill"]
    given += [(uri, "model") for uri in section.get("further_teachers", ())]
    given += [(uri, "teacher_outputs") for uri in section.get("further_recordings", ())]
    found = {artifacts.manifest(uri, kind).fingerprint for uri, kind in given}
    # The section itself names the commit of timm's weights.
    version = artifacts.weights_version(section.get("weights", ""), section.get("weights_file", ""))
    return found | {version} if version else found


def _take(outputs: Mapping[Path, Kind], directory: Path) -> None:
    """Check artifacts, and put those of another run into this one as hard links; an `ArtifactError` if one is damaged."""
    with tempfile.TemporaryDirectory(prefix=".", dir=directory) as draft:
        for place, kind in outputs.items():
            if place.parent == directory:
                artifacts.read(place, kind)
            else:
                artifacts.copy(place, Path(draft, place.name), kind, link=True)
        for copy in Path(draft).iterdir():
            copy.rename(directory / copy.name)
