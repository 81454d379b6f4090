"""The rules: what slows a training or makes it fail, with the evidence, the cure and what that would save."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.profiling.rules.gpu import batch_size, gpu_utilization, host_syncs, host_to_device, teacher_share
from trainer.profiling.rules.learning import (
    class_imbalance,
    loss_not_falling,
    low_recorded_mass,
    overfitting,
    vanishing_loss_term,
    weak_teacher,
)
from trainer.profiling.rules.lifecycle import (
    gpu_memory_growth,
    own_overhead,
    recompilation,
    stalled_training,
    start_up,
    step_outliers,
)
from trainer.profiling.rules.loading import cpu_bottleneck, io_bottleneck, loader_workers
from trainer.profiling.rules.outcomes import Case, NotJudged, Outcome, Rule
from trainer.profiling.rules.processes import communication, load_balance, stragglers
from trainer.profiling.rules.weights import (
    exploding_gradients,
    poor_initialisation,
    unchanged_weights,
    update_ratio,
    vanishing_gradients,
)

SYSTEM_RULES: Sequence[Rule] = (
    io_bottleneck,
    loader_workers,
    cpu_bottleneck,
    host_to_device,
    host_syncs,
    communication,
    stragglers,
    load_balance,
    batch_size,
    gpu_utilization,
    teacher_share,
    gpu_memory_growth,
    start_up,
    recompilation,
    step_outliers,
    own_overhead,
)
"""How fast the machine is used."""
TRAINING_RULES: Sequence[Rule] = (
    poor_initialisation,
    exploding_gradients,
    vanishing_gradients,
    update_ratio,
    unchanged_weights,
    loss_not_falling,
    overfitting,
    stalled_training,
    class_imbalance,
    weak_teacher,
    vanishing_loss_term,
    low_recorded_mass,
)
"""What is learned."""
RULES: Sequence[Rule] = (*SYSTEM_RULES, *TRAINING_RULES)


def judge(case: Case) -> dict[Rule, Outcome]:
    """Judge a training by every rule, or by those that allow it while it runs."""
    return {
        rule: rule.judge(case)
        if getattr(case.rules, rule.name).enabled
        else NotJudged(reason=f"turned off (profile.rules.{rule.name}.enabled)")
        for rule in RULES
        if rule.live or not case.live
    }
