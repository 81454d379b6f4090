import io

import numpy as np
import pytest
import torch
from PIL import Image

from trainer import models
from trainer.config import MaeSettings, ModelSettings
from trainer.data.loader import Batch
from trainer.errors import ModelError
from trainer.pretraining import (
    MaeObjective,
    MaskedAutoencoder,
    draw_noise,
    draw_reconstructions,
    normalize_patches,
    patchify,
    sine_positions,
    unpatchify,
)

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
SETTINGS = MaeSettings(decoder_dim=16, decoder_depth=1, decoder_heads=2)
IMAGES = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
KEYS = torch.tensor([5, -9, 2**40])
ZEROS = torch.zeros(3, dtype=torch.int64)


def autoencoder(settings=SETTINGS, **arguments):
    torch.manual_seed(0)
    model = models.create(ModelSettings(architecture="vit_tiny_patch16_224", args=TINY | arguments), ["a", "b"])
    return MaskedAutoencoder(model, settings)


def test_patches_are_cut_row_by_row():
    pixels = torch.rand(2, 3, 32, 32)
    patches = patchify(pixels, 8)
    for row in range(4):
        for column in range(4):
            cut = pixels[1, :, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8]
            expected = [float(cut[channel, y, x]) for y in range(8) for x in range(8) for channel in range(3)]
            assert patches[1, row * 4 + column].tolist() == expected
    assert torch.equal(unpatchify(patches, 8), pixels)


def test_targets_are_normalised_patch_by_patch():
    patches = torch.rand(2, 4, 12) * 5 + 3
    ours = normalize_patches(patches).numpy()
    for image in range(2):
        for patch in range(4):
            values = patches[image, patch].double().numpy()
            expected = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-6)
            assert np.allclose(ours[image, patch], expected, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_loss_is_the_mean_error_over_hidden_patches_only(normalize):
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


def test_hidden_patches_are_not_seen():
    model = autoencoder().eval()
    noise = draw_noise(KEYS, ZEROS, 16, seed=0)
    _, predicted, mask = model(IMAGES, noise)
    hidden = unpatchify(mask.unsqueeze(2).expand(-1, -1, 192), 8).bool()
    _, same, _ = model(torch.where(hidden, 255 - IMAGES, IMAGES), noise)
    assert torch.equal(predicted, same)
    _, other, _ = model(torch.where(hidden, IMAGES, 255 - IMAGES), noise)
    assert not torch.allclose(predicted, other)


def test_the_mask_is_a_function_of_key_and_view_number():
    whole = draw_noise(KEYS, torch.tensor([0, 1, 2]), 16, seed=3)
    assert torch.equal(draw_noise(KEYS[1:2], torch.tensor([1]), 16, seed=3)[0], whole[1])
    assert not torch.equal(draw_noise(KEYS[1:2], torch.tensor([2]), 16, seed=3)[0], whole[1])
    assert not torch.equal(draw_noise(KEYS[1:2], torch.tensor([1]), 16, seed=4)[0], whole[1])


def test_every_patch_is_hidden_three_times_out_of_four():
    keys = torch.arange(4000)
    _, _, mask = autoencoder()(
        IMAGES[:1].expand(4000, -1, -1, -1), draw_noise(keys, torch.zeros_like(keys), 16, seed=0)
    )
    assert torch.equal(mask.sum(1), torch.full((4000,), 12.0))
    assert ((mask.mean(0) - 0.75).abs() < 0.03).all()


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
def test_training_lowers_the_loss_and_leaves_the_head_alone(arguments):
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
    model = models.create(ModelSettings(architecture="resnet10t"), ["a", "b"])
    with pytest.raises(ModelError, match=r"resnet10t is a ResNet.*pretrain.mae.epochs=0"):
        MaskedAutoencoder(model, SETTINGS)


def test_a_decoder_width_that_fits_no_positions_is_refused():
    with pytest.raises(ModelError, match="multiple of 4, got 18"):
        sine_positions(18, 2, 2)


def test_the_picture_shows_images_what_is_visible_and_the_reconstruction():
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
