from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.profiling.startup import Startup

ALONE = """
import json, time
from trainer.profiling.startup import Startup
startup = Startup()
with startup.part("fetch"):
    time.sleep(0.2)
print(json.dumps([startup.until(time.time()), Startup().until(time.time())]))
"""


def test_the_parts_make_up_the_time_from_the_launch_to_the_recording() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    environment.pop("TORCHELASTIC_RESTART_COUNT", None)
    launched = time.time()
    printed = subprocess.run(
        [sys.executable, "-c", ALONE],
        env=environment | {"TRAINER_LAUNCHED": str(launched - 1.5)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    passed = time.time() - launched
    first, second = json.loads(printed)
    assert set(first) == {"launch", "imports", "fetch", "preparation"}
    assert 1.4 < first["launch"] < passed + 1.6, (
        "the operating system counts a process's start in hundredths of a second"
    )
    assert first["fetch"] >= 0.2
    assert 0 < first["imports"] < passed
    assert sum(first.values()) <= passed + 1.6
    assert set(second) == {"preparation"}, "the imports are counted once"


def test_a_part_that_comes_twice_is_added_and_a_later_training_begins_anew() -> None:
    began = time.time()
    startup = Startup()
    for _ in range(2):
        with startup.part("fetch"):
            time.sleep(0.02)
    now = time.time()
    parts = startup.until(now + 10)
    assert 0.04 <= parts["fetch"] <= now - began
    assert parts["fetch"] + parts["preparation"] == pytest.approx(now + 10 - began, abs=0.01 + now - began)
    startup.begin_again()
    assert set(startup.until(time.time())) == {"preparation"}
