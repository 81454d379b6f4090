"""Training processes that are forked, with and without the launcher of this machine: each starts within a moment."""

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil
import torch
from torch.distributed import TCPStore

from tests.forks import CONTEXT, settle
from trainer.data.loader import MicroBatches
from trainer.io.errors import PREEMPTED_EXIT_CODE

_OF_AGENT = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_")
"""Begins the names of the variables that torch's agent sets for each process."""
SEEN = "seen"
"""Begins the names of files with the keys of the samples of each step, one line a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A signal that a training process sends to itself, once."""

    step: int
    """Before which step; counted from 0."""
    sends: int = signal.SIGKILL
    rank: int = 0
    validating: bool = False
    """Rather in the validation after that step."""
    loading: bool = False
    """Rather a loader process hangs before it makes a batch of that step."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the processes of a group have ended, by rank."""

    codes: list[int]
    messages: list[str]
    said: list[str]
    """What they wrote to standard output and standard error."""


def run(distillation, *, processes=1, fault=None, limit_s=60, stage="distill", **environment):
    """Distill, as `processes` processes that a launcher has started; those that the fault stops are killed when the others have ended."""
    started = start(distillation, processes=processes, fault=fault, stage=stage, **environment)
    try:
        for process in started:
            _join(process, limit_s)
    finally:
        for process in started:
            process.kill()  # one that has not ended
            process.join()
    folder = notes(distillation)
    return Ended(
        codes=[process.exitcode for process in started],
        messages=[_message(folder / f"{rank}.json") for rank in range(processes)],
        said=[_said(folder, rank).read_text(errors="replace") for rank in range(processes)],
    )


def start(distillation, *, processes=1, fault=None, stage="distill", **environment):
    """Start the processes that `run` waits for, or those of another stage."""
    folder = notes(distillation)
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("[0-9]*.json"):
        left.unlink()
    places = {**distillation.inputs, **distillation.outputs}
    arguments = [
        *("stage", stage, "--worker", "--settings", json.dumps(distillation.settings)),
        *(text for name, place in places.items() for text in (f"--{name.replace('_', '-')}", place)),
    ]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a launcher's outlives its processes, too
    group = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TRAINER_FAILURES": str(folder),
        "TRAINER_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINER_", "MLFLOW_"))}
    attempt = 1 + _attempts(folder)
    started = [
        CONTEXT.Process(
            target=_train, args=(rank, arguments, inherited | group, fault, folder / f"{SEEN}-{attempt}-{rank}")
        )
        for rank in range(processes)
    ]
    for process in started:
        process.start()
        process.rendezvous = store  # which lives as long as they do
    return started


def check_resumes(whole, broken, *, step, processes=1, **options):
    """Train one to its end, and the other with a request to end before a step: both end with the same bits and the same losses."""
    asked = Fault(sends=signal.SIGTERM, step=step, rank=processes - 1)
    assert run(whole, processes=processes, **options).codes == [0] * processes
    assert run(broken, processes=processes, fault=asked, **options).codes == [PREEMPTED_EXIT_CODE] * processes
    assert run(broken, processes=processes, **options).codes == [0] * processes
    weights = broken.weights()
    for name, value in whole.weights().items():
        assert torch.equal(weights[name], value), name
    before, after = whole.losses(), broken.losses()
    assert 3 <= len(after) <= len(before) - step
    assert torch.equal(after, before[-len(after) :])


def launch(spec):
    """Run a job by the launcher of this machine, with forked processes."""
    from trainer.runner.launch import run_here

    with forking():
        run_here(spec)


@contextlib.contextmanager
def forking():
    """Let the launcher's agent fork its processes instead of starting them."""
    from torch.distributed.launcher import api

    start = api.elastic_launch

    def fork(config, _python):
        config.start_method = CONTEXT.get_start_method()
        return lambda *arguments: start(config, _work)(dict(os.environ), *arguments)

    with patch.object(api, "elastic_launch", fork):
        yield


def seen(distillation):
    """Keys of the samples of each step, of all ranks, as the last try that came to the step saw them."""
    steps = {}
    for attempt in range(1, 1 + _attempts(notes(distillation))):
        in_attempt = {}
        for file in notes(distillation).glob(f"{SEEN}-{attempt}-*"):
            for line in file.read_text().splitlines():
                step, keys = json.loads(line)
                in_attempt.setdefault(step, []).extend(keys)
        steps |= in_attempt
    return [steps[step] for step in sorted(steps)]


def notes(distillation):
    return Path(next(iter(distillation.outputs.values()))).parent / "notes"


def _attempts(folder):
    return len({file.name.split("-")[1] for file in folder.glob(f"{SEEN}-*")})


def _said(folder, rank):
    return folder / f"said-{rank}"


def _message(file):
    return json.loads(file.read_text())["message"] if file.exists() else ""


def _join(process, limit_s):
    """Wait until a process has ended, or is stopped."""
    deadline = time.monotonic() + limit_s
    while process.exitcode is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                return
        process.join(0.05)


def _train(rank, arguments, environment, fault, seen_by):
    settle(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    said = os.open(_said(seen_by.parent, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    from trainer import cli

    _watch_steps(fault if fault is not None and fault.rank == rank else None, seen_by)
    sys.exit(cli.main(arguments))


def _work(environment, *arguments):
    """A process of torch's agent: what `python` does with these arguments in this environment."""
    of_agent = {name: value for name, value in os.environ.items() if name.startswith(_OF_AGENT)}
    settle(environment | of_agent)
    from trainer import cli

    assert arguments[:2] == ("-m", "trainer")
    sys.exit(cli.main(arguments[2:]))


class _Hanging(MicroBatches):
    """Micro-batches of which the first one of a step is never made."""

    step = None

    def __getstate__(self):
        return self.__dict__ | {"step": self.step}

    def __getitem__(self, position):
        if position // self.count == self.step:
            time.sleep(600)
        return super().__getitem__(position)


def _watch_steps(fault, seen_by):
    """Note the samples of each step, and let the fault strike."""
    from trainer.objectives.distillation.objective import DistillObjective
    from trainer.training import classification, loop
    from trainer.training.loop import Trainer

    plain_step, plain_objective, plain_measure = Trainer.train_step, DistillObjective.__call__, classification._measure
    now = [-1]

    def step(self, number, *arguments):
        now[0] = number
        if fault is not None and not fault.validating and not fault.loading and number == fault.step:
            signal.raise_signal(fault.sends)
        return plain_step(self, number, *arguments)

    def objective(self, model, batch):
        with seen_by.open("a") as lines:
            lines.write(json.dumps([now[0], batch.keys.tolist()]) + "\n")
        return plain_objective(self, model, batch)

    def measure(*arguments):
        if fault is not None and fault.validating and now[0] == fault.step:
            now[0] = -1  # once
            signal.raise_signal(fault.sends)
        return plain_measure(*arguments)

    Trainer.train_step, DistillObjective.__call__, classification._measure = step, objective, measure
    if fault is not None and fault.loading:
        _Hanging.step = fault.step
        loop.MicroBatches = _Hanging
