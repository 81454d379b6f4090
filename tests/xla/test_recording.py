"""What a recording counts on XLA; the steps are those of a plain loop, and each test has shapes of its own, for graphs are kept."""

import threading
import time

import pytest
import torch
from torch import nn

from tests.unit.profiling.rules.synthetic import case_of, judge_by
from trainer.config import EvidenceSettings
from trainer.profiling.recorder import Recorder
from trainer.profiling.rules.gpu import HostSyncs
from trainer.profiling.rules.lifecycle import Recompilation
from trainer.profiling.rules.outcomes import Finding, Healthy

torch_xla = pytest.importorskip("torch_xla")
xla = pytest.importorskip("trainer.profiling.xla_counters")

STEPS = 40


def nothing(_loss, _step):
    """A healthy step."""


def train(width, *, in_step=nothing, between=nothing, size=lambda _: 8, steps=STEPS):
    """Evidence of steps on the device."""
    device = torch_xla.device()
    model = nn.Linear(width, width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch_xla.sync()
    recorder = Recorder(EvidenceSettings(system_interval_s=0.05), name="distill", device=device, rank=0, world_size=1)
    with recorder:
        for step in range(steps):
            with recorder.timeline.step(step, images=size(step)):
                images = torch.ones(size(step), width).to(device)
                loss = model(images).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                in_step(loss, step)
                torch_xla.sync()
            between(loss, step)
    return recorder.snapshot().ranks[0]


def test_healthy_loop_compiles_once_and_transfers_nothing_in_its_steps():
    rank = train(11, between=lambda loss, step: step % 10 or loss.item())
    (compilation,) = rank.record.compilations
    assert (compilation.step, compilation.graphs) == (0, 1)
    assert rank.record.startup["compile"] == pytest.approx(compilation.seconds)
    assert 0 < compilation.seconds <= rank.steps["seconds"][0]
    assert not rank.steps["transfers"].any()
    assert rank.record.transfers.from_device == STEPS / 10
    assert rank.record.transfers.fallbacks == {}
    assert isinstance(judge_by(HostSyncs, case_of(rank)), Healthy)
    assert isinstance(judge_by(Recompilation, case_of(rank)), Healthy)


def test_the_device_has_its_name():
    record = train(11, steps=1).record
    assert record.device == "xla:0 (CPU)"
    assert "GetAllocatorStats" in record.missing["device_memory"]
    assert "noted for XLA" in record.missing["operators"]


def test_compiling_counts_for_its_step():
    rank = train(13, size=lambda step: 9 if step == 20 else 8)
    assert [(one.step, one.graphs) for one in rank.record.compilations] == [(0, 1), (20, 1)]
    finding = judge_by(Recompilation, case_of(rank))
    assert isinstance(finding, Finding)
    assert "The number of images had changed: 9 instead of 8." in finding.text
    assert rank.record.compilations[1].seconds <= rank.steps["seconds"][20]


def test_what_is_compiled_between_steps_is_apart():
    def validate(loss, step):
        if step == 20:
            loss.detach().expand(29).cumsum(0).cpu()

    record = train(27, between=validate, steps=30).record
    assert [one.step for one in record.compilations] == [0]
    assert record.compile_beside_s > 0
    assert record.transfers.from_device == 1
    assert train(27, steps=2).record.compile_beside_s == 0


def test_a_constant_differs_from_a_shape():
    rank = train(17, in_step=lambda loss, step: loss.expand(step + 1).cumsum(0), steps=20)
    assert len(rank.record.compilations) == 1, "the result is unused, so it is not computed"
    kept = []
    rank = train(17, in_step=lambda loss, step: kept.append(loss.detach().expand(step + 2).sum()), steps=20)
    finding = judge_by(Recompilation, case_of(rank))
    assert isinstance(finding, Finding)
    assert "a number that changes in each step" in finding.text
    assert finding.numbers["graphs"] == 10


def test_host_operators_and_copies_are_counted():
    rank = train(19, in_step=lambda loss, step: torch.special.i0(loss.detach()) if step >= 20 else None)
    assert rank.steps["transfers"].tolist() == [0] * 20 + [1] * 20
    assert rank.record.transfers.fallbacks == {"aten::i0": 20}
    finding = judge_by(HostSyncs, case_of(rank))
    assert isinstance(finding, Finding)
    assert finding.text.endswith("aten::i0 (20 calls) ran on the host.")
    assert finding.steps == (20, 39)
    copied = train(19, in_step=lambda loss, _: loss.detach().cpu())
    assert copied.record.transfers.fallbacks == {}
    assert isinstance(judge_by(HostSyncs, case_of(copied)), Finding)


def test_what_looking_itself_transfers_is_not_the_trainings():
    counters, value = xla.XlaCounters(), torch.ones(2, device=torch_xla.device())
    torch_xla.sync()
    counters.begin(0)
    value.cpu()
    with counters.apart():
        value.cpu()
    assert counters.end(0) == 1


def test_what_comes_after_the_recording_counts_for_nothing():
    counters, value = xla.XlaCounters(), torch.ones(31, device=torch_xla.device())
    counters.start()
    counters.stop()
    value.cumsum(0).cpu()
    assert (counters.transfers.from_device, counters.beside_s) == (0, 0)


def test_in_long_training_transfers_are_counted_in_some_steps():
    counters = xla.XlaCounters()
    counted = []
    for ordinal in range(3 * xla.COUNTED_STEPS):
        counters.begin(ordinal)
        counted.append(counters.end(ordinal) == 0)
    assert all(counted[: xla.COUNTED_STEPS])
    assert sum(counted[xla.COUNTED_STEPS :]) == pytest.approx(2 * xla.COUNTED_STEPS / xla.COUNTED_EVERY, abs=1)


def test_another_thread_sees_that_graph_is_being_compiled():
    counters, ended, seen = xla.XlaCounters(), threading.Event(), []

    def look():
        while not ended.is_set():
            seen.append(counters.compiling)
            time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    model = nn.Sequential(*[nn.Linear(23, 23) for _ in range(30)]).to(torch_xla.device())
    model(torch.ones(4, 23).to(torch_xla.device())).sum().backward()
    torch_xla.sync(wait=True)
    ended.set()
    thread.join()
    assert any(seen)
    assert not counters.compiling
