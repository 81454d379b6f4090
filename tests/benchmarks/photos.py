"""Made-up photos for benchmarks: as large, as smooth and as noisy as real ones, so that they cost as much to decode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 464, 348


def write_photos(folder: Path, *, classes: int, per_class: int, seed: int = 0) -> Path:
    """Write `classes` folders of JPEG files below `folder`, which is given back."""
    generator = np.random.default_rng(seed)
    for label in range(classes):
        place = folder / f"class-{label:03d}"
        place.mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            Image.fromarray(photo(generator)).save(place / f"{number:05d}.jpg", quality=85)
    return folder


def photo(generator: np.random.Generator, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """Noise whose amplitude falls with frequency, as smooth as photos of a telephone: uint8 [height, width, 3]."""
    frequencies = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequencies[0, 0] = 1
    spectrum = np.fft.rfft2(generator.standard_normal((3, height, width))) / frequencies**1.5
    pixels = np.fft.irfft2(spectrum, s=(height, width))
    pixels /= pixels.std((1, 2), keepdims=True)
    channels = 128 + 45 * (pixels.mean(0) + 0.4 * pixels)  # channels are much alike
    return np.clip(channels, 0, 255).astype(np.uint8).transpose(1, 2, 0)
