"""Kernels for a CPU: the same mathematics, chosen by processor, precision and shapes."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from trainer.config import MaeSettings, ModelSettings
from trainer.devices import choose_device, device
from trainer.devices.process_group import Processes
from trainer.models import networks
from trainer.training import cpu_kernels
from trainer.training.cpu_kernels import ConvolvedLinear, choose_cpu_kernels, use_fast_kernels
from trainer.training.optimizers import AveragedModel
from trainer.training.parallelize import parallelize_model

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


@pytest.mark.parametrize("rows", [1, cpu_kernels.LEAST_ROWS - 1, cpu_kernels.LEAST_ROWS, 1000])
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
    convolve = cpu_kernels.F.conv2d
    monkeypatch.setattr(
        cpu_kernels.F, "conv2d", lambda *given, **named: (calls.append(1), convolve(*given, **named))[1]
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
