import copy
import json
import logging

import pytest
import torch
from torch import nn

from tests.forks import on_two_processes
from trainer.config import MaeSettings, ModelSettings, TrainingSettings
from trainer.devices import choose_device, device
from trainer.devices.process_group import Processes
from trainer.models import networks
from trainer.objectives.pretraining import MaskedAutoencoder
from trainer.training import parallelize
from trainer.training.optimizers import AveragedModel
from trainer.training.parallelize import (
    WARM_STEPS,
    CompileCounter,
    ConvolvedLinear,
    choose_cpu_kernels,
    compile_blocks,
    parallelize_model,
    repeated_blocks,
    use_fast_kernels,
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


class Shapes(CompileCounter):
    """Counts graphs, also a validation's, runs them as they are, and notes which of them take a size that is not a number."""

    def __init__(self):
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
    model, graphs = make(drop_path=0.2, depth=5), Shapes()
    compile_blocks(model, graphs)
    for _ in range(2):
        for size in (3, 4):
            model.train()(images()[:size]).sum().backward()
        with torch.inference_mode():
            for size in (1, 2):
                model.eval()(images()[:size])
    assert (graphs.count, graphs.all, graphs.symbolic) == (10, 20, 0)


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


WIDE = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 3}
"""65 tokens; four images are enough rows."""


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    return choose_device()


@pytest.fixture
def processor(monkeypatch):
    """Says which processor this is."""
    monkeypatch.setattr(device, "has_bf16_instructions", device.has_bf16_instructions.__wrapped__)  # not cached

    def says(**capabilities):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **capabilities})

    return says


def make_wide(**changes):
    torch.manual_seed(0)
    return networks.create(ModelSettings(architecture="vit_tiny_patch16_224", args=WIDE | changes), ["a", "b", "c"])


def pictures(count=8):
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def logits_and_gradients(model, device, precision):
    with device.autocast(precision):
        logits = model(pictures()).float()
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


def kinds(model):
    """Of the linear layers in the blocks, which are wide, and of the head, which is not."""
    network = model.network
    return {type(module) for module in network.blocks.modules() if isinstance(module, nn.Linear)}, type(network.head)


@pytest.mark.parametrize("rows", [1, parallelize.LEAST_ROWS - 1, parallelize.LEAST_ROWS, 1000])
@pytest.mark.parametrize(("width_in", "width_out"), [(96, 96), (96, 288), (384, 96)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_is_a_matrix_product(rows, width_in, width_out, bias):
    torch.manual_seed(rows)
    linear = nn.Linear(width_in, width_out, bias=bias)
    convolved = ConvolvedLinear(linear)
    inputs = torch.randn(1, rows, width_in)
    theirs, ours = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    weight = torch.randn(1, rows, width_out)
    (linear(theirs) * weight).sum().backward()
    expected = [parameter.grad.clone() for parameter in linear.parameters()]
    linear.zero_grad()
    output = convolved(ours)
    (output * weight).sum().backward()
    assert output.is_contiguous()
    torch.testing.assert_close(output, linear(inputs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    for gradient, parameter in zip(expected, linear.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-3)


def test_large_products_only_are_convolutions(monkeypatch):
    calls = []
    convolve = parallelize.F.conv2d
    monkeypatch.setattr(
        parallelize.F, "conv2d", lambda *given, **named: (calls.append(1), convolve(*given, **named))[1]
    )

    def used(rows, dtype=torch.float32):
        calls.clear()
        ConvolvedLinear(nn.Linear(96, 96).to(dtype))(torch.zeros(rows, 96, dtype=dtype))
        return bool(calls)

    assert used(256)
    assert not used(255)
    assert not used(256, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert not used(256)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_logits_and_gradients_are_those_of_the_plain_model(on_cpu, processor, precision, tolerance):
    plain, fast = make_wide(), make_wide()
    processor(cpu_name="AMD EPYC", avx512_f=True, avx512_bf16=True)
    use_fast_kernels(fast, on_cpu, precision)
    assert list(fast.state_dict()) == list(plain.state_dict())
    expected, got = (logits_and_gradients(model, on_cpu, precision) for model in (plain, fast))
    for theirs, ours in zip(expected, got, strict=True):
        assert float((ours - theirs).norm() / theirs.norm().clamp(min=1e-6)) < tolerance


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_a_convolutional_network_computes_with_the_channels_last(on_cpu, precision, tolerance):
    def make():
        torch.manual_seed(0)
        return networks.create(ModelSettings(architecture="tf_efficientnet_lite0", image_size=32), ["a", "b"]).eval()

    plain, fast = make(), make()
    use_fast_kernels(fast, on_cpu, precision)
    maps = []
    fast.network.blocks[0].register_forward_pre_hook(lambda _, inputs: maps.append(inputs[0]))
    expected, got = (logits_and_gradients(model, on_cpu, precision) for model in (plain, fast))
    assert maps[0].is_contiguous(memory_format=torch.channels_last)
    assert not maps[0].is_contiguous()
    for theirs, ours in zip(expected, got, strict=True):
        assert ours.is_contiguous(), "optimizers and checkpoints know nothing of it"
        assert float((ours - theirs).norm() / theirs.norm().clamp(min=1e-6)) < tolerance


def test_a_transformer_does_not(on_cpu):
    model = make_wide()
    use_fast_kernels(model, on_cpu, "fp32")
    assert model.preprocess(pictures()).is_contiguous()


def test_the_same_bits_again(on_cpu, processor):
    processor(cpu_name="AMD EPYC", avx512_f=True)
    first, second = make_wide(), make_wide()
    for model in (first, second):
        use_fast_kernels(model, on_cpu, "fp32")
    for one, other in zip(
        logits_and_gradients(first, on_cpu, "fp32"), logits_and_gradients(second, on_cpu, "fp32"), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("processor", "fp32", "bf16"),
    [
        ({"cpu_name": "AMD EPYC", "avx2": True}, (False, False), (False, False)),  # Zen 3, as measured
        (
            {"cpu_name": "AMD EPYC", "avx512_f": True, "avx512_bf16": True},
            (True, False),
            (False, True),
        ),  # Zen 5, as measured
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, (True, False), (False, False)),
        ({"cpu_name": "Intel Xeon", "avx512_f": True}, (False, False), (False, False)),
        (
            {"cpu_name": "Intel Xeon", "avx512_f": True, "avx512_bf16": True, "amx_bf16": True},
            (False, False),
            (False, False),
        ),
        ({"architecture": "arm64"}, (False, False), (False, False)),
    ],
)
def test_kernels_are_ours_where_they_were_measured_to_be_faster(processor, fp32, bf16):
    assert choose_cpu_kernels(processor, bf16=False) == fp32
    assert choose_cpu_kernels(processor, bf16=True) == bf16


def test_the_layers_are_as_chosen_and_the_choice_is_logged(on_cpu, processor, caplog):
    caplog.set_level(logging.INFO)
    settings, processes = MaeSettings(), Processes(rank=0, world_size=1, local_rank=0, device=on_cpu)

    def after(precision, **capabilities):
        processor(cpu_name="AMD EPYC", **capabilities)
        model, _ = parallelize_model(make_wide(), settings.model_copy(update={"precision": precision}), processes)
        return kinds(model)[0], model.network.blocks[0].attn.fused_attn

    assert after("fp32", avx512_f=True, avx512_bf16=True) == ({ConvolvedLinear}, True)
    assert caplog.messages == [
        "processor AMD EPYC  linear layers by 1x1 convolutions (oneDNN), attention fused by torch"
    ]
    assert after("auto", avx512_f=True, avx512_bf16=True) == ({ConvolvedLinear}, True)
    assert after("bf16", avx512_f=True, avx512_bf16=True) == ({nn.Linear}, False)
    assert after("bf16", avx512_f=True) == ({ConvolvedLinear}, True)  # it computes in fp32
    assert after("bf16", avx2=True) == ({nn.Linear}, True)
    assert caplog.messages[-1] == "processor AMD EPYC  linear layers by torch's products, attention fused by torch"


def test_copies_averages_and_optimizers_keep_to_the_weights(on_cpu, processor):
    processor(cpu_name="AMD EPYC", avx512_f=True)
    model = make_wide()
    weights = dict(model.named_parameters())
    use_fast_kernels(model, on_cpu, "fp32")
    use_fast_kernels(model, on_cpu, "fp32")
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())

    duplicate = copy.deepcopy(model)
    average = AveragedModel(model, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    average.update(0)
    for name, parameter in duplicate.named_parameters():
        assert torch.allclose(parameter + 1, weights[name])
        assert torch.allclose(average.model.state_dict()[name], parameter + 0.9, atol=1e-5)
    assert kinds(duplicate) == kinds(average.model) == ({ConvolvedLinear}, nn.Linear)
    make_wide().load_state_dict(model.state_dict())
