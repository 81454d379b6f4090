"""A picture of what the masked autoencoder sees and what it makes of it."""

from __future__ import annotations

import io

import torch
from PIL import Image
from torch import Tensor

from trainer.pretraining.masked_autoencoder import MaskedAutoencoder, draw_noise, patchify, unpatchify

_GREY = 0.5
_GAP = 4
_LEAST_EDGE = 96


@torch.no_grad()
def draw_reconstructions(model: MaskedAutoencoder, images: Tensor, keys: Tensor, *, seed: int) -> bytes:
    """Three rows: images, what is visible of them, and the visible patches with the predicted ones between them.

    Predictions of normalised targets are shown with each patch's own mean and spread.

    Args:
        model: a trained masked autoencoder.
        images: uint8 [B, 3, S, S].
        keys: key of each image, int64 [B].
        seed: draws the masks.

    Returns:
        A PNG file.
    """
    model.eval()
    noise = draw_noise(keys, torch.zeros_like(keys), model.encoder.patch_embed.num_patches, seed=seed)
    _, predicted, mask = model(images, noise.to(images.device))
    size = model.encoder.patch_embed.img_size[0]
    pixels = torch.nn.functional.interpolate(images.float() / 255, size=(size, size), mode="bilinear", antialias=True)
    patches = patchify(pixels, model.patch_size)
    hidden = mask.unsqueeze(2)
    variance, mean = torch.var_mean(patches, dim=2, keepdim=True)
    predicted = predicted * variance.sqrt() + mean
    rows = [
        patches,
        torch.where(hidden > 0, torch.full_like(patches, _GREY), patches),
        torch.lerp(patches, predicted, hidden),
    ]
    return _png([unpatchify(row, model.patch_size) for row in rows])


def _png(rows: list[Tensor]) -> bytes:
    """Rows of images in [0, 1], each [B, 3, H, H], as one picture."""
    edge = rows[0].shape[-1]
    scale = max(1, -(-_LEAST_EDGE // edge))
    step = edge * scale + _GAP
    canvas = Image.new("RGB", (len(rows[0]) * step - _GAP, len(rows) * step - _GAP), "white")
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            array = (image.clamp(0, 1) * 255).byte().permute(1, 2, 0).cpu().numpy()
            canvas.paste(
                Image.fromarray(array).resize((edge * scale, edge * scale), Image.Resampling.NEAREST),
                (x * step, y * step),
            )
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return file.getvalue()
