import dataclasses

import pytest
from torch import nn

from trainer.config import TrainingSettings
from trainer.devices import choose_device
from trainer.errors import SettingsError
from trainer.training.process_group import Processes
from trainer.training.spec import check_batch, fit_batch


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")


def processes(*, traces=False, rank=0):
    device = dataclasses.replace(choose_device(), traces=traces)
    return Processes(rank=rank, world_size=4, local_rank=rank, device=device)


@pytest.mark.parametrize(("traces", "size"), [(False, 643), (True, 640)])
def test_a_clamped_batch_can_be_dealt_to_the_processes(traces, size):
    """XLA, which compiles each size by itself, refuses one that cannot be dealt evenly."""
    group, settings = processes(traces=traces), TrainingSettings(batch_size=1024, accumulation=2)
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
