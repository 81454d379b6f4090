"""On XLA, too: what slows a training is really made, and exactly the rule that looks for it fires; a healthy training fires none."""

import itertools
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from tests.distillations import QUICK, TINY
from tests.pathologies import Patient, findings
from trainer.objectives.distillation import objective
from trainer.objectives.distillation.objective import DistillObjective

SETTINGS = {
    "student": QUICK["student"] | {"args": TINY | {"depth": 1}},
    "logit_weight": 0.0,
    "label_weight": 1.0,
    "epochs": 6,
}
"""Without a teacher: less to compile. Nearly sixty steps."""


@pytest.fixture(scope="module")
def patient(digits, teacher, tmp_path_factory):
    return Patient(dataset=digits, teacher=teacher, folder=tmp_path_factory.mktemp("patient"))


@pytest.fixture(autouse=True)
def on_xla(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "xla")


@contextmanager
def a_value_is_read():
    """As in an objective that looks at the logits."""
    label_loss = objective.label_loss

    def looking(*chosen):
        loss = label_loss(*chosen)

        def looked(logits, *given, **settings):
            return loss(logits if logits.mean().item() < 1e9 else logits.detach(), *given, **settings)

        return looked

    with patch.object(objective, "label_loss", looking):
        yield


@contextmanager
def a_smaller_batch():
    """In step 30 a few images are left out."""
    calls, called = itertools.count(), DistillObjective.__call__

    def cut(self, model, batch):
        count = 120 if next(calls) == 30 else len(batch.images)
        part = batch._replace(images=batch.images[:count], labels=batch.labels[:count])
        return called(self, model, part)

    with patch.object(DistillObjective, "__call__", cut):
        yield


def test_a_healthy_training_fires_no_rule(patient):
    training = patient.distill(**SETTINGS)
    assert findings(training) == {}
    assert training.ranks[0].record.transfers.fallbacks == {}


def test_reading_a_value_is_found_by_its_rule(patient):
    found = findings(patient.distill(fault=a_value_is_read, **SETTINGS))
    assert set(found) == {"host_syncs"}, found
    assert found["host_syncs"].startswith("In 100% of the steps values come from the device (1 times a step")
    assert "(aten::_local_scalar_dense)" in found["host_syncs"]


def test_batch_of_another_size_is_found_by_its_rule_alone(patient):
    found = findings(patient.distill(fault=a_smaller_batch, **SETTINGS))
    assert set(found) == {"recompilation"}, found
    assert found["recompilation"].startswith("1 graphs were compiled again after 10 steps (first after step 30)")
