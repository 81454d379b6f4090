"""Who is to blame where a training waits for its batches; GPUs are synthetic here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.profiling.rules.synthetic import GPU, case_of, judge_by, rank_of, steps_of, together
from trainer.profiling.rules.loading import CpuBottleneck, IoBottleneck, LoaderWorkers
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged

RULES = (IoBottleneck, LoaderWorkers, CpuBottleneck)


def fired(*ranks: Any) -> list[str]:
    return [rule.name for rule in RULES if isinstance(judge_by(rule, case_of(*ranks)), Finding)]


def finding(rule: Any, *ranks: Any) -> Finding:
    outcome = judge_by(rule, case_of(*ranks))
    assert isinstance(outcome, Finding)
    return outcome


# The other phases of a step take 9 ms.
WAITS = {
    "loads for itself, computing": ([], {"data": 16}, {}),
    "most of the step": (["loader_workers"], {"data": 18}, {}),
    "on its only core": (["cpu_bottleneck"], {"data": 18}, {"cores": 1}),
    "beside programs that take half of its core": (
        ["loader_workers"],
        {
            "data": 36,
            "teacher_forward": 13,
            "host_data_cpu_seconds": 18,
            "host_data_delayed_seconds": 18,
            "host_delayed_seconds": 27,
        },
        {},
    ),
    "sleeps in data": (["io_bottleneck"], {"data": 3, "host_cpu_seconds": 9.3, "host_data_cpu_seconds": 0.3}, {}),
    "sleeps there a little": ([], {"data": 1.5, "host_cpu_seconds": 9, "host_data_cpu_seconds": 0.1}, {}),
    "for a busy loader": (
        ["cpu_bottleneck"],
        {"data": 5, "queued": 0, "host_data_cpu_seconds": 0},
        {"workers": 1, "system": {"loaders_cpu_percent": 99.0}},
    ),
    "for a loader on a crowded machine": (
        [],
        {"data": 5, "queued": 0, "host_data_cpu_seconds": 0},
        {"workers": 1, "system": {"loaders_cpu_percent": 50.0}},
    ),
    "for a loader that waits itself": (
        ["io_bottleneck"],
        {"data": 5, "queued": 0, "host_data_cpu_seconds": 0},
        {"workers": 1, "system": {"loaders_cpu_percent": 10.0}},
    ),
    "while batches are ready": (
        [],
        {"data": 5, "queued": 1, "host_data_cpu_seconds": 0},
        {"workers": 1, "system": {"loaders_cpu_percent": 10.0}},
    ),
    "for one loader on many cores": (
        ["loader_workers"],
        {"data": 5, "queued": 0, "host_data_cpu_seconds": 0},
        {"workers": 1, "cores": 16, "system": {"loaders_cpu_percent": 99.0}},
    ),
    "for nothing, with three loaders": ([], {}, {"workers": 3, "system": {"loaders_cpu_percent": 30.0}}),
    "for nothing, with four loaders": (["loader_workers"], {}, {"workers": 4, "system": {"loaders_cpu_percent": 30.0}}),
    "for storage, with many loaders": (
        ["io_bottleneck"],
        {"data": 5, "queued": 0, "host_data_cpu_seconds": 0},
        {"workers": 8, "system": {"loaders_cpu_percent": 30.0}},
    ),
    "for its own loading, on a GPU": (["loader_workers"], {"data": 2}, {"device": GPU, "cores": 16}),
    "for loading, a GPU whose cores are all taken": (["cpu_bottleneck"], {"data": 2}, {"device": GPU, "cores": 1}),
    "a little, on a GPU": ([], {"data": 1.5}, {"device": GPU}),
}


@pytest.mark.parametrize(("expected", "milliseconds", "record"), WAITS.values(), ids=WAITS)
def test_a_cause_has_one_finding(expected: list[str], milliseconds: dict[str, float], record: dict[str, Any]) -> None:
    assert fired(rank_of(steps_of(**milliseconds), **record)) == expected


def test_gpu_that_idles_beside_busy_core_or_waiting_cores() -> None:
    busy = {"cpu0_percent": 100.0, "cpu1_percent": 5.0, "iowait_percent": 0.0, "gpu_percent": 5.0}
    assert fired(rank_of(device=GPU, cores=1, system=busy)) == ["cpu_bottleneck"]
    assert fired(rank_of(device=GPU, cores=1, system=busy | {"gpu_percent": 50.0})) == []
    assert fired(rank_of(device=GPU, cores=1, system=busy | {"cpu0_percent": 80.0})) == []
    assert fired(rank_of(device=GPU, system=busy | {"cpu0_percent": 5.0, "iowait_percent": 60.0})) == ["io_bottleneck"]
    assert fired(rank_of(device=GPU, system=busy | {"cpu0_percent": 5.0, "iowait_percent": 40.0})) == []


def test_loading_is_judged() -> None:
    assert fired(*together(steps_of(), steps_of(data=20), cores=4)) == []
    assert fired(*together(steps_of(data=20), steps_of(data=20), cores=4)) == ["loader_workers"]
    # The advised number of workers keeps up.
    waiting = finding(LoaderWorkers, rank_of(steps_of(data=27), device=GPU, cores=16))
    assert "data.workers=4" in waiting.advice  # 27 ms to load, 9 to compute: three, and a margin
    assert waiting.saving is not None
    assert waiting.saving.seconds == pytest.approx(110 * 0.027)
    few = finding(LoaderWorkers, rank_of(steps_of(data=27), device=GPU, cores=3))
    assert "data.workers=2" in few.advice
    assert few.saving is not None
    assert few.saving.seconds == pytest.approx(110 * 0.027 / 2)
    # What waiting costs is reported.
    slow = finding(IoBottleneck, rank_of(steps_of(data=11, host_cpu_seconds=9, host_data_cpu_seconds=0)))
    assert slow.text.startswith("55% of each step (11 ms of 20 ms undisturbed)")
    assert slow.saving is not None
    assert slow.saving.seconds == pytest.approx(110 * 0.011)
    # Few steps are not judged.
    for rule in RULES:
        outcome = judge_by(rule, case_of(rank_of(steps_of(39, data=50))))
        assert outcome == NotJudged(
            reason="only 29 steps were measured after the first 10; 30 are needed", too_short=True
        )
        assert isinstance(judge_by(rule, case_of(rank_of(steps_of(40)))), Healthy)


def test_too_many_workers_are_note_until_training_waits() -> None:
    note = finding(LoaderWorkers, rank_of(workers=4))
    assert note.severity == "note"
    assert note.saving is None
    assert "data.workers=1" in note.advice
    system = {"loaders_cpu_percent": 400.0}
    warning = finding(
        LoaderWorkers, rank_of(steps_of(data=5, queued=0, host_data_cpu_seconds=0), workers=4, system=system)
    )
    assert warning.severity == "warning"
