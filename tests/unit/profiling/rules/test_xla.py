"""What is compiled again on XLA, and what breaks its steps up; evidence is synthetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.synthetic import STEPS, case_of, rank_of, steps_of, together
from trainer.profiling.evidence import RankEvidence
from trainer.profiling.evidence_schema import CompilationRecord, TransferRecord
from trainer.profiling.rules import judge
from trainer.profiling.rules.gpu import gpu_utilization, host_syncs, host_to_device
from trainer.profiling.rules.lifecycle import gpu_memory_growth, recompilation, start_up
from trainer.profiling.rules.outcomes import Finding, NotJudged, Rule
from trainer.profiling.rules.processes import communication, stragglers
from trainer.thresholds import Recompilation, RuleSettings

DEVICE = "xla:0 (NEURON)"
NUMBERS = np.arange(STEPS)


def on_xla(
    steps: Mapping[str, np.ndarray] | None = None,
    *,
    transfers: Any = 0.0,
    fallbacks: Mapping[str, int] | None = None,
    compiled: Mapping[int, float] | None = None,
    **record: Any,
) -> RankEvidence:
    """A process on XLA.

    Args:
        steps: its step table.
        transfers: from the device, in each step.
        fallbacks: operator that ran on the host -> calls.
        compiled: step -> seconds in the compiler.
        record: further fields of its record.
    """
    steps = dict(steps or steps_of())
    steps["transfers"] = np.zeros(len(steps["step"])) + transfers
    exchanged = TransferRecord(
        from_device=200,
        from_device_s=2.0,
        from_device_bytes=800,
        to_device_bytes=10**6,
        fallbacks=fallbacks or {},
    )
    compilations = tuple(
        CompilationRecord(step=step, graphs=1, seconds=spent)
        for step, spent in ({0: 60.0, 1: 50.0} | dict(compiled or {})).items()
    )
    return rank_of(steps, device=DEVICE, transfers=exchanged, compilations=compilations, **record)


def finding(rule: Rule, *ranks: RankEvidence) -> Finding:
    outcome = rule.judge(case_of(*ranks))
    assert isinstance(outcome, Finding), outcome
    return outcome


def fired(*ranks: RankEvidence) -> list[str]:
    return [one.rule.name for one in judge(case_of(*ranks)) if isinstance(one.outcome, Finding)]


def test_a_healthy_training_fires_nothing() -> None:
    assert fired(on_xla()) == []


# -- transfers


def test_a_tenth_of_the_steps_may_read_values() -> None:
    assert fired(on_xla(transfers=NUMBERS % 10 == 0)) == []
    assert fired(on_xla(transfers=NUMBERS % 9 == 0)) == ["host_syncs"]


def test_the_first_steps_may_read_values() -> None:
    assert fired(on_xla(transfers=np.where(NUMBERS < 10, 5.0, 0.0))) == []


def test_values_that_are_read_are_reported_with_steps_and_saving() -> None:
    found = finding(host_syncs, on_xla(transfers=np.where(NUMBERS >= 50, 2.0, 0.0)))
    assert found.text.startswith("In 60% of the steps values come from the device (1.2 times a step, first in step 50")
    assert ".cpu()" in found.advice
    assert found.steps == (50, STEPS - 1)
    assert found.saving is not None
    assert found.saving.seconds == pytest.approx(2.0 * 1.2 * STEPS / 200)


def test_operators_on_the_host_are_named() -> None:
    found = finding(host_syncs, on_xla(transfers=1.0, fallbacks={"aten::_local_scalar_dense": 9, "aten::i0": 110}))
    assert "aten::i0 (110 calls) ran on the host; single values were read 9 times" in found.text
    assert "XLA has no aten::i0" in found.advice
    assert found.numbers["aten::i0_calls"] == 110


def test_single_values_are_named() -> None:
    found = finding(host_syncs, on_xla(transfers=1.0, fallbacks={"aten::_local_scalar_dense": 110}))
    assert "Single values were read 110 times (aten::_local_scalar_dense)." in found.text
    assert ".item()" in found.advice


def test_steps_whose_transfers_were_not_counted_say_nothing() -> None:
    counted = np.where(NUMBERS % 17 == 0, 1.0, np.nan)
    few = host_syncs.judge(case_of(on_xla(transfers=counted)))
    assert isinstance(few, NotJudged)
    assert "10 are needed" in few.reason
    assert (
        finding(host_syncs, on_xla(transfers=np.where(NUMBERS % 5 == 0, 1.0, np.nan))).numbers["transferring_share"]
        == 1
    )


# -- compilations


def test_graphs_of_the_first_ten_steps_are_no_finding() -> None:
    assert fired(on_xla(compiled={9: 1.0})) == []
    assert fired(on_xla(compiled={10: 1.0})) == ["recompilation"]


def test_a_batch_of_another_size_is_named() -> None:
    steps = steps_of()
    steps["images"] = np.where(NUMBERS == 40, 77.0, 128.0)
    found = finding(recompilation, on_xla(steps, compiled={40: 30.0}))
    assert found.text.endswith("which took 30.0 s. The number of images had changed: 77 instead of 128.")
    assert "pad or drop" in found.advice
    assert found.steps == (40, 40)


def test_steps_are_found_in_a_training_that_went_on() -> None:
    steps = steps_of()
    steps["step"] = steps["step"] + 1000
    steps["images"] = np.where(NUMBERS == 40, 77.0, 128.0)
    assert "77 instead of 128" in finding(recompilation, on_xla(steps, compiled={40: 30.0})).text


def test_a_look_at_the_weights_is_named() -> None:
    def finding_at(*steps: int) -> Finding:
        rank = on_xla(compiled=dict.fromkeys(steps, 30.0), tensors=2)
        looks = replace(rank.tensors, steps=np.array([50.0, 100.0]))
        return finding(recompilation, replace(rank, tensors=looks))

    assert "a measurement of the weights" in finding_at(50, 100).text
    assert "evidence.tensors_every" in finding_at(50).advice
    assert "measurement" not in finding_at(50, 51).text


def test_a_number_in_the_graph_is_distinguished_from_a_value_that_changed_once() -> None:
    always = finding(recompilation, on_xla(compiled=dict.fromkeys(range(12, STEPS), 0.1)))
    assert "a number that changes in each step" in always.text
    once = finding(recompilation, on_xla(compiled={12: 0.1, 60: 0.1}))
    assert "A shape changed, or a Python value" in once.text
    assert all("PT_XLA_DEBUG_LEVEL=2" in found.advice for found in (always, once))


def test_a_step_that_the_table_no_longer_holds_had_as_many_images_as_any() -> None:
    steps = steps_of()
    steps["images"] = np.where(NUMBERS == 42, 77.0, 128.0)
    kept = {name: values[::2] for name, values in steps.items()}
    assert "number of images" not in finding(recompilation, on_xla(kept, compiled={41: 30.0})).text
    assert "number of images" in finding(recompilation, on_xla(kept, compiled={42: 30.0})).text


def test_a_training_that_ended_in_its_first_step_has_no_sizes_to_compare() -> None:
    nothing = on_xla({name: values[:0] for name, values in steps_of().items()}, samples=1)
    found = recompilation.judge(case_of(nothing, rules=RuleSettings(recompilation=Recompilation(after_steps=0))))
    assert isinstance(found, Finding)
    assert "A shape changed" in found.text


# -- what other rules say of such a device


def test_a_long_compilation_has_a_cache_of_its_own() -> None:
    found = finding(start_up, on_xla(startup={"compile": 2000.0}))
    assert "NEURON_COMPILE_CACHE_URL" in found.advice
    assert "TORCHINDUCTOR" not in found.advice


def test_what_only_gpus_have_is_not_judged() -> None:
    reasons = {rule.name: rule.judge(case_of(on_xla())) for rule in (gpu_utilization, host_to_device)}
    assert reasons["gpu_utilization"] == NotJudged(reason=f"the training runs on {DEVICE}")
    assert reasons["host_to_device"] == NotJudged(reason="on XLA batches are sent ahead, while the device computes")


def test_waiting_for_others_where_the_graph_is_handed_over_is_no_own_work() -> None:
    def both(**slower: float) -> list[RankEvidence]:
        return together(steps_of(dispatch=5.0), steps_of(**slower), device=DEVICE)

    assert isinstance(stragglers.judge(case_of(*both(forward=7.0))), Finding)
    assert not isinstance(stragglers.judge(case_of(*both(dispatch=5.0))), Finding)
    exchanged = communication.judge(case_of(*both(dispatch=5.0)))
    assert isinstance(exchanged, NotJudged)
    assert "XLA" in exchanged.reason


def test_memory_of_the_device_that_grows() -> None:
    def grown(share: float) -> RankEvidence:
        system = {
            "device_memory_used_bytes": 2**30 * np.linspace(1, 1 + share, 100),
            "device_memory_total_bytes": 2.0**34,
        }
        return on_xla(system=system)

    assert fired(grown(0.05)) == []
    found = finding(gpu_memory_growth, grown(0.2))
    assert found.text.startswith("Memory of the device grows")
    left_h = (2**34 - found.numbers["last_bytes"]) / found.numbers["bytes_an_hour"]
    assert f"full in {left_h:.1f} h" in found.text
