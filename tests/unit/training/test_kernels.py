"""Faster kernels compute what torch's own do."""

import copy

import pytest
import torch
from torch import nn

from trainer import devices, models
from trainer.config import ModelSettings
from trainer.devices import choose_device
from trainer.training import kernels
from trainer.training.averages import AveragedModel
from trainer.training.kernels import ConvolvedLinear, use_fast_kernels

WIDE = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 3}
"""65 tokens; four images are enough rows."""


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    return choose_device()


@pytest.fixture
def processor(monkeypatch):
    """Says which processor this is."""
    monkeypatch.setattr(devices, "has_bf16_instructions", devices.has_bf16_instructions.__wrapped__)  # not cached

    def says(**capabilities):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **capabilities})

    return says


def make(**changes):
    torch.manual_seed(0)
    return models.create(ModelSettings(architecture="vit_tiny_patch16_224", args=WIDE | changes), ["a", "b", "c"])


def images(count=8):
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def logits_and_gradients(model, device, precision):
    with device.autocast(precision):
        logits = model(images()).float()
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


def kinds(model):
    """Of the linear layers in the blocks, which are wide, and of the head, which is not."""
    network = model.network
    return {type(module) for module in network.blocks.modules() if isinstance(module, nn.Linear)}, type(network.head)


@pytest.mark.parametrize("rows", [1, kernels.LEAST_ROWS - 1, kernels.LEAST_ROWS, 1000])
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
    convolve = kernels.F.conv2d
    monkeypatch.setattr(kernels.F, "conv2d", lambda *given, **named: (calls.append(1), convolve(*given, **named))[1])

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
    plain, fast = make(), make()
    processor(cpu_name="AMD EPYC", avx512_bf16=True)
    use_fast_kernels(fast, on_cpu, precision)
    assert list(fast.state_dict()) == list(plain.state_dict())
    expected, got = (logits_and_gradients(model, on_cpu, precision) for model in (plain, fast))
    for theirs, ours in zip(expected, got, strict=True):
        assert float((ours - theirs).norm() / theirs.norm().clamp(min=1e-6)) < tolerance


def test_the_same_bits_again(on_cpu, processor):
    processor(cpu_name="AMD EPYC")
    first, second = make(), make()
    for model in (first, second):
        use_fast_kernels(model, on_cpu, "fp32")
    for one, other in zip(
        logits_and_gradients(first, on_cpu, "fp32"), logits_and_gradients(second, on_cpu, "fp32"), strict=True
    ):
        assert torch.equal(one, other)


def test_the_processor_and_the_precision_decide(on_cpu, processor):
    def after(precision, **capabilities):
        processor(**capabilities)
        model = make()
        use_fast_kernels(model, on_cpu, precision)
        return kinds(model)[0], model.network.blocks[0].attn.fused_attn

    assert after("fp32", cpu_name="AMD EPYC", avx512_bf16=True) == ({ConvolvedLinear}, True)
    assert after("auto", cpu_name="AMD EPYC", avx512_bf16=True) == ({ConvolvedLinear}, True)
    assert after("bf16", cpu_name="AMD EPYC", avx512_bf16=True) == ({nn.Linear}, False)
    assert after("bf16", cpu_name="Intel Xeon", amx_bf16=True) == ({nn.Linear}, True)
    assert after("bf16", cpu_name="AMD EPYC", avx512_bf16=False) == ({ConvolvedLinear}, True)
    assert after("fp32", cpu_name="Intel Xeon") == ({nn.Linear}, True)
    assert after("fp32") == ({nn.Linear}, True)


def test_copies_averages_and_optimizers_keep_to_the_weights(on_cpu, processor):
    processor(cpu_name="AMD EPYC")
    model = make()
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
    make().load_state_dict(model.state_dict())
