"""Whether a student is good enough to be promoted."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import GateSettings

_ROUNDING = 1e-9  # 0.90 - 0.85 is 0.05000000000000004 and still a drop of 0.05


@dataclass(frozen=True, kw_only=True)
class GateFigures:
    """The figures that the gate checks."""

    teacher_top1: float
    student_top1: float
    teacher_parameters: int
    student_parameters: int
    student_p95_ms: float
    """95th percentile of the student's latency at the first of `evaluate.latency_batch_sizes`."""


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """The outcome of the gate."""

    passed: bool
    reasons: list[str]
    """Each failed condition, with its number and its limit; empty if all held."""


def judge(settings: GateSettings, figures: GateFigures) -> GateVerdict:
    """Check every condition of the gate."""
    checks = (_drop, _floor, _compression, _latency)
    conditions = [check(settings, figures) for check in checks]
    reasons = [reason for reason in conditions if reason]
    return GateVerdict(passed=not reasons, reasons=reasons)


def _drop(settings: GateSettings, figures: GateFigures) -> str:
    drop = figures.teacher_top1 - figures.student_top1
    if drop <= settings.max_accuracy_drop + _ROUNDING:
        return ""
    return (
        f"accuracy: the student's test top-1 of {figures.student_top1:.2%} is {100 * drop:.2f} points below the teacher's "
        f"{figures.teacher_top1:.2%}; evaluate.gate.max_accuracy_drop allows {100 * settings.max_accuracy_drop:.2f}"
    )


def _floor(settings: GateSettings, figures: GateFigures) -> str:
    if figures.student_top1 >= settings.min_accuracy - _ROUNDING:
        return ""
    return (
        f"accuracy: the student's test top-1 of {figures.student_top1:.2%} is below "
        f"evaluate.gate.min_accuracy = {settings.min_accuracy:.2%}"
    )


def _compression(settings: GateSettings, figures: GateFigures) -> str:
    ratio = figures.teacher_parameters / figures.student_parameters
    if ratio >= settings.min_compression - _ROUNDING:
        return ""
    return (
        f"compression: the student's {figures.student_parameters:,} parameters are {ratio:.2f} times fewer than the "
        f"teacher's {figures.teacher_parameters:,}; evaluate.gate.min_compression asks for {settings.min_compression:g}"
    )


def _latency(settings: GateSettings, figures: GateFigures) -> str:
    if settings.max_latency_ms == 0 or figures.student_p95_ms <= settings.max_latency_ms:
        return ""
    return (
        f"latency: the student's p95 of {figures.student_p95_ms:.2f} ms is over "
        f"evaluate.gate.max_latency_ms = {settings.max_latency_ms:g}"
    )
