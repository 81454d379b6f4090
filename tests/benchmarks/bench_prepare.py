"""What preparing photos costs, on one core: `python tests/benchmarks/bench_prepare.py`.

- decoding: CPU time of a made-up photo of each size, from the file's bytes to the stored square, with its content key and its look; bytes
  of the file and of the square; images a second and core, and the same by a plain loop of Pillow that decodes, resizes and encodes.
- deciding: copies, contradictions and splits of `--rows` made-up facts, some of them copies; one thread, peak of the memory that is
  no mapped file.

The figures of `trainer/runner/plan.py` are those of this command.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from PIL import Image, ImageOps

from tests.benchmarks.photos import photo
from trainer.config import DataSettings
from trainer.data import facts, preparation
from trainer.data.facts import ImageFacts
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


def write_facts(file: Path, count: int) -> None:
    """Write made-up facts: keys at random, some of them those of another image."""
    generator = np.random.default_rng(0)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, facts._SCHEMA) as writer:
        for start in range(0, count, 100_000):
            rows = min(100_000, count - start)
            digits = np.frombuffer(generator.bytes(32 * rows).hex().encode(), dtype=np.uint8).reshape(rows, 64).copy()
            digits[:-1000:2000] = digits[1000::2000]  # of the same class
            digits[100:-1:200] = digits[101::200]  # of another class
            ends = pa.py_buffer(np.arange(0, 64 * rows + 1, 64, dtype=np.int32))
            columns = {
                "name": [f"class-{number % 1000:04d}/photo-{number:09d}.jpg" for number in range(start, start + rows)],
                "label": np.arange(start, start + rows, dtype=np.int32) % 1000,
                "split": np.zeros(rows, dtype=np.int8),
                "key": pa.StringArray.from_buffers(rows, ends, pa.py_buffer(digits)),
                "appearance": [""] * rows,
                **dict.fromkeys(("width", "height", "gray_peak"), np.full(rows, 500, dtype=np.int32)),
            }
            writer.write_table(pa.table([columns[name] for name in facts._SCHEMA.names], schema=facts._SCHEMA))


def deciding(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_facts(Path(folder) / "facts.arrow", count)
        peak, ended = [0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.02):
                peak[0] = max(peak[0], psutil.Process().memory_info().rss - psutil.Process().memory_info().shared)

        watcher = threading.Thread(target=watch)
        watcher.start()
        before, began, cpu = psutil.Process().memory_info(), time.perf_counter(), time.process_time()
        given = ImageFacts.read(Path(folder) / "facts.arrow")
        kept, contradicting, dropped = facts.quarantine_and_drop(given, [str(one) for one in range(1000)], Path(folder))
        kept = facts.take_missing_splits(kept, {"test": 0.01, "val": 0.01}, 0, Path(folder))
        took, used = time.perf_counter() - began, time.process_time() - cpu
        ended.set()
        watcher.join()
        more = peak[0] - (before.rss - before.shared)
        print(
            f"{count:,} rows: {took:.1f} s, {used:.1f} s of CPU, {more / 2**30:.2f} GiB, {more / count:.0f} bytes a row; kept "
            f"{len(kept):,}, contradicting {len(contradicting):,}, copies {len(dropped):,}, test {len(kept.of('test')):,}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of made-up facts; 0: decoding alone")
    parser.add_argument("--no-decoding", action="store_true")
    options = parser.parse_args()
    if not options.no_decoding:
        decoding(options.rounds)
    if options.rows:
        deciding(options.rows)


if __name__ == "__main__":
    main()
