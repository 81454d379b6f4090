"""How a process of `python -m trainer` ends."""

import subprocess
import sys

import pytest

LEFT_ALONE = """
import multiprocessing, sys, threading, time
from torch.distributed import TCPStore
from trainer.__main__ import leave

def ask(store):
    while True:
        store.check(["key"])

def sleep():
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=sleep, daemon=True).start()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    threading.Thread(target=ask, args=[store], daemon=True).start()
    print("last words")
    leave(int(sys.argv[1]))
"""
"""A process with a thread in torch's native code, and a child."""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "left_alone.py"
    path.write_text(LEFT_ALONE)
    return path


def test_a_failure_keeps_its_exit_code(program):
    """Without `leave` torch ends this process with SIGABRT."""
    ended = subprocess.run([sys.executable, program, "7"], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "last words\n", "")
