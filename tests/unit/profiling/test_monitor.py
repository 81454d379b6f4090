from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from trainer.profiling.monitor import (
    Monitor,
    Signal,
    cpu_signal,
    loaders_signal,
    process_signal,
    signals,
    stolen_signal,
)

CPU = torch.device("cpu")


class Count:
    """A signal that tells how often it was read, and fails at the reading `fails_at`."""

    columns = ("count",)

    def __init__(self, fails_at: int = -1) -> None:
        self.readings = 0
        self._fails_at = fails_at

    def read(self) -> Sequence[float]:
        self.readings += 1
        if self.readings == self._fails_at:
            raise OSError("the driver went away")
        return (float(self.readings),)


def monitor_of(*setups: tuple[str, Callable[[], Signal]], interval_s: float = 0.01, kept: int = 64) -> Monitor:
    return Monitor(dict(setups), interval_s, origin_ns=time.perf_counter_ns(), samples_kept=kept)


def sampled(monitor: Monitor, seconds: float) -> dict[str, np.ndarray]:
    monitor.start()
    time.sleep(seconds)
    monitor.stop()
    return dict(zip(monitor.columns, monitor.samples().T, strict=True))


def busy_on_core(core: int, ready: object, stop: object) -> None:
    os.sched_setaffinity(0, {core})
    ready.set()
    while not stop.is_set():
        sum(range(10_000))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to a core here")
def test_a_core_that_is_really_busy_is_seen() -> None:
    core = max(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=busy_on_core, args=(core, ready, stop))
    process.start()
    try:
        assert ready.wait(60)
        signal = cpu_signal()
        time.sleep(0.5)
        values = dict(zip(signal.columns, signal.read(), strict=True))
    finally:
        stop.set()
        process.join(30)
    assert values[f"cpu{core}_percent"] > 80
    assert 0 <= values["iowait_percent"] <= 100


def test_own_cpu_time_and_memory_are_seen() -> None:
    signal = process_signal()
    block = np.ones(30_000_000)
    end = time.process_time() + 0.3
    while time.process_time() < end:
        sum(range(10_000))
    memory, private, cpu = signal.read()
    assert memory > private > block.nbytes
    assert cpu > 5


def test_what_host_takes_of_training_s_core_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def kernel_counts(busy: int, idle: int, steal: int) -> None:
        """So many hundredths of a second of the second core; the first one, where no training is, loses all its time."""
        columns = (f"{busy} 0 0 {idle} 0 0 0 {steal} 0 0", f"0 0 0 0 0 0 0 {busy + idle + steal} 0 0")
        (tmp_path / "stat").write_text("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 {1}\ncpu1 {0}\n".format(*columns))

    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(cpu_num=lambda: 1))
    kernel_counts(busy=1000, idle=2000, steal=300)
    signal = stolen_signal()
    kernel_counts(busy=1040, idle=2040, steal=320)
    assert signal.read() == pytest.approx((20,))
    kernel_counts(busy=1140, idle=2040, steal=320)
    assert signal.read() == (0,)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to a core here")
def test_loader_processes_are_seen_while_there_are_some() -> None:
    pids: list[int] = []
    signal = loaders_signal(lambda: pids)
    (none,) = signal.read()
    assert np.isnan(none)
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=busy_on_core, args=(max(os.sched_getaffinity(0)), ready, stop))
    process.start()
    try:
        assert ready.wait(60)
        pids.append(process.pid)
        signal.read()
        time.sleep(0.5)
        (percent,) = signal.read()
    finally:
        stop.set()
        process.join(30)
    assert 5 < percent < 110
    (ended,) = signal.read()
    assert np.isnan(ended)


def test_signals_of_machine_are_sampled_by_one_process_only() -> None:
    assert {"cpu", "memory", "disk", "network", "process"} <= signals(CPU, machine=True).keys()
    assert not {"cpu", "memory", "disk", "network"} & signals(CPU, machine=False).keys()


def test_gpu_that_is_not_there_is_missing_with_reason() -> None:
    monitor = Monitor(signals(CPU, machine=False), 0.02, origin_ns=0)
    assert monitor.missing == {"gpu_utilization": "the training runs on cpu", "gpu_memory": "the training runs on cpu"}
    assert "gpu_percent" not in monitor.columns


def test_swapping_is_sampled_where_there_is_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    def machine_with(swap: int) -> Monitor:
        moved = iter(range(0, 10**9, 10**6))
        monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=swap, sin=next(moved), sout=0))
        return Monitor({"swap": signals(CPU, machine=True)["swap"]}, 0.02, origin_ns=0)

    assert machine_with(0).missing == {"swap": "the machine has no swap"}
    columns = sampled(machine_with(2**30), 0.1)
    assert (columns["swap_in_bytes_per_s"] > 0).all()
    assert (columns["swap_out_bytes_per_s"] == 0).all()


def test_signals_that_fail() -> None:
    def broken() -> Signal:
        raise PermissionError("not for you")

    monitor = monitor_of(("broken", broken), ("count", Count))
    assert monitor.missing == {"broken": "not for you"}
    assert len(sampled(monitor, 0.05)["count"]) > 0
    # A signal that fails later is missing from there and not asked again.
    count = Count(fails_at=3)
    columns = sampled(monitor_of(("count", lambda: count)), 0.1)
    assert np.isfinite(columns["count"][0])
    assert np.isnan(columns["count"][1:]).all()
    assert count.readings == 3


def test_full_table_is_averaged_in_pairs_and_interval_doubles() -> None:
    count = Count()
    monitor = monitor_of(("count", lambda: count), interval_s=0.001, kept=8)
    columns = sampled(monitor, 0.3)
    rows: list[float] = []
    doublings = 0
    for reading in range(2, count.readings + 1):  # the first reading is taken at set-up
        if len(rows) == 8:
            rows = [(rows[index] + rows[index + 1]) / 2 for index in range(0, 8, 2)]
            doublings += 1
        rows.append(reading)
    assert doublings > 0
    assert columns["count"].tolist() == pytest.approx(rows)
    assert monitor.interval_s == pytest.approx(0.001 * 2**doublings)
    assert (np.diff(columns["end_s"]) > 0).all()


def test_cores_are_counted_where_their_times_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container that sees another number of cores than the system has, the samples fit their columns."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 64)
    signal = cpu_signal()
    assert len(signal.read()) == len(signal.columns) == len(psutil.cpu_times(percpu=True)) + 1


def test_mlflow_gets_the_means_since_a_moment_in_its_units() -> None:
    use = (
        "memory_used_bytes",
        "gpu_percent",
        "gpu_memory_used_bytes",
        "gpu_memory_total_bytes",
        "cpu0_percent",
        "cpu1_percent",
    )
    signal = Signal((*use, "network_received_bytes_per_s"), lambda: (2e9, 40.0, 2e9, 8e9, 20.0, 60.0, 1e6))
    monitor = monitor_of(("made", lambda: signal))
    seconds = sampled(monitor, 0.1)["end_s"][-1]
    assert monitor.for_mlflow(0.0) == pytest.approx(
        {
            "system/cpu_utilization_percentage": 40.0,
            "system/system_memory_usage_megabytes": 2000.0,
            "system/system_memory_usage_percentage": 2e11 / psutil.virtual_memory().total,
            "system/network_receive_megabytes": seconds,
            "system/gpu_0_utilization_percentage": 40.0,
            "system/gpu_0_memory_usage_megabytes": 2000.0,
            "system/gpu_0_memory_usage_percentage": 25.0,
        }
    )
    assert list(monitor.for_mlflow(seconds)) == ["system/network_receive_megabytes"]
