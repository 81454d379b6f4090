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
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import components
import trainer
from components import launching, references, sections, task
from components.image import tagged
from components.launching import Placement
from pipelines import compile as compilation
from pipelines import pipeline_options
from trainer import commands, config, launch, runner, storage, tracking
from trainer import summary as summaries
from trainer.errors import LaunchError, TrackingError, writing_to
from trainer.graph import needed_stages

CODE = tuple(Path(folder) for package in (trainer, components) for folder in package.__path__)
CACHE = runner.RUNS / ".cache"
"""What earlier runs made, by what it was made from; the artifacts themselves lie in those runs' directories."""
CHECKPOINTS = runner.RUNS / ".checkpoints"
"""Where an interrupted training is found by the next run with the same settings and inputs."""

_WITHOUT_GPU = 2
"""Training processes here where there is no GPU."""


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """What is to be run."""

    parameters: Mapping[str, str]
    """The pipeline's parameters, but for the place."""
    place: Placement
    """Where the trainings run."""
    output: str | None
    """The run's directory; None for a new one below `runs/`."""
    fresh: bool
    """Make everything again."""
    debug: bool
    """Show tracebacks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code. An error that the user can mend ends in one message."""
    request = _request(arguments)
    return commands.exit_code(
        lambda: run(request),
        debug=request.debug,
        interrupted="interrupted; what was written is kept, and finished stages are not repeated",
    )


def _request(arguments: Sequence[str] | None) -> LocalRun:
    parser = argparse.ArgumentParser(
        prog="python -m pipelines.local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pipeline_options.add(
        parser,
        files=True,
        pool="on this machine",
        processes="one for each GPU or other device of it; on this machine without a GPU 2",
    )
    parser.add_argument("--output", default=None, metavar="DIR", help="where to write (default: runs/<time>-<recipe>)")
    parser.add_argument("--fresh", action="store_true", help="take nothing from earlier runs")
    commands.add_debug(parser)
    options = parser.parse_args(arguments)
    return LocalRun(
        parameters=pipeline_options.values(options),
        place=pipeline_options.place(options),
        output=options.output or None,
        fresh=options.fresh,
        debug=options.debug,
    )


def run(request: LocalRun) -> dict[str, Any]:
    """Run the pipeline and print its progress and its results.

    Returns:
        The content of `summary.json`.

    Raises:
        TrainerError: a setting is wrong, before anything starts; or a stage failed, which has printed its own message.
    """
    settings = sections.resolve(**request.parameters)
    request.place.check(warms_up=settings.warm_up.enabled)
    request = replace(request, place=with_processes(request.place, settings.run.device))
    if request.place.pool:
        storage.children(
            launching.exchange_folder()
        )  # a store that refuses, or is not there, is reported before the work
    directory = runner.new_directory(request.parameters["recipe"], request.output)
    (directory / summaries.SUMMARY).unlink(missing_ok=True)
    os.environ.update(_environment(settings, directory, request))
    try:
        summary = _run_pipeline(request, directory, needed_stages(settings))
    except BaseException as error:
        _close_tracking("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    _print_results(summary, directory)
    _close_tracking("FINISHED")
    return summary


def with_processes(place: Placement, device: str) -> Placement:
    """The place with training processes, where none are asked for here: one for each GPU; two without, which shows what several do.

    Args:
        place: as asked for.
        device: `run.device`.
    """
    if place.pool or place.processes_per_node:
        return place
    gpus = launch.gpus() if device in {"auto", "cuda"} else 0
    return replace(place, processes_per_node=gpus or _WITHOUT_GPU)


def _environment(settings: config.Settings, directory: Path, request: LocalRun) -> dict[str, str]:
    """What the tasks read from the environment, for as parameters they would spoil the cache."""
    packages = [str(Path(trainer.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = runner.environment(settings, directory)
    environment[config.CHECKPOINTS_VARIABLE] = _checkpoints(request.place)
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(packages),
        "PYTHONSAFEPATH": "1",  # a folder `trainer` where the user stands is not ours
        "PYTHONUNBUFFERED": "1",
        task.DEBUG: "1" if request.debug else "",
    }


def _checkpoints(place: Placement) -> str:
    """Where the next run finds them too: a job's lie in a store, in the folder that is named or beside what it exchanges."""
    if not place.pool:
        return str(CHECKPOINTS.resolve())
    named = os.environ.get(config.CHECKPOINTS_VARIABLE, "")
    return named if storage.is_remote(named) else storage.join(launching.exchange_folder(), "checkpoints")


def _run_pipeline(request: LocalRun, directory: Path, optional: Collection[str]) -> dict[str, Any]:
    from pipelines import local_tasks

    pipeline = compilation.with_image(compilation.compiled_text(optional), tagged(f"local-{code_version(*CODE)}"))
    with writing_to(directory):
        (directory / "pipeline.yaml").write_text(pipeline)
        with (directory / "kfp.log").open("w") as log:
            try:
                tasks = local_tasks.run(
                    pipeline,
                    {**request.parameters, **asdict(request.place)},
                    directory=directory / "pipeline",
                    cache_root=CACHE,
                    fresh=request.fresh,
                    log=log,
                    reporter=_TaskReporter(sys.stdout),
                )
            except local_tasks.TaskError as error:
                raise LaunchError(str(error)) from error
    _check_all_ran(pipeline, tasks)
    return _write_summary(directory, tasks)


def code_version(*folders: Path) -> str:
    """A text that changes with the code in these folders, as a cluster's image does: part of what a cached result depends on."""
    digest = hashlib.sha256()
    for root in folders:
        for path in sorted(path for path in root.rglob("*") if path.suffix in {".jinja", ".py", ".toml"}):
            digest.update(f"{root.name}/{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _check_all_ran(pipeline: str, tasks: Mapping[str, Any]) -> None:
    """`kfp.local` succeeds when it leaves out a task whose inputs it could not resolve; we do not."""
    skipped = sorted(compilation.task_names(pipeline) - tasks.keys())
    if skipped:
        raise LaunchError(f"the pipeline ended without running {', '.join(skipped)}; look into kfp.log of the run")


def _write_summary(directory: Path, tasks: Mapping[str, Any]) -> dict[str, Any]:
    """The register stage's summary beside the run's artifacts; a stage taken from the cache keeps its true seconds."""
    registration = Path(references.uri_of(tasks["register"].outputs["registration_uri"]))
    summary: dict[str, Any] = json.loads((registration / summaries.SUMMARY).read_text())
    for name, stage in summary["stages"].items():
        task_name = name.replace("_", "-")  # as KFP has it
        if task_name in tasks and tasks[task_name].cached:
            stage["cached"] = True
    storage.write_bytes(directory / summaries.SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False).encode())
    return summary


def _close_tracking(status: str) -> None:
    """End the parent run in MLflow; a server that went away must not hide what the run made or why it failed."""
    try:
        tracking.finish_parent(status)
    except TrackingError as error:
        print(f"warning: the run stays open in MLflow: {error}", file=sys.stderr)


def _print_results(summary: Mapping[str, Any], directory: Path) -> None:
    print(f"\n{summaries.table(summary)}\n\nAll of it: {directory / summaries.SUMMARY}")


class _TaskReporter:
    """One line when a task starts and one when it has ended, with the task's own lines between them."""

    def __init__(self, stream: TextIO) -> None:
        self._start, self._stream = time.monotonic(), stream

    def started(self, name: str) -> None:
        self._tell(name, "started")

    def line(self, text: str) -> None:
        self._stream.write(f"  {text}\n")
        self._stream.flush()

    def ended(self, task: Any) -> None:
        self._tell(task.name, "cached, as an earlier run made it" if task.cached else f"done in {task.seconds:.1f} s")

    def _tell(self, name: str, what: str) -> None:
        self._stream.write(f"[{time.monotonic() - self._start:6.1f} s] {name}: {what}\n")
        self._stream.flush()


if __name__ == "__main__":
    sys.exit(main())
