"""Each thing that slows a training is really made, and exactly the rule that looks for it fires, of all rules; healthy trainings fire none.

What needs a GPU is made in tests/local/test_pathologies_gpu.py.
"""

import hashlib
import itertools
import os
import threading
import time
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distillations import QUICK, TINY
from tests.pathologies import before_batch, before_each, before_forward, compute, findings, judged, on_rank
from trainer import config
from trainer.config.rules import RuleSettings
from trainer.objectives.distillation.objective import DistillObjective
from trainer.profiling.rules.lifecycle import OwnOverhead, StartUp
from trainer.profiling.rules.outcomes import Finding, NotJudged
from trainer.stages import distill, reinforce
from trainer.training import parallelize

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create [34] worker processes"
)  # torch counts cores, too


@pytest.fixture(autouse=True)
def two_cores():
    """As many cores as the rules on loader processes are tested with."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


RECORDING = {
    "views": 8,
    "augmentation": config.ViewSettings(**QUICK["views"]).model_dump(),
    "workers": 0,
    "seed": QUICK["seed"],
}


@pytest.fixture(scope="module")
def recorded(patient):
    """The teacher's recorded outputs."""
    outputs = str(patient.folder / "recorded")
    settings = config.validate(config.ReinforceSettings, RECORDING)
    reinforce.run(settings, dataset=patient.dataset, teacher=patient.teacher, teacher_outputs=outputs)
    return outputs


@contextmanager
def leak():
    """Keeps 4 MiB of every step."""
    kept = []
    with before_forward(lambda: kept.append(torch.ones(2**20))):
        yield


def read_values():
    """What `loss.item()` in an objective does."""
    for value in torch.ones(4):
        value.item()


_hungry = itertools.count()


def take_cores():
    """What threads of a library do that wait for their next work by counting: two in each process that loads, from its first batch on."""
    if next(_hungry) == 0:
        for _ in range(2):
            threading.Thread(target=_compute_for_ever, daemon=True).start()


def _compute_for_ever():
    while True:
        hashlib.sha256(bytes(2**24))  # without the interpreter's lock


@contextmanager
def hiccups():
    """One step of 25 takes half a second more."""
    calls = itertools.count(1)
    with before_forward(lambda: time.sleep(0.5 * (next(calls) % 25 == 0))):
        yield


@contextmanager
def swinging():
    """Every other step takes a fifth of a second more."""
    calls = itertools.count(1)
    with before_forward(lambda: time.sleep(0.2 * (next(calls) % 2))):
        yield


@contextmanager
def by_turns():
    """Every other step has more to do, on one process or on the other."""
    calls = itertools.count(int(os.environ["RANK"]))
    with before_forward(lambda: time.sleep(0.1 * (next(calls) % 2))):
        yield


@contextmanager
def slow_network():
    """Gradients travel for 100 milliseconds, while the processes may go on."""

    def exchange(_state, bucket):
        def arrive(sent):
            time.sleep(0.1)
            return sent.value()[0]

        return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(arrive)

    with patch.object(parallelize, "bf16_compress_hook", exchange):
        yield


@contextmanager
def changing_strides():
    """From the 40th step on images lie otherwise in memory; graphs are captured, and not compiled further."""
    calls, losses_of = itertools.count(), DistillObjective.__call__

    def restrided(self, model, batch):
        later = next(calls) >= 40
        return losses_of(self, model, batch._replace(images=batch.images.contiguous()) if later else batch)

    graphs = partial(parallelize.CompileCounter, "eager")
    with patch.object(DistillObjective, "__call__", restrided), patch.object(parallelize, "CompileCounter", graphs):
        yield


PATHOLOGIES = {
    "storage that is slow": ("io_bottleneck", {"fault": partial(before_batch, partial(time.sleep, 0.03))}),
    "storage that is slow for a loader": (
        "io_bottleneck",
        {"fault": partial(before_batch, partial(time.sleep, 0.2)), "workers": 1, "epochs": 5},
    ),
    "no loader beside a free core": (
        "loader_workers",
        {"fault": partial(before_batch, partial(compute, 0.2)), "epochs": 5},
    ),
    "a busy loader beside a training that waits": (
        "cpu_bottleneck",
        {"fault": partial(before_batch, partial(compute, 0.15)), "workers": 1, "epochs": 5},
    ),
    "more loaders than cores": ("loader_workers", {"workers": 4, "epochs": 5}),
    "a leak": ("gpu_memory_growth", {"fault": leak, "epochs": 14}),
    "values read in the objective": ("host_syncs", {"fault": partial(before_forward, read_values)}),
    "steps that are slow by turns": ("uneven_steps", {"fault": swinging, "epochs": 5}),
    "steps that hang now and then": ("step_outliers", {"fault": hiccups}),
    "graphs compiled again": ("recompilation", {"fault": changing_strides, "compile": "on"}),
}
APART = {
    "a process that is slow": (
        "stragglers",
        {"fault": partial(on_rank, 1, partial(before_forward, partial(time.sleep, 0.03)))},
    ),
    "processes that are slow by turns": ("load_balance", {"fault": by_turns, "epochs": 5}),
    "a slow network": ("communication", {"fault": slow_network, "gradient_compression": "bf16", "epochs": 5}),
}
LONG = {
    "storage that is slow for a loader",
    "no loader beside a free core",
    "graphs compiled again",
    "processes that are slow by turns",
    "a slow network",
}
"""Those that take longest, and whose rules others of the same phase or unit tests cover besides."""
HEALTHY = {"one process": {}, "one process and three loaders": {"workers": 3}}


def each(pathologies):
    """Every pathology as parameters of a test."""
    return [
        pytest.param(*made, id=name, marks=[pytest.mark.long] if name in LONG else [])
        for name, made in pathologies.items()
    ]


@pytest.mark.parametrize(("rule", "training"), each(PATHOLOGIES))
def test_a_pathology_is_found_by_its_rule_alone(patient, rule, training):
    found = findings(patient.distill(**training))
    assert set(found) == {rule}, found


def test_loaders_that_take_cores_are_found_by_their_rule_alone(patient):
    """Its healthy twin is the training with three loaders that only load."""
    training = patient.distill(fault=partial(before_batch, take_cores), workers=3, epochs=5)
    crowded = judged(training)["cores_oversubscribed"]
    assert isinstance(crowded, Finding), crowded
    if crowded.severity == "note":
        pytest.skip(f"other programs leave the loaders no cores to take: {crowded.text}")
    assert set(findings(training)) == {"cores_oversubscribed"}
    assert crowded.text.startswith("Loader processes take the cores: 3 beside each training process.")
    assert "data.workers=1 in place of 3" in crowded.advice


@pytest.mark.parametrize(("rule", "training"), each(APART))
def test_pathology_between_processes_is_found_by_its_rule_alone(patient, rule, training):
    found = findings(patient.distill(processes=2, **training))
    assert set(found) == {rule}, found


def test_long_start_up_is_found_by_its_rule_alone(patient):
    slow = partial(before_each, distill, "open_dataset", partial(time.sleep, 4))
    rules = RuleSettings(start_up=StartUp(largest_minutes=3 / 60))
    found = findings(patient.distill(fault=slow), rules)
    assert set(found) == {"start_up"}, found
    # No other rule fires on a healthy training either, which has a test of its own.
    assert "start_up" not in findings(patient.distill(), rules)


def test_recording_too_much_is_found_by_its_rule_alone(patient):
    rules = RuleSettings(own_overhead=OwnOverhead(fewest_seconds=0))
    evidence = {"system_interval_s": 0.05, "operators_steps": 0, "tensors_every": 1, "tensors_budget": 1.0}
    found = findings(patient.distill(evidence=evidence), rules)
    assert set(found) == {"own_overhead"}, found


@pytest.mark.parametrize("training", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_training_fires_no_rule(patient, training):
    assert findings(patient.distill(**training)) == {}


def test_healthy_processes_fire_no_rule(patient):
    assert findings(patient.distill(processes=2)) == {}


def test_healthy_training_from_recorded_outputs_fires_no_rule(patient, recorded):
    """Without a teacher's forward pass a larger student keeps loading a small part of the step."""
    student = QUICK["student"] | {"args": TINY | {"patch_size": 4, "embed_dim": 32}}
    assert findings(patient.distill(teacher="recorded", teacher_outputs=recorded, student=student)) == {}


def test_teacher_that_takes_much_of_each_step_is_noted(patient, recorded):
    """The small student of these tests computes far less than its teacher; recorded outputs take that out of the steps."""
    note = judged(patient.distill())["teacher_share"]
    assert isinstance(note, Finding), note
    assert note.severity == "note"
    assert "it pays where there are at least 4 distillations of 8 epochs" in note.advice
    without = judged(patient.distill(teacher="recorded", teacher_outputs=recorded))["teacher_share"]
    assert isinstance(without, NotJudged)
