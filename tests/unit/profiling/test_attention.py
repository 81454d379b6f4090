from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from trainer import models
from trainer.config import MaeSettings, ModelSettings
from trainer.models import Classifier
from trainer.pretraining.masked_autoencoder import MaskedAutoencoder
from trainer.profiling.attention import AttentionEntropy
from trainer.training.parallelize import CompileCounter, compile_blocks


def make(**changes: object) -> Classifier:
    torch.manual_seed(0)
    args = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2} | changes
    return models.create(ModelSettings(architecture="vit_tiny_patch16_224", args=args), ["a", "b"], drop_path=0.5)


def images() -> torch.Tensor:
    return torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_the_entropy_is_that_of_the_rows() -> None:
    model = make().train()
    heard: list[torch.Tensor] = []
    attention = model.network.blocks[1].attn
    nn.init.normal_(attention.qkv.weight)
    handle = attention.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    entropy = AttentionEntropy(model)
    assert entropy.metrics == ["attention_entropy/network.blocks.0", "attention_entropy/network.blocks.1"]
    values = entropy.measure(lambda: model(images()))
    handle.remove()
    with torch.no_grad():
        queries, keys, _ = attention.qkv(heard[0]).reshape(3, 17, 3, 2, 8).permute(2, 0, 3, 1, 4)
        rows = (queries @ keys.transpose(-2, -1) / math.sqrt(8)).softmax(-1)
    expected = torch.distributions.Categorical(probs=rows).entropy().mean() / math.log(17)
    assert float(values[1]) == pytest.approx(float(expected), rel=1e-4)
    assert 0.01 < float(values[1]) < 0.9 < float(values[0]) <= 1


def test_attention_to_one_token_has_none() -> None:
    model = make(embed_dim=32)
    for block in model.network.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=30)
    assert (AttentionEntropy(model).measure(lambda: model(images())) < 0.05).all()


def test_looking_leaves_no_trace() -> None:
    model = make().train()
    state = torch.get_rng_state()
    entropy = AttentionEntropy(model)
    entropy.measure(lambda: model(images()))
    assert torch.equal(torch.get_rng_state(), state), "stochastic depth draws nothing"
    assert model.training
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(weights.grad is None for weights in model.parameters())


def test_an_exception_leaves_no_trace_either() -> None:
    model = make().train()
    with pytest.raises(RuntimeError, match="size of tensor"):
        AttentionEntropy(model).measure(lambda: model(images()[:, :1].float().expand(3, 4, 16, 16)))
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_both_networks_of_an_autoencoder_are_seen() -> None:
    settings = MaeSettings(decoder_dim=8, decoder_depth=1, decoder_heads=2)
    autoencoder = MaskedAutoencoder(make(), settings)
    entropy = AttentionEntropy(autoencoder)
    assert entropy.metrics[-1] == "attention_entropy/decoder_blocks.0"
    values = entropy.measure(lambda: autoencoder(images(), torch.rand(3, 16)))
    assert torch.isfinite(values).all()


def test_a_block_that_nobody_asks_is_not_told() -> None:
    model = make()
    values = AttentionEntropy(model).measure(lambda: model.network.blocks[0](torch.rand(1, 17, 16)))
    assert torch.isnan(values).tolist() == [False, True]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_what_is_compiled_is_neither_asked_nor_compiled_again() -> None:
    torch._dynamo.reset()
    model, graphs = make().train(), CompileCounter("eager")
    compile_blocks(model, graphs)
    model(images()).sum().backward()
    compiled = graphs.count
    assert compiled
    entropy = AttentionEntropy(model)
    for _ in range(2):
        assert torch.isfinite(entropy.measure(lambda: model(images()[:2]))).all()
        model(images()).sum().backward()
    assert graphs.count == compiled
    torch._dynamo.reset()
