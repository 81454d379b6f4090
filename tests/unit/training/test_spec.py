import dataclasses

import pytest
from torch import nn

from tests.checkpoints import learner, snapshot_of
from trainer.config import DistillSettings, ModelSettings, TrainingSettings
from trainer.devices import HOST, choose_device
from trainer.devices.process_group import Processes
from trainer.io.errors import SettingsError
from trainer.models import networks
from trainer.training.checkpoints import Checkpoints, Dealing
from trainer.training.spec import check_batch, fit_batch, keep_micro_batches, why_micro_batches_count


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")


def processes(*, is_lazy=False, rank=0):
    device = dataclasses.replace(choose_device(), is_lazy=is_lazy)
    return Processes(rank=rank, world_size=4, local_rank=rank, device=device)


@pytest.mark.parametrize(("is_lazy", "size"), [(False, 643), (True, 640)])
def test_a_clamped_batch_can_be_dealt_to_the_processes(is_lazy, size):
    """XLA, which compiles each size by itself, refuses one that cannot be dealt evenly."""
    group, settings = processes(is_lazy=is_lazy), TrainingSettings(batch_size=1024, accumulation=2)
    fitted = fit_batch("distill", settings, 643, group)
    assert fitted.batch_size == size
    check_batch(nn.Linear(2, 2), fitted, group)


@pytest.mark.parametrize(("batch_size", "advised"), [(8, None), (7, 8), (4, 8)])
def test_batch_normalization_needs_two_images_in_each_micro_batch(batch_size, advised):
    group, settings = processes(), TrainingSettings(batch_size=batch_size)
    check_batch(nn.LayerNorm(2), settings, group)
    network = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)).eval()
    if advised is None:
        check_batch(network, settings, group)
        return
    with pytest.raises(SettingsError, match=rf"^batch_size = {batch_size} leaves one image .*choose {advised} or more"):
        check_batch(network, settings, group)


def test_the_first_of_the_processes_warns_of_a_clamped_batch(caplog):
    for rank in range(4):
        fit_batch("pretrain.mae", TrainingSettings(batch_size=1024), 643, processes(rank=rank))
    (message,) = caplog.messages
    assert message.startswith("pretrain.mae.batch_size = 1024 is larger than the 643 images to train on")


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches of a training that is resumed


ALONE = Processes(rank=0, world_size=1, local_rank=0, device=HOST)


def resumed(root, dealing, accumulation, group=ALONE):
    """The accumulation with which a training goes on whose checkpoint notes this."""
    held = Checkpoints(root, "distill", settings={"epochs": 3}, parents={"dataset": "abc"})
    held.dealing = dealing
    held.save(snapshot_of(10, learner()))
    held.finish(needed=True)
    settings = TrainingSettings(batch_size=64, accumulation=accumulation)
    return keep_micro_batches("distill", settings, held, group, because="a reason").accumulation


@pytest.mark.parametrize(
    ("dealing", "accumulation", "expected"),
    [(Dealing(4, 4), 4, 4), (Dealing(4, 2), 4, 4), (Dealing(8, 2), 2, 8), (None, 3, 3)],
    ids=["as before", "as before by settings", "on a quarter of the processes", "of an older version"],
)
def test_a_resumed_training_keeps_its_micro_batches(tmp_path, caplog, dealing, accumulation, expected):
    assert resumed(tmp_path, dealing, accumulation) == expected
    said = [text for text in caplog.messages if "continues on 1 processes with accumulation=8 in place of 2" in text]
    assert len(said) == (expected == 8)


def test_another_accumulation_is_refused_with_the_one_that_fits(tmp_path):
    reason = r"distill\.accumulation = 4 on 1 processes makes 4 micro-batches .* began with 2 .*\(a reason\); give accumulation=2 to"
    with pytest.raises(SettingsError, match=reason):
        resumed(tmp_path, Dealing(2, 2), 4)


def test_processes_that_cannot_share_the_micro_batches_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Processes, "gather", lambda self, value, what: [value] * self.world_size)
    with pytest.raises(
        SettingsError, match=r"on 4 processes makes 4 .* give a number of processes that divides 6 to continue"
    ):
        resumed(tmp_path, Dealing(6, 1), 1, processes())


def made(architecture, **args):
    return networks.create(ModelSettings(architecture=architecture, args=args), ["a", "b"])


def test_micro_batches_count_where_images_meet_in_them():
    tiny = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    transformer, convolutional = made("vit_tiny_patch16_224", **tiny), made("test_resnet")
    related = DistillSettings(logit={"loss": "dist"})
    assert why_micro_batches_count(related, transformer).startswith("logit.loss=dist compares")
    for settings in ({}, {"logit": {"loss": "dist", "gamma": 0}}, {"logit_weight": 0, "label_weight": 1}):
        assert not why_micro_batches_count(DistillSettings(**settings), transformer), settings
    assert why_micro_batches_count(DistillSettings(), convolutional).startswith("batch normalization takes")
    convolutional.trains_head_alone = True
    assert not why_micro_batches_count(DistillSettings(), convolutional), "its statistics are those that it has"
