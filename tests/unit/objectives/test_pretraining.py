import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from trainer.config import FinetuneSettings, LoraSettings, MaeSettings, ModelSettings
from trainer.data.loader import Batch
from trainer.io.errors import ModelError
from trainer.models import networks
from trainer.objectives.pretraining import (
    FinetuneObjective,
    LoraLinear,
    MaeObjective,
    MaskedAutoencoder,
    draw_noise,
    draw_reconstructions,
    freeze,
    merge_lora,
    normalize_patches,
    patchify,
    sine_positions,
    unpatchify,
)
from trainer.training.optimizers import parameter_groups, running_statistics

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
SETTINGS = MaeSettings(decoder_dim=16, decoder_depth=1, decoder_heads=2)
IMAGES = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
KEYS = torch.tensor([5, -9, 2**40])
ZEROS = torch.zeros(3, dtype=torch.int64)


def autoencoder(settings=SETTINGS, **arguments):
    torch.manual_seed(0)
    model = networks.create(ModelSettings(architecture="vit_tiny_patch16_224", args=TINY | arguments), ["a", "b"])
    return MaskedAutoencoder(model, settings)


def test_patches():
    pixels = torch.rand(2, 3, 32, 32)
    patches = patchify(pixels, 8)
    for row in range(4):
        for column in range(4):
            cut = pixels[1, :, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8]
            expected = [float(cut[channel, y, x]) for y in range(8) for x in range(8) for channel in range(3)]
            assert patches[1, row * 4 + column].tolist() == expected
    assert torch.equal(unpatchify(patches, 8), pixels)
    # Targets are normalized patch by patch.
    patches = torch.rand(2, 4, 12) * 5 + 3
    ours = normalize_patches(patches).numpy()
    for image in range(2):
        for patch in range(4):
            values = patches[image, patch].double().numpy()
            expected = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-6)
            assert np.allclose(ours[image, patch], expected, atol=1e-5)
    # Hidden patches are not seen.
    model = autoencoder().eval()
    noise = draw_noise(KEYS, ZEROS, 16, seed=0)
    _, predicted, mask = model(IMAGES, noise)
    hidden = unpatchify(mask.unsqueeze(2).expand(-1, -1, 192), 8).bool()
    _, same, _ = model(torch.where(hidden, 255 - IMAGES, IMAGES), noise)
    assert torch.equal(predicted, same)
    _, other, _ = model(torch.where(hidden, IMAGES, 255 - IMAGES), noise)
    assert not torch.allclose(predicted, other)


@pytest.mark.parametrize("normalize", [True, False])
def test_loss_is_mean_error_over_hidden_patches_only(normalize):
    model = autoencoder(SETTINGS.model_copy(update={"normalize_targets": normalize}))
    loss, predicted, mask = model(IMAGES, draw_noise(KEYS, ZEROS, 16, seed=0))
    pixels = (IMAGES.double() / 255 - 0.5) / 0.5
    errors = []
    for image in range(3):
        for patch in range(16):
            if mask[image, patch] == 0:
                continue
            row, column = divmod(patch, 4)
            cut = pixels[image, :, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8].permute(1, 2, 0).reshape(-1)
            if normalize:
                cut = (cut - cut.mean()) / (cut.var() + 1e-6).sqrt()
            errors.append(float((predicted[image, patch].detach().double() - cut).square().mean()))
    assert len(errors) == 3 * 12
    assert float(loss.detach()) == pytest.approx(np.mean(errors), rel=1e-4)


def test_mask_is_function_of_key_and_view_number():
    whole = draw_noise(KEYS, torch.tensor([0, 1, 2]), 16, seed=3)
    assert torch.equal(draw_noise(KEYS[1:2], torch.tensor([1]), 16, seed=3)[0], whole[1])
    assert not torch.equal(draw_noise(KEYS[1:2], torch.tensor([2]), 16, seed=3)[0], whole[1])
    assert not torch.equal(draw_noise(KEYS[1:2], torch.tensor([1]), 16, seed=4)[0], whole[1])


def test_positions_are_those_of_the_published_code():
    """MAE's get_2d_sincos_pos_embed (facebookresearch/mae, util/pos_embed.py), written out number by number."""
    width, rows, columns = 16, 3, 5
    ours = sine_positions(width, rows, columns)[0].double().numpy()
    for row in range(rows):
        for column in range(columns):
            expected = []
            for position in (column, row):
                angles = [position / 10000 ** (i / (width / 4)) for i in range(width // 4)]
                expected += [np.sin(angle) for angle in angles] + [np.cos(angle) for angle in angles]
            assert np.allclose(ours[row * columns + column], expected, atol=1e-6)


@pytest.mark.parametrize("arguments", [{}, {"global_pool": "avg", "class_token": False}])
def test_training_lowers_loss_and_leaves_head_alone(arguments):
    model = autoencoder(**arguments)
    objective = MaeObjective(model, seed=0)
    head = model.encoder.head.weight.clone()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-3)
    batch = Batch(IMAGES, ZEROS, KEYS, ZEROS, None)
    losses = []
    for _ in range(50):
        loss = objective(model, batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in trainable)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.75 * losses[0]
    assert torch.equal(model.encoder.head.weight, head)
    objective.release()
    assert model.encoder.head.weight.requires_grad


def test_a_network_that_is_no_vit_is_refused():
    model = networks.create(ModelSettings(architecture="resnet10t"), ["a", "b"])
    with pytest.raises(ModelError, match=r"resnet10t is a ResNet.*pretrain.mae.epochs=0"):
        MaskedAutoencoder(model, SETTINGS)


def test_picture_shows_images_what_is_visible_and_reconstruction():
    model = autoencoder()
    with Image.open(io.BytesIO(draw_reconstructions(model, IMAGES, KEYS, seed=0))) as picture:
        pixels = np.asarray(picture).astype(int)
    assert pixels.shape == (3 * 96 + 8, 3 * 96 + 8, 3)
    first = np.asarray(IMAGES[0].permute(1, 2, 0)).repeat(3, 0).repeat(3, 1)
    assert np.abs(pixels[:96, :96] - first).max() <= 1
    _, _, mask = model(IMAGES, draw_noise(KEYS, ZEROS, 16, seed=0))
    for patch in range(16):
        row, column = divmod(patch, 4)
        cut = pixels[100 + row * 24 : 124 + row * 24, column * 24 : 24 + column * 24]
        assert (np.abs(cut - 127).max() <= 1) == bool(mask[0, patch])


# ---------------------------------------------------------------------------------------------------------------------
# Low-rank adaptation, and fine-tuning of the head alone: what is trained, what is frozen, and what comes out

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
PHOTOS = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 1])


def made(name="vit_tiny_patch16_224", **settings):
    torch.manual_seed(0)
    model = networks.create(
        ModelSettings(architecture=name, args=NETWORKS.get(name, {}), image_size=32), ["a", "b", "c"]
    )
    freeze(model, FinetuneSettings(**settings))
    return model


def learned(model, steps=3):
    """Train a little with large steps, so that nothing that can change stays as it is."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model.train()(PHOTOS), LABELS).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("name", NETWORKS)
def test_merged_weights_compute_what_was_trained(name):
    model = made(name, method="lora", lora=LoraSettings(rank=2))
    before = {key: value.clone() for key, value in made(name).network.state_dict().items()}
    assert torch.allclose(model.eval()(PHOTOS), made(name).eval()(PHOTOS)), "it begins where the weights are"
    adapted = [key for key, module in model.network.named_modules() if isinstance(module, LoraLinear)]
    assert adapted
    learned(model)
    assert all(part.grad is not None and part.grad.any() for part in model.parameters() if part.requires_grad)
    expected = model.eval()(PHOTOS)
    merge_lora(model.network)
    after = model.network.state_dict()
    assert list(after) == list(before), "an ordinary model of the architecture"
    of_head = networks.is_of_head(model.network)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed == {f"{key}.weight" for key in adapted} | {key for key in after if of_head(key)}
    torch.testing.assert_close(model(PHOTOS), expected, rtol=1e-4, atol=1e-5)


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
def test_the_optimizer_has_only_what_is_trained(method, layer_decay):
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


def test_a_frozen_network_stays_as_it_is():
    """Its running statistics too, and it draws nothing, whatever a validation in between does."""
    model = made("resnet10t", method="head")
    before = {key: value.clone() for key, value in model.network.state_dict().items()}
    learned(model.eval().train())
    of_head = networks.is_of_head(model.network)
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
    with pytest.raises(ModelError, match=r"method is lora, but ResNet has no linear layer beside its head"):
        made("resnet10t", method="lora")
    with pytest.raises(
        ModelError, match=r"layers: VisionTransformer has no linear layer named 'query'.*parts attn, bl"
    ):
        made(method="lora", lora=LoraSettings(layers=("qkv", "query")))
