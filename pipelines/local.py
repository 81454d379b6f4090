"""Run the pipeline on this machine, with real processes, tracking and registration.

  python -m pipelines.local                                             the bundled digits
  python -m pipelines.local --recipe digits --set distill.temperature=3
  python -m pipelines.local --set data.source=imagefolder:/photos --output DIR

What an earlier run made from the same inputs, settings and code is taken from it (`--fresh` makes all again).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import components
import trainer
from components import IMAGE_NAME, launching, references, sections, task
from components.launching import Placement
from pipelines import compile as compilation
from pipelines.distillation import add_parameters, given_parameters, given_place
from trainer import config
from trainer.cli import commands
from trainer.graph import STAGES, needed_stages
from trainer.io import artifacts, storage
from trainer.io.errors import LaunchError, OutputError, TrackingError, writing_to
from trainer.io.host import environment_variables
from trainer.report import finished_run, tracking
from trainer.runner import launch, local_run

CODE = tuple(Path(folder) for package in (trainer, components) for folder in package.__path__)
CACHE = local_run.RUNS / ".cache"
"""What earlier runs made, by what it was made from; the artifacts themselves lie in those runs' directories."""
CHECKPOINTS = local_run.RUNS / ".checkpoints"
"""Where an interrupted training is found by the next run with the same settings and inputs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code. An error that the user can mend ends in one message."""
    parser = commands.module_parser("pipelines.local", __doc__)
    add_parameters(
        parser,
        files=True,
        pool="on this machine",
        processes="one for each GPU or other device of it; on this machine without a GPU 2",
    )
    parser.add_argument("--output", default=None, metavar="DIR", help="where to write (default: runs/<time>-<recipe>)")
    parser.add_argument("--fresh", action="store_true", help="take nothing from earlier runs")
    commands.add_debug(parser)
    options = parser.parse_args(arguments)
    return commands.exit_code(
        lambda: run(options),
        debug=options.debug,
        interrupted="interrupted; what was written is kept, and finished stages are not repeated",
    )


def run(options: argparse.Namespace) -> None:
    """Run the pipeline, print its progress and its results, and leave `summary.json` in the run's directory.

    Raises:
        TrainerError: a setting is wrong, before anything starts; or a stage failed, which has printed its own message.
    """
    parameters, place = given_parameters(options), given_place(options)
    settings = sections.resolve(**parameters)
    place.check(warms_up=settings.warm_up.enabled)
    place = with_processes(place, settings.run.device)
    if place.pool:
        # A store that refuses, or is not there, is reported before the work.
        storage.children(launching.exchange_folder())
    directory = local_run.new_directory(options.recipe, options.output or None)
    folders = [directory / spec.folder for stage in STAGES.values() for spec in stage.makes.values()]
    for own in folders:
        if own.is_dir() and not own.is_symlink():
            raise OutputError(
                f"cannot write to {directory}: it has {own.name}/ of `python -m trainer run`; choose another output"
            )
    variables = {**_environment(settings, directory, place), task.DEBUG: "1" if options.debug else ""}
    with local_run.only_run_in(directory), environment_variables(variables):
        # The names of an earlier run here; nothing takes the place of what this one leaves out.
        for left in (
            *(directory / finished_run.SUMMARY, directory / finished_run.INDEX),
            *filter(Path.is_symlink, folders),
        ):
            left.unlink(missing_ok=True)
        try:
            summary = _run_pipeline(
                {**parameters, **asdict(place)}, directory, needed_stages(settings), fresh=options.fresh
            )
        except BaseException as error:
            _close_tracking("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        print(f"\n{finished_run.table(summary, directory / finished_run.INDEX)}")
        _close_tracking("FINISHED")


def with_processes(place: Placement, device: str) -> Placement:
    """Return the place with training processes, if none are asked for here: one for each GPU; else two, which shows what several do."""
    if place.pool or place.processes_per_node:
        return place
    gpus = launch.gpus() if device in {"auto", "cuda"} else 0
    return replace(place, processes_per_node=gpus or 2)


def _environment(settings: config.Settings, directory: Path, place: Placement) -> dict[str, str]:
    """Return what the tasks read from the environment, for as parameters they would spoil the cache."""
    packages = [str(Path(trainer.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    checkpoints = str(CHECKPOINTS.resolve())
    if place.pool:  # a job's lie in a store, in the folder that is named or beside what it exchanges
        named = os.environ.get(artifacts.CHECKPOINTS_VARIABLE, "")
        checkpoints = named if storage.is_remote(named) else storage.join(launching.exchange_folder(), "checkpoints")
    return {
        **local_run.environment(settings, directory),
        artifacts.CHECKPOINTS_VARIABLE: checkpoints,
        "PYTHONPATH": os.pathsep.join(packages),
        "PYTHONSAFEPATH": "1",  # a folder `trainer` where the user stands is not ours
        "PYTHONUNBUFFERED": "1",
    }


def _run_pipeline(
    parameters: Mapping[str, Any], directory: Path, optional: Collection[str], *, fresh: bool
) -> dict[str, Any]:
    """Run the pipeline with the optional stages that are named; gives the content of `summary.json`."""
    from pipelines import local_tasks

    pipeline = compilation.with_image(compilation.compiled_text(optional), f"{IMAGE_NAME}:local-{code_version(*CODE)}")
    with writing_to(directory):
        (directory / "pipeline.yaml").write_text(pipeline, encoding="utf-8")
        with (directory / "kfp.log").open("w", encoding="utf-8") as log:
            try:
                tasks = local_tasks.run(
                    pipeline,
                    parameters,
                    directory=directory / "pipeline",
                    cache_root=CACHE,
                    fresh=fresh,
                    log=log,
                    reporter=local_tasks.TaskReporter(sys.stdout),
                )
            except local_tasks.TaskError as error:
                raise LaunchError(str(error)) from error
    _check_all_ran(pipeline, tasks)
    # The register stage's summary beside the run's artifacts; a stage taken from the cache keeps its true seconds.
    registration = Path(references.uri_of(tasks["register"].outputs["registration_uri"]))
    summary: dict[str, Any] = json.loads((registration / finished_run.SUMMARY).read_text(encoding="utf-8"))
    for name, stage in STAGES.items():
        ran = tasks.get(name.replace("_", "-"))  # as KFP has it
        if ran and ran.cached and name in summary["stages"]:
            summary["stages"][name]["cached"] = True
        for keyword, spec in stage.makes.items():
            if ran and (reference := ran.outputs[f"{keyword}_uri"]):
                # A name at the top leads to the artifact, whose own place is some folders down, or in an earlier run.
                made = directory / f".{spec.folder}.{os.getpid()}"
                made.symlink_to(os.path.relpath(Path(references.uri_of(reference)).resolve(), directory.resolve()))
                made.replace(directory / spec.folder)
    storage.write_bytes(directory / finished_run.SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False).encode())
    finished_run.write_front_page(directory, summary)
    return summary


def _check_all_ran(pipeline: str, tasks: Mapping[str, Any]) -> None:
    """`kfp.local` succeeds when it leaves out a task whose inputs it could not resolve; we do not."""
    if skipped := sorted(compilation.task_names(pipeline) - tasks.keys()):
        raise LaunchError(f"the pipeline ended without running {', '.join(skipped)}; look into kfp.log of the run")


def code_version(*folders: Path) -> str:
    """Return a text that changes with the code in these folders, as a cluster's image does: part of what a cached result depends on."""
    digest = hashlib.sha256()
    for root in folders:
        for path in sorted(path for path in root.rglob("*") if path.suffix in {".jinja", ".py", ".toml"}):
            digest.update(f"{root.name}/{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _close_tracking(status: str) -> None:
    """End the parent run in MLflow; a server that went away must not hide what the run made or why it failed."""
    try:
        tracking.finish_parent(status)
    except TrackingError as error:
        print(f"warning: the run stays open in MLflow: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
