import pytest
import torch

from trainer import models
from trainer.config import ModelSettings, TrainingSettings
from trainer.devices import HOST, choose_device
from trainer.training.optimizers import AveragedModel, make_optimizer, parameter_groups, rows_of, set_learning_rate
from trainer.training.process_group import Processes

TINY = ModelSettings(
    architecture="vit_tiny_patch16_224",
    args={"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2},
)


@pytest.fixture
def model():
    return models.create(TINY, ["a", "b"])


def names_of(model, group):
    names = {id(parameter): name for name, parameter in model.network.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
def test_every_weight_is_in_one_group_and_only_matrices_decay(model, layer_decay):
    groups = parameter_groups(model, weight_decay=0.1, layer_decay=layer_decay)
    everything = [name for group in groups for name in names_of(model, group)]
    assert sorted(everything) == sorted(name for name, _ in model.network.named_parameters())
    for group in groups:
        for name in names_of(model, group):
            is_matrix = name.endswith("weight") and "norm" not in name
            assert group["weight_decay"] == (0.1 if is_matrix else 0.0), name


def test_layer_decay_halves_the_rate_from_block_to_block(model):
    groups = parameter_groups(model, weight_decay=0.1, layer_decay=0.5)
    scales = {name: group["lr_scale"] for group in groups for name in names_of(model, group)}
    assert scales["head.weight"] == 1.0
    assert [scales[f"blocks.{block}.mlp.fc1.weight"] for block in (2, 1, 0)] == [0.5, 0.25, 0.125]
    assert scales["patch_embed.proj.weight"] == scales["pos_embed"] == 0.0625


def test_the_learning_rate_reaches_every_group_with_its_scale(model):
    processes = Processes(rank=0, world_size=1, local_rank=0, device=choose_device())
    groups = parameter_groups(model, weight_decay=0.1, layer_decay=0.5)
    optimizer = make_optimizer(groups, TrainingSettings(), processes)
    set_learning_rate(optimizer, 0.8, HOST)
    assert {group["lr"] for group in optimizer.param_groups} == {0.8, 0.4, 0.2, 0.1, 0.05}


def test_frozen_weights_are_in_no_group(model):
    model.network.head.requires_grad_(False)
    groups = parameter_groups(model, weight_decay=0.1)
    assert not any("head" in name for group in groups for name in names_of(model, group))


def test_steps_are_those_of_plain_adamw():
    processes = Processes(rank=0, world_size=1, local_rank=0, device=choose_device())
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    theirs.load_state_dict(ours.state_dict())
    settings = TrainingSettings(weight_decay=0.1, batch_size=256, base_learning_rate=0.01)
    optimizer = make_optimizer(parameter_groups(ours, weight_decay=0.1), settings, processes)
    plain = torch.optim.AdamW(
        [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}], lr=0.01
    )
    for _ in range(3):
        inputs = torch.randn(8, 4)
        for model, stepper in ((ours, optimizer), (theirs, plain)):
            model.zero_grad()
            model(inputs).square().mean().backward()
            stepper.step()
    assert torch.allclose(ours.weight, theirs.weight)
    assert torch.allclose(ours.bias, theirs.bias)


def test_the_average_follows_its_recurrence():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.0)
    average = AveragedModel(model, decay=0.6)
    expected = 0.0
    for step in range(20):
        torch.nn.init.constant_(model.weight, float(step))
        average.update(step)
        decay = min(0.6, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert float(average.model.weight) == pytest.approx(expected, rel=1e-5)


def test_buffers_are_copied_and_nothing_is_trained():
    model = torch.nn.BatchNorm1d(3)
    average = AveragedModel(model, decay=0.9)
    model(torch.randn(16, 3) + 5)
    average.update(0)
    assert torch.equal(average.model.running_mean, model.running_mean)
    assert not any(parameter.requires_grad for parameter in average.model.parameters())
    assert not average.model.training


@pytest.mark.parametrize("shape", [(5,), (4, 3), (1, 2, 2), (7, 1)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_rows_are_dealt_evenly_and_all(shape, world_size):
    tensor = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    parts = [rows_of(tensor, rank, world_size) for rank in range(world_size)]
    assert len({part.shape for part in parts}) == 1
    assert len(parts[0]) == -(-shape[0] // world_size)
    joined = torch.cat(parts)
    assert torch.equal(joined[: shape[0]], tensor)
    assert not joined[shape[0] :].any()
