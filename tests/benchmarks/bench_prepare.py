"""What preparing photos costs, on one core: `python tests/benchmarks/bench_prepare.py`.

CPU time of a made-up photo of each size, from the file's bytes to the stored square, with its content key and its look; bytes of the file
and of the square; images a second and core, and the same by a plain loop of Pillow that decodes, resizes and encodes.

The figures of `trainer/runner/plan.py` are those of this command.
"""

from __future__ import annotations

import argparse
import io
import time

import numpy as np
from PIL import Image, ImageOps

from tests.benchmarks.photos import photo
from trainer.config import DataSettings
from trainer.data import preparation
from trainer.data.sources import Item

SIZES = ((500, 375), (1024, 768), (4000, 3000))


def by_pillow(file: bytes) -> bytes:
    with Image.open(io.BytesIO(file)) as image:
        square = ImageOps.fit(image.convert("RGB"), (256, 256), Image.Resampling.BICUBIC)
    return preparation.encode_square(square, "jpeg", 95)


def decoding(rounds: int) -> None:
    settings, generator = DataSettings(), np.random.default_rng(0)
    print("photo         file kB   stored kB   ms CPU   images/s and core   plain Pillow   ours / Pillow")
    for width, height in SIZES:
        buffer = io.BytesIO()
        Image.fromarray(photo(generator, width, height)).save(buffer, "JPEG", quality=90)
        file, count = buffer.getvalue(), max(2, 4_000_000 // (width * height))
        read = dict.fromkeys([""], file).__getitem__
        item = Item(name="photo", location="", label=0, split="train")
        ours, plain = [], []
        for _ in range(rounds):
            began = time.process_time()
            for _ in range(count):
                _, _, square = preparation._decode(item, read, settings)
            ours.append((time.process_time() - began) / count)
            began = time.process_time()
            for _ in range(count):
                by_pillow(file)
            plain.append((time.process_time() - began) / count)
        one, other = np.median(ours), np.median(plain)
        print(
            f"{f'{width} x {height}':<12}{len(file) / 1e3:9.0f}{len(square) / 1e3:12.1f}{1e3 * one:9.1f}{1 / one:20.1f}{1 / other:15.1f}"
            f"{other / one:16.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    decoding(options.rounds)


if __name__ == "__main__":
    main()
