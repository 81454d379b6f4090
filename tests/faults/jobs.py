"""Jobs that faults strike: a stage on its real command line, in processes of its own, and what has become of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.faults.inside import NONE, NOTES, Fault, Notes, install
from trainer.graph import flag
from trainer.io import artifacts, storage
from trainer.models import networks
from trainer.profiling import findings
from trainer.report import finished_run
from trainer.runner import launch
from trainer.stages import STAGES, evaluate
from trainer.stages.tuning.tuning_schema import read_tuning

ROOT = Path(__file__).parents[2]
PRELOADED = ["trainer.__main__", *(f"trainer.stages.{name}" for name in STAGES if name != "register"), "datasets"]
"""What takes seconds to import, for `Job.fork`."""


def _files(start: str) -> Callable[[artifacts.Artifact], Mapping[str, str]]:
    """Checksums of the files whose names start so."""
    return lambda whole: {name: record["sha256"] for name, record in whole.files.items() if name.startswith(start)}


def _decided(tuning: artifacts.Artifact) -> Mapping[str, str]:
    """The settings that a distillation would take: what was measured differs."""
    return {"settings": artifacts.digest(dict(read_tuning(tuning.path).settings))}


def _registered(registration: artifacts.Artifact) -> Mapping[str, str]:
    """Which version of the model it is: the first one, unless a try before has left one."""
    return {"version": json.loads((registration.path / finished_run.SUMMARY).read_text())["mlflow"]["model_version"]}


COMPARED: Mapping[str, Callable[[artifacts.Artifact], Mapping[str, str]]] = {
    "dataset": _files(""),
    "model": _files(networks.WEIGHTS),
    "teacher_outputs": _files("records/"),
    "tuning": _decided,
    "report": _files(findings.FINDINGS),
    "evaluation": _files(evaluate.CONFUSION),
    "registration": _registered,
}
"""Kind of artifact -> what is the same of it in every run; the rest holds times."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a command ended."""

    code: int
    """Exit code; minus the number of the signal that ended it."""
    said: str
    """What it wrote to standard error."""
    began: float
    ended: float
    """By the machine's monotonic clock, as all times here."""
    fired: float | None
    """When the fault struck; none where it did not."""
    steps: list[tuple[int, int, float]]
    """Rank, step and time of every completed step."""
    writes: list[str]
    """What was done below the folder that the fault watched."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def last_step(self) -> int:
        """The last step that a process completed; -1 where there is none."""
        return max((step for _, step, _ in self.steps), default=-1)

    def recovered(self, before: Ending) -> float:
        """Seconds from the fault in the command before until this one had done all that was done then."""
        assert before.fired is not None, "nothing to recover from"
        reached = [at for _, step, at in self.steps if step >= before.last_step >= 0]
        return max(0.0, before.ended - before.fired) + (min(reached) if reached else self.ended) - self.began

    def repeats(self, before: Ending) -> int:
        """How many steps this command did again that the one before had completed."""
        first = min((step for _, step, _ in self.steps), default=before.last_step + 1)
        return max(0, before.last_step + 1 - first)


@dataclass(kw_only=True)
class Job:
    """A stage with its inputs and outputs; the same command can be given again and again."""

    stage: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    scratch: Path
    """A folder for notes."""
    processes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    process: int = 0
    """Number of the process that was started last."""
    _tries: int = 0

    @property
    def folder(self) -> str:
        """Where its outputs lie, and its checkpoints."""
        return storage.parent(next(iter(self.outputs.values())))

    @property
    def checkpoints(self) -> str:
        """Where its checkpoints, or its finished shards, stand while it works."""
        return storage.join(self.folder, "checkpoints")

    @property
    def upcoming(self) -> Notes:
        """The notes of the command that is given next, or is under way."""
        folder = self.scratch / f"notes-{self._tries}"
        folder.mkdir(parents=True, exist_ok=True)
        return Notes(folder)

    def arguments(self) -> list[str]:
        """What follows `python -m trainer`."""
        places = {**self.inputs, **self.outputs}
        flags = [text for name, place in places.items() for text in (f"--{flag(name)}", place)]
        return ["stage", self.stage, "--settings", json.dumps(self.settings), *flags]

    def run(self, fault: Fault = NONE, *, limit_s: float = 300.0) -> Ending:
        """Give the command, as a user does, and wait for its end.

        Raises:
            AssertionError: it takes longer than the limit, or leaves processes behind.
        """
        notes = self.upcoming
        processes = ["--processes", str(self.processes)] if STAGES[self.stage].launched else []
        began = time.monotonic()
        with (notes.folder / "said").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer", *self.arguments(), *processes],
                stdout=subprocess.DEVNULL,
                stderr=said,
                cwd=ROOT,
                env=_inherited() | {**self.environment, **fault.environment(notes.folder)},
                start_new_session=True,
            )
            self.process = process.pid
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
        return self._ending(notes, code, began, limit_s)

    def fork(self, fault: Fault = NONE, *, limit_s: float = 200.0) -> Ending:
        """Let one process that has loaded torch already do what the command's training process does; quick, for many tries.

        Raises:
            AssertionError: as `run`.
        """
        notes = self.upcoming
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        worker = ["--worker"] if STAGES[self.stage].launched else []
        began = time.monotonic()
        process = context.Process(
            target=_work, args=([*self.arguments(), *worker], fault, notes.folder, dict(self.environment))
        )
        process.start()
        assert process.pid is not None, "a process that was started has a number"
        self.process = process.pid
        process.join(limit_s)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        process.close()
        return self._ending(notes, code, began, limit_s)

    def _ending(self, notes: Notes, code: int | None, began: float, limit_s: float) -> Ending:
        ended, left = time.monotonic(), _end_all(notes.folder)
        self._tries += 1
        said = (notes.folder / "said").read_text(errors="replace")
        assert code is not None, f"no end within {limit_s:.0f} s; it said:\n{said[-3000:]}"
        assert not left or code == -signal.SIGKILL, f"left processes behind: {left}; it said:\n{said[-3000:]}"
        return Ending(
            code=code, said=said, began=began, ended=ended, fired=notes.fired, steps=notes.steps, writes=notes.writes
        )

    # What has become of it

    def result(self) -> dict[str, str]:
        """What is the same in every run of its outputs, such as checksums of files; all outputs are checked."""
        found = {}
        for keyword, kind in STAGES[self.stage].outputs.items():
            whole = artifacts.read(self.outputs[keyword], kind)
            same = COMPARED[kind](whole) if kind in COMPARED else {}
            found |= {f"{keyword}/{name}": value for name, value in same.items()}
        return found

    @property
    def trains(self) -> bool:
        """Whether its steps are those of one training, so that they tell how far it has come."""
        return self.stage in ("pretrain", "distill")

    def believed(self) -> list[str]:
        """The outputs that say that they are complete; each is checked."""
        kinds = STAGES[self.stage].outputs
        there = [keyword for keyword in kinds if artifacts.exists(self.outputs[keyword])]
        for keyword in there:
            artifacts.read(self.outputs[keyword], kinds[keyword])
        return there


def _inherited() -> dict[str, str]:
    """This process's environment without what leads a job elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TRAINER_"))}
    return {"OMP_NUM_THREADS": "1"} | kept


def _work(arguments: list[str], fault: Fault, notes: Path, environment: Mapping[str, str]) -> None:
    """What a forked process does."""
    import torch

    from trainer import cli
    from trainer.__main__ import leave

    kept = _inherited()
    os.environ.clear()
    os.environ.update(kept | environment | {launch.FAILURES_VARIABLE: str(notes)})
    torch.set_num_threads(1)
    said = os.open(notes / "said", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    install(fault, Notes(notes))
    code = cli.main(arguments)
    failure = notes / "0.json"  # where a training process leaves its message for its launcher
    if failure.exists():
        os.write(2, f"error: {json.loads(failure.read_text())['message']}\n".encode())
    leave(code)


def _end_all(notes: Path) -> list[str]:
    """End whatever still works for a job; gives the command lines."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(NOTES) == str(notes):
                left.append(" ".join(process.cmdline())[:120])
                process.kill()
                process.wait(10)
        except psutil.Error:  # it has ended meanwhile, or is somebody else's
            continue
    return left
