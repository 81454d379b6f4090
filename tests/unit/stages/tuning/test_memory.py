"""Whether a candidate will fit, by what those before it used."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from trainer.devices import Device
from trainer.devices.process_group import Processes
from trainer.stages.tuning.memory import Memory, container_room, gauge_of


class Given:
    """A gauge with given measurements, in bytes."""

    def __init__(self, used=0, unused=1000, *, exact=True):
        self.now, self.free, self.exact, self.highest = used, unused, exact, used

    def begin(self):
        """Nothing is to be reset."""

    def used(self):
        return self.now

    def unused(self):
        return self.free

    def peak(self):
        return self.highest


def test_nothing_known_has_room():
    assert Memory(Given()).has_room("fp32", 10**12)


def test_two_measurements_are_a_fixed_part_and_a_slope():
    """A teacher of 500 bytes, and 2 bytes an image: a model in proportion would allow 115 images, and 200 need no more than 900."""
    memory = Memory(Given())
    memory.learn("fp32", 32, 564, fixed=0)
    memory.learn("fp32", 64, 628, fixed=0)
    assert memory.has_room("fp32", 200)
    assert not memory.has_room("fp32", 201)


def test_one_measurement_bounds_the_slope_by_what_was_not_there_before():
    """The teacher's 500 bytes were; weights and the optimizer's state, 64 bytes, are taken to grow too."""
    memory = Memory(Given())
    memory.learn("fp32", 32, 628, fixed=500)
    assert memory.has_room("fp32", 100)
    assert not memory.has_room("fp32", 101)


@pytest.mark.parametrize("noise", [-3, 0, 3])
def test_measurements_that_scatter_move_the_bound_little(noise):
    memory = Memory(Given())
    memory.learn("fp32", 32, 628, fixed=500)
    memory.learn("fp32", 64, 692 + noise, fixed=500)
    memory.learn("fp32", 16, 596, fixed=500)
    assert memory.has_room("fp32", 160)
    assert not memory.has_room("fp32", 176)


def test_what_ran_fits_and_so_does_another_kind_that_needs_as_much():
    """It used more than the share of the memory that may be planned with."""
    memory = Memory(Given())
    memory.learn("fp32", 64, 980, fixed=0)
    assert memory.ran("fp32", 64)
    assert memory.ran("fp32", 32)
    assert not memory.ran("fp32", 65)
    assert memory.has_room("fp32", 64)
    assert not memory.has_room("fp32", 65)
    assert not memory.ran("bf16", 64)
    assert memory.has_room("bf16", 64)
    assert not memory.has_room("bf16", 128)


def test_a_peak_that_was_there_before_says_no_slope():
    """On a host a smaller batch shows the larger one's peak."""
    memory = Memory(Given(used=100, exact=False))
    memory.learn("fp32", 64, 600, fixed=0)
    memory.learn("fp32", 32, 600, fixed=0)
    assert memory.has_room("fp32", 115)
    assert not memory.has_room("fp32", 116)


def test_memory_that_was_used_before_is_no_part_of_a_trial():
    memory = Memory(Given(used=400, unused=1000))
    memory.learn("fp32", 10, 500, fixed=0)
    assert memory.has_room("fp32", 90)
    assert not memory.has_room("fp32", 91)


def group(kind):
    device = Device(kind=kind, torch_device=torch.device(kind), backend="", has_bf16=False, compiles=False)
    return Processes(rank=0, world_size=4, local_rank=0, local_world_size=4, device=device)


def test_each_process_has_a_gpu_for_itself_but_shares_the_machines_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert gauge_of(group("cuda")).unused() == 1000
    assert gauge_of(group("cpu")).unused() == 250


def test_what_this_process_holds_is_measured():
    memory = Memory(gauge_of(group("cpu")))
    memory.begin()
    before = memory.peak
    # 1 MiB each, and more of them than glibc can have kept of what other tests have freed: the peak is theirs.
    held = torch.ones(before // 2**20 + 128, 2**18)
    assert memory.peak - before >= 100 * 2**20
    memory.learn("fp32", len(held), memory.peak, fixed=memory.fixed)
    assert memory.has_room("fp32", len(held))
    assert not memory.has_room("fp32", 10**9)


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
