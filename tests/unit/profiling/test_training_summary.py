from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.profiling.evidence import TrainingEvidence, measured_steps
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.training_summary import named_number, summarize


@pytest.fixture
def trainings(evidence: Path) -> list[TrainingEvidence]:
    return list(read_evidence(evidence).trainings)


def test_numbers_of_steps_are_those_of_the_table(trainings: list[TrainingEvidence]) -> None:
    first = trainings[1].ranks[0]
    rows = [step for step in range(1, 40) if step not in (4, 5)]
    assert measured_steps(first.steps).tolist() == rows
    seconds = [float(first.steps["seconds"][row]) for row in rows]
    summary = summarize(trainings[1])
    assert summary.step_ms is not None
    assert summary.steps_measured == 37
    assert summary.step_ms.p50 == pytest.approx(1000 * statistics.median(seconds))
    assert summary.step_ms.max == pytest.approx(1000 * max(seconds))
    assert summary.images_per_second == pytest.approx(37 * 32 / sum(seconds))


def test_shares(trainings: list[TrainingEvidence]) -> None:
    summary = summarize(trainings[1])
    assert sum(phase.share for phase in summary.phases.values()) == pytest.approx(1, abs=1e-4)
    forward = summary.phases["forward"]
    assert 0 < forward.ranges["forward/attention"] < forward.share
    assert "forward/attention" not in summary.phases
    assert "teacher_forward" not in summary.phases, "it never ran"
    # Shares of the recording hold what lies outside of steps.
    shares = summarize(trainings[1]).recorded_shares
    assert sum(shares.values()) == pytest.approx(1)
    assert {"forward", "backward", "evaluate", "between", "profiler"} <= shares.keys()


def test_operators_are_ranked(trainings: list[TrainingEvidence]) -> None:
    operators = summarize(trainings[1]).operators
    assert operators is not None
    assert operators.clock == "cpu"
    times = [operator.self_cpu_ms for operator in operators.operators]
    assert times == sorted(times, reverse=True)
    table = trainings[1].ranks[0].record.operators
    assert table is not None
    products = sum(row.self_cpu_ms for row in table.operators if row.category == "matrix product")
    assert operators.categories["matrix product"] == pytest.approx(products / 2)
    # Operators are ranked by the device where there is one.
    training = trainings[1]
    table = training.ranks[0].record.operators
    assert table is not None
    last = replace(table.operators[-1], self_device_ms=7.0)
    kernel = replace(last, name="kernel", kind="kernel")
    moved = replace(table, operators=(*table.operators[:-1], last, kernel))
    rank = replace(training.ranks[0], record=training.ranks[0].record.model_copy(update={"operators": moved}))
    operators = summarize(replace(training, ranks=[rank])).operators
    assert operators is not None
    assert operators.clock == "device"
    assert operators.operators[0] == last
    assert list(operators.categories.values()) == [3.5], "a kernel's time is not counted beside its operator's"
    assert operators.kernels == [kernel]


def test_ranks_stand_side_by_side(trainings: list[TrainingEvidence]) -> None:
    ranks = summarize(trainings[1]).ranks
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank.step_ms is not None
        assert rank.memory_bytes is not None
        assert rank.memory_bytes > 10e6
        assert rank.phase_ms["backward"] > 0


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("waiting_share", 0.4, ("waiting share", "40 %")),
        ("busy_percent", 99.0, ("busy", "99 %")),
        ("longest_ms", 12_345.0, ("longest", "12.3 s")),
        ("wait_s", 4000.0, ("wait", "66.7 min")),
        ("disk_read_bytes_per_s", 2.5e6, ("disk, read", "2.5 MB/s")),
        ("disk_read_bytes_per_s", 100.0, ("disk, read", "0.1 kB/s")),
        ("process_rss_bytes", 1.06e9, ("memory of the process", "1.06 GB")),
        ("growth", float("inf"), ("growth", "inf")),
        ("steps", 0.0, ("steps", "0")),
        ("parameters", 86e6, ("parameters", "86,000,000")),
    ],
)
def test_a_number_has_the_unit_of_its_name(name: str, value: float, expected: tuple[str, str]) -> None:
    assert named_number(name, value) == expected
