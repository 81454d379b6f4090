"""The rules: what slows a training or makes it fail, with the evidence, the cure and what that would save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trainer.rules.gpu import BatchSize, GpuUtilization, HostSyncs, HostToDevice, TeacherShare
from trainer.rules.learning import (
    ClassImbalance,
    LossNotFalling,
    LowRecordedMass,
    Overfitting,
    VanishingLossTerm,
    WeakTeacher,
)
from trainer.rules.lifecycle import GpuMemoryGrowth, OwnOverhead, Recompilation, StartUp, StepOutliers
from trainer.rules.loading import CoresOversubscribed, CpuBottleneck, IoBottleneck, LoaderWorkers
from trainer.rules.outcomes import Case, NotJudged, Outcome, Rule, Rules
from trainer.rules.processes import Communication, LoadBalance, Stragglers
from trainer.rules.stalled import StalledTraining
from trainer.rules.weights import (
    ExplodingGradients,
    LossNotFinite,
    PoorInitialization,
    UnchangedWeights,
    UpdateRatio,
    VanishingGradients,
)


class RuleSettings(Rules):
    """Every rule, with its thresholds; docs/rules.md describes them."""

    former_names: ClassVar[Mapping[str, str]] = {"poor_initialisation": "poor_initialization"}

    io_bottleneck: IoBottleneck = IoBottleneck()
    loader_workers: LoaderWorkers = LoaderWorkers()
    cpu_bottleneck: CpuBottleneck = CpuBottleneck()
    cores_oversubscribed: CoresOversubscribed = CoresOversubscribed()
    host_to_device: HostToDevice = HostToDevice()
    host_syncs: HostSyncs = HostSyncs()
    communication: Communication = Communication()
    stragglers: Stragglers = Stragglers()
    load_balance: LoadBalance = LoadBalance()
    batch_size: BatchSize = BatchSize()
    gpu_utilization: GpuUtilization = GpuUtilization()
    teacher_share: TeacherShare = TeacherShare()
    gpu_memory_growth: GpuMemoryGrowth = GpuMemoryGrowth()
    start_up: StartUp = StartUp()
    recompilation: Recompilation = Recompilation()
    step_outliers: StepOutliers = StepOutliers()
    own_overhead: OwnOverhead = OwnOverhead()
    poor_initialization: PoorInitialization = PoorInitialization()
    exploding_gradients: ExplodingGradients = ExplodingGradients()
    loss_not_finite: LossNotFinite = LossNotFinite()
    vanishing_gradients: VanishingGradients = VanishingGradients()
    update_ratio: UpdateRatio = UpdateRatio()
    unchanged_weights: UnchangedWeights = UnchangedWeights()
    loss_not_falling: LossNotFalling = LossNotFalling()
    overfitting: Overfitting = Overfitting()
    stalled_training: StalledTraining = StalledTraining()
    class_imbalance: ClassImbalance = ClassImbalance()
    weak_teacher: WeakTeacher = WeakTeacher()
    vanishing_loss_term: VanishingLossTerm = VanishingLossTerm()
    low_recorded_mass: LowRecordedMass = LowRecordedMass()


def judge(case: Case) -> dict[Rule, Outcome]:
    """Judge a training by every rule, or by those that allow it while it runs."""
    return {
        rule: rule.judge(case) if rule.enabled else NotJudged(f"turned off (profile.rules.{rule.name}.enabled)")
        for rule in case.rules.all()
        if rule.live or not case.live
    }
