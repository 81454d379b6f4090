"""torch_xla's ZeRO-1, alone on its device: the same steps as AdamW's, and the same checkpoints."""

import copy

import torch

from trainer.config import TrainingSettings
from trainer.devices import HOST, choose_device
from trainer.devices.process_group import Processes
from trainer.training.optimizers import RowShardedOptimizer, local_optimizer, make_optimizer, parameter_groups
from trainer.training.training_state import capture, restore

SETTINGS = TrainingSettings(base_learning_rate=0.1, clip_norm=0.5, zero=True)


def learner(device, *, sharded=False):
    """A model with its optimizer, and the process that they belong to."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 3)).to(device.torch_device)
    alone = Processes(rank=0, world_size=1, local_rank=0, device=device)
    options = {"lr": 0.1, **device.adamw_options}
    groups = parameter_groups(model, weight_decay=0.05)
    if not sharded:
        return model, make_optimizer(groups, SETTINGS, alone), alone
    return model, device.sharded_adamw(groups, options, clip_norm=SETTINGS.clip_norm), alone


def steps(count, model, optimizer, processes):
    device = processes.device.torch_device
    for _ in range(count):
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        model(torch.linspace(-3, 3, 12).view(4, 3).to(device)).square().sum().backward()
        if not isinstance(optimizer, RowShardedOptimizer):
            torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        processes.device.dispatch()


def state(step, model, optimizer, processes):
    return capture(step, model, optimizer, copy.deepcopy(model), processes=processes)


def assert_same(one, other):
    for part in ("model", "optimizer", "average"):
        theirs = getattr(other, part)
        assert {*getattr(one, part)} == {*theirs}
        for name, tensor in getattr(one, part).items():
            torch.testing.assert_close(tensor.cpu(), theirs[name].cpu(), rtol=1e-4, atol=1e-5, msg=name)


def test_its_steps_and_its_state_are_those_of_adamw(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "xla")
    there, here = learner(choose_device(), sharded=True), learner(HOST)
    assert local_optimizer(there[1]) is not there[1]
    for parts in (there, here):
        steps(5, *parts)
    assert_same(state(5, *there), state(5, *here))


def test_a_training_moves_between_cpu_and_xla(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "xla")
    device = choose_device()
    there, here, expected = learner(device, sharded=True), learner(HOST), learner(HOST)
    steps(9, *expected)
    steps(3, *there)
    restore(state(3, *there), here[0], here[1], None)
    steps(3, *here)
    there = learner(device, sharded=True)
    restore(state(6, *here), there[0], there[1], None)
    steps(3, *there)
    assert_same(state(9, *there), state(9, *expected))
