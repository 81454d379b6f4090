"""Processes beside one another; evidence is synthetic."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.profiling.rules.synthetic import GPU, STEPS, XLA, case_of, judge_by, rank_of, steps_of, together
from trainer.profiling.evidence import CommunicationRecord, ContextRecord, RankEvidence
from trainer.profiling.rules.outcomes import Finding, NotJudged, Rule
from trainer.profiling.rules.processes import Communication, LoadBalance, Stragglers

RULES = (Stragglers, LoadBalance, Communication)
TURNS = np.arange(STEPS) % 2


def fired(ranks: list[RankEvidence]) -> list[str]:
    return [rule.name for rule in RULES if isinstance(judge_by(rule, case_of(*ranks)), Finding)]


def finding(kind: type[Rule], ranks: list[RankEvidence]) -> Finding:
    outcome = judge_by(kind, case_of(*ranks))
    assert isinstance(outcome, Finding)
    return outcome


def slower(milliseconds: float, **record: object) -> list[RankEvidence]:
    """Four processes, of which one computes so much longer, and the others wait for it in the backward pass."""
    waiting = [steps_of(backward=2 + milliseconds) for _ in range(3)]
    return together(*waiting, steps_of(forward=2 + milliseconds), **record)


def test_stragglers() -> None:
    assert fired(slower(2.4)) == []
    assert fired(slower(2.6)) == ["stragglers"]
    found = finding(Stragglers, slower(10))
    assert "process 3 on node-a takes 18 ms" in found.text
    assert "`forward`" in found.text
    assert found.saving is not None
    assert found.saving.seconds == pytest.approx(STEPS * 0.010)
    # A process that was slower for a while is no straggler.
    forward = np.where(np.arange(STEPS) < 50, 22.0, 2.0)
    assert fired(together(steps_of(backward=forward), steps_of(forward=forward))) == []

    # Half of its time it was ready and had no core.
    crowded = steps_of(data=2, teacher_forward=8, forward=4, optimizer=2, host_cpu_seconds=9, host_delayed_seconds=9)
    assert fired(together(steps_of(backward=10, host_cpu_seconds=10), crowded)) == []
    assert fired(together(steps_of(backward=10), crowded, device=GPU)) == [
        "stragglers"
    ]  # there its clock is the device's

    # A virtual machine's kernel counts that for the core, not for the thread: half of the time of the slow process.
    slow = steps_of(data=2, teacher_forward=8, forward=4, optimizer=2, backward=4, host_backward_cpu_seconds=4)

    def ranks(percent: float) -> list[RankEvidence]:
        tables = {0.0: steps_of(backward=12), percent: slow}
        return [
            rank_of(table, rank=rank, world_size=2, system={"stolen_percent": stolen})
            for rank, (stolen, table) in enumerate(tables.items())
        ]

    assert fired(ranks(percent=50)) == []
    assert fired(ranks(percent=5)) == ["stragglers"]


def test_processes_that_are_slow_by_turns() -> None:
    def balanced(milliseconds: float) -> list[RankEvidence]:
        mine, other = milliseconds * TURNS, milliseconds * (1 - TURNS)
        return together(steps_of(forward=2 + mine, backward=2 + other), steps_of(forward=2 + other, backward=2 + mine))

    assert fired(balanced(6)) == []
    assert fired(balanced(7)) == ["load_balance"]
    saving = finding(LoadBalance, balanced(10)).saving
    assert saving is not None
    assert saving.seconds == pytest.approx(STEPS * 0.005)


def test_uneven_gpus() -> None:
    def used(percent: float) -> list[RankEvidence]:
        percents = [[95.0] * 100, [95.0] * 40 + [percent] * 60]
        return [
            rank_of(rank=rank, world_size=2, device=GPU, system={"gpu_percent": values})
            for rank, values in enumerate(percents)
        ]

    assert fired(used(96.0)) == []
    assert fired(used(55.0)) == ["load_balance"]
    assert "0.60 apart" in finding(LoadBalance, used(55.0)).text
    # An optimizer that exchanges weights waits there too.
    ranks = [steps_of(optimizer=11), steps_of(forward=12)]
    assert fired(together(*ranks)) == []
    sharded = ContextRecord(settings={"zero": True})
    assert fired(together(*ranks, context=sharded)) == ["stragglers"]


def traveling(exposed_ms: float) -> CommunicationRecord:
    return CommunicationRecord(steps=50, backward_s=0.002, exchange_s=(exposed_ms + 5) / 1e3, hidden_s=0.005)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_gradients_that_travel_for_long(device: str) -> None:
    def ranks(exposed_ms: float) -> list[RankEvidence]:
        return together(*[steps_of(backward=2 + exposed_ms)] * 2, device=device, communication=traveling(exposed_ms))

    assert fired(ranks(2)) == []
    assert fired(ranks(3)) == ["communication"]
    saving = finding(Communication, ranks(10)).saving
    assert saving is not None
    assert saving.seconds == pytest.approx(STEPS * 0.010)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_waiting_for_a_slow_process_is_no_communication(device: str) -> None:
    steps = [steps_of(backward=12), steps_of(forward=12)]
    ranks = [
        rank_of(table, rank=rank, world_size=2, device=device, communication=traveling(exposed))
        for rank, (table, exposed) in enumerate(zip(steps, (10.0, 0.1), strict=True))
    ]
    assert fired(ranks) == ["stragglers"]


def test_what_cannot_be_compared_is_not_judged() -> None:
    for rule in RULES:
        assert judge_by(rule, case_of()) == NotJudged(reason="one process trains alone")
        few = together(steps_of(20), steps_of(20), communication=traveling(50))
        assert "only 10 steps" in str(judge_by(rule, case_of(*few)))
    without = judge_by(Communication, case_of(*together(steps_of(), steps_of(), device=GPU)))
    assert "was not measured" in str(without)
    for rule in RULES:
        assert not rule.live
        assert isinstance(judge_by(rule, case_of(rank_of(world_size=2), live=True)), NotJudged)


# -- on XLA


def test_waiting_inside_a_graph_is_no_work() -> None:
    def both(**slower: float) -> list[RankEvidence]:
        return together(steps_of(dispatch=5.0), steps_of(**slower), device=XLA)

    assert isinstance(judge_by(Stragglers, case_of(*both(forward=7.0))), Finding)
    assert not isinstance(judge_by(Stragglers, case_of(*both(dispatch=5.0))), Finding)
    exchanged = judge_by(Communication, case_of(*both(dispatch=5.0)))
    assert isinstance(exchanged, NotJudged)
    assert "XLA" in exchanged.reason
