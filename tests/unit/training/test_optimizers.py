import json

import pytest
import safetensors.torch
import torch

from tests.forks import Program, free_port
from trainer.config import ModelSettings, TrainingSettings
from trainer.devices import HOST, choose_device
from trainer.devices.process_group import Processes
from trainer.models import networks
from trainer.training.optimizers import AveragedModel, make_optimizer, parameter_groups, rows_of, set_learning_rate

TINY = ModelSettings(
    architecture="vit_tiny_patch16_224",
    args={"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2},
)


@pytest.fixture
def model():
    return networks.create(TINY, ["a", "b"])


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
    for kept, learned in zip(average.model.buffers(), model.buffers(), strict=True):
        assert torch.equal(kept, learned)
    assert average.model.num_batches_tracked == 1
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


# -- batch normalization on several processes, each of which sees its own images

TRAINED = """
import json, sys
from pathlib import Path
import timm, torch
from tests.distillations import QUICK
from trainer import config; from trainer.models import networks as models
from trainer.config import EvidenceSettings, FinetuneSettings, ResidentSettings
from trainer.data.dataset import open_dataset
from trainer.data.loader import Samples
from trainer.models.networks import Classifier, ModelCard
from trainer.objectives.pretraining import FinetuneObjective
from trainer.devices import Device
from trainer.training.loop import Trainer
from trainer.devices.process_group import join_processes
from trainer.training.spec import TrainingSpec

folder, digits = Path(sys.argv[1]), sys.argv[2]
asked = {name: QUICK[name] for name in ("epochs", "warmup_epochs", "log_every", "checkpoint_every", "evidence")}
settings = config.validate(FinetuneSettings, asked | {"batch_size": 720, "accumulation": 2, "ema_decay": 0.5})
settings = settings.model_copy(update={"evidence": EvidenceSettings(operators_steps=0, tensors_every=0)})
torch.manual_seed(0)
network = timm.create_model("resnet10t", num_classes=10, stem_width=8, channels=(8, 8, 16, 16))
card = ModelCard(
    architecture="resnet10t", args={}, labels=tuple(map(str, range(10))), image_size=16, mean=(0.5,) * 3, std=(0.25,) * 3
)
before = []
average = Device.average

def noted(device, tensors, *, world_size):
    before.append(torch.cat([tensor.flatten() for tensor in tensors]).tolist())
    average(device, tensors, world_size=world_size)

Device.average = noted
with join_processes() as processes:
    training = TrainingSpec(
        name="finetune", objective=FinetuneObjective(Classifier(network, card), label_smoothing=0.0),
        samples=Samples([open_dataset(digits).split("train")]), view_size=16, settings=settings, loading=ResidentSettings(workers=0),
        processes=processes,
    )
    trained = Trainer(training).train()
    models.save(trained, folder)
    held = {name: buffer.tolist() for name, buffer in trained.network.named_buffers()}
    print(json.dumps([before, held, {name: part.tolist() for name, part in network.named_buffers()}]))
"""


def test_statistics_are_averaged_over_the_processes_and_kept(digits, tmp_path):
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    folders = [tmp_path / str(rank) for rank in range(2)]
    programs = []
    for rank, folder in enumerate(folders):
        folder.mkdir()
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TRAINER_DEVICE": "cpu"}
        programs.append(Program(TRAINED, str(folder), digits, folder=folder, **common, **place))
    (first, averaged, plain), second = [json.loads(program.end()[0]) for program in programs]
    assert len(first) == len(second[0]) == 2, "once a step"
    assert first[-1] != second[0][-1], "the processes have seen other images"
    assert [averaged, plain] == second[1:]
    statistics = [name for name in plain if not name.endswith("num_batches_tracked")]
    expected = [(one + other) / 2 for one, other in zip(first[-1], second[0][-1], strict=True)]
    got = [number for name in statistics for number in plain[name]]
    assert max(abs(one - other) for one, other in zip(got, expected, strict=True)) < 1e-6
    assert averaged == plain, "the moving average of the weights has the same statistics"
    assert plain["bn1.num_batches_tracked"] == 4, "a step has two micro-batches"
    saved = [safetensors.torch.load_file(folder / "model.safetensors") for folder in folders]
    assert all(saved[0][name].tolist() == saved[1][name].tolist() == plain[name] for name in statistics)
