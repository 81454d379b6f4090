"""The same trainings on a GPU."""

import logging

import pytest
import torch

from tests import groups
from tests.benchmarks.photos import write_photos
from tests.distillations import MIXED, Distillation
from trainer import config
from trainer.config import DEVICE_VARIABLE, EvidenceSettings
from trainer.data import dataset as dataset_module
from trainer.data.dataset import open_dataset
from trainer.data.loader import Samples
from trainer.devices import choose_device
from trainer.devices.process_group import Processes
from trainer.models import networks
from trainer.objectives.distillation.frozen_teacher import GRAPH_BATCH, FrozenTeacher
from trainer.objectives.distillation.objective import DistillObjective
from trainer.profiling.evidence_files import read_evidence
from trainer.report.tracking.stage_runs import Tracker
from trainer.stages import prepare
from trainer.training import loop
from trainer.training.checkpointing import Checkpointing
from trainer.training.checkpoints import Checkpoints
from trainer.training.loop import Trainer
from trainer.training.metric_logger import MetricLogger
from trainer.training.spec import TrainingSpec
from trainer.training.trace import Trace

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_a_gpu")]

WARM_STEPS = 5
"""Steps that compile, or fill caches of memory."""


@pytest.fixture
def strict():
    """Turns the error for whatever makes the host wait for the GPU on and off."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


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


WAYS = {
    "online teacher, averaged weights": {"ema_decay": 0.9},
    "compiled": {"compile": "on"},
    "stochastic depth, accumulation": {"drop_path": 0.1, "accumulation": 2, "precision": "fp32"},
}


@pytest.mark.parametrize("way", WAYS)
def test_it_resumes_to_the_same_bits(distillation, way):
    settings = {"deterministic": True, "epochs": 2, "compile": "off", "views": MIXED, "checkpoint_every": 100} | WAYS[
        way
    ]
    whole, broken = distillation("whole", **settings), distillation("broken", **settings)
    groups.check_resumes(whole, broken, step=13, limit_s=300, **{DEVICE_VARIABLE: "cuda"})


def test_a_distillation_from_files_that_the_gpu_decodes(teacher, tmp_path, monkeypatch):
    """nvJPEG's pixels differ by a few levels from the CPU's."""
    monkeypatch.setattr(dataset_module, "IN_MEMORY_BYTES", 0)  # else the images are decoded once, by the CPU
    dataset = tmp_path / "dataset"
    for label, folder in enumerate(sorted(write_photos(tmp_path / "photos", classes=10, per_class=30).iterdir())):
        folder.rename(folder.with_name(str(label)))
    source = f"imagefolder:{tmp_path / 'photos'}"
    prepare.run(config.DataSettings(source=source, image_size=64), dataset=dataset)
    ways = {
        way: Distillation(
            dataset, teacher, tmp_path / way, decode_on=way, views_on="device", batch_size=32, epochs=3, compile="off"
        ).run_here()
        for way in ("cpu", "cuda")
    }
    assert torch.allclose(ways["cpu"].losses(), ways["cuda"].losses(), rtol=2e-2)


class Strict:
    """An objective after whose first steps nothing may make the host wait for the GPU."""

    def __init__(self, objective, mode):
        self.model, self.left_out = objective.model, objective.left_out
        self.show, self.end_step = objective.forward_for_hooks, objective.end_step
        self._objective, self._mode, self.steps = objective, mode, 0

    def __call__(self, model, batch):
        self.steps += 1
        if self.steps == WARM_STEPS:
            self._mode("error")
        return self._objective(model, batch)


@pytest.mark.parametrize("views_on", ["device", "cpu"])
@pytest.mark.parametrize("compiled", ["on", "off"])
def test_a_step_makes_the_host_wait_for_nothing(
    digits, teacher, tmp_path, monkeypatch, strict, caplog, compiled, views_on
):
    caplog.set_level(logging.WARNING)
    from tests.distillations import QUICK

    views = {
        "min_scale": 0.5,
        "color_jitter": 0.3,
        "randaugment_operations": 2,
        "erasing": 0.5,
        "mixup": 0.8,
        "cutmix": 1.0,
    }
    changes = {"epochs": 4, "compile": compiled, "ema_decay": 0.9, "log_every": 7, "views": views}
    settings = config.validate(config.DistillSettings, QUICK | changes)
    settings = settings.model_copy(update={"evidence": EvidenceSettings(operators_steps=0)})
    data, frozen = open_dataset(digits), networks.load(teacher)
    device = choose_device()
    processes = Processes(rank=0, world_size=1, local_rank=0, device=device)
    student = networks.create(settings.student, data.classes)
    asked = FrozenTeacher(frozen, device, precision=settings.precision, compile=settings.compile)
    objective = Strict(DistillObjective(student, [asked], settings), strict)
    training = TrainingSpec(
        name="distill",
        objective=objective,
        samples=Samples([data.split("train")]),
        view_size=16,
        settings=settings,
        loading=config.ResidentSettings(workers=1, views_on=views_on),
        processes=processes,
        val_split=data.split("val"),
    )

    def after_the_last_step(*_, **__):
        strict("default")
        return {}

    monkeypatch.setattr(loop, "validate", after_the_last_step)
    trace, tracker = Trace(), Tracker()
    checkpointing = Checkpointing(Checkpoints(tmp_path, "distill", settings={}, parents={}), tracker)
    Trainer(training, [MetricLogger(trace, tracker), trace, checkpointing]).train()
    assert objective.steps == training.total_steps > 3 * WARM_STEPS
    assert not [message for message in caplog.messages if "compiled" in message]


@pytest.mark.parametrize("count", [GRAPH_BATCH // 2, 2 * GRAPH_BATCH])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_teacher_says_the_same_each_time(teacher, count, precision):
    """Small batches are replayed as a CUDA graph, which writes over its outputs: those given before must not change."""
    device = choose_device()
    images = [torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, device="cuda") for _ in range(4)]
    plain, compiled = (
        FrozenTeacher(networks.load(teacher), device, precision=precision, batch_size=GRAPH_BATCH // 4 * 3, compile=way)
        for way in ("off", "on")
    )
    expected = [plain(batch).logits for batch in images]
    for _ in range(3):
        for got, wanted in zip([compiled(batch).logits for batch in images], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
