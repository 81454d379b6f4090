"""Rules on GPUs, of which there is none here: all evidence is synthetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.rules.synthetic import (
    GPU,
    STEPS,
    XLA,
    all_fired,
    case_of,
    finding,
    judge_by,
    on_xla,
    rank_of,
    steps_of,
)
from trainer import config
from trainer.config.rules import RuleSettings
from trainer.profiling.evidence import ContextRecord, Operator, OperatorTable, RankEvidence, Spans
from trainer.profiling.rules.gpu import BatchSize, GpuUtilization, HostSyncs, HostToDevice, TeacherShare
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged
from trainer.profiling.training_summary import summarize

NUMBERS = np.arange(STEPS)
RULES = (BatchSize, GpuUtilization, HostToDevice, HostSyncs)
USED = {
    "cpu0_percent": 30.0,
    "cpu1_percent": 50.0,
    "gpu_percent": 95.0,
    "gpu_memory_used_bytes": 8e9,
    "gpu_memory_total_bytes": 10e9,
}


def fired(*ranks: RankEvidence) -> list[str]:
    return [rule.name for rule in RULES if isinstance(judge_by(rule, case_of(*ranks)), Finding)]


def on_gpu(steps: dict[str, np.ndarray] | None = None, **system: object) -> RankEvidence:
    return rank_of(steps, device=GPU, system=USED | system, context=ContextRecord(micro_batch=32))


def test_an_idle_machine_wants_a_larger_batch() -> None:
    idle = {"gpu_percent": 60.0, "gpu_memory_used_bytes": 4e9}
    assert fired(on_gpu()) == []
    assert fired(on_gpu(**idle)) == ["batch_size"]
    assert "64 images in each micro-batch" in finding(BatchSize, on_gpu(**idle)).advice
    assert fired(on_gpu(**(idle | {"gpu_memory_used_bytes": 8e9}))) == ["gpu_utilization"]
    assert fired(on_gpu(**(idle | {"cpu0_percent": 100.0, "cpu1_percent": 100.0}))) == ["gpu_utilization"]


def test_a_gpu_used_by_fits_and_starts() -> None:
    by_turns = [95.0] * 94 + [0.0] * 6
    assert fired(on_gpu(gpu_percent=by_turns)) == ["gpu_utilization"]
    assert "5th percentile 0 %, 95th 95 %" in finding(GpuUtilization, on_gpu(gpu_percent=by_turns)).text
    assert fired(on_gpu(gpu_percent=[95.0] * 97 + [0.0] * 3)) == []


def test_a_gpu_idles_rightly_while_the_training_validates() -> None:
    rank = on_gpu(gpu_percent=[95.0] * 90 + [0.0] * 10)
    assert fired(rank) == ["gpu_utilization"]
    start = float(rank.system["end_s"][89])
    spans = Spans(names=["evaluate"], start_s=np.array([start]), seconds=np.array([rank.record.ended_s - start]))
    assert (
        fired(RankEvidence(record=rank.record, steps=rank.steps, spans=spans, tensors=rank.tensors, system=rank.system))
        == []
    )


def test_what_a_gpu_waits_for_is_found_first() -> None:
    loading = on_gpu(steps_of(data=9), gpu_percent=40.0, gpu_memory_used_bytes=4e9)
    assert fired(loading) == []
    outcome = judge_by(BatchSize, case_of(loading))
    assert isinstance(outcome, NotJudged)
    assert "loader_workers" in outcome.reason


def test_a_better_use_saves_time() -> None:
    saving = finding(BatchSize, on_gpu(gpu_percent=35.0, gpu_memory_used_bytes=4e9)).saving
    assert saving is not None
    assert saving.seconds == pytest.approx(STEPS * 0.010 / 2)


def test_few_samples_or_none_are_not_judged() -> None:
    few = rank_of(device=GPU, system=USED, samples=20)
    unknown = rank_of(device=GPU, missing={"gpu_utilization": "no NVML"})
    unsized = rank_of(device=GPU, system={"gpu_percent": 40.0})
    reasons = [str(judge_by(BatchSize, case_of(rank))) for rank in (few, unknown, unsized, rank_of())]
    for reason, expected in zip(
        reasons, ("20 are needed", "no NVML", "the GPU's memory", "runs on a CPU"), strict=True
    ):
        assert expected in reason
    assert isinstance(judge_by(GpuUtilization, case_of(rank_of())), NotJudged)
    assert isinstance(judge_by(HostToDevice, case_of(rank_of())), NotJudged)


def test_copies_to_the_gpu() -> None:
    assert fired(on_gpu(steps_of(to_device=1.0))) == []
    assert fired(on_gpu(steps_of(to_device=1.3))) == ["host_to_device"]
    saving = finding(HostToDevice, on_gpu(steps_of(to_device=10))).saving
    assert saving is not None
    assert saving.seconds == pytest.approx(STEPS * 0.010)


def test_a_host_that_starts_kernels_slowly_is_not_a_slow_copy() -> None:
    """On an H100, steps of 35 ms that the host filled with starting kernels spent 3.9 ms so in `to_device`; none of it was a copy."""
    idle = {"gpu_percent": 50.0, "cpu0_percent": 80.0}
    assert fired(on_gpu(steps_of(to_device=4, host_to_device_seconds=3.9), **idle)) == ["gpu_utilization"]
    assert fired(on_gpu(steps_of(to_device=4, host_to_device_seconds=1), **idle)) == ["host_to_device"]
    assert fired(on_gpu(steps_of(to_device=4, host_to_device_seconds=3.9))) == ["host_to_device"]  # the GPU is busy


def test_a_host_that_is_the_slower_one_is_named() -> None:
    idle = {"gpu_percent": 46.0, "gpu_memory_used_bytes": 4e9}
    small = finding(BatchSize, on_gpu(**idle, process_cpu_percent=102.0))
    assert "computes meanwhile (102 % of a core): the GPU waits for it to start the next kernels" in small.text
    full = finding(GpuUtilization, on_gpu(gpu_percent=46.0, gpu_memory_used_bytes=8e9, process_cpu_percent=102.0))
    assert "(102 % of a core)" in full.text
    for other in (10.0, np.nan):
        assert "kernels" not in finding(BatchSize, on_gpu(**idle, process_cpu_percent=other)).text


def test_evidence_of_before_the_hosts_time_was_measured() -> None:
    steps = steps_of(to_device=4)
    del steps["host_to_device_seconds"]
    assert fired(on_gpu(steps, gpu_percent=50.0, cpu0_percent=80.0)) == ["host_to_device"]


def table(**calls: int) -> OperatorTable:
    """A window of four steps."""
    rows = [
        Operator(
            name=name.replace("___", "::_"),
            kind="operator",
            category="other",
            calls=count,
            self_cpu_ms=1.0,
            self_device_ms=0.0,
        )
        for name, count in calls.items()
    ]
    return OperatorTable(steps=4, operators=tuple(rows))


def test_a_host_that_waits_for_the_gpu() -> None:
    def rank(calls: int) -> RankEvidence:
        return rank_of(
            device=GPU,
            system=USED | {"gpu_percent": 80.0},
            operators=table(cudaStreamSynchronize=calls, cudaDeviceSynchronize=1),
        )

    assert fired(rank(3)) == []
    assert fired(rank(4)) == ["host_syncs"]
    found = finding(HostSyncs, rank(7))
    assert found.text.startswith("2 waits for the device in each step")
    assert found.saving is not None
    assert found.saving.seconds == pytest.approx(STEPS * 0.010 * 0.2)


def test_values_read_on_a_cpu() -> None:
    """AdamW reads one of each of the five tensors in each step."""

    def rank(calls: int, world_size: int = 1) -> RankEvidence:
        return rank_of(tensors=5, operators=table(aten___local_scalar_dense=calls), world_size=world_size)

    assert fired(rank(4 * (5 + 1))) == []
    assert fired(rank(4 * (5 + 2))) == ["host_syncs"]
    assert finding(HostSyncs, rank(4 * 7)).severity == "note"
    assert fired(rank(4 * (5 + 5), world_size=2)) == []
    assert isinstance(judge_by(HostSyncs, case_of(rank(0))), Healthy)


def test_without_a_window_or_a_look_reads_are_not_judged() -> None:
    without = judge_by(HostSyncs, case_of(rank_of(missing={"operators": "turned off"})))
    assert without == NotJudged(reason="no operators were recorded: turned off")
    assert isinstance(judge_by(HostSyncs, case_of(rank_of(operators=table()))), NotJudged)


def judged(teacher_ms: float, *, epochs: int = 60, live: bool = False, **given: Any) -> Any:
    """Of a step that takes ten milliseconds with the teacher's."""
    settings = {"teacher": given.pop("teacher", "online"), "epochs": epochs}
    context = ContextRecord(settings=settings | given.pop("settings", {}), total_steps=given.pop("total_steps", None))
    rules = given.pop("rules", RuleSettings())
    table = steps_of(given.pop("steps", STEPS), teacher_forward=teacher_ms, forward=6 - teacher_ms)
    return judge_by(TeacherShare, case_of(rank_of(table, context=context, **given), live=live, rules=rules))


@pytest.mark.parametrize(("teacher_ms", "kind"), [(2.4, Healthy), (2.6, Finding), (4.2, Finding)])
def test_a_teacher_that_takes_more_than_a_quarter_of_a_step_is_noted(teacher_ms: float, kind: type) -> None:
    assert isinstance(judged(teacher_ms), kind)


def test_the_note_says_what_recorded_outputs_would_bring() -> None:
    note = judged(4.2)
    assert note.severity == "note"
    assert note.text.startswith(
        "The teacher's forward pass takes 42 % of a step: from recorded outputs a step would be up to 1.7 times"
    )
    assert "it pays in one distillation already, because 60 epochs are more than 30 views" in note.advice
    assert note.saving.seconds == pytest.approx(STEPS * 4.2e-3 / 2), (
        "half of the teacher's passes are made to record 30 views"
    )


def test_the_saving_is_that_of_the_views_which_would_be_recorded() -> None:
    given = config.resolve("", ["reinforce.views=15"])
    note = judged(4.2, rules=config.ProfileSettings.model_validate(given.for_stage("profile")).rules)
    assert "the teacher sees each image 15 times (reinforce.views)" in note.text
    assert note.saving.seconds == pytest.approx(STEPS * 4.2e-3 * 3 / 4)
    assert given.for_stage("distill") == config.resolve("", []).for_stage("distill"), "no training depends on it"


@pytest.mark.parametrize(("epochs", "distillations"), [(30, 2), (20, 2), (15, 3), (4, 8)])
def test_where_one_distillation_asks_the_teacher_less_the_note_says_how_many_pay(
    epochs: int, distillations: int
) -> None:
    note = judged(4.2, epochs=epochs)
    assert note.saving is None
    assert f"it pays where there are at least {distillations} distillations of {epochs} epochs, or" in note.advice
    assert distillations * epochs > 30 >= (distillations - 1) * epochs


def test_while_it_runs_the_saving_is_of_the_whole_training() -> None:
    whole, half = judged(4.2, total_steps=2 * STEPS, live=True), judged(4.2)
    assert whole.saving.seconds == pytest.approx(2 * half.saving.seconds)


def test_features_have_to_be_recorded_too() -> None:
    assert "reinforce.features=true" in judged(4.2, settings={"feature_weight": 1.0}).advice
    assert "features" not in judged(4.2).advice


def test_the_share_is_that_of_the_page() -> None:
    settings = {"teacher": "online", "epochs": 60}
    case = case_of(
        rank_of(steps_of(teacher_forward=4.2, recorder=1.3), context=ContextRecord(settings=settings)),
        rules=RuleSettings(teacher_share=TeacherShare(share=0.1)),
    )
    note = judge_by(TeacherShare, case)
    assert isinstance(note, Finding)
    assert note.numbers["teacher_share"] == summarize(case.training).phases["teacher_forward"].share


@pytest.mark.parametrize("given", [{"teacher": "recorded"}, {"device": "xla:0 (a Trainium)"}, {"steps": 30}])
def test_where_no_teacher_runs_or_too_little_is_known_it_is_not_judged(given: dict[str, Any]) -> None:
    assert isinstance(judged(4.2, **given), NotJudged)


# -- on XLA


def test_a_tenth_of_the_steps_may_read_values() -> None:
    assert all_fired(on_xla(transfers=NUMBERS % 10 == 0)) == []
    assert all_fired(on_xla(transfers=NUMBERS % 9 == 0)) == ["host_syncs"]


def test_the_first_steps_may_read_values() -> None:
    assert all_fired(on_xla(transfers=np.where(NUMBERS < 10, 5.0, 0.0))) == []


def test_values_that_are_read_are_reported_with_steps_and_saving() -> None:
    found = finding(HostSyncs, on_xla(transfers=np.where(NUMBERS >= 50, 2.0, 0.0)))
    assert found.text.startswith("In 60% of the steps values come from the device (1.2 times a step, first in step 51 ")
    assert ".cpu()" in found.advice
    assert found.steps == (50, STEPS - 1)
    assert found.saving is not None
    assert found.saving.seconds == pytest.approx(2.0 * 1.2 * STEPS / 200)


def test_operators_on_the_host_are_named() -> None:
    found = finding(HostSyncs, on_xla(transfers=1.0, fallbacks={"aten::_local_scalar_dense": 9, "aten::i0": 110}))
    assert "aten::i0 (110 calls) ran on the host; single values were read 9 times" in found.text
    assert "XLA has no aten::i0" in found.advice
    assert found.numbers["aten::i0_calls"] == 110


def test_single_values_are_named() -> None:
    found = finding(HostSyncs, on_xla(transfers=1.0, fallbacks={"aten::_local_scalar_dense": 110}))
    assert "Single values were read 110 times (aten::_local_scalar_dense)." in found.text
    assert ".item()" in found.advice


def test_steps_whose_transfers_were_not_counted_say_nothing() -> None:
    counted = np.where(NUMBERS % 17 == 0, 1.0, np.nan)
    few = judge_by(HostSyncs, case_of(on_xla(transfers=counted)))
    assert isinstance(few, NotJudged)
    assert "10 are needed" in few.reason
    assert (
        finding(HostSyncs, on_xla(transfers=np.where(NUMBERS % 5 == 0, 1.0, np.nan))).numbers["transferring_share"] == 1
    )


def test_what_only_gpus_have_is_not_judged() -> None:
    reasons = {rule.name: judge_by(rule, case_of(on_xla())) for rule in (GpuUtilization, HostToDevice)}
    assert reasons["gpu_utilization"] == NotJudged(reason=f"the training runs on {XLA}")
    assert reasons["host_to_device"] == NotJudged(reason="on XLA batches are sent ahead, while the device computes")
