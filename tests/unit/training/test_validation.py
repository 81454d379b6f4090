import multiprocessing

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainer import models
from trainer.config import ModelSettings, TrainingSettings
from trainer.devices import choose_device
from trainer.training.process_group import Processes
from trainer.training.validation import batch_size_of, validate

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


class Images:
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)
        self.labels = np.arange(count) % 3
        self.keys = np.arange(count, dtype=np.uint64)

    def __len__(self):
        return len(self.labels)

    def read(self, indices):
        return self.images[list(indices)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return models.create(ModelSettings(architecture="vit_tiny_patch16_224", args=TINY), ["a", "b", "c"], drop_path=0.5)


def processes(rank=0, world_size=1):
    return Processes(rank=rank, world_size=world_size, local_rank=rank, device=choose_device())


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_figures_are_those_of_one_forward_pass(model, batch_size):
    split = Images(20)
    figures = validate(model.train(), split, processes(), batch_size=batch_size, precision="fp32")
    assert model.training
    logits = model.eval()(split.images).detach()
    labels = torch.from_numpy(split.labels)
    assert figures["val_top1"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert figures["val_loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


def test_processes_share_the_images_out_without_leaving_one(model, monkeypatch):
    split, seen = Images(11), []
    read = split.read
    split.read = lambda indices: (seen.extend(indices), read(indices))[1]
    monkeypatch.setattr(Processes, "gather", lambda self, value, what: [value])
    for rank in range(3):
        validate(model, split, processes(rank, 3), batch_size=2, precision="fp32")
    assert sorted(seen) == list(range(11))


def test_loader_processes_read_the_images(model, monkeypatch):
    split, read_here = Images(20), []
    read = split.read
    split.read = lambda indices: (read_here.extend(indices), read(indices))[1]
    alone = validate(model, split, processes(), batch_size=6, precision="fp32")
    assert len(read_here) == 20
    read_here.clear()
    assert validate(model, split, processes(), batch_size=6, precision="fp32", workers=2) == alone
    assert read_here == []
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("world_size", "expected"), [(1, 25), (2, 13)])
def test_a_batch_is_the_micro_batch_of_the_training(world_size, expected):
    settings = TrainingSettings(batch_size=100, accumulation=4)
    assert batch_size_of(settings, processes(0, world_size)) == expected


def test_it_is_broken_off_after_a_batch_and_equally_often_asked_on_all_processes(model):
    asked = []
    for rank in range(3):
        looks = []
        figures = validate(
            model.train(), Images(7), processes(rank, 3), batch_size=1, precision="fp32",
            should_stop=lambda looks=looks: looks.append(1) or len(looks) == 3,
        )  # fmt: skip
        asked.append(len(looks))
        assert figures is None, "two of the processes have no third image, but the first one has"
        assert model.training
    assert asked == [3, 3, 3]
