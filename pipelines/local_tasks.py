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
from typing import Any, TextIO

import psutil
from kfp import components, local
from kfp.local import cache, status, subprocess_task_handler
from kfp.local.orchestrator import task_executor

from components import references, task
from trainer.io.errors import ArtifactError

GRACE_S = 30.0
"""How long the processes of a task have to end when the run is interrupted, as on a cluster: it may have a job to delete there."""


class TaskError(Exception):
    """A task ended with an error; the text is its own message, if it had one."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task that has ended well."""

    name: str
    seconds: float  # from its start to its end in this run
    cached: bool
    outputs: Mapping[str, Any]  # parameters, and artifacts as KFP's objects


class TaskReporter:
    """Print one line when a task starts and one when it has ended, with the task's own lines between them."""

    def __init__(self, stream: TextIO) -> None:
        self._start, self._stream = time.monotonic(), stream

    def started(self, name: str) -> None:
        self._tell(name, "started")

    def line(self, text: str) -> None:
        print(f"  {text}", file=self._stream, flush=True)

    def ended(self, task: Task) -> None:
        self._tell(task.name, "cached, as an earlier run made it" if task.cached else f"done in {task.seconds:.1f} s")

    def _tell(self, name: str, what: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f} s] {name}: {what}", file=self._stream, flush=True)


def run(
    pipeline: str,
    parameters: Mapping[str, Any],
    *,
    directory: Path,
    cache_root: Path,
    fresh: bool,
    log: TextIO,
    reporter: TaskReporter,
) -> dict[str, Task]:
    """Run a compiled pipeline on this machine, one task after the other; `log` takes kfp's own words.

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
    tasks = _Tasks(reporter, log, directory / "error.txt")
    checked = CheckedCache(cache_root, fresh=fresh)
    with contextlib.ExitStack() as after, contextlib.redirect_stdout(log), warnings.catch_warnings():
        places: tuple[tuple[Any, str, Any], ...] = (
            (cache, "get_local_cache", lambda: checked),
            (task_executor, "execute_single_task", tasks.execute),
            (subprocess_task_handler, "run_local_subprocess", tasks.run_subprocess),
        )
        for module, name, function in places:
            after.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, function)
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
        """Return the outputs made under this key, if they are still whole."""
        outputs: dict[str, Any] | None = None if self._fresh else super().get(key)
        # Only what names an artifact of ours can be checked.
        made = [output for output in (outputs or {}).values() if references.is_reference(output)]
        try:
            return outputs if all(map(references.is_whole, made)) else None
        except ArtifactError as error:
            logging.getLogger(__name__).warning("made again: %s", error)
            return None


class _Tasks:
    """Stands between `kfp.local` and the tasks."""

    def __init__(self, reporter: TaskReporter, log: TextIO, error_file: Path) -> None:
        self._reporter, self._log, self._error_file = reporter, log, error_file
        self.done: dict[str, Task] = {}
        self._name, self._ran = "", False
        self._execute = task_executor.execute_single_task

    def execute(self, task_name: str, **arguments: Any) -> tuple[dict[str, Any], Any]:
        """For `kfp.local.orchestrator.task_executor.execute_single_task`."""
        self._reporter.started(task_name)
        start, self._name, self._ran = time.monotonic(), task_name, False
        outputs, ended = self._execute(task_name=task_name, **arguments)
        if ended != status.Status.SUCCESS:
            raise TaskError(f"{task_name}: kfp.local could not run it; {self._log.name} tells why")
        seconds = time.monotonic() - start
        self.done[task_name] = Task(name=task_name, seconds=seconds, cached=not self._ran, outputs=outputs)
        self._reporter.ended(self.done[task_name])
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
                encoding="utf-8",
                errors="replace",
                bufsize=1,
                env={**os.environ, **(env_vars or {}), task.ERROR_FILE: str(self._error_file)},
                start_new_session=True,
            ) as process,
            _ended(process),
        ):
            # Not those of KFP's executor: its log, and the JSON object that it logs at the start.
            inside_json = False
            for line in process.stdout or ():
                if line.startswith("[KFP Executor "):
                    inside_json = "Got executor_input:" in line
                elif inside_json:
                    inside_json = line.rstrip() != "}"
                else:
                    self._reporter.line(line.rstrip("\n"))
            exit_code = process.wait()
        if exit_code == 0:
            return exit_code
        if self._error_file.is_file():
            raise TaskError(self._error_file.read_text(encoding="utf-8"))
        raise TaskError(f"{self._name}: ended with exit code {exit_code}; its last lines stand above")


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leave no process of a task behind, whatever ends the block: each is asked to end first, and forced after `GRACE_S`."""
    try:
        yield
    except BaseException:
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
            parent = psutil.Process(process.pid)
            family = [*parent.children(recursive=True), parent]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended with another one
                member.terminate()
        _, alive = psutil.wait_procs(family, timeout=GRACE_S)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        raise
