import json
import logging

import pytest
import torch
from torch import nn

from tests.forks import on_two_processes
from tests.stand_ins.gpu import DEVICE as GPU
from trainer.config import MaeSettings, ModelSettings, TrainingSettings
from trainer.devices import HOST, choose_device
from trainer.devices.process_group import Processes
from trainer.devices.torch_private import keep_activations
from trainer.models import networks
from trainer.objectives.pretraining import MaskedAutoencoder
from trainer.training import parallelize
from trainer.training.parallelize import (
    WARM_STEPS,
    CompileCounter,
    compile_blocks,
    compiler_options,
    parallelize_model,
    repeated_blocks,
)

# The tracer looks at inner tensors too.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 10, "num_heads": 2}


def make(*, drop_path=0.0, **changes):
    torch.manual_seed(0)
    settings = ModelSettings(architecture="vit_tiny_patch16_224", args=TINY | changes)
    return networks.create(settings, ["a", "b", "c"], drop_path=drop_path)


def images():
    return torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def graphs():
    """Counts the graphs that are traced, and runs them as they are: a compiler would take seconds for each."""
    torch._dynamo.reset()
    yield CompileCounter("eager")
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


def test_a_smaller_budget_keeps_fewer_activations():
    kept = {}
    for share in (1.0, 0.0, 1.0):
        torch._dynamo.reset()
        keep_activations(share)
        model, sizes = make(depth=2), []
        compile_blocks(model, CompileCounter("aot_eager_decomp_partition"))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one, own=sizes: own.append(one.nbytes) or one, lambda one: one
        ):
            model(images())
        kept[share] = sum(sizes)
    assert kept[0.0] < 0.7 * kept[1.0]


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
    with torch.inference_mode():  # a validation
        model.eval()(images()[:2])
    graphs.check("distill", WARM_STEPS + 2)
    assert caplog.messages == []
    model.train()(images()[:2])
    graphs.check("distill", WARM_STEPS + 2, planned=True)  # the input grew
    assert caplog.messages == []
    model.train()(images()[:3])
    graphs.check("distill", WARM_STEPS + 2)
    assert caplog.messages == ["distill  compiled again after 5 steps (3 graphs by now), which costs time"]
    graphs.check("distill", WARM_STEPS + 3)
    assert len(caplog.messages) == 1


def test_only_max_changes_the_compiler_and_graphs_need_steps_that_are_alike():
    def options(device=GPU, world_size=1, **values):
        processes = Processes(rank=0, world_size=world_size, local_rank=0, device=device)
        return compiler_options(TrainingSettings(**values), processes)

    assert options(compile="on") == options(compile="auto") == {}
    assert options(compile="max") == {"max_autotune_gemm": True, "triton.cudagraphs": True}
    unlike = (
        {"accumulation": 2},
        {"world_size": 2},
        {"low_resolution": {"image_size": 8, "epochs": 1}},
        {"device": HOST},
    )
    for changes in unlike:
        assert not options(compile="max", **changes)["triton.cudagraphs"], changes


class Shapes(CompileCounter):
    """Counts graphs, also a validation's, runs them as they are, and notes which of them take a size that is not a number."""

    def __init__(self, options=None):
        assert not options
        super().__init__("eager")
        self.all = self.symbolic = 0

    def __call__(self, graph, inputs):
        self.all += 1
        sizes = [size for one in inputs for size in (one.shape if isinstance(one, torch.Tensor) else [one])]
        self.symbolic += any(isinstance(size, torch.SymInt) for size in sizes)
        return super().__call__(graph, inputs)


def test_blocks_of_one_training_after_another_are_compiled_for_their_own_shape(monkeypatch):
    """As those of tune's trials: a size that changes would become a symbol, and from the ninth training on torch would give up."""
    monkeypatch.setattr(parallelize, "CompileCounter", Shapes)
    monkeypatch.setattr(parallelize, "DistributedDataParallel", lambda model, **_: model)
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    processes = Processes(rank=0, world_size=2, local_rank=0, device=choose_device())
    counts = []
    for size in range(2, 12):
        called, graphs = parallelize_model(make(depth=2).train(), TrainingSettings(compile="on"), processes)
        for _ in range(2):
            called(torch.zeros(size, 3, 16, 16, dtype=torch.uint8)).sum().backward()
        counts.append((graphs.count, graphs.symbolic))
    assert counts == [(1, 0)] * 10


def test_blocks_with_stochastic_depth_are_compiled_for_two_sizes_of_a_step_and_of_a_validation():
    """Where processes cannot share a batch evenly, there are two of each."""
    torch.compiler.reset()
    model, graphs = make(drop_path=0.2, depth=3), Shapes()
    compile_blocks(model, graphs)
    for _ in range(2):
        for size in (3, 4):
            model.train()(images()[:size]).sum().backward()
        with torch.inference_mode():
            for size in (1, 2):
                model.eval()(images()[:size])
    assert (graphs.count, graphs.all, graphs.symbolic) == (6, 12, 0)  # torch gives up at more than 8 of a function


def test_one_process_gets_its_own_model_unless_it_is_compiled(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    alone = Processes(rank=0, world_size=1, local_rank=0, device=choose_device())
    model = make(depth=2)
    assert parallelize_model(model, TrainingSettings(), alone) == (model, None)
    whole, graphs = parallelize_model(model, TrainingSettings(compile="on"), alone)
    assert whole is not model
    assert isinstance(graphs, CompileCounter)


SHARED = """
import json, torch
from trainer.models import networks as models
from trainer.config import MaeSettings, ModelSettings, TrainingSettings
from trainer.objectives.distillation.objective import ProjectedStudent
from trainer.objectives.pretraining import MaeObjective, MaskedAutoencoder
from trainer.devices.process_group import join_processes
from trainer.training.parallelize import DdpTimer, CompileCounter, compile_blocks, parallelize_model

TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 10, "num_heads": 2}

def make(drop_path=0.0):
    torch.manual_seed(0)
    settings = ModelSettings(architecture="vit_tiny_patch16_224", args=TINY)
    return models.create(settings, ["a", "b"], drop_path=drop_path).train()

def gradient(model, loss, processes=None, **settings):
    called = model
    if processes is not None:
        called, _ = parallelize_model(model, TrainingSettings(**settings), processes)
    for step in range(3):
        model.zero_grad()
        generator = torch.Generator().manual_seed(step)
        images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=generator)
        noise = torch.rand(4, 4, generator=generator)
        if processes is not None:
            half = slice(2 * processes.rank, 2 * processes.rank + 2)
            images, noise = images[half], noise[half]
        torch.manual_seed(step)
        loss(called, images, noise).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])

def autoencoder():
    model = MaskedAutoencoder(make(), MaeSettings(decoder_dim=16, decoder_depth=2, decoder_heads=2))
    MaeObjective(model, 0)
    return model

def student():
    return ProjectedStudent(make(), 8)

def of_logits(model, images, noise):
    return model(images).square().mean()

def of_both(model, images, noise):
    logits, _, features, *_ = model(images, compared=True)
    return logits.square().mean() + features.square().mean()

def of_reconstruction(model, images, noise):
    return model(images, noise)[0]

with join_processes() as processes:
    result = {}
    for name, build, loss, settings in (
        ("logits", make, of_logits, {}),
        ("logits, rounded", make, of_logits, {"gradient_compression": "bf16"}),
        ("features", student, of_both, {}),
        ("reconstruction", autoencoder, of_reconstruction, {}),
    ):
        expected, got = gradient(build(), loss), gradient(build(), loss, processes, **settings)
        result[name] = float((got - expected).norm() / expected.norm())
    model, graphs = make(drop_path=0.2), CompileCounter("eager")
    compile_blocks(model, graphs)
    compiled = gradient(model, of_logits, processes)
    result["compiled"] = float((compiled - gradient(make(drop_path=0.2), of_logits, processes)).norm() / compiled.norm())
    result["graphs"] = graphs.count
    model, _ = parallelize_model(make(), TrainingSettings(), processes)
    exchange, reported = DdpTimer(model), []
    for step in range(14):
        model(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).sum().backward()
        exchange.read()
        reported.append(exchange.record())
    result["exchange"] = [sum(record is None for record in reported), reported[-1].model_dump()]
    print(json.dumps(result))
"""


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path):
    """With a static graph, for every kind of model that is trained; stochastic depth draws differently, so it is compared with itself."""
    for printed in [json.loads(out) for out, _ in on_two_processes(SHARED, tmp_path, TRAINER_DEVICE="cpu")]:
        assert printed.pop("graphs") == 10
        unknown, exchange = printed.pop("exchange")
        assert unknown >= WARM_STEPS
        assert 3 <= exchange["steps"] <= 10 - WARM_STEPS
        assert 0 <= exchange["hidden_s"] <= exchange["exchange_s"] < 10
        assert 0 < exchange["backward_s"] < 10
        assert 1e-4 < printed.pop("logits, rounded") < 1e-2
        assert all(error < 1e-5 for error in printed.values()), printed
