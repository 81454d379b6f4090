from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.config import GateSettings
from trainer.evaluation.gates import GateFigures, judge

GATE = GateSettings(max_accuracy_drop=0.05, min_compression=10, max_latency_ms=20)
GOOD = GateFigures(
    teacher_top1=0.98, student_top1=0.95, teacher_parameters=1000, student_parameters=50, student_p95_ms=12.5
)


def test_a_good_student_passes():
    verdict = judge(GATE, GOOD)
    assert verdict.passed
    assert verdict.reasons == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"student_top1": 0.92},
            "accuracy: the student's test top-1 of 92.00% is 6.00 points below the teacher's 98.00%",
        ),
        ({"student_parameters": 200}, "compression: the student's 200 parameters are 5.00 times fewer"),
        ({"student_p95_ms": 20.01}, "latency: the student's p95 of 20.01 ms is over evaluate.gate.max_latency_ms = 20"),
    ],
)
def test_a_failed_condition_is_named_with_its_numbers(change, reason):
    verdict = judge(GATE, replace(GOOD, **change))
    assert not verdict.passed
    assert len(verdict.reasons) == 1
    assert reason in verdict.reasons[0]


def test_all_failed_conditions_are_named():
    verdict = judge(GATE, replace(GOOD, student_top1=0.5, student_parameters=900, student_p95_ms=99))
    assert [reason.split(":")[0] for reason in verdict.reasons] == ["accuracy", "compression", "latency"]


@pytest.mark.parametrize(("teacher", "student"), [(0.90, 0.85), (0.35, 0.30), (0.80, 0.99)])
def test_a_drop_at_the_limit_or_a_gain_passes(teacher, student):
    assert judge(GATE, replace(GOOD, teacher_top1=teacher, student_top1=student)).passed


def test_compression_and_latency_at_the_limit_pass():
    assert judge(GATE, replace(GOOD, student_parameters=100, student_p95_ms=20)).passed


def test_latency_limit_zero_is_no_limit():
    assert judge(GATE.model_copy(update={"max_latency_ms": 0.0}), replace(GOOD, student_p95_ms=1e6)).passed


def test_the_floor_of_accuracy_holds_whatever_the_teacher_does():
    gate = GATE.model_copy(update={"min_accuracy": 0.8})
    assert judge(gate, replace(GOOD, teacher_top1=0.8, student_top1=0.8)).passed
    verdict = judge(gate, replace(GOOD, teacher_top1=0.1, student_top1=0.1))
    assert verdict.reasons == [
        "accuracy: the student's test top-1 of 10.00% is below evaluate.gate.min_accuracy = 80.00%"
    ]
