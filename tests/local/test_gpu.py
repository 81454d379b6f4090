"""The same trainings on a GPU."""

import pytest
import torch

from trainer.config import DEVICE_VARIABLE
from trainer.profiling.evidence import read_evidence

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")


def test_losses_are_those_of_the_cpu(distillation, monkeypatch):
    on_gpu = distillation("gpu", precision="fp32", compile="off").run()
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    on_cpu = distillation("cpu", precision="fp32").run()
    assert torch.allclose(on_gpu.losses(), on_cpu.losses(), rtol=1e-3)


@pytest.mark.parametrize("compiled", ["on", "off"])
def test_bf16_stays_close_to_fp32(distillation, compiled):
    half = distillation("half", precision="bf16", compile=compiled).run()
    full = distillation("full", precision="fp32", compile="off").run()
    assert torch.allclose(half.losses(), full.losses(), rtol=5e-2)


def test_phases_are_timed_on_the_device(distillation):
    training = distillation("timed", epochs=4).run()
    (recorded,) = read_evidence(training.outputs["evidence"]).trainings
    steps = recorded.ranks[0].steps
    assert {"teacher_forward", "forward", "backward", "optimizer"} <= set(recorded.ranks[0].ranges)
    assert all(seconds > 0 for seconds in steps["seconds"])
