"""Low-rank adaptation, and fine-tuning of the head alone: what is trained, what is frozen, and what comes out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer import models
from trainer.config import FinetuneSettings, LoraSettings, ModelSettings
from trainer.errors import ModelError
from trainer.pretraining import FinetuneObjective, freeze
from trainer.training.lora import LoraLinear, merge_lora
from trainer.training.optimizers import parameter_groups, running_statistics

SMALL = {"img_size": 32, "embed_dim": 32, "num_heads": 2, "depth": 2}
NETWORKS = {
    "vit_tiny_patch16_224": SMALL | {"patch_size": 8},
    "beit_base_patch16_224": SMALL | {"patch_size": 8},
    "eva02_tiny_patch14_224": SMALL | {"patch_size": 8},
    "vit_small_patch16_dinov3": SMALL | {"patch_size": 8},
    "swin_tiny_patch4_window7_224": {"img_size": 32, "embed_dim": 16, "window_size": 4},
    "convnext_atto": {"conv_mlp": False},
}
"""Architectures whose linear layers are called in different ways -> arguments that make them small."""
IMAGES = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 1])


def made(name="vit_tiny_patch16_224", **settings):
    torch.manual_seed(0)
    model = models.create(ModelSettings(architecture=name, args=NETWORKS.get(name, {}), image_size=32), ["a", "b", "c"])
    freeze(model, FinetuneSettings(**settings))
    return model


def learned(model, steps=3):
    """Train a little with large steps, so that nothing that can change stays as it is."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model.train()(IMAGES), LABELS).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("name", NETWORKS)
def test_merged_weights_compute_what_was_trained_and_only_matrices_and_the_head_are_others(name):
    model = made(name, method="lora", lora=LoraSettings(rank=2))
    before = {key: value.clone() for key, value in made(name).network.state_dict().items()}
    assert torch.allclose(model.eval()(IMAGES), made(name).eval()(IMAGES)), "it begins where the weights are"
    adapted = [key for key, module in model.network.named_modules() if isinstance(module, LoraLinear)]
    assert adapted
    learned(model)
    assert all(part.grad is not None and part.grad.any() for part in model.parameters() if part.requires_grad)
    expected = model.eval()(IMAGES)
    merge_lora(model.network)
    after = model.network.state_dict()
    assert list(after) == list(before), "an ordinary model of the architecture"
    of_head = models.is_of_head(model.network)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed == {f"{key}.weight" for key in adapted} | {key for key in after if of_head(key)}
    torch.testing.assert_close(model(IMAGES), expected, rtol=1e-4, atol=1e-5)


def test_a_layer_computes_the_formula_of_the_paper():
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(6, 4), LoraSettings(rank=3, alpha=5.0))
    nn.init.normal_(layer.up)
    rows = torch.randn(2, 7, 6)
    weight = layer.base.weight.double() + 5.0 / 3 * layer.up.double() @ layer.down.double()
    expected = torch.einsum("nk,bik->bin", weight, rows.double()) + layer.base.bias.double()
    torch.testing.assert_close(layer(rows).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight.double(), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layer_decay", [1.0, 0.75])
@pytest.mark.parametrize("method", ["head", "lora"])
def test_the_optimizer_has_what_is_trained_and_no_other_gradient_is_kept(method, layer_decay):
    model = learned(made(method=method), steps=1)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    of_head = {"network.head.weight", "network.head.bias"}
    updates = {
        f"network.blocks.{block}.{layer}.{part}"
        for block in range(2)
        for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        for part in ("down", "up")
    }
    assert trained == (of_head if method == "head" else of_head | updates)
    groups = parameter_groups(model, weight_decay=0.05, layer_decay=layer_decay)
    names = {one: name for name, one in model.named_parameters()}
    assert {names[one] for group in groups for one in group["params"]} == trained
    scales = {names[one]: group["lr_scale"] for group in groups for one in group["params"]}
    assert scales["network.head.weight"] == 1
    if method == "lora":
        assert scales["network.blocks.0.attn.qkv.up"] == pytest.approx(layer_decay**2)
    assert {name for name, one in model.named_parameters() if one.grad is not None} == trained
    assert set(FinetuneObjective(model, label_smoothing=0.0).left_out) == {*names.values()} - trained


def test_a_frozen_network_stays_as_it_is_under_the_head_that_is_trained():
    """Its running statistics too, and it draws nothing, whatever a validation in between does."""
    model = made("resnet10t", method="head")
    before = {key: value.clone() for key, value in model.network.state_dict().items()}
    learned(model.eval().train())
    of_head = models.is_of_head(model.network)
    changed = {key for key, value in model.network.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {key for key in before if of_head(key)}
    assert running_statistics(model) == [], "nothing to average over processes"
    assert running_statistics(made("resnet10t").train())
    assert model.training
    assert not model.network.training


def test_layers_are_chosen_by_parts_of_their_names():
    model = made(method="lora", lora=LoraSettings(layers=("qkv",)))
    adapted = [name for name, module in model.network.named_modules() if isinstance(module, LoraLinear)]
    assert adapted == ["blocks.0.attn.qkv", "blocks.1.attn.qkv"]


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(
        ModelError, match=r"method is lora, but ResNet has no linear layer beside its head; set method="
    ):
        made("resnet10t", method="lora")
    with pytest.raises(
        ModelError, match=r"layers: VisionTransformer has no linear layer named 'query'.*parts attn, bl"
    ):
        made(method="lora", lora=LoraSettings(layers=("qkv", "query")))
