"""An elastic job on this machine: nodes are killed, come back and are asked to end, and the training goes on with those that are there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from trainer.data.dataset import open_dataset
from trainer.data.sampler import StatelessSampler
from trainer.graph import JobSpec
from trainer.io.errors import PREEMPTED_EXIT_CODE

ROOT = Path(__file__).parents[2]
SETTINGS = {"epochs": 5, "checkpoint_every": 5, "batch_size": 127}
"""A batch that two processes cannot share evenly."""
RENDEZVOUS = "timeout=120,join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=12"
"""Torch's own last call, for nodes that may still come, takes half a minute."""
LIMIT_S = 120
NOTES = """
import json, os, time
from pathlib import Path

if "RANK" in os.environ:
    from trainer.io import host
    from trainer.training import prefetch, loop

    folder, state = Path(os.environ["NOTES"]), {"asked": False}
    handle, step, take = host.EndRequest._handle, loop.Trainer.train_step, prefetch.Prefetcher.next

    def noting_handle(self, *arguments):
        state["asked"] = True
        handle(self, *arguments)

    def noting_step(self, number, *arguments):
        state["step"] = number
        while not state["asked"] and number >= int((folder / "hold").read_text()):
            time.sleep(0.02)
        return step(self, number, *arguments)

    def noting_take(self, *arguments):
        batch = take(self, *arguments)
        note = {"step": state["step"], "time": time.time(), "start": os.environ["MASTER_PORT"], "keys": batch.keys.tolist()}
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(note) + chr(10))
        return batch

    host.EndRequest._handle, loop.Trainer.train_step, prefetch.Prefetcher.next = noting_handle, noting_step, noting_take
"""
"""For `sitecustomize`: a process writes down which samples it takes for which step, and waits before the step that `hold` names."""


class Job:
    """The nodes of one job."""

    def __init__(self, distillation, folder):
        self.folder = folder
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(NOTES)
        self._spec = JobSpec(
            stage="distill", settings=distillation.settings, inputs=distillation.inputs, outputs=distillation.outputs
        )
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
        self._nodes = []

    def hold(self, step):
        """Let no process begin this step."""
        (self.folder / "new").write_text(str(step))
        (self.folder / "new").rename(self.folder / "hold")

    def start(self):
        """One more node, as a pod of an elastic PyTorchJob starts it."""
        environment = {
            "PET_NNODES": "1:2",
            "PET_NPROC_PER_NODE": "1",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"127.0.0.1:{self._port}",
            "PET_RDZV_CONF": RENDEZVOUS,
            "PET_MAX_RESTARTS": "3",
            "PET_LOCAL_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "NOTES": str(self.folder),
            "PYTHONPATH": f"{self.folder}:{ROOT}",
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TRAINER_"))}
        log = (self.folder / f"node-{len(self._nodes)}.log").open("w")
        with log:
            command = [sys.executable, *self._spec.arguments("--node")]
            node = subprocess.Popen(command, env=inherited | environment, stdout=log, stderr=log, cwd=ROOT)
        self._nodes.append(node)
        return node

    def is_served(self):
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self._port)) == 0

    def notes(self):
        """What all processes have written down, the earliest first."""
        lines = [line for path in self.folder.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
        return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda note: note["time"])

    def wait_for(self, what, condition):
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S} s\n{self.logs()}"
            time.sleep(0.1)

    def wait_for_step(self, step, processes):
        """Wait until so many processes of one start have had this step."""

        def reached():
            starts = defaultdict(int)
            for note in self.notes():
                starts[note["start"]] += note["step"] == step
            return processes in starts.values()

        self.wait_for(f"step {step} by {processes} processes", reached)

    def logs(self):
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("node-*.log")))

    def close(self):
        for node in self._nodes:
            kill(node)


def workers(node):
    if node.poll() is not None:
        return []
    return [child for child in psutil.Process(node.pid).children(recursive=True) if "--worker" in child.cmdline()]


def kill(node):
    """As a machine that is gone: the agent and its processes at once."""
    family = [*psutil.Process(node.pid).children(recursive=True)] if node.poll() is None else []
    node.kill()
    node.wait()
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=10)


@contextmanager
def job_of(distillation, folder):
    job = Job(distillation, folder)
    try:
        yield job
    finally:
        job.close()


@pytest.mark.long
def test_job_goes_on_with_nodes_that_are_there(distillation, digits, tmp_path):
    elastic, whole = distillation("elastic", **SETTINGS), distillation("whole", **SETTINGS).train()
    with job_of(elastic, tmp_path / "job") as job:
        job.hold(13)
        first = job.start()
        job.wait_for("the first node, where all meet", job.is_served)
        second = job.start()
        job.wait_for_step(12, processes=2)
        kill(second)
        job.hold(25)
        job.wait_for_step(24, processes=1)  # from the checkpoint after step 10 on
        third = job.start()
        job.wait_for("a process of the new node", lambda: workers(third))
        job.hold(37)
        job.wait_for_step(36, processes=2)
        third.send_signal(signal.SIGTERM)
        job.wait_for_step(37, processes=1)  # it goes on to a step at which both can end
        job.hold(10_000)
        assert third.wait(LIMIT_S) == PREEMPTED_EXIT_CODE, job.logs()
        assert first.wait(LIMIT_S) == 0, job.logs()
        notes = job.notes()
    assert (
        sum("ended early" in line for line in job.logs().splitlines()) == 1
    )  # whoever was asked to end left a checkpoint
    split, order = open_dataset(digits).split("train"), StatelessSampler(len(open_dataset(digits).split("train")), 3)
    assert len({note["start"] for note in notes}) == 4
    for step in range(len(whole.losses())):
        counts = [note for note in notes if note["step"] == step]
        counts = [note for note in counts if note["start"] == counts[-1]["start"]]  # what was lost was done again
        seen = sorted(key for note in counts for key in note["keys"])
        expected = split.keys[order.take(step * 127, (step + 1) * 127).indices].view("int64")
        assert seen == sorted(expected.tolist()), step
    assert torch.allclose(elastic.losses()[-5:], whole.losses()[-5:], rtol=1e-3)
    for name, value in whole.weights().items():
        assert torch.allclose(elastic.weights()[name], value, atol=1e-3), name
