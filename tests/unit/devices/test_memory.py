"""What a process keeps of the memory that its steps free, with the C library that is installed."""

import os
import subprocess
import sys

STEPS = """
import psutil, torch
from trainer.devices import HOST

HOST.open()
process, kept = psutil.Process(), torch.ones(1)
before = process.memory_info().rss
activations = [torch.ones(64 << 20, dtype=torch.uint8) for _ in range(3)]
del activations
print((process.memory_info().rss - before) >> 20)
"""


def mebibytes_after_a_step(**variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", STEPS]
    ended = subprocess.run(command, env=environment | variables, check=True, capture_output=True, text=True)
    return int(ended.stdout)


def test_memory_is_kept_unless_environment_says_something_else():
    assert mebibytes_after_a_step() >= 128
    assert mebibytes_after_a_step(MALLOC_TRIM_THRESHOLD_="131072") < 64
