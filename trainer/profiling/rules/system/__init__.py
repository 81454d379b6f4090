"""The rules on how fast the machine is used."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.profiling.rules.outcomes import Rule
from trainer.profiling.rules.system.gpu import BATCH_SIZE, GPU_UTILIZATION, HOST_SYNCS, HOST_TO_DEVICE
from trainer.profiling.rules.system.lifecycle import (
    MEMORY_GROWTH,
    OWN_OVERHEAD,
    RECOMPILATION,
    START_UP,
    STEP_OUTLIERS,
)
from trainer.profiling.rules.system.loading import CPU_BOTTLENECK, IO_BOTTLENECK, LOADER_WORKERS
from trainer.profiling.rules.system.processes import COMMUNICATION, LOAD_BALANCE, STRAGGLERS
from trainer.profiling.rules.system.teacher_share import TEACHER_SHARE

SYSTEM_RULES: Sequence[Rule] = (
    IO_BOTTLENECK,
    LOADER_WORKERS,
    CPU_BOTTLENECK,
    HOST_TO_DEVICE,
    HOST_SYNCS,
    COMMUNICATION,
    STRAGGLERS,
    LOAD_BALANCE,
    BATCH_SIZE,
    GPU_UTILIZATION,
    TEACHER_SHARE,
    MEMORY_GROWTH,
    START_UP,
    RECOMPILATION,
    STEP_OUTLIERS,
    OWN_OVERHEAD,
)
