"""How `kfp.local` runs the tasks here: what it shows, what it takes from its cache, and how it ends.

`kfp.local` prints its own log around every task, ends with its own traceback when one fails, leaves processes behind when it is
interrupted, and takes a cached artifact for whole when its directory exists. It has no settings for this, so `run` puts three
functions in the place of its own while a pipeline runs; whatever it still prints goes to a log file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import psutil
from kfp import components, local
from kfp.local import cache, status, subprocess_task_handler
from kfp.local.orchestrator import task_executor

from components import references, task
from trainer.errors import ArtifactError

GRACE_S = 30.0
"""How long the processes of a task have to end when the run is interrupted, as on a cluster: it may have a job to delete there."""


class TaskError(Exception):
    """A task ended with an error; the text is its own message, if it had one."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task that has ended well."""

    name: str
    seconds: float
    """From its start to its end in this run."""
    cached: bool
    outputs: Mapping[str, Any]
    """Parameters, and artifacts as KFP's objects."""


class Reporter(Protocol):
    """What a run tells while it goes on."""

    def started(self, name: str) -> None:
        """A task starts; it may yet be found in the cache."""

    def line(self, text: str) -> None:
        """A line that the task printed."""

    def ended(self, task: Task) -> None:
        """A task has ended well."""


def run(
    pipeline: str,
    parameters: Mapping[str, Any],
    *,
    directory: Path,
    cache_root: Path,
    fresh: bool,
    log: TextIO,
    reporter: Reporter,
) -> dict[str, Task]:
    """Run a compiled pipeline on this machine, one task after the other.

    Args:
        pipeline: KFP's YAML.
        parameters: the pipeline's parameters.
        directory: where its artifacts go.
        cache_root: what was made before, and whether it is still valid.
        fresh: make everything again.
        log: takes kfp's own words.
        reporter: reports every task.

    Returns:
        Name of each task that ran or was found in the cache -> the task.

    Raises:
        TaskError: a task failed; the tasks before it stay in the cache.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "error.txt").unlink(missing_ok=True)
    local.init(
        local.SubprocessRunner(use_venv=False),
        pipeline_root=str(directory),
        enable_caching=True,
        cache_root=str(cache_root),
    )
    tasks = _Tasks(CheckedCache(cache_root, fresh=fresh), reporter, log, directory / "error.txt")
    with _in_place_of_kfp(tasks), contextlib.redirect_stdout(log), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*custom or non-Python base image", category=RuntimeWarning)
        # What a pod on a cluster gets means nothing here.
        warnings.filterwarnings("ignore", message=".* have no effect in the current local runner", category=UserWarning)
        components.load_component_from_text(pipeline)(**parameters)
    return tasks.done


class CheckedCache(cache.LocalCache):  # type: ignore[misc]  # kfp has no types
    """KFP's cache, which takes an artifact for lost when it is damaged and not only when it is gone."""

    def __init__(self, cache_root: Path, *, fresh: bool) -> None:
        """`fresh` finds nothing, and what is made replaces what was there."""
        super().__init__(str(cache_root))
        self._fresh = fresh

    def get(self, key: str) -> dict[str, Any] | None:
        """The outputs made under this key, if they are still whole."""
        outputs: dict[str, Any] | None = None if self._fresh else super().get(key)
        if outputs is None or all(_is_whole(output) for output in outputs.values()):
            return outputs
        return None


def _is_whole(output: object) -> bool:
    """Whether an output can be used again; only what names an artifact of ours can be checked."""
    if not references.is_reference(output):
        return True
    try:
        return references.is_whole(str(output))
    except ArtifactError as error:
        logging.getLogger(__name__).warning("made again: %s", error)
        return False


class _Tasks:
    """Stands between `kfp.local` and the tasks."""

    def __init__(self, checked: CheckedCache, reporter: Reporter, log: TextIO, error_file: Path) -> None:
        self.checked, self.reporter, self._log, self._error_file = checked, reporter, log, error_file
        self.done: dict[str, Task] = {}
        self._name, self._ran = "", False
        self._execute = task_executor.execute_single_task

    def cache(self) -> CheckedCache:
        """For `kfp.local.cache.get_local_cache`."""
        return self.checked

    def execute(self, task_name: str, **arguments: Any) -> tuple[dict[str, Any], Any]:
        """For `kfp.local.orchestrator.task_executor.execute_single_task`."""
        self.reporter.started(task_name)
        start, self._name, self._ran = time.monotonic(), task_name, False
        outputs, ended = self._execute(task_name=task_name, **arguments)
        if ended != status.Status.SUCCESS:
            raise TaskError(f"{task_name}: kfp.local could not run it; {self._log.name} tells why")
        seconds = time.monotonic() - start
        self.done[task_name] = Task(name=task_name, seconds=seconds, cached=not self._ran, outputs=outputs)
        self.reporter.ended(self.done[task_name])
        return outputs, ended

    def run_subprocess(self, full_command: list[str], env_vars: Mapping[str, str] | None = None) -> int:
        """For `kfp.local.subprocess_task_handler.run_local_subprocess`."""
        self._ran = True
        # A session of its own, so that Ctrl-C reaches this process alone, which then ends the task in order. On a terminal
        # the task draws its progress bars there; elsewhere its lines are ours to pass on.
        with (
            subprocess.Popen(
                full_command,
                stdout=subprocess.PIPE,
                stderr=None if sys.stderr.isatty() else subprocess.STDOUT,
                text=True,
                bufsize=1,
                env={**os.environ, **(env_vars or {}), task.ERROR_FILE: str(self._error_file)},
                start_new_session=True,
            ) as process,
            _ended(process),
        ):
            for line in _without_kfp(process.stdout or ()):
                self.reporter.line(line)
            exit_code = process.wait()
        if exit_code != 0:
            raise TaskError(self._message(exit_code))
        return exit_code

    def _message(self, exit_code: int) -> str:
        if self._error_file.is_file():
            return self._error_file.read_text()
        return f"{self._name}: ended with exit code {exit_code}; its last lines stand above"


def _without_kfp(lines: Any) -> Iterator[str]:
    """The lines of a task without those of KFP's executor: its log, and the JSON object that it logs at the start."""
    inside_json = False
    for line in lines:
        if line.startswith("[KFP Executor "):
            inside_json = "Got executor_input:" in line
        elif inside_json:
            inside_json = line.rstrip() != "}"
        else:
            yield line.rstrip("\n")


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leave no process of a task behind, whatever ends the block."""
    try:
        yield
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and all below it: asked first, forced after `GRACE_S`."""
    try:
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:  # it ended by itself
        family = []
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended with another one
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=GRACE_S)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


@contextmanager
def _in_place_of_kfp(tasks: _Tasks) -> Iterator[None]:
    """Put the functions of `tasks` in the place of those of `kfp.local`, and put these back in the end."""
    places: list[tuple[Any, str, Any]] = [
        (cache, "get_local_cache", tasks.cache),
        (task_executor, "execute_single_task", tasks.execute),
        (subprocess_task_handler, "run_local_subprocess", tasks.run_subprocess),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    try:
        for module, name, function in places:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
