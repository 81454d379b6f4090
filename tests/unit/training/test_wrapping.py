import logging

import pytest
import torch
from torch import nn

from trainer import models
from trainer.config import MaeSettings, ModelSettings, TrainingSettings
from trainer.pretraining.masked_autoencoder import MaskedAutoencoder
from trainer.training.devices import choose_device
from trainer.training.processes import Processes
from trainer.training.wrapping import WARM_STEPS, Graphs, compile_blocks, repeated_blocks, wrap

# The tracer looks at inner tensors too.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 10, "num_heads": 2}


def make(*, drop_path=0.0, **changes):
    torch.manual_seed(0)
    settings = ModelSettings(architecture="vit_tiny_patch16_224", args=TINY | changes)
    return models.create(settings, ["a", "b", "c"], drop_path=drop_path)


def images():
    return torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def graphs():
    """Counts the graphs that are traced, and runs them as they are: a compiler would take seconds for each."""
    torch._dynamo.reset()
    yield Graphs("eager")
    torch._dynamo.reset()


def test_the_blocks_are_those_of_encoder_and_decoder():
    model = make(depth=3)
    assert list(repeated_blocks(model)) == list(model.network.blocks)
    autoencoder = MaskedAutoencoder(model, MaeSettings(decoder_dim=8, decoder_depth=2, decoder_heads=2))
    assert list(repeated_blocks(autoencoder)) == [*model.network.blocks, *autoencoder.decoder_blocks]


@pytest.mark.parametrize(("drop_path", "count"), [(0.0, 1), (0.2, 10)])
def test_every_block_is_compiled_and_alike_ones_share_a_graph(graphs, drop_path, count):
    plain, compiled = make(drop_path=drop_path), make(drop_path=drop_path)
    compile_blocks(compiled, graphs)
    for _ in range(2):
        outputs = []
        for model in (plain, compiled):
            torch.manual_seed(1)
            outputs.append(model.train()(images()))
            outputs[-1].sum().backward()
        assert torch.allclose(*outputs, atol=1e-5)
        assert graphs.count == count
    assert list(compiled.state_dict()) == list(plain.state_dict())


def test_a_model_without_repeated_blocks_is_compiled_whole(graphs):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    compile_blocks(model, graphs)
    model(torch.ones(1, 4))
    assert graphs.count == 1


def test_a_compiler_that_does_nothing_or_too_much_is_noticed(graphs, caplog):
    caplog.set_level(logging.WARNING)
    graphs.check("distill", WARM_STEPS)
    assert caplog.messages == ["distill  nothing of the model was compiled, so it trains uncompiled; set compile=off"]
    caplog.clear()
    model = make()
    compile_blocks(model, graphs)
    model(images())
    for steps in range(1, WARM_STEPS + 2):
        graphs.check("distill", steps)
    assert caplog.messages == []
    model(images()[:3])
    graphs.check("distill", WARM_STEPS + 2)
    assert caplog.messages == ["distill  compiled again after 5 steps (2 graphs by now), which costs time"]
    graphs.check("distill", WARM_STEPS + 3)
    assert len(caplog.messages) == 1


def test_one_process_gets_its_own_model_unless_it_is_compiled(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    alone = Processes(rank=0, world_size=1, local_rank=0, device=choose_device())
    model = make(depth=2)
    assert wrap(model, TrainingSettings(), alone) == (model, None)
    whole, graphs = wrap(model, TrainingSettings(compile="on"), alone)
    assert whole is not model
    assert isinstance(graphs, Graphs)
