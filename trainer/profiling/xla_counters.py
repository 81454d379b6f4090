"""What XLA reports of a training: the graphs that it compiled, what came back from the device, its memory.

Imported only where a training runs on such a device. Operations on tensors are only noted; a graph of them is compiled, on the thread that
asked for it, when they are handed over (`torch_xla.sync`) or read, so a compilation belongs to the step in which that happens and the
host's clock sees all of it. The device then works while the host continues; the host waits for it where it reads a tensor, and where it
hands over a graph before the one before has ended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch_xla
from torch_xla.core import xla_model
from torch_xla.debug import metrics

from trainer.profiling.evidence import CompilationRecord, TransferRecord

COUNTED_STEPS = 256
"""In so many first steps transfers are counted, and then in one of `COUNTED_EVERY`: torch_xla copies the last thousand measurements of a
metric for whoever reads it, which takes 40 us."""
COUNTED_EVERY = 17  # a prime, not to fall in with what happens every so many steps

_COMPILED = "UncachedCompile"
_COMPILE_TIME = "CompileTime"
_FROM_DEVICE = "TransferFromDeviceTime"
_BYTES_FROM_DEVICE = "InboundData"
_BYTES_TO_DEVICE = "OutboundData"


def device_name(device: torch.device) -> str:
    """`xla:0 (NEURON)`."""
    return f"{device} ({xla_model.xla_device_hw(device)})"


class XlaCounters:
    """Counts compilations, transfers and operators that fell back to the host within the steps of a recording."""

    def __init__(self) -> None:
        self.records: dict[int, CompilationRecord] = {}  # of each step that compiled something
        self.beside_s = 0.0  # seconds in the compiler between the steps
        self._fallbacks: Counter[str] = Counter()
        self._compiled = _counter(_COMPILED), _sum(_COMPILE_TIME) * 1e-9
        self._fallbacks_before: Mapping[str, int] = {}
        self._transfers_before = math.nan
        self._began = _exchanged()
        self._ended: Mapping[str, float] | None = None

    def start(self) -> None:
        """Begin to count."""
        self._began = _exchanged()
        self._newly_compiled()

    def stop(self) -> None:
        """Count compilations after the last step, and nothing later."""
        self.beside_s += self._newly_compiled()[1]
        self._ended = _exchanged()

    def begin(self, ordinal: int) -> None:
        """A step begins, the so-manyth of the recording."""
        self.beside_s += self._newly_compiled()[1]
        self._fallbacks_before = _fallbacks()
        self._transfers_before = _count(_FROM_DEVICE) if _is_counted(ordinal) else math.nan

    def end(self, ordinal: int) -> float:
        """The step ends; gives the transfers from the device that it waited for, NaN where they were not counted."""
        graphs, seconds = self._newly_compiled()
        if graphs:
            self.records[ordinal] = CompilationRecord(step=ordinal, graphs=graphs, seconds=seconds)
        fallbacks = _fallbacks()
        if fallbacks != self._fallbacks_before:
            self._fallbacks.update({name: fallbacks[name] - self._fallbacks_before.get(name, 0) for name in fallbacks})
        return _count(_FROM_DEVICE) - self._transfers_before if _is_counted(ordinal) else math.nan

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave the transfers of a block within a step out of the training's."""
        if math.isnan(self._transfers_before):
            yield
            return
        before = _count(_FROM_DEVICE)
        yield
        self._transfers_before += _count(_FROM_DEVICE) - before

    def _newly_compiled(self) -> tuple[int, float]:
        """Graphs that were compiled since the last call, and seconds in the compiler."""
        graphs, before = _counter(_COMPILED), self._compiled
        if graphs == before[0]:
            return 0, 0.0
        self._compiled = graphs, _sum(_COMPILE_TIME) * 1e-9
        return graphs - before[0], max(0.0, self._compiled[1] - before[1])

    @property
    def compiling(self) -> bool:
        """Whether a graph is being compiled; another thread may ask."""
        return _counter(_COMPILED) > _count(_COMPILE_TIME)

    @property
    def transfers(self) -> TransferRecord:
        """Transfers between device and host from the beginning to now or to the end."""
        exchanged: Mapping[str, Any] = {
            name: now - self._began[name] for name, now in (self._ended or _exchanged()).items()
        }
        fallbacks = {name: count for name, count in sorted(self._fallbacks.items()) if count}
        return TransferRecord(fallbacks=fallbacks, **exchanged)


def memory_of(device: torch.device) -> tuple[float, float]:
    """Return the used and the total memory of the device, in bytes; the CPU's runtime has no such figures."""
    memory = torch_xla._XLAC._xla_memory_info(str(device))
    return (float(memory["bytes_used"]), float(memory["bytes_limit"]))


def _exchanged() -> dict[str, float]:
    """Return the transfers between device and host since the process began, as fields of the record."""
    return {
        "from_device": _count(_FROM_DEVICE),
        "from_device_s": _sum(_FROM_DEVICE) * 1e-9,
        "from_device_bytes": int(_sum(_BYTES_FROM_DEVICE)),
        "to_device_bytes": int(_sum(_BYTES_TO_DEVICE)),
    }


def _is_counted(ordinal: int) -> bool:
    return ordinal < COUNTED_STEPS or ordinal % COUNTED_EVERY == 0


def _fallbacks() -> dict[str, int]:
    """Return the calls so far of each operator that XLA lacks, or whose result the host read."""
    return {name: _counter(name) for name in metrics.executed_fallback_ops()}


def _counter(name: str) -> int:
    return metrics.counter_value(name) or 0


def _count(metric: str) -> int:
    data = metrics.metric_data(metric)
    return int(data[0]) if data else 0


def _sum(metric: str) -> float:
    data = metrics.metric_data(metric)
    return float(data[1]) if data else 0.0
