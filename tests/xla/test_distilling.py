"""Distillations through XLA come to what those on a CPU come to, and go on from one another's checkpoints."""

import signal

import pytest
import torch

from tests import groups
from tests.distillations import QUICK, Distillation
from tests.groups import Fault
from trainer import config
from trainer.data.dataset import open_dataset
from trainer.io.errors import PREEMPTED_EXIT_CODE
from trainer.models import networks
from trainer.profiling.evidence_files import read_evidence
from trainer.stages import evaluate, reinforce

SETTINGS = {
    "epochs": 6,
    "ema_decay": 0.9,
    "label_weight": 0.3,
    "validate_every_epochs": 2,
    "views": {"min_scale": 0.5, "flip": False, "mixup": 0.4, "cutmix": 0.6},
}
"""60 steps."""
CLOSE = {"rtol": 2e-4, "atol": 1e-5}
ASKED = Fault(sends=signal.SIGTERM, step=23)
"""To end, in the middle of an epoch."""


@pytest.fixture(scope="module")
def ended(digits, teacher, tmp_path_factory):
    """The same distillation, on both devices."""
    folder = tmp_path_factory.mktemp("both")
    return {
        kind: Distillation(digits, teacher, folder / kind, **SETTINGS).train(TRAINER_DEVICE=kind)
        for kind in ("cpu", "xla")
    }


def test_first_fifty_losses_are_those_of_cpu(ended):
    assert len(ended["xla"].losses()) == 60
    torch.testing.assert_close(ended["xla"].losses()[:50], ended["cpu"].losses()[:50], **CLOSE)


def test_validation_counts_no_image_twice(ended):
    """Its last batch is filled up."""
    there, here = (read_evidence(ended[kind].outputs["evidence"]).trainings[0].metrics for kind in ("xla", "cpu"))
    torch.testing.assert_close(there["val_loss"].values, here["val_loss"].values, **CLOSE)
    torch.testing.assert_close(there["val_top1"].values, here["val_top1"].values, rtol=0, atol=0.01)


def test_graphs_compile_in_the_first_steps(ended):
    (training,) = read_evidence(ended["xla"].outputs["evidence"]).trainings
    rank = training.ranks[0]
    assert {record.step for record in rank.record.compilations} <= {0, 1, 2}
    assert rank.record.device.startswith("xla")
    assert not rank.steps["transfers"].any()


@pytest.mark.parametrize("kinds", [("xla", "xla"), ("xla", "cpu"), ("cpu", "xla")], ids="-".join)
def test_a_training_goes_on_on_any_device(distillation, ended, kinds):
    first, second = kinds
    going = distillation("going", **SETTINGS)
    assert groups.run(going, fault=ASKED, limit_s=300, TRAINER_DEVICE=first).codes == [PREEMPTED_EXIT_CODE]
    going.train(TRAINER_DEVICE=second)
    remaining = ended[first].losses()[ASKED.step + 1 :]
    if first == second:
        assert torch.equal(going.losses(), remaining)
        for name, value in ended[first].weights().items():
            assert torch.equal(going.weights()[name], value), name
    torch.testing.assert_close(going.losses(), remaining, **CLOSE)


def test_recorded_outputs_are_those_of_cpu_and_teach_same(digits, teacher, tmp_path, monkeypatch):
    values = {"views": 3, "top_k": 4, "batch_size": 100, "workers": 0, "seed": 3, "augmentation": QUICK["views"]}
    losses = {}
    for kind in ("xla", "cpu"):
        monkeypatch.setenv("TRAINER_DEVICE", kind)
        recorded = Distillation(digits, teacher, tmp_path / kind, epochs=1, teacher="recorded")
        recorded.inputs["teacher_outputs"] = str(tmp_path / f"outputs-{kind}")
        settings = config.validate(config.ReinforceSettings, values)
        reinforce.run(settings, dataset=digits, teacher=teacher, teacher_outputs=recorded.inputs["teacher_outputs"])
        losses[kind] = recorded.train(TRAINER_DEVICE=kind).losses()
    torch.testing.assert_close(losses["xla"], losses["cpu"], rtol=2e-3, atol=1e-4)


def test_student_is_as_good_on_xla_as_on_cpu(digits, teacher, ended, tmp_path, monkeypatch):
    student, found = ended["xla"].outputs["student"], {}
    for kind in ("cpu", "xla"):
        monkeypatch.setenv("TRAINER_DEVICE", kind)
        data = open_dataset(digits)
        found[kind] = torch.from_numpy(evaluate.predict(networks.load(student), data.split("test"), 100, "student"))
    torch.testing.assert_close(found["xla"], found["cpu"], **CLOSE)


def test_processes_that_do_not_form_one_group_are_refused(distillation):
    """As torchrun starts them beside the CPU runtime, which leaves each of them alone."""
    ended = groups.run(distillation("apart"), processes=2, limit_s=120, TRAINER_DEVICE="xla")
    assert ended.codes == [2, 2]
    assert "would train isolated copies" in ended.messages[0]
    assert "PJRT_DEVICE=CPU" in ended.messages[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": "on"}, "XLA compiles whole steps by itself; set compile=auto"),
        ({"accumulation": 3}, "cannot be dealt evenly to 1 processes x 3 micro-batches"),
    ],
)
def test_what_xla_cannot_do_is_refused_with_reason(distillation, settings, message):
    ended = groups.run(distillation("refused", **settings), limit_s=120, TRAINER_DEVICE="xla")
    assert ended.codes == [2]
    assert message in ended.messages[0]
