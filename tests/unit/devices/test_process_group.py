import importlib
import json
import logging
import os
import re
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from tests.forks import on_two_processes
from tests.stand_ins.gpu import DEVICE
from trainer.devices import choose_device, device, process_group
from trainer.devices.process_group import (
    CollectiveWatchdog,
    Processes,
    join_processes,
    measure_exchange,
    prove_one_group,
    wait_limit_s,
)
from trainer.io.errors import LostProcessError, SettingsError, TrainingError

USING = "Using network %s"
"""In NCCL's log, of its choice."""


def alone(rank=0):
    return Processes(rank=rank, world_size=1, local_rank=rank, device=choose_device())


@pytest.mark.parametrize("rank", [0, 1])
def test_isolated_copies_are_refused(rank):
    with pytest.raises(
        TrainingError, match=r"2 processes were started, but the sum over their ranks is \d instead of 3"
    ):
        prove_one_group(alone(rank), expected=2)


def test_without_torchrun_there_is_one_process(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with join_processes() as processes:
        assert (processes.rank, processes.world_size, processes.is_first) == (0, 1, True)
        assert processes.total(torch.tensor([3.0])).tolist() == [3.0]
        processes.barrier()


def test_sums_are_over_all_processes(tmp_path):
    script = (
        "import json, sys, torch\n"
        "from trainer.devices.process_group import join_processes\n"
        "with join_processes() as processes:\n"
        "    values = torch.tensor([float(processes.rank), 10.0])\n"
        "    result = {'total': processes.total(values).tolist(), 'own': values.tolist()}\n"
        "    print(json.dumps(result))\n"
    )
    results = [json.loads(out) for out, _ in on_two_processes(script, tmp_path)]
    assert [result["total"] for result in results] == [[1.0, 20.0]] * 2
    assert [result["own"] for result in results] == [[0.0, 10.0], [1.0, 10.0]]


def test_others_wait_for_the_first_process_as_long_as_it_works(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_WAIT_S", "3")
    script = (
        "import time\n"
        "from trainer.devices.process_group import join_processes\n"
        "def make(works):\n"
        "    for _ in range(50):\n"
        "        works()\n"
        "        time.sleep(0.1)\n"
        "    return 'made'\n"
        "with join_processes() as processes:\n"
        "    print(processes.from_first(make, 'what takes longer than they wait'))\n"
    )
    assert [out.strip() for out, _ in on_two_processes(script, tmp_path)] == ["made"] * 2


@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu", "must be auto, cpu, cuda or xla, got 'tpu'"), ("cuda", "finds no GPU on this machine")],
)
def test_a_device_that_is_not_there_is_named(monkeypatch, device, message):
    monkeypatch.setenv("TRAINER_DEVICE", device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=message):
        choose_device()


@pytest.mark.parametrize(("major", "has_bf16"), [(7, False), (8, True), (9, True)])
def test_gpu_without_bf16_instructions_does_not_take_it_by_itself(monkeypatch, major, has_bf16):
    """Those before Ampere emulate it, which is slower than float32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)
    monkeypatch.setenv("TRAINER_DEVICE", "cuda")
    device = choose_device()
    assert device.has_bf16 is device.uses_bf16("auto") is has_bf16
    assert device.uses_bf16("bf16")


def test_gpu_is_deterministic_while_it_is_asked_to_be(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with DEVICE.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
        assert torch._inductor.config.deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch._inductor.config.deterministic


def test_a_seed_is_that_of_torch(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    choose_device().seed(2**62 + 7)
    drawn = torch.rand(3)
    torch.manual_seed(2**62 + 7)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("instructions", [False, True])
def test_autocast_follows_the_precision_and_the_processor(monkeypatch, instructions):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    monkeypatch.setattr(device, "has_bf16_instructions", lambda: instructions)
    matrix = torch.ones(2, 2)
    asked = torch.bfloat16 if instructions else torch.float32
    for precision, kind in (("fp32", torch.float32), ("auto", torch.float32), ("bf16", asked)):
        with choose_device().autocast(precision):
            assert (matrix @ matrix).dtype == kind


# ---------------------------------------------------------------------------------------------------------------------
# Who is missing

TIMED_OUT = (
    "[/build/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete. Hint"
)
CLOSED = (
    "[/build/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4711. This is typically caused by"
)


@pytest.fixture
def group(monkeypatch):
    """Three processes with one store."""
    monkeypatch.setattr(process_group, "_ROLL_CALL_S", 0.3)
    store = HashStore()
    return [CollectiveWatchdog(store, rank=rank, world_size=3, limit_s=5) for rank in range(3)]


def come(watchdog, what, reason=None):
    with watchdog.waiting(what, is_collective=True):
        if reason is not None:
            raise RuntimeError(reason)


def wait(watchdog, what, reason):
    with watchdog.waiting(what):
        raise RuntimeError(reason)


def messages(calls):
    """What the errors of calls that are made at the same time say."""
    reported = []

    def run(call):
        with pytest.raises(LostProcessError) as ended:
            call()
        reported.append(str(ended.value))

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return set(reported)


def test_a_process_that_does_not_come_is_named(group):
    for one in group:
        come(one, "the first meeting")
    expected = "rank 1 did not come to the checkpoint of step 7 within 5 s; the log there may say why"
    # Torch breaks the connections to all others where one gives up; to them it looks as if it were lost.
    calls = [
        lambda: come(group[0], "the checkpoint of step 7", TIMED_OUT),
        lambda: come(group[2], "the checkpoint of step 7", CLOSED),
    ]
    assert messages(calls) == {expected}


def test_a_waiting_process_finds_who_is_missing(group):
    for one in group:
        come(one, "the start")
    for _ in range(3):
        with group[0].waiting("step 1"):
            pass
    assert messages([lambda: wait(group[0], "step 4", TIMED_OUT)]) == {
        "ranks 1, 2 did not come to step 4 within 5 s; the log there may say why"
    }


def test_process_that_is_gone_is_named_without_limit_that_no_one_waited_for(group):
    expected = "rank 2 went away during step 4 (Connection closed by peer [10.0.0.7]:4711)"
    assert messages([lambda one=one: wait(one, "step 4", CLOSED) for one in group[:2]]) == {expected}


def test_all_may_have_come_and_lost_each_other(group):
    (message,) = messages([lambda one=one: wait(one, "step 4", CLOSED) for one in group])
    assert message.startswith("step 4: all processes came, but lost each other (Connection closed")


class Silent(HashStore):
    """A store that takes what is given and answers nothing."""

    def check(self, keys):
        time.sleep(60)


def test_meeting_place_that_does_not_answer_holds_none_up(monkeypatch):
    monkeypatch.setattr(process_group, "_STORE_S", 0.2)
    one = CollectiveWatchdog(Silent(), rank=0, world_size=2, limit_s=5)
    began = time.monotonic()
    with pytest.raises(LostProcessError, match="who is missing is not known"):
        wait(one, "step 4", TIMED_OUT)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("text", ["0", "-3", "ten", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("TRAINER_WAIT_S", text)
    with pytest.raises(SettingsError, match=f"TRAINER_WAIT_S must be a number of seconds above 0, got '{text}'"):
        wait_limit_s()


def test_limit_is_ten_minutes_unless_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv("TRAINER_WAIT_S", raising=False)
    assert timedelta(seconds=wait_limit_s()) == timedelta(minutes=10)
    monkeypatch.setenv("TRAINER_WAIT_S", "7.5")
    assert wait_limit_s() == 7.5


class _OneOfFour(Processes):
    """The first of four GPUs of two machines, whose sums are its own values."""

    def total(self, values, what=""):
        return values.clone()


@pytest.fixture
def of_two_machines():
    gpu = SimpleNamespace(kind="cuda", torch_device="cpu", synchronize=lambda: None)
    return _OneOfFour(rank=0, world_size=4, local_rank=0, local_world_size=2, device=gpu)


def test_rate_between_machines_is_logged_and_missing_efa_is_named_with_its_price(of_two_machines, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    measure_exchange(replace(of_two_machines, local_world_size=4))
    assert not caplog.messages, "one machine"
    monkeypatch.delenv("FI_PROVIDER", raising=False)
    measure_exchange(of_two_machines)
    (line,) = caplog.messages
    assert re.fullmatch(r"gradients travel between 2 machines at [\d.]+ GB/s \(all-reduce of 64 MiB\)", line)
    caplog.clear()
    price = {"dollars_an_hour": 20.0, "date": "2026-11", "region": "r", "source": "s"}
    monkeypatch.setenv("FI_PROVIDER", "efa")
    monkeypatch.setenv("TRAINER_PLACE", json.dumps({"pool": "gpu-a100", "nodes": 2, "price": price}))
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")  # so that they are as before in the end
        monkeypatch.delenv(name)
    process_group._log_network()
    log = Path(os.environ["NCCL_DEBUG_FILE"])
    measure_exchange(of_two_machines)
    assert len(caplog.messages) == 1, "what it took is not known"
    for network, warned in (("Socket", True), ("AWS Libfabric", False)):
        caplog.clear()
        log.write_text(
            f"node:1:7 [0] NCCL INFO NET/Plugin: ...\nnode:1:7 [0] NCCL INFO {USING % network}\n", encoding="utf-8"
        )
        measure_exchange(of_two_machines)
        assert len(caplog.messages) == 1 + warned
        said = r"NCCL took its network Socket, so .* over TCP, at [\d.]+ GB/s, on machines for \$40\.00 an hour"
        assert bool(re.search(said, caplog.text)) == warned
    log.unlink()


def test_nccl_says_which_network_it_takes():
    """The words are in the library that PyPI's torch brings."""
    (library,) = (Path(path) / "lib" / "libnccl.so.2" for path in importlib.import_module("nvidia.nccl").__path__)
    assert USING.encode() in library.read_bytes()
