"""Whether a candidate will fit, by what those before it used."""

from __future__ import annotations

import sys

import pytest
import torch

from trainer.training.devices import choose_device
from trainer.training.processes import Processes
from trainer.tuning.memory import Memory, container_room


def test_what_images_took_tells_how_many_will_fit(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    memory = Memory(Processes(rank=0, world_size=1, local_rank=0, device=choose_device()))
    assert memory.has_room(10**12)  # nothing is known yet
    memory.begin()
    held = torch.ones(32, 2**20)  # 128 MiB: 4 MiB an image
    memory.learn(len(held), memory.peak)
    assert memory.peak >= held.nbytes
    assert memory.has_room(1)
    assert not memory.has_room(10**6)


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, sys.maxsize),
        ({"memory.max": "max\n", "memory.current": "5\n"}, sys.maxsize),
        ({"memory.max": "1000\n", "memory.current": "400\n"}, 600),
        ({"memory/memory.limit_in_bytes": "1000\n", "memory/memory.usage_in_bytes": "300\n"}, 700),
    ],
)
def test_a_container_may_have_less_memory_than_its_machine(tmp_path, files, room):
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert container_room(tmp_path) == room
