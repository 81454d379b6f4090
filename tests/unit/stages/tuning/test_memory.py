"""The memory of a trial, and its limits."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from trainer.devices import Device
from trainer.devices.process_group import Processes
from trainer.stages.tuning.memory import MemoryGauge, container_room


def group(kind):
    device = Device(kind=kind, torch_device=torch.device(kind), backend="", has_bf16=False, compiles=False)
    return Processes(rank=0, world_size=4, local_rank=0, local_world_size=4, device=device)


def test_processes_share_the_machines_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 200)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert MemoryGauge(group("cuda")).limit == 200 + 900
    host = MemoryGauge(group("cpu"))
    assert host.limit - host.begin() == pytest.approx(225)


def test_memory_that_a_trial_uses_is_measured():
    gauge = MemoryGauge(group("cpu"))
    assert gauge.begin() > 0
    before = gauge.peak
    # 1 MiB each, and more of them than glibc can have kept of what other tests have freed: the peak is theirs.
    held = torch.ones(before // 2**20 + 128, 2**18)
    assert gauge.peak - before >= 100 * 2**20
    del held


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, sys.maxsize),
        ({"memory.max": "max\n", "memory.current": "5\n"}, sys.maxsize),
        ({"memory.max": "1000\n", "memory.current": "400\n"}, 600),
        ({"memory/memory.limit_in_bytes": "1000\n", "memory/memory.usage_in_bytes": "300\n"}, 700),
    ],
)
def test_container_may_have_less_memory_than_its_machine(tmp_path, files, room):
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert container_room(tmp_path) == room
