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


def test_idle_gpu() -> None:
    idle = {"gpu_percent": 60.0, "gpu_memory_used_bytes": 4e9}
    assert fired(on_gpu()) == []
    assert fired(on_gpu(**idle)) == ["batch_size"]
    assert "64 images in each micro-batch" in finding(BatchSize, on_gpu(**idle)).advice
    assert fired(on_gpu(**(idle | {"gpu_memory_used_bytes": 8e9}))) == ["gpu_utilization"]
    assert fired(on_gpu(**(idle | {"cpu0_percent": 100.0, "cpu1_percent": 100.0}))) == ["gpu_utilization"]
    # A gpu used by fits and starts.
    by_turns = [95.0] * 94 + [0.0] * 6
    assert fired(on_gpu(gpu_percent=by_turns)) == ["gpu_utilization"]
    assert "5th percentile 0 %, 95th 95 %" in finding(GpuUtilization, on_gpu(gpu_percent=by_turns)).text
    assert fired(on_gpu(gpu_percent=[95.0] * 97 + [0.0] * 3)) == []
    # A gpu idles rightly while the training validates.
    rank = on_gpu(gpu_percent=[95.0] * 90 + [0.0] * 10)
    assert fired(rank) == ["gpu_utilization"]
    start = float(rank.system["end_s"][89])
    spans = Spans(names=["evaluate"], start_s=np.array([start]), seconds=np.array([rank.record.ended_s - start]))
    assert (
        fired(RankEvidence(record=rank.record, steps=rank.steps, spans=spans, tensors=rank.tensors, system=rank.system))
        == []
    )
    # What a gpu waits for is found first.
    loading = on_gpu(steps_of(data=9), gpu_percent=40.0, gpu_memory_used_bytes=4e9)
    assert fired(loading) == []
    outcome = judge_by(BatchSize, case_of(loading))
    assert isinstance(outcome, NotJudged)
    assert "loader_workers" in outcome.reason
    # Few samples or none are not judged.
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


def test_slow_copies() -> None:
    assert fired(on_gpu(steps_of(to_device=1.0))) == []
    assert fired(on_gpu(steps_of(to_device=1.3))) == ["host_to_device"]
    saving = finding(HostToDevice, on_gpu(steps_of(to_device=10))).saving
    assert saving is not None
    assert saving.seconds == pytest.approx(STEPS * 0.010)
    # A host that starts kernels slowly is not a slow copy.
    idle = {"gpu_percent": 50.0, "cpu0_percent": 80.0}
    assert fired(on_gpu(steps_of(to_device=4, host_to_device_seconds=3.9), **idle)) == ["gpu_utilization"]
    assert fired(on_gpu(steps_of(to_device=4, host_to_device_seconds=1), **idle)) == ["host_to_device"]
    assert fired(on_gpu(steps_of(to_device=4, host_to_device_seconds=3.9))) == ["host_to_device"]  # the GPU is busy
    # A host that is the slower one is named.
    idle = {"gpu_percent": 46.0, "gpu_memory_used_bytes": 4e9}
    small = finding(BatchSize, on_gpu(**idle, process_cpu_percent=102.0))
    assert "computes meanwhile (102 % of a core): the GPU waits for it to start the next kernels" in small.text
    full = finding(GpuUtilization, on_gpu(gpu_percent=46.0, gpu_memory_used_bytes=8e9, process_cpu_percent=102.0))
    assert "(102 % of a core)" in full.text
    for other in (10.0, np.nan):
        assert "kernels" not in finding(BatchSize, on_gpu(**idle, process_cpu_percent=other)).text


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


def test_host_reads() -> None:
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

    # AdamW reads one of each of the five tensors in each step.
    def rank(calls: int, world_size: int = 1) -> RankEvidence:
        return rank_of(tensors=5, operators=table(aten___local_scalar_dense=calls), world_size=world_size)

    assert fired(rank(4 * (5 + 1))) == []
    assert fired(rank(4 * (5 + 2))) == ["host_syncs"]
    assert finding(HostSyncs, rank(4 * 7)).severity == "note"
    assert fired(rank(4 * (5 + 5), world_size=2)) == []
    assert isinstance(judge_by(HostSyncs, case_of(rank(0))), Healthy)


def judged(teacher_ms: float, *, epochs: int = 60, live: bool = False, **given: Any) -> Any:
    """Of a step that takes ten milliseconds with the teacher's."""
    settings = {"teacher": given.pop("teacher", "online"), "epochs": epochs}
    context = ContextRecord(settings=settings | given.pop("settings", {}), total_steps=given.pop("total_steps", None))
    rules = given.pop("rules", RuleSettings())
    table = steps_of(given.pop("steps", STEPS), teacher_forward=teacher_ms, forward=6 - teacher_ms)
    return judge_by(TeacherShare, case_of(rank_of(table, context=context, **given), live=live, rules=rules))


@pytest.mark.parametrize(("teacher_ms", "kind"), [(2.4, Healthy), (2.6, Finding), (4.2, Finding)])
def test_an_expensive_teacher_is_noted(teacher_ms: float, kind: type) -> None:
    assert isinstance(judged(teacher_ms), kind)


def test_note_on_recording_saves() -> None:
    note = judged(4.2)
    assert note.severity == "note"
    assert note.text.startswith(
        "The teacher's forward pass takes 42 % of a step: from recorded outputs a step would be up to 1.7 times"
    )
    assert "it pays in one distillation already, because 60 epochs are more than 30 views" in note.advice
    assert note.saving.seconds == pytest.approx(STEPS * 4.2e-3 / 2), (
        "half of the teacher's passes are made to record 30 views"
    )
    # The saving is that of the views which would be recorded.
    given = config.resolve("", ["reinforce.views=15"])
    note = judged(4.2, rules=config.ProfileSettings.model_validate(given.for_stage("profile")).rules)
    assert "the teacher sees each image 15 times (reinforce.views)" in note.text
    assert note.saving.seconds == pytest.approx(STEPS * 4.2e-3 * 3 / 4)
    assert given.for_stage("distill") == config.resolve("", []).for_stage("distill"), "no training depends on it"
    # Features have to be recorded too.
    assert "reinforce.features=true" in judged(4.2, settings={"feature_weight": 1.0}).advice
    assert "features" not in judged(4.2).advice


@pytest.mark.parametrize(("epochs", "distillations"), [(30, 2), (20, 2), (15, 3), (4, 8)])
def test_note_says_how_many_distillations_pay(epochs: int, distillations: int) -> None:
    note = judged(4.2, epochs=epochs)
    assert note.saving is None
    assert f"it pays where there are at least {distillations} distillations of {epochs} epochs, or" in note.advice
    assert distillations * epochs > 30 >= (distillations - 1) * epochs


@pytest.mark.parametrize("given", [{"teacher": "recorded"}, {"device": "xla:0 (a Trainium)"}, {"steps": 30}])
def test_too_little_known_of_a_teacher(given: dict[str, Any]) -> None:
    assert isinstance(judged(4.2, **given), NotJudged)


# -- on XLA


def test_read_values() -> None:
    assert all_fired(on_xla(transfers=NUMBERS % 10 == 0)) == []
    assert all_fired(on_xla(transfers=NUMBERS % 9 == 0)) == ["host_syncs"]
    # The first steps may read values.
    assert all_fired(on_xla(transfers=np.where(NUMBERS < 10, 5.0, 0.0))) == []
    # Values that are read are reported with steps and saving.
    found = finding(HostSyncs, on_xla(transfers=np.where(NUMBERS >= 50, 2.0, 0.0)))
    assert found.text.startswith("In 60% of the steps values come from the device (1.2 times a step, first in step 51 ")
    assert ".cpu()" in found.advice
    assert found.steps == (50, STEPS - 1)
    assert found.saving is not None
    assert found.saving.seconds == pytest.approx(2.0 * 1.2 * STEPS / 200)
    # Operators on the host are named.
    found = finding(HostSyncs, on_xla(transfers=1.0, fallbacks={"aten::_local_scalar_dense": 9, "aten::i0": 110}))
    assert "aten::i0 (110 calls) ran on the host; single values were read 9 times" in found.text
    assert "XLA has no aten::i0" in found.advice
    assert found.numbers["aten::i0_calls"] == 110
    # Single values are named.
    found = finding(HostSyncs, on_xla(transfers=1.0, fallbacks={"aten::_local_scalar_dense": 110}))
    assert "Single values were read 110 times (aten::_local_scalar_dense)." in found.text
    assert ".item()" in found.advice
    # Steps whose transfers were not counted say nothing.
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
