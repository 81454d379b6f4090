"""The digits as photos: of many shapes and kinds of files, each of which looks otherwise where a step of the preprocessing is left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from sklearn.datasets import load_digits

from trainer.config import DataSettings
from trainer.data.dataset import open_dataset
from trainer.io import artifacts
from trainer.models import networks
from trainer.stages import evaluate, prepare

EDGE = 48
"""Of the digit in a photo, in pixels; what is beside it is cut off."""
SPLITS = {"train": range(60), "val": range(60, 100), "test": range(1200, 1500)}


def _padded(digit: npt.NDArray[np.uint8], height: int, width: int) -> Image.Image:
    """The digit in the middle of a gray photo, with bright and dark stripes at the ends."""
    photo = Image.fromarray(np.where(np.arange(width) % 8 < 4, 200, 20).astype(np.uint8)[None].repeat(height, 0))
    photo.paste(Image.fromarray(digit).resize((EDGE, EDGE), 0), ((width - EDGE) // 2, (height - EDGE) // 2))
    return photo


def _wide(digit: npt.NDArray[np.uint8], file: Path) -> None:
    _padded(digit, 48, 64).convert("RGB").save(file.with_suffix(".png"))


def _tall(digit: npt.NDArray[np.uint8], file: Path) -> None:
    _padded(digit, 85, 48).convert("RGB").save(file.with_suffix(".png"))


def _turned(digit: npt.NDArray[np.uint8], file: Path) -> None:
    """Stored on its side, with the note that says so."""
    exif = Image.Exif()
    exif[0x0112] = 6
    _padded(digit, 48, 64).convert("RGB").transpose(Image.Transpose.ROTATE_90).save(file.with_suffix(".jpg"), exif=exif)


def _transparent(digit: npt.NDArray[np.uint8], file: Path) -> None:
    """All black; white shines through where the digit is."""
    clear = Image.fromarray(255 - np.asarray(_padded(digit, 48, 64)))
    black = Image.new("L", clear.size)
    Image.merge("RGBA", [black, black, black, clear]).save(file.with_suffix(".png"))


def _gray(digit: npt.NDArray[np.uint8], file: Path) -> None:
    _padded(digit, 48, 60).save(file.with_suffix(".png"))


def _deep(digit: npt.NDArray[np.uint8], file: Path) -> None:
    """16-bit grays."""
    Image.fromarray(np.asarray(_padded(digit, 60, 48)).astype(np.uint16) * 257).save(file.with_suffix(".png"))


def _printed(digit: npt.NDArray[np.uint8], file: Path) -> None:
    """CMYK."""
    _padded(digit, 48, 56).convert("RGB").convert("CMYK").save(file.with_suffix(".jpg"), quality=95)


def _palette(digit: npt.NDArray[np.uint8], file: Path) -> None:
    """Colors by number, in disorder."""
    order = np.random.default_rng(0).permutation(256)
    photo = Image.fromarray(np.argsort(order).astype(np.uint8)[np.asarray(_padded(digit, 48, 64))], "P")
    photo.putpalette(np.repeat(order, 3).astype(np.uint8).tobytes())
    photo.save(file.with_suffix(".png"))


def _large(digit: npt.NDArray[np.uint8], file: Path) -> None:
    """Large enough to be averaged down before it is resized."""
    photo = _padded(digit, 48, 64).resize((256, 192), Image.Resampling.BICUBIC)
    photo.convert("RGB").save(file.with_suffix(".jpg"), quality=90)


KINDS = (_wide, _tall, _turned, _transparent, _gray, _deep, _printed, _palette, _large)


def write_photos(folder: Path) -> None:
    """Write photos of digits, a folder a class, the kinds in turns; their names begin with the kind's."""
    digits = load_digits()
    for split, indices in SPLITS.items():
        for index in indices:
            kind = KINDS[index % len(KINDS)]
            place = folder / split / str(digits.target[index])
            place.mkdir(parents=True, exist_ok=True)
            gray = np.round(digits.images[index] * (255 / 16)).astype(np.uint8)
            kind(gray, place / f"{kind.__name__.removeprefix('_')}-{index}")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What evaluate measured on the squares of photos."""

    dataset: Path
    student: Path
    files: list[Path]
    """The test's photos, [N]."""
    labels: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    """Of the student, [N, 10]."""


def measure(student: Path, files: Path, folder: Path, **settings: object) -> Measured:
    """Prepare photos and measure a student on them, whose card then says what a training on them would have written there."""
    given = {"source": f"imagefolder:{files}", "image_size": 16, "encoding": "png", "max_pixels": 100_000}
    prepare.run(DataSettings.model_validate(given | settings), dataset=folder / "dataset")
    data, model = open_dataset(folder / "dataset"), networks.load(student)
    model.card = replace(model.card, square=data.square)
    with artifacts.create(folder / "student", "model", settings={}) as draft:
        networks.save(model, draft.path)
    split = data.split("test")
    return Measured(
        dataset=folder / "dataset",
        student=folder / "student",
        files=[files / source for source in split.sources],
        labels=split.labels,
        logits=evaluate.predict(model, split, 64, "student"),
    )
