"""The ladder on machines that are functions of a setting: its rate, its loading, its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from trainer.devices import Device, device
from trainer.io.errors import SettingsError
from trainer.stages.tuning.ladder import Ladder, Workload
from trainer.stages.tuning.tuning_schema import Candidate, Trial

ENDLESS = float("inf")
GIB = 2**30
START = Candidate(workers=0, batch_size=64, accumulation=1, precision="fp32", compile="off", teacher="online")


def device_of(kind, *, has_bf16=False):
    return Device(kind=kind, torch_device=torch.device(kind), backend="", has_bf16=has_bf16, compiles=kind == "cuda")


JOB = Workload(
    images=10**7,
    largest_batch=64,
    largest_batch_why="more were not asked for",
    device=device_of("cpu"),
    world_size=1,
    most_workers=4,
    no_recording="no loss compares with the teacher",
)
GPU = replace(JOB, device=device_of("cuda", has_bf16=True), most_workers=8)


@dataclass
class Machine:
    """Measures candidates by functions of their settings."""

    step: object = lambda candidate: 0.1
    """Seconds of a step on batches in memory."""
    loading_s: float = 0.0
    """Seconds of an image on one core."""
    ended: object = lambda candidate: "measured"
    memory: object = lambda held: 0
    fixed: int = 0
    noise: float = 0.001
    trial_s: float = 1.0

    def __call__(self, candidate, *, loads=False):
        ended = self.ended(candidate)
        if ended != "measured":
            return Trial(candidate=candidate, loads=loads, ended=ended, seconds=self.trial_s)
        workers = 2 if candidate.workers == "auto" else candidate.workers
        seconds, loading = self.step(candidate), candidate.batch_size * self.loading_s
        if loads:
            seconds = max(seconds, loading / workers) if workers else seconds + loading
        rate = candidate.batch_size / seconds
        return Trial(
            candidate=candidate,
            loads=loads,
            ended="measured",
            images_per_second=rate,
            low=(1 - self.noise) * rate,
            high=(1 + self.noise) * rate,
            steps=10,
            seconds=self.trial_s,
            loading_s=self.loading_s,
            workers=workers,
            memory_bytes=self.memory(candidate.held),
            fixed_bytes=self.fixed,
        )


def climbed(measure, job=JOB, *, limit_s=ENDLESS, **start):
    ladder = Ladder(job=job, measure=measure, limit_s=limit_s)
    ladder.climb(START.model_copy(update=start))
    return ladder


def changed(ladder):
    before, after = ladder.given.candidate, ladder.whole.candidate
    return {name: value for name, value in after if value != getattr(before, name)}


def sizes(ladder):
    return [tried.trial.candidate.batch_size for tried in ladder.tried if not tried.trial.loads]


def affine(candidate):
    """A step with a part that does not depend on its images."""
    return 0.5 + candidate.batch_size * 0.001


# ---------------------------------------------------------------------------------------------------------------------
# Loader processes


@pytest.mark.parametrize(("loading_s", "workers"), [(0.0, 0), (0.001, 1), (0.004, 4), (0.1, 8)])
def test_gpu_gets_fewest_loader_processes_that_keep_up(loading_s, workers):
    ladder = climbed(Machine(lambda _: 0.1, loading_s), GPU)
    assert ladder.whole.candidate.workers == workers
    assert changed(ladder) == ({"workers": workers} if workers else {})


def test_loader_processes_follow_the_step():
    machine = Machine(lambda one: 0.05 if one.precision == "bf16" else 0.1, loading_s=0.002)
    ladder = climbed(machine, GPU)
    taken = [tried.trial.candidate.workers for tried in ladder.tried if tried.taken and tried.trial.loads]
    assert taken == [0, 2, 4]
    assert changed(ladder) == {"workers": 4, "precision": "bf16"}

    # Loader processes that crowd a cpu are taken away.
    def measure(candidate, *, loads=False):
        crowd = 1 + max(0, (0 if candidate.workers == "auto" else candidate.workers) - 2) / 4
        return Machine(lambda _: 0.1 * crowd if loads else 0.1)(candidate, loads=loads)

    assert changed(climbed(measure, workers=8)) == {"workers": 0}
    assert changed(climbed(measure, workers=1)) == {}


# ---------------------------------------------------------------------------------------------------------------------
# Precision, compile, teacher, micro-batches


def test_only_gains_beyond_the_noise():
    for gain, noise, kept in ((1.04, 0.001, True), (1.04, 0.05, False), (1.005, 0.0, False), (0.9, 0.0, False)):
        machine = Machine(lambda one, gain=gain: 0.1 / (gain if one.precision == "bf16" else 1), noise=noise)
        assert changed(climbed(machine)) == ({"precision": "bf16"} if kept else {})

    def measure(candidate, *, loads=False):
        return Machine(lambda one: 0.05 if one.precision == "bf16" and not loads else 0.1)(candidate, loads=loads)

    ladder = climbed(measure)
    assert (changed(ladder), ladder.reasons) == ({}, [])


def test_device_gets_only_rungs_that_it_has(monkeypatch):
    found = climbed(Machine(), GPU)
    tried = {tried.idea.split(":")[0] for tried in found.tried}
    assert {"precision=bf16", "compile=on"} <= tried
    assert {"compile", "teacher=recorded"} <= set(climbed(Machine()).untried)
    assert "precision=bf16" in climbed(Machine(), replace(JOB, device=device_of("cuda"))).untried
    monkeypatch.setattr(device, "has_bf16_instructions", lambda: False)
    assert "precision=bf16" in climbed(Machine(), replace(JOB, device=device.HOST)).untried


@pytest.mark.parametrize(
    ("recording_s", "share", "chosen"), [(100.0, 0.5, "recorded"), (10**6, 0.5, "online"), (10**4, 0.01, "online")]
)
def test_the_teacher_is_recorded_where_that_pays(recording_s, share, chosen):
    job = replace(JOB, no_recording="", recording_s=recording_s)
    machine = Machine(lambda one: 0.1 if one.teacher == "online" else 0.1 * (1 - share))
    for given in ("online", "recorded"):
        assert climbed(machine, job, teacher=given).whole.candidate.teacher == chosen


def test_micro_batches_grow_where_that_is_faster():
    machine = Machine(lambda one: 0.1 + 0.02 * one.accumulation)
    assert changed(climbed(machine, accumulation=4)) == {"accumulation": 1}
    dist = replace(JOB, why_parts_count="logit.loss=dist compares its images with one another")
    ladder = climbed(machine, dist, accumulation=4)
    assert changed(ladder) == {}
    assert "logit.loss=dist" in ladder.untried["accumulation"]


# ---------------------------------------------------------------------------------------------------------------------
# The batch


@pytest.mark.parametrize(
    ("gib", "found"), [(20.0, 1024), (20.9, 1024), (21.0, 1088), (22.5, 1152), (23.0, 1216), (80.0, 4096)]
)
def test_the_largest_batch_is_found_in_sixteenths(gib, found):
    """Weights, optimizer and teacher of 4 GiB, of which the teacher's 1 GiB is known, and 16 GiB for 1,024 images."""

    def memory(held):
        return int((4 + held / 64) * GIB)

    machine = Machine(
        affine,
        memory=memory,
        fixed=GIB,
        ended=lambda one: "measured" if memory(one.held) <= gib * GIB else "out of memory",
    )
    job = replace(GPU, largest_batch=4096, memory_limit=gib * GIB)
    ladder = climbed(machine, job, batch_size=1024)
    assert ladder.whole.candidate.batch_size == found
    assert all(tried.trial.ended == "measured" for tried in ladder.tried)


def test_largest_batch_of_unmeasured_memory():
    machine = Machine(affine, ended=lambda one: "measured" if one.held <= 1190 else "out of memory")
    ladder = climbed(machine, replace(JOB, largest_batch=4096), batch_size=1024)
    assert ladder.whole.candidate.batch_size == 1152
    assert sizes(ladder)[-5:] == [2048, 1536, 1280, 1152, 1216]
    assert ladder.untried["batch_size=1216"] == "does not fit into memory"
    # The first bound takes all memory to grow with the images, but for 1 GiB; each larger batch makes it sharper.
    machine = Machine(affine, memory=lambda held: int((4 + held / 64) * GIB), fixed=GIB)
    ladder = climbed(machine, replace(JOB, largest_batch=4096, memory_limit=30 * GIB), batch_size=1024)
    assert max(sizes(ladder)) <= (30 - 4) * 64
    assert ladder.whole.candidate.batch_size >= 1472


@pytest.mark.parametrize(("largest", "found"), [(64, 64), (100, 100), (255, 252), (256, 256)])
def test_a_batch_grows_to_its_limit(largest, found):
    ladder = climbed(Machine(affine), replace(JOB, largest_batch=largest))
    assert ladder.whole.candidate.batch_size == found
    assert "more were not asked for" in ladder.untried[f"batch_size={found + 4}"]
    assert any(f"grown from 64 to {found} images" in text for text in ladder.reasons) == (found > 64)


# ---------------------------------------------------------------------------------------------------------------------
# What fails, and when it ends


def test_given_settings_that_do_not_fit_are_halved_until_they_do():
    machine = Machine(ended=lambda one: "measured" if one.held <= 16 else "out of memory")
    ladder = climbed(machine)
    assert [tried.trial.candidate.accumulation for tried in ladder.tried[:3]] == [1, 2, 4]
    assert [tried.verdict for tried in ladder.tried[:2]] == ["does not fit into memory"] * 2
    assert ladder.whole.candidate.accumulation == 4
    nothing = Machine(ended=lambda _: "out of memory")
    with pytest.raises(SettingsError, match=r"distill\.batch_size = 64 .* on 1 processes, .* 64 micro-batches"):
        climbed(nothing)
    with pytest.raises(SettingsError, match=r"not even in 8 micro-batches"):
        climbed(nothing, replace(JOB, least_part=2, world_size=4))


def test_uncompiled_trials_are_not_taken():
    machine = Machine(
        lambda one: 0.01 if one.compile == "on" else 0.1,
        ended=lambda one: "not compiled" if one.compile == "on" else "measured",
    )
    assert changed(climbed(machine, GPU)) == {}
    ladder = climbed(machine, GPU, compile="on")
    assert (ladder.tried[0].trial.ended, ladder.tried[0].taken) == ("not compiled", False)
    assert ladder.given.candidate.compile == ladder.whole.candidate.compile == "off"


def test_weights_that_are_not_finite_are_refused_or_not_taken():
    machine = Machine(affine, ended=lambda one: "not finite" if one.batch_size > 64 else "measured")
    assert changed(climbed(machine, replace(JOB, largest_batch=256))) == {}
    with pytest.raises(SettingsError, match=r"lower distill\.base_learning_rate"):
        climbed(machine, batch_size=128)


def test_search_is_limited():
    ladder = climbed(Machine(affine, trial_s=10.0), replace(JOB, largest_batch=256), limit_s=30.0)
    assert ladder.seconds <= 30.0
    assert ladder.stopped == ladder.untried["batch_size=128"] == "the 0.5 minutes of the search are over (tune.minutes)"
    # A short distillation is not searched.
    ladder = climbed(Machine(affine, trial_s=10.0), replace(JOB, images=5_000, largest_batch=256))
    assert all(tried.trial.candidate == START for tried in ladder.tried)
    assert "more than a tenth of a distillation of" in ladder.stopped
    # The same measurements give the same climb.
    job = replace(GPU, largest_batch=4096)
    first, second = (climbed(Machine(affine, loading_s=0.0005), job).tried for _ in range(2))
    assert first == second
