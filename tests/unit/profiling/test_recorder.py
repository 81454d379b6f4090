from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.callback import callback_handler

from trainer.profiling.recorder import Compilations, Startup
from trainer.profiling.timeline import HostClock, Timeline

ALONE = """
import json, time
from trainer.profiling.recorder import Startup
startup = Startup()
with startup.part("fetch"):
    time.sleep(0.2)
print(json.dumps([startup.until(time.time()), Startup().until(time.time())]))
"""


def test_parts_make_up_the_start() -> None:
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


def test_repeated_parts_are_added() -> None:
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


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_what_step_compiles_is_counted_with_its_time() -> None:
    timeline = Timeline(HostClock())
    compilations = Compilations(timeline)
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", dynamic=False)
    timeline.start()
    compilations.start()
    for step, size in enumerate((2, 2, 3, 3, 4)):
        with timeline.step(step):
            compiled(torch.ones(size))
    compiled(torch.ones(5))
    compilations.stop()
    timeline.finish()
    compiled(torch.ones(6))
    assert [(record.step, record.graphs) for record in compilations.records.values()] == [(0, 1), (2, 1), (4, 1)]
    assert all(record.seconds > 0 for record in compilations.records.values())


def test_no_one_hears_after_the_end() -> None:
    before = len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)
    compilations = Compilations(Timeline(HostClock()))
    compilations.start()
    compilations.stop()
    assert (len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)) == before
