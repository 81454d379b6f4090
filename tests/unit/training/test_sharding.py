"""Weights that processes share out: what a process needs of its memory, and when `sharding=auto` shares them out."""

import json
import logging
from dataclasses import replace

import pytest
from torch import nn

from tests.forks import on_two_processes
from trainer.config import TrainingSettings
from trainer.devices import HOST
from trainer.devices.process_group import Processes
from trainer.io.errors import SettingsError
from trainer.io.formatting import size
from trainer.training import sharding
from trainer.training.sharding import decided

PEAK = """
import resource
import sys
import psutil
import torch
from torch import nn
from trainer.config import ModelSettings, TrainingSettings
from trainer.devices.process_group import join_processes
from trainer.models import networks
from trainer.training.optimizers import make_optimizer, parameter_groups
from trainer.training.parallelize import parallelize_model

SETTINGS = TrainingSettings(sharding=sys.argv[1])

def train(processes, **args):
    sizes = {"img_size": 16, "patch_size": 8, "num_heads": 5, **args}
    model = networks.create(ModelSettings(architecture="vit_tiny_patch16_224", args=sizes), ["a", "b"]).train()
    parallel, _ = parallelize_model(model, SETTINGS, processes)
    optimizer = make_optimizer(parameter_groups(model, weight_decay=0.05), SETTINGS, processes)
    for _ in range(2):
        parallel(torch.full((2, 3, 16, 16), 128, dtype=torch.uint8)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

with join_processes() as processes:
    train(processes, embed_dim=20, depth=2)  # loads what is loaded once
    before = psutil.Process().memory_info().rss
    train(processes, embed_dim=320, depth=24)
    print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_two_processes_need_at_most_0_65_of_the_memory_each(tmp_path):
    whole, shared = (
        max(json.loads(said) for said, _ in on_two_processes(PEAK, tmp_path, way)) for way in ("none", "fsdp")
    )
    assert shared <= 0.65 * whole, (shared >> 20, whole >> 20)


class Two(Processes):
    """One of two processes that are alike."""

    def gather(self, value, what=""):
        return [value] * 2


TWO = Two(rank=0, world_size=2, local_rank=0, local_world_size=2, device=HOST)
MODEL, TEACHER = nn.Linear(100, 10), nn.Linear(50, 2)  # 1,010 and 102 weights


@pytest.mark.parametrize(
    ("settings", "bytes_each"), [({}, 1010 * 16 + 102 * 4), ({"ema_decay": 0.9}, 1010 * 20 + 102 * 4)]
)
def test_auto_shares_out_what_takes_more_than_half_of_the_memory(monkeypatch, caplog, settings, bytes_each):
    caplog.set_level(logging.INFO)
    for memory, wanted in ((2 * bytes_each, "none"), (2 * bytes_each - 2, "fsdp")):
        monkeypatch.setattr(sharding, "usable_memory", lambda memory=memory: 2 * memory)  # of two processes
        assert decided("distill", TrainingSettings(**settings), TWO, MODEL, [TEACHER]).sharding == wanted
        assert f"sharding={wanted}: a process has {size(memory)}, " in caplog.messages[-1]
    explicit = TrainingSettings(sharding="none")
    assert decided("distill", explicit, TWO, MODEL) is explicit
    frozen = nn.Linear(100, 10).requires_grad_(False)
    assert decided("distill", TrainingSettings(**settings), TWO, frozen).sharding == "none", "has no gradient"


def test_a_single_process_and_xla_share_nothing_out():
    alone = Processes(rank=0, world_size=1, local_rank=0, device=HOST)
    assert decided("distill", TrainingSettings(), alone, MODEL).sharding == "auto"
    xla = replace(TWO, device=replace(HOST, kind="xla", is_lazy=True))
    assert decided("distill", TrainingSettings(), xla, MODEL).sharding == "auto"
    with pytest.raises(SettingsError, match=r"distill\.sharding is fsdp.*set distill\.sharding=none"):
        decided("distill", TrainingSettings(sharding="fsdp"), xla, MODEL)
