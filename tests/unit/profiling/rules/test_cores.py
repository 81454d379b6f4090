"""Who has the cores that a training lacks; all machines are synthetic here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.synthetic import GPU, STEPS, all_fired, case_of, finding, judge_by, rank_of, steps_of
from trainer.profiling.evidence import RankEvidence
from trainer.profiling.rules.lifecycle import UnevenSteps
from trainer.profiling.rules.loading import CoresOversubscribed
from trainer.profiling.rules.outcomes import Healthy, NotJudged

RULE = CoresOversubscribed.name
FULL = {"cpu0_percent": 100.0, "cpu1_percent": 100.0}


def machine(*, training: float = 0.0, loaders: float = 0.0, **signals: Any) -> dict[str, Any]:
    """A machine of two full cores, of which the training and its loader processes take so much."""
    return FULL | {"process_cpu_percent": 100 * training, "loaders_cpu_percent": 100 * loaders} | signals


def waits(milliseconds: float, **others: Any) -> Mapping[str, np.ndarray]:
    """Steps of ten milliseconds, in which the training had no core for so many more, in its forward pass."""
    return steps_of(forward=2 + milliseconds, host_delayed_seconds=milliseconds, host_cpu_seconds=10, **others)


FORWARD_S = (7.77, 0.67, 0.91, 0.61, 0.83, 0.76)
BACKWARD_S = (1.58, 24.7, 8.3, 30.9, 8.4, 29.9)


def two_gpus(**given: Any) -> list[RankEvidence]:
    """Two GPUs whose six steps repeat: batches are ready in half a millisecond, and yet a backward pass takes 1.6 s or 31 s.

    Eight loader processes for each keep the sixteen cores full; a backward pass that has its core takes 1.5 s, a forward pass 0.6 s.
    """
    rounds = STEPS // len(BACKWARD_S) + 1
    forward, backward = (np.tile(np.array(once) * 1e3, rounds)[:STEPS] for once in (FORWARD_S, BACKWARD_S))
    waited = {
        "host_delayed_seconds": (backward - 1500) + (forward - 600),
        "host_backward_delayed_seconds": backward - 1500,
    }
    steps = steps_of(
        data=0.5, teacher_forward=0, optimizer=50, forward=forward, backward=backward, queued=2, **(waited | given)
    )
    cores: dict[str, Sequence[float] | float] = {f"cpu{number}_percent": 100.0 for number in range(16)}
    shared = {"cores": 16, "workers": 8, "device": GPU, "samples": 400}
    uneven = [np.where(np.arange(400) % 5 < busy, 95.0, 2.0) for busy in (3, 1)]
    return [
        rank_of(
            steps,
            rank=rank,
            world_size=2,
            system=cores | {"process_cpu_percent": 80.0, "loaders_cpu_percent": 700.0, "gpu_percent": use},
            **shared,
        )
        for rank, use in enumerate(uneven)
    ]


def test_starving_loaders_are_named() -> None:
    ranks = two_gpus()
    assert all_fired(*ranks) == [RULE]
    found = finding(CoresOversubscribed, *ranks)
    assert found.text.startswith("Loader processes take the cores: 8 beside each training process.")
    assert "mostly in `backward`" in found.text
    assert "loader processes take 14.0, the training 1.6, other programs 0.4" in found.text
    assert "data.workers=4 in place of 8" in found.advice
    assert found.saving is not None
    assert "For 89 % of a step the training was ready and had no core, and the GPU idles for 42 %" in found.text
    assert found.saving.seconds == pytest.approx(0.42 * ranks[0].record.steps.seconds, rel=0.02)
    # The same training is not judged where its waiting was not recorded.
    old = two_gpus(host_delayed_seconds=np.full(STEPS, np.nan), host_backward_delayed_seconds=np.full(STEPS, np.nan))
    outcome = judge_by(CoresOversubscribed, case_of(*old))
    assert outcome == NotJudged("how long the training was ready and had no core was not recorded")
    assert all_fired(*old) == [UnevenSteps.name]
    found = finding(UnevenSteps, *old)
    assert "most of it in `backward`, which takes between 1.6 s and 30.9 s" in found.text
    assert (
        "All 16 cores are taken (100 %): loader processes take 14.0, the training 1.6, other programs 0.4" in found.text
    )
    assert (
        "fewer loader processes (data.workers=4 in place of 8, then 1 and 0), one thread in each process"
        in found.advice
    )
    assert found.saving is not None
    assert found.saving.seconds == pytest.approx(0.52 * ranks[0].record.steps.seconds, rel=0.02)
    # There the work of loading has to be done by the same cores, whoever does it.
    fast, slow = (rank_of(waits(wait), workers=3, system=machine(training=0.8, loaders=1.2)) for wait in (6, 8))
    assert isinstance(judge_by(CoresOversubscribed, case_of(fast)), Healthy)
    assert all_fired(slow) == [RULE]


WHO = {
    "loader processes": ("warning", "Loader processes take the cores: 3 beside", {"workers": 3}, {"loaders": 1.2}),
    "threads": ("warning", "The training's own threads", {"workers": 0}, {"training": 2.0}),
    "more processes than cores": (
        "warning",
        "4 training processes share 2 cores",
        {"world_size": 4},
        {"training": 0.5},
    ),
    "other programs": ("note", "Other programs on the machine", {"workers": 1}, {"training": 0.5, "loaders": 0.2}),
}


@pytest.mark.parametrize(("severity", "text", "record", "use"), WHO.values(), ids=WHO)
def test_who_has_the_cores_is_said(severity: str, text: str, record: dict[str, Any], use: dict[str, float]) -> None:
    found = finding(CoresOversubscribed, rank_of(waits(12), system=machine(**use), **record))
    assert (found.severity, found.text[: len(text)]) == (severity, text)


def test_cores_are_free_or_batches_awaited() -> None:
    free = {"cpu0_percent": 50.0, "cpu1_percent": 50.0, "process_cpu_percent": 60.0, "loaders_cpu_percent": 40.0}
    assert all_fired(rank_of(waits(12), workers=3, system=free)) == []
    slow = steps_of(
        data=30,
        queued=0,
        host_data_cpu_seconds=0,
        host_data_delayed_seconds=0,
        host_delayed_seconds=20,
        host_cpu_seconds=9,
    )
    outcome = judge_by(CoresOversubscribed, case_of(rank_of(slow, workers=3, system=machine(loaders=1.7))))
    assert isinstance(outcome, NotJudged)
    assert "loader_workers" in outcome.reason
    # More loaders than cores that do take them have one finding.
    crowded = {"workers": 8, "system": machine(training=0.4, loaders=1.6)}
    assert all_fired(rank_of(waits(1), **crowded)) == ["loader_workers"]
    assert all_fired(rank_of(waits(12), **crowded)) == [RULE]

    # A container may use two of many cores.
    cores = {f"cpu{number}_percent": 40.0 for number in range(16)}
    system = cores | {"process_cpu_percent": 40.0, "loaders_cpu_percent": 150.0}
    found = finding(CoresOversubscribed, rank_of(waits(12), workers=3, system=system))
    assert "loader processes take 1.5, the training 0.4, other programs 0.0" in found.text
    assert "data.workers=1 in place of 3" in found.advice
