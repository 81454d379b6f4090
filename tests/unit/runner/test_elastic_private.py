"""What torch does not document of its agent does what it is used for, and which ends of its processes get another start."""

from __future__ import annotations

import socket
import subprocess
import sys
import uuid

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from trainer.io import host
from trainer.io.errors import CRASH_EXIT_CODE, EXIT_CODE, PREEMPTED_EXIT_CODE
from trainer.runner import elastic_private, launch

ENDS = """
import os, pathlib, sys
notes, codes = pathlib.Path(sys.argv[1]), sys.argv[2:]
starts = notes.read_text().split() if notes.exists() else []
notes.write_text(" ".join([*starts, os.environ["TRAINER_LAUNCHED"]]))
sys.exit(int(codes[min(len(starts), len(codes) - 1)]))
"""
"""A process that notes when it was launched, and ends with the code of its turn."""


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """When processes were launched whose ends have these exit codes, and with which code the job failed."""
    monkeypatch.setenv(host.LAUNCHED_VARIABLE, "1.0")

    def run(*codes, max_restarts):
        config = api.LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=1,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=max_restarts,
        )
        failed = 0
        try:
            with launch.quiet_agent():
                elastic_private.run(config, ["-c", ENDS, str(tmp_path / "notes"), *map(str, codes)])
        except ChildFailedError as error:
            failed = error.get_first_failure()[1].exitcode
        return [float(text) for text in (tmp_path / "notes").read_text().split()], failed

    return run


def test_who_was_asked_to_end_is_started_again_as_often_as_that_happens(starts):
    launched, failed = starts(*[PREEMPTED_EXIT_CODE] * 3, 0, max_restarts=1)
    assert (len(launched), failed) == (4, 0)
    assert launched == sorted(set(launched))  # each start counts from its own beginning
    assert launched[0] == 1.0


def test_crash_is_tried_again_as_often_as_job_allows(starts):
    launched, failed = starts(CRASH_EXIT_CODE, max_restarts=1)
    assert (len(launched), failed) == (2, CRASH_EXIT_CODE)


def test_error_of_trainers_own_is_not_tried_again(starts):
    launched, failed = starts(EXIT_CODE, max_restarts=3)
    assert (len(launched), failed) == (1, EXIT_CODE)


@pytest.mark.parametrize("code", [PREEMPTED_EXIT_CODE, CRASH_EXIT_CODE])
def test_in_job_that_is_not_elastic_nothing_is_started_again(starts, code):
    launched, failed = starts(code, max_restarts=0)
    assert (len(launched), failed) == (1, code)


NODE = """
import sys
from torch.distributed.launcher import api
from trainer.runner import elastic_private, launch

elastic_private.EXIT_BARRIER_S, port, rank, seconds = 3.0, *sys.argv[1:]
config = api.LaunchConfig(
    min_nodes=2, max_nodes=2, nproc_per_node=1, run_id="lost", rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}",
    rdzv_configs={"rank": int(rank), "timeout": 60}, max_restarts=0,
)
with launch.quiet_agent():
    elastic_private.run(config, ["-c", f"import time; time.sleep({seconds})"])
"""


def test_node_that_has_finished_does_not_wait_long_for_one_that_is_lost():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    first, other = (
        subprocess.Popen([sys.executable, "-c", NODE, port, rank, seconds])
        for rank, seconds in (("0", "0"), ("1", "600"))
    )
    try:
        assert first.wait(timeout=100) == 0
        assert other.poll() is None
    finally:
        other.terminate()
        other.wait(timeout=60)
        first.kill()


def test_a_machine_knows_its_own_names():
    assert elastic_private.is_this_machine("localhost")
    assert elastic_private.is_this_machine(socket.gethostname())
    assert not elastic_private.is_this_machine("192.0.2.1")  # reserved for documentation
