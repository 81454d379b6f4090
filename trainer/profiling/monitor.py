"""What the machine does while a training runs: a thread that samples CPU cores, memory, disk, network and the GPU.

A signal that cannot be read here is recorded as missing, with the reason; nothing is ever raised into the training. Signals of the
whole machine are sampled by one process of each machine. Memory is bounded: when the table is full, neighbouring samples
are averaged and the interval doubles, so a long training is seen whole, only coarser.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import psutil
import torch

from trainer.profiling.series import Series

SAMPLES_KEPT = 8192
"""Rows of the table; at half a second's interval it is full, and halved, for the first time after 68 minutes."""


class Signal(Protocol):
    """Some columns that are read together."""

    @property
    def columns(self) -> Sequence[str]: ...

    def read(self) -> Sequence[float]:
        """One value for each column, over the time since the last call where it is a rate.

        Raises:
            Exception: the signal cannot be read here.
        """
        ...


class CpuSignal:
    """Share of time each core was busy, and the share of all cores that waited for input or output, in percent."""

    def __init__(self) -> None:
        self._last = psutil.cpu_times(percpu=True)
        self.columns = [*(f"cpu{core}_percent" for core in range(len(self._last))), "iowait_percent"]

    def read(self) -> Sequence[float]:
        # psutil.cpu_percent keeps its last reading in a global, which anything else in this process would reset.
        now = psutil.cpu_times(percpu=True)
        spent = [np.subtract(after[:8], before[:8]) for before, after in zip(self._last, now, strict=True)]
        fields = now[0]._fields[:8]
        self._last = now
        total = [max(float(core.sum()), 1e-9) for core in spent]
        waits = [float(core[fields.index("iowait")]) if "iowait" in fields else 0.0 for core in spent]
        idle = [float(core[fields.index("idle")]) for core in spent]
        busy = [100 * (1 - (i + w) / t) for i, w, t in zip(idle, waits, total, strict=True)]
        return [*np.clip(busy, 0, 100).tolist(), 100 * sum(waits) / sum(total)]


class MemorySignal:
    """Memory of the machine that is in use and cannot be freed, in bytes."""

    columns = ("memory_used_bytes",)

    def read(self) -> Sequence[float]:
        memory = psutil.virtual_memory()
        return (memory.total - memory.available,)


class _Rates:
    """How much counters grow in a second, from one reading to the next."""

    def __init__(self, *counters: float) -> None:
        self._last = (time.perf_counter(), *counters)

    def since_last(self, *counters: float) -> list[float]:
        now, before = (time.perf_counter(), *counters), self._last
        self._last = now
        seconds = max(now[0] - before[0], 1e-9)
        return [(after - first) / seconds for after, first in zip(now[1:], before[1:], strict=True)]


class ProcessSignal:
    """This process: resident memory, also without what it shares (mapped files), in bytes; CPU time in percent of one core."""

    columns = ("process_rss_bytes", "process_private_bytes", "process_cpu_percent")

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._rates = _Rates(time.process_time())

    def read(self) -> Sequence[float]:
        (share,) = self._rates.since_last(time.process_time())
        memory = self._process.memory_info()
        return (memory.rss, memory.rss - getattr(memory, "shared", 0), 100 * share)


class StolenSignal:
    """What the host of a virtual machine takes of the core that the training's thread is on, in percent of the time.

    Linux counts that steal for each core in /proc/stat, and for no thread.
    """

    columns = ("stolen_percent",)

    def __init__(self) -> None:
        if not psutil.LINUX:
            raise LookupError("only Linux counts what a virtual machine's host takes")
        self._process = psutil.Process()
        self._last = psutil.cpu_times(percpu=True)

    def read(self) -> Sequence[float]:
        core, before, now = self._process.cpu_num(), self._last, psutil.cpu_times(percpu=True)
        self._last = now
        spent = np.subtract(now[core][:8], before[core][:8])  # without guests, which `user` counts already
        return (100 * float(spent[now[core]._fields.index("steal")]) / max(float(spent.sum()), 1e-9),)


class LoadersSignal:
    """The loader processes of this process: their CPU time together, in percent of one core; NaN while there are none."""

    columns = ("loaders_cpu_percent",)

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        """`pids` gives their ids now."""
        self._pids = pids
        self._processes: dict[int, psutil.Process] = {}
        self._rates = _Rates(math.nan)

    def read(self) -> Sequence[float]:
        times = []  # of all of them; NaN where there are none, or one has ended
        for pid in self._pids():
            try:
                if pid not in self._processes:
                    self._processes[pid] = psutil.Process(pid)
                spent = self._processes[pid].cpu_times()
                times.append(spent.user + spent.system)
            except psutil.NoSuchProcess:
                times = [math.nan]
                break
        (share,) = self._rates.since_last(math.fsum(times) if times else math.nan)
        return (100 * share,)


class CounterSignal:
    """Rates of two counters of the operating system, in bytes a second."""

    def __init__(self, columns: tuple[str, str], counters: Callable[[], tuple[float, float]]) -> None:
        self.columns = columns
        self._counters = counters
        self._rates = _Rates(*counters())

    def read(self) -> Sequence[float]:
        return self._rates.since_last(*self._counters())


class _OfGpu:
    """A signal of the GPU that this process trains on."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise LookupError(f"the training runs on {device.type}")
        self._device = device


class GpuSignal(_OfGpu):
    """The GPU that this process trains on: utilisation in percent, as NVML sees it."""

    columns = ("gpu_percent",)

    def read(self) -> Sequence[float]:
        """Share of the last sampling period of NVML in which a kernel ran."""
        return (float(torch.cuda.utilization(self._device)),)


class GpuMemorySignal(_OfGpu):
    """The memory of the GPU that this process trains on, in bytes: used by any process, there is, held by this process's tensors."""

    columns = ("gpu_memory_used_bytes", "gpu_memory_total_bytes", "gpu_memory_allocated_bytes")

    def read(self) -> Sequence[float]:
        free, total = torch.cuda.mem_get_info(self._device)
        return (float(total - free), float(total), float(torch.cuda.memory_allocated(self._device)))


def _disk_counters() -> tuple[float, float]:
    counters = psutil.disk_io_counters()
    if counters is None:
        raise LookupError("the operating system shows no disk")
    return (counters.read_bytes, counters.write_bytes)


def _swap_counters() -> tuple[float, float]:
    memory = psutil.swap_memory()
    if not memory.total:
        raise LookupError("the machine has no swap")
    return (memory.sin, memory.sout)


def _network_counters() -> tuple[float, float]:
    outside = [counters for name, counters in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    if not outside:
        raise LookupError("the operating system shows no network interface but the loopback")
    return (sum(counters.bytes_recv for counters in outside), sum(counters.bytes_sent for counters in outside))


def signals(
    device: torch.device, *, machine: bool, loaders: Callable[[], Sequence[int]] = tuple
) -> dict[str, Callable[[], Signal]]:
    """How each signal is set up, by name.

    Args:
        device: on which this process trains.
        machine: whether to add the signals of the whole machine.
        loaders: gives the ids of this process's loader processes.
    """
    of_process: dict[str, Callable[[], Signal]] = {
        "process": ProcessSignal,
        "stolen": StolenSignal,
        "loaders": lambda: LoadersSignal(loaders),
        "gpu_utilization": lambda: GpuSignal(device),
        "gpu_memory": lambda: GpuMemorySignal(device),
    }
    if device.type == "xla":
        from trainer.profiling.xla_counters import XlaMemorySignal

        of_process["device_memory"] = lambda: XlaMemorySignal(device)
    of_machine: dict[str, Callable[[], Signal]] = {
        "cpu": CpuSignal,
        "memory": MemorySignal,
        "disk": lambda: CounterSignal(("disk_read_bytes_per_s", "disk_write_bytes_per_s"), _disk_counters),
        "swap": lambda: CounterSignal(("swap_in_bytes_per_s", "swap_out_bytes_per_s"), _swap_counters),
        "network": lambda: CounterSignal(
            ("network_received_bytes_per_s", "network_sent_bytes_per_s"), _network_counters
        ),
    }
    return (of_machine if machine else {}) | of_process


class Monitor:
    """Samples signals at an interval, in a thread of its own, from `start` to `stop`."""

    def __init__(
        self,
        setups: dict[str, Callable[[], Signal]],
        interval_s: float,
        *,
        origin_ns: int,
        samples_kept: int = SAMPLES_KEPT,
    ) -> None:
        self.missing: dict[str, str] = {}
        """Name of each signal that could not be read -> the reason."""
        self.interval_s = interval_s
        """Seconds between two samples; grows when the table was full."""
        self.spent_s = 0.0
        """CPU time of the thread."""
        self._origin_ns = origin_ns
        self._signals: dict[str, Signal] = {}
        for name, setup in setups.items():
            try:
                signal = setup()
                signal.read()
            except Exception as error:  # noqa: BLE001  # whatever a driver answers, the training continues
                self.missing[name] = str(error) or type(error).__name__
            else:
                self._signals[name] = signal
        self.columns = ["end_s", *(column for signal in self._signals.values() for column in signal.columns)]
        self._values = np.full((samples_kept, len(self.columns)), np.nan)
        self._kept = 0
        self._table = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end the thread."""
        self._stopping.set()
        self._thread.join()

    def samples(self) -> Series:
        """The kept samples, [samples, columns]; `end_s` is the end of the time that a sample covers, since the recording began."""
        with self._table:
            return self._values[: self._kept].copy()

    def _run(self) -> None:
        while not self._stopping.wait(self.interval_s):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        row = [(time.perf_counter_ns() - self._origin_ns) * 1e-9]
        for name, signal in self._signals.items():
            values: Sequence[float] = [np.nan] * len(signal.columns)
            if name not in self.missing:
                try:
                    values = signal.read()
                except Exception as error:  # noqa: BLE001  # as at the set-up; it is not asked again
                    self.missing[name] = f"stopped during the training: {str(error) or type(error).__name__}"
            row.extend(values)
        with self._table:
            if self._kept == len(self._values):  # average neighbours, and sample half as often
                self._kept //= 2
                pairs = self._values[: 2 * self._kept].reshape(self._kept, 2, -1)
                merged = pairs.mean(axis=1)
                merged[:, 0] = pairs[:, 1, 0]
                self._values[: self._kept] = merged
                self._values[self._kept :] = np.nan
                self.interval_s *= 2
            self._values[self._kept] = row
            self._kept += 1
        self.spent_s = time.thread_time()
