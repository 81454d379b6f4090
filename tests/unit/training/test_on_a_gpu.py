"""Whole stages on a GPU, as far as a machine without one can tell: what is where, how it came there, and on which stream."""

import gc
import os
import types
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.distillations import QUICK, TINY
from tests.stand_ins.gpu import DEVICE, Event, Gpu
from trainer import config
from trainer.config import DistillSettings, MaeSettings, ModelSettings, PretrainSettings, ReinforceSettings
from trainer.data.batch import Batch, to_device
from trainer.data.batch_memory import empty_images
from trainer.data.loader import PREFETCHED, make_loader
from trainer.devices import HOST, process_group
from trainer.models import networks
from trainer.objectives.distillation.frozen_teacher import FrozenTeacher
from trainer.objectives.distillation.objective import DistillObjective, ProjectedStudent
from trainer.objectives.pretraining import FinetuneObjective, MaeObjective, MaskedAutoencoder
from trainer.stages import distill, pretrain, reinforce
from trainer.training import prefetch
from trainer.training.classification import ConfusedPairs
from trainer.training.loop import Trainer

VIEWS = {
    "min_scale": 0.5,
    "color_jitter": 0.3,
    "randaugment_operations": 2,
    "erasing": 0.5,
    "mixup": 0.8,
    "cutmix": 1.0,
}
TWO_STEPS = {
    **{name: QUICK[name] for name in ("epochs", "warmup_epochs", "log_every", "evidence")},
    "batch_size": 640,
    "ema_decay": 0.9,
    "views": VIEWS,
}
MODEL = {"architecture": "vit_tiny_patch16_224", "args": TINY | {"depth": 1}}
IN_THE_MAIN_PROCESS = {"seed": 0, "workers": 0}
NOT_IN_A_STEP = {
    "loop.py:__init__",  # the model
    "frozen_teacher.py:__init__",
    "frozen_teacher.py:_place",
    "tensor_sampler.py:__init__",  # what looks at the weights
    "pretrain.py:pretrain",  # the picture at the end
    "pretraining.py:draw_reconstructions",
}
"""Where tensors may come to the GPU from pageable memory."""
WAITS = {
    "copy to the host in networks.py:with_labels",
    "copy to the host in networks.py:save",
    "copy to the host in checkpointing.py:save",  # of a checkpoint
    "copy to the host in pretraining.py:_png",
    "a number to the host in networks.py:_is_its_answer",
}
"""Where the host may wait."""


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that every process finds; in no step is the host made to wait for it."""
    monkeypatch.setattr(process_group, "choose_device", lambda *_: DEVICE)
    monkeypatch.setattr(ConfusedPairs, "count", lambda *_: None)  # it computes nothing, so answers are no classes
    with Gpu() as gpu:
        yield gpu
    assert any(copy.pinned for copy in gpu.copies)
    assert {copy.place for copy in gpu.copies if not (copy.pinned and copy.non_blocking)} <= NOT_IN_A_STEP
    assert set(gpu.waits) <= WAITS


def places(directory, *names):
    return {name: str(directory / name) for name in names}


def test_pretraining_and_finetuning(digits, tmp_path, gpu):
    autoencoder = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}
    settings = {
        **IN_THE_MAIN_PROCESS,
        "teacher": MODEL,
        "mae": TWO_STEPS | autoencoder,
        "finetune": TWO_STEPS | {"layer_decay": 0.7, "drop_path": 0.1},
    }
    pretrain.run(config.validate(PretrainSettings, settings), dataset=digits, **places(tmp_path, "teacher", "evidence"))


@pytest.mark.parametrize(
    "loss", [{"logit": {"loss": "kl"}, "feature_weight": 0.5}, {"logit": {"loss": "dist"}, "accumulation": 2}]
)
def test_distilling_from_a_teacher_that_is_online(digits, teacher, tmp_path, gpu, loss):
    settings = config.validate(DistillSettings, TWO_STEPS | IN_THE_MAIN_PROCESS | loss | {"student": MODEL})
    distill.run(settings, dataset=digits, teacher=teacher, **places(tmp_path, "student", "evidence"))


def test_recording_and_distilling_from_the_records(digits, teacher, tmp_path, gpu):
    recording = {"features": True, "top_k": 4, "views": 1, "view_size": 16, "augmentation": VIEWS}
    distillation = {"teacher": "recorded", "student": MODEL, "feature_weight": 0.5}
    outputs = places(tmp_path, "teacher_outputs")
    reinforce.run(
        config.validate(ReinforceSettings, IN_THE_MAIN_PROCESS | recording), dataset=digits, teacher=teacher, **outputs
    )
    distill.run(
        config.validate(DistillSettings, TWO_STEPS | IN_THE_MAIN_PROCESS | distillation),
        dataset=digits,
        teacher=teacher,
        **places(tmp_path, "student", "evidence"),
        **outputs,
    )


def test_a_training_is_deterministic_where_the_run_is(digits, teacher, tmp_path, monkeypatch, gpu):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # a person's own stays
    deterministic, step = [], Trainer.train_step

    def watched(*arguments):
        deterministic.append(torch.are_deterministic_algorithms_enabled())
        return step(*arguments)

    monkeypatch.setattr(Trainer, "train_step", watched)
    settings = config.resolve("digits", ["run.deterministic=true"]).for_stage("distill")
    assert settings["deterministic"] is True
    few = TWO_STEPS | IN_THE_MAIN_PROCESS | {"student": MODEL, "logit_weight": 0.0, "feature_weight": 0.0}
    for asked in (True, False):
        chosen = config.validate(DistillSettings, few | {"deterministic": asked})
        distill.run(chosen, dataset=digits, teacher=teacher, **places(tmp_path / str(asked), "student", "evidence"))
    assert deterministic == [True, True, False, False]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_files_are_decoded_on_the_stream_that_sends(monkeypatch, gpu):
    streams = []

    def decode(files, lengths, device):
        streams.append(torch.cuda.current_stream())
        return torch.zeros(len(lengths), 3, 16, 16, dtype=torch.uint8, device=device)

    def batches():
        for _ in range(2):
            numbers = torch.zeros(2, dtype=torch.int64).pin_memory()
            files, lengths = torch.zeros(30, dtype=torch.uint8), torch.tensor([10, 20])
            yield Batch(images=files, labels=numbers, keys=numbers, numbers=numbers, lengths=lengths)

    monkeypatch.setattr(prefetch, "decode_jpegs", decode)
    feed = prefetch.Prefetcher(batches(), SimpleNamespace(resident=None, fused=False), DEVICE)
    for _ in range(2):
        taken = feed.next()
        feed.preload()
        assert taken.lengths is None
        assert (taken.images.float() / 255).sum().device == DEVICE.torch_device  # the computation may use them
    assert len(streams) == 2
    assert torch.cuda.current_stream() not in streams


class Ready(Dataset):
    """Batches of images that a loader process made where the training process finds them."""

    def __getitem__(self, number):
        images, few = empty_images(4, 160).fill_(number), torch.zeros(4, dtype=torch.int64)
        return Batch(images=images.permute(0, 3, 1, 2), labels=few, keys=few, numbers=few)


@pytest.mark.parametrize("copied", [True, False])
def test_memory_of_loader_processes_is_used_again_after_its_copy(monkeypatch, gpu, copied):
    places = []

    def noted(tensor, device):
        if tensor.dim() > 1:
            places.append(tensor.data_ptr())
            assert tensor.unique().tolist() == [len(places) - 1]
        return to_device(tensor, device)

    monkeypatch.setattr(prefetch, "to_device", noted)
    monkeypatch.setattr(Event, "query", lambda _: copied)
    batches = make_loader(Ready(), range(20), workers=1, pin_memory=True)
    feed = prefetch.Prefetcher(batches, SimpleNamespace(resident=None, fused=False), DEVICE)
    for _ in range(20):
        feed.next()
        feed.preload()
    batches.close()
    assert len(places) == 20
    assert len(set(places)) <= PREFETCHED + 4 if copied else len(set(places)) == 20


# ---------------------------------------------------------------------------------------------------------------------
# What an objective holds


def classifier():
    return networks.create(ModelSettings.model_validate(MODEL), ["a", "b", "c"])


def masked_autoencoder():
    settings = MaeSettings(decoder_dim=16, decoder_depth=1, decoder_heads=2)
    return MaeObjective(MaskedAutoencoder(classifier(), settings), seed=0)


def distillation(*, online, **settings):
    student = ProjectedStudent(classifier(), 16) if settings.get("feature_weight") else classifier()
    teacher = FrozenTeacher(classifier(), HOST, precision="bf16", features=True)
    return DistillObjective(student, [teacher] if online else [], config.validate(DistillSettings, settings))


@pytest.mark.parametrize(
    "make",
    [
        masked_autoencoder,
        lambda: FinetuneObjective(classifier(), label_smoothing=0.1),
        partial(distillation, online=True),
        partial(distillation, online=True, feature_weight=0.5, logit={"loss": "dkd"}),
        partial(distillation, online=False, teacher="recorded", feature_weight=0.5),
    ],
    ids=["mae", "finetune", "online", "features", "recorded"],
)
def test_whatever_an_objective_holds_goes_where_its_models_go(make):
    objective = make()
    held = tensors_of(objective)
    assert len(held) > 10
    objective.model.to("meta")
    for teacher in getattr(objective, "_teachers", ()):
        teacher._model.to("meta")
    assert [tuple(tensor.shape) for tensor in tensors_of(objective) if not tensor.is_meta] == []


def reachable(root):
    """All objects of a program that an object leads to, through attributes, collections, closures and bound methods."""
    found, left = {}, [root]
    while left:
        thing = left.pop()
        if id(thing) in found or isinstance(thing, (type, types.ModuleType, str, bytes, int, float, torch.dtype)):
            continue
        found[id(thing)] = thing
        if isinstance(thing, types.FunctionType):
            left += [cell.cell_contents for cell in thing.__closure__ or ()]
        elif not isinstance(thing, Tensor):
            left += gc.get_referents(thing)
    return list(found.values())


def tensors_of(objective):
    return [thing for thing in reachable(objective) if isinstance(thing, Tensor)]
