"""The rules: what slows a training or makes it fail, with the evidence, the cure and what that would save."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.profiling.rules import gpu, learning, lifecycle, loading, processes, weights
from trainer.profiling.rules.outcomes import Case, NotJudged, Outcome, Rule

SYSTEM_RULES: Sequence[Rule] = (
    loading.io_bottleneck,
    loading.loader_workers,
    loading.cpu_bottleneck,
    gpu.host_to_device,
    gpu.host_syncs,
    processes.communication,
    processes.stragglers,
    processes.load_balance,
    gpu.batch_size,
    gpu.gpu_utilization,
    gpu.teacher_share,
    lifecycle.gpu_memory_growth,
    lifecycle.start_up,
    lifecycle.recompilation,
    lifecycle.step_outliers,
    lifecycle.own_overhead,
)
"""How fast the machine is used."""
TRAINING_RULES: Sequence[Rule] = (
    weights.poor_initialisation,
    weights.exploding_gradients,
    weights.vanishing_gradients,
    weights.update_ratio,
    weights.unchanged_weights,
    learning.loss_not_falling,
    learning.overfitting,
    lifecycle.stalled_training,
    learning.class_imbalance,
    learning.weak_teacher,
    learning.vanishing_loss_term,
    learning.low_recorded_mass,
)
"""What is learned."""
RULES: Sequence[Rule] = (*SYSTEM_RULES, *TRAINING_RULES)


def judge(case: Case) -> dict[Rule, Outcome]:
    """Judge a training by every rule, or by those that allow it while it runs."""
    return {
        rule: rule.judge(case)
        if getattr(case.rules, rule.name).enabled
        else NotJudged(f"turned off (profile.rules.{rule.name}.enabled)")
        for rule in RULES
        if rule.live or not case.live
    }
