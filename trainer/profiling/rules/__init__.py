"""The rules: what slows a training or makes it fail, with the evidence, the cure and what that would save."""

from __future__ import annotations

from trainer.profiling.rules.gpu import BatchSize, GpuUtilization, HostSyncs, HostToDevice, TeacherShare
from trainer.profiling.rules.learning import (
    ClassImbalance,
    LossNotFalling,
    LowRecordedMass,
    Overfitting,
    VanishingLossTerm,
    WeakTeacher,
)
from trainer.profiling.rules.lifecycle import GpuMemoryGrowth, OwnOverhead, Recompilation, StartUp, StepOutliers
from trainer.profiling.rules.loading import CoresOversubscribed, CpuBottleneck, IoBottleneck, LoaderWorkers
from trainer.profiling.rules.outcomes import Case, NotJudged, Outcome, Rule
from trainer.profiling.rules.processes import Communication, LoadBalance, Stragglers
from trainer.profiling.rules.stalled import StalledTraining
from trainer.profiling.rules.weights import (
    ExplodingGradients,
    LossNotFinite,
    PoorInitialization,
    UnchangedWeights,
    UpdateRatio,
    VanishingGradients,
)

RULES: tuple[type[Rule], ...] = (
    IoBottleneck,
    LoaderWorkers,
    CpuBottleneck,
    CoresOversubscribed,
    HostToDevice,
    HostSyncs,
    Communication,
    Stragglers,
    LoadBalance,
    BatchSize,
    GpuUtilization,
    TeacherShare,
    GpuMemoryGrowth,
    StartUp,
    Recompilation,
    StepOutliers,
    OwnOverhead,
    PoorInitialization,
    ExplodingGradients,
    LossNotFinite,
    VanishingGradients,
    UpdateRatio,
    UnchangedWeights,
    LossNotFalling,
    Overfitting,
    StalledTraining,
    ClassImbalance,
    WeakTeacher,
    VanishingLossTerm,
    LowRecordedMass,
)  # in the order of docs/rules.md


def judge(case: Case) -> dict[Rule, Outcome]:
    """Judge a training by every rule, or by those that allow it while it runs."""
    return {
        rule: rule.judge(case) if rule.enabled else NotJudged(f"turned off (profile.rules.{rule.name}.enabled)")
        for rule in map(case.rule, RULES)
        if rule.live or not case.live
    }
