"""What the machine does while a training runs: a thread that samples CPU cores, memory, disk, network and the GPU.

A signal that cannot be read here is recorded as missing, with the reason; nothing is ever raised into the training. Signals of the
whole machine are sampled by one process of each machine. Memory is bounded: when the table is full, neighboring samples
are averaged and the interval doubles, so a long training is seen whole, only coarser.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

from trainer.profiling.evidence import is_core
from trainer.profiling.series import Series

SAMPLES_KEPT = 8192
"""Rows of the table; at half a second's interval it is full, and halved, for the first time after 68 minutes."""


@dataclass(frozen=True)
class Signal:
    """Some columns that are read together."""

    columns: Sequence[str]
    read: Callable[[], Sequence[float]]
    """One value for each column, over the time since the last call where it is a rate; raises where it cannot be read here."""


def _growth(counters: Callable[[], Any]) -> Callable[[], Series]:
    """Give by how much counters grow from one reading to the next."""
    last = np.asarray(counters(), dtype=float)

    def read() -> Series:
        nonlocal last
        before, last = last, np.asarray(counters(), dtype=float)
        return np.asarray(last - before)

    return read


def _rates(counters: Callable[[], Sequence[float]]) -> Callable[[], list[float]]:
    """Give how much counters grow in a second, from one reading to the next."""
    growth = _growth(lambda: (time.perf_counter(), *counters()))

    def read() -> list[float]:
        seconds, *grown = growth().tolist()
        return [counter / max(seconds, 1e-9) for counter in grown]

    return read


def _core_seconds() -> Series:
    """Return each core's time by kind, [cores, kinds of time], without that of guests, which `user` includes."""
    return np.array([core[:8] for core in psutil.cpu_times(percpu=True)])


def cpu_signal() -> Signal:
    """Share of time each core was busy, and the share of all cores that waited for input or output, in percent."""
    kinds, cores = psutil.cpu_times()._fields, len(_core_seconds())
    growth = _growth(_core_seconds)

    def read() -> list[float]:
        # psutil.cpu_percent keeps its last reading in a global, which anything else in this process would reset.
        spent = growth()
        total = np.maximum(spent.sum(axis=1), 1e-9)
        waits = spent[:, kinds.index("iowait")] if "iowait" in kinds else np.zeros(len(spent))
        busy = 100 * (1 - (spent[:, kinds.index("idle")] + waits) / total)
        return [*np.clip(busy, 0, 100).tolist(), 100 * float(waits.sum() / total.sum())]

    return Signal([*(f"cpu{core}_percent" for core in range(cores)), "iowait_percent"], read)


def process_signal() -> Signal:
    """This process: resident memory, resident memory without shared pages, in bytes; CPU time in percent of one core."""
    process, rates = psutil.Process(), _rates(lambda: (time.process_time(),))

    def read() -> Sequence[float]:
        (share,), memory = rates(), process.memory_info()
        return (memory.rss, memory.rss - getattr(memory, "shared", 0), 100 * share)

    return Signal(("process_rss_bytes", "process_private_bytes", "process_cpu_percent"), read)


def stolen_signal() -> Signal:
    """Time that the host of a virtual machine takes of the training thread's core, in percent; Linux counts it by core, not by thread."""
    if not psutil.LINUX:
        raise LookupError("only Linux counts what a virtual machine's host takes")
    process, steal, growth = psutil.Process(), psutil.cpu_times()._fields.index("steal"), _growth(_core_seconds)

    def read() -> Sequence[float]:
        spent = growth()[process.cpu_num()]
        return (100 * float(spent[steal] / max(spent.sum(), 1e-9)),)

    return Signal(("stolen_percent",), read)


def loaders_signal(pids: Callable[[], Sequence[int]]) -> Signal:
    """The loader processes with the ids `pids()`: CPU time together, in percent of one core; NaN without any."""
    processes: dict[int, psutil.Process] = {}

    def spent() -> Sequence[float]:
        """Of all of them; NaN where there are none, or one has ended."""
        times = []
        for pid in pids():
            try:
                if pid not in processes:
                    processes[pid] = psutil.Process(pid)
                of_process = processes[pid].cpu_times()
            except psutil.NoSuchProcess:
                return (math.nan,)
            times.append(of_process.user + of_process.system)
        return (math.fsum(times) if times else math.nan,)

    rates = _rates(spent)
    return Signal(("loaders_cpu_percent",), lambda: (100 * rates()[0],))


def _gpu_signal(
    device: torch.device, columns: Sequence[str], read: Callable[[torch.device], Sequence[float]]
) -> Signal:
    """The GPU that this process trains on."""
    if device.type != "cuda":
        raise LookupError(f"the training runs on {device.type}")
    return Signal(columns, lambda: read(device))


_DEVICE_MEMORY = ("device_memory_used_bytes", "device_memory_total_bytes")
_NETWORK = ("network_received_bytes_per_s", "network_sent_bytes_per_s")
_GPU_MEMORY = ("gpu_memory_used_bytes", "gpu_memory_total_bytes", "gpu_memory_allocated_bytes")


def _gpu_memory(device: torch.device) -> Sequence[float]:
    """In bytes: used by all processes, total, and allocated to this process's tensors."""
    free, total = torch.cuda.mem_get_info(device)
    return (float(total - free), float(total), float(torch.cuda.memory_allocated(device)))


def _disk_counters() -> Sequence[float]:
    counters = psutil.disk_io_counters()
    if counters is None:
        raise LookupError("the operating system shows no disk")
    return (counters.read_bytes, counters.write_bytes)


def _swap_counters() -> Sequence[float]:
    memory = psutil.swap_memory()
    if not memory.total:
        raise LookupError("the machine has no swap")
    return (memory.sin, memory.sout)


def _network_counters() -> Sequence[float]:
    outside = [counters for name, counters in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    if not outside:
        raise LookupError("the operating system shows no network interface but the loopback")
    return (sum(counters.bytes_recv for counters in outside), sum(counters.bytes_sent for counters in outside))


def signals(
    device: torch.device, *, machine: bool, loaders: Callable[[], Sequence[int]] = tuple
) -> dict[str, Callable[[], Signal]]:
    """Return the set-up of each signal by name: of this process, of its loader processes (`loaders` gives ids), and of the machine."""
    of_process: dict[str, Callable[[], Signal]] = {
        "process": process_signal,
        "stolen": stolen_signal,
        "loaders": lambda: loaders_signal(loaders),
        # the share of NVML's last sampling period in which a kernel ran
        "gpu_utilization": lambda: _gpu_signal(device, ("gpu_percent",), lambda gpu: (torch.cuda.utilization(gpu),)),
        "gpu_memory": lambda: _gpu_signal(device, _GPU_MEMORY, _gpu_memory),
    }
    if device.type == "xla":
        from trainer.profiling.xla_counters import memory_of

        of_process["device_memory"] = lambda: Signal(_DEVICE_MEMORY, lambda: memory_of(device))

    def used_memory() -> Sequence[float]:
        memory = psutil.virtual_memory()
        return (memory.total - memory.available,)

    of_machine: dict[str, Callable[[], Signal]] = {
        "cpu": cpu_signal,
        "memory": lambda: Signal(("memory_used_bytes",), used_memory),
        "disk": lambda: Signal(("disk_read_bytes_per_s", "disk_write_bytes_per_s"), _rates(_disk_counters)),
        "swap": lambda: Signal(("swap_in_bytes_per_s", "swap_out_bytes_per_s"), _rates(_swap_counters)),
        "network": lambda: Signal(_NETWORK, _rates(_network_counters)),
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
        self.missing: dict[str, str] = {}  # name of each signal that could not be read -> the reason
        self.interval_s = interval_s  # seconds between two samples; grows when the table was full
        self.spent_s = 0.0  # CPU time of the thread
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

    def for_mlflow(self, since_s: float) -> dict[str, float]:
        """Average the samples since a moment of the recording, under the names that MLflow's page of system metrics expects."""
        rows = self.samples()
        columns = dict(zip(self.columns, rows.T, strict=True))
        recent = {name: values[columns["end_s"] > since_s] for name, values in columns.items()}
        means = {name: float(values.mean()) for name, values in recent.items() if len(values)}
        cores = [mean for name, mean in means.items() if is_core(name)]
        used, total = (means.get(f"gpu_memory_{name}_bytes", math.nan) for name in ("used", "total"))
        memory, seconds = means.get("memory_used_bytes", math.nan), np.diff(columns["end_s"], prepend=0.0)
        received, sent = (
            float(np.nansum(columns[name] * seconds)) if name in columns else math.nan for name in _NETWORK
        )
        figures = {
            "cpu_utilization_percentage": sum(cores) / len(cores) if cores else math.nan,
            "system_memory_usage_megabytes": memory / 1e6,
            "system_memory_usage_percentage": 100 * memory / psutil.virtual_memory().total,
            "network_receive_megabytes": received / 1e6,  # since the recording began, as MLflow counts
            "network_transmit_megabytes": sent / 1e6,
            "gpu_0_utilization_percentage": means.get("gpu_percent", math.nan),
            "gpu_0_memory_usage_megabytes": used / 1e6,
            "gpu_0_memory_usage_percentage": 100 * used / total,
        }
        return {f"system/{name}": value for name, value in figures.items() if math.isfinite(value)}

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
            if self._kept == len(self._values):  # average neighbors, and sample half as often
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
