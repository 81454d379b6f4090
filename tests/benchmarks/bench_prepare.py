"""What preparing photos costs, on one core: `python tests/benchmarks/bench_prepare.py`.

- decoding: CPU time of a made-up photo of each size, from the file's bytes to the stored square, with its content key and its look; bytes
  of the file and of the square; images a second and core, and the same by a plain loop of Pillow that decodes, resizes and encodes.
- listing: `--rows` made-up names, each kind in a process of its own: a manifest, and a folder of a store that lists names, sizes and
  ETags; the peak of the memory that is no mapped file, and what of it the listing keeps.
- deciding: copies, contradictions and splits of as many made-up facts, some of them copies, and the search for near-duplicates; one
  thread, the same peak; `--parts separating`: the decision of data.near_duplicates=separate.
- scaling (`--parts scaling`): images a second of a whole preparation of 1024 x 768 pixels by one and by two processes, and by a plain loop;
  with `--ray-python` that of an environment with `ray[data]`, also by Ray Data.
- writing (`--parts writing`): the splits of at most 20,000 made-up squares, and the peak of the disk.

The figures of `trainer/runner/plan.py` are those of this command.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import multiprocessing
import subprocess
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from PIL import Image, ImageOps

from tests.benchmarks.photos import photo
from trainer.config import DataSettings
from trainer.data import curation, facts, near_duplicates, preparation
from trainer.data.dataset_schema import SPLITS, features
from trainer.data.decode_cache import DecodeCache
from trainer.data.facts import ImageFacts
from trainer.data.sources import Item, list_source
from trainer.io import storage
from trainer.io.formatting import aligned

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


def looks(generator: np.random.Generator, rows: int) -> list[str]:
    size = near_duplicates._BYTES
    digits = generator.bytes(size * rows).hex()
    return [digits[start : start + 2 * size] for start in range(0, len(digits), 2 * size)]


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
                "name": [*map(name_of, range(start, start + rows))],
                "label": np.arange(start, start + rows, dtype=np.int32) % 1000,
                "split": np.zeros(rows, dtype=np.int8),
                "key": pa.StringArray.from_buffers(rows, ends, pa.py_buffer(digits)),
                "appearance": looks(generator, rows),
                **dict.fromkeys(("width", "height", "gray_peak"), np.full(rows, 500, dtype=np.int32)),
            }
            writer.write_table(pa.table([columns[name] for name in facts._SCHEMA.names], schema=facts._SCHEMA))


@contextmanager
def watched() -> Iterator[list[float]]:
    """Give a list that then holds seconds, seconds of CPU, and how many bytes of memory came in between: at the peak, and to stay."""
    peak, ended, figures = [0], threading.Event(), list[float]()

    def used() -> int:
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared

    def watch() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], used())

    gc.collect()
    before, began, cpu = used(), time.perf_counter(), time.process_time()
    watcher = threading.Thread(target=watch)
    watcher.start()
    yield figures
    figures += [time.perf_counter() - began, time.process_time() - cpu, max(peak[0], used()) - before]
    ended.set()
    watcher.join()
    gc.collect()
    pa.default_memory_pool().release_unused()
    figures.append(used() - before)


def name_of(number: int) -> str:
    return f"class-{number % 1000:04d}/photo-{number:09d}.jpg"


def listing(kind: str, count: int) -> None:
    if kind == "folder":
        # In the store's order, which is that of the names, with an ETag as S3 gives it.
        numbers = (first + step for first in range(min(count, 1000)) for step in range(0, count - first, 1000))
        objects = (storage.Listed(name_of(number), 150_000, f'"{number:032x}"') for number in numbers)
        storage.listing = lambda folder: objects
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "list.csv"
        if kind == "manifest":
            with file.open("w") as text:
                text.write("path,label,split\n")
                text.writelines(f"{name_of(number)},class {number % 1000},train\n" for number in range(count))
        source = f"manifest:{file}" if kind == "manifest" else "imagefolder:s3://bucket/photos"
        with watched() as figures:
            found = list_source(source)
        took, used, peak, kept = figures
        print(
            f"listing, {kind} of {len(found.items):,}: {took:.1f} s, {used:.1f} s of CPU, {peak / count:.0f} bytes an image, of which "
            f"{kept / count:.0f} stay"
        )


def shown(count: int, figures: list[float]) -> str:
    took, used, peak, _ = figures
    return f"{count:,}: {took:.1f} s, {used:.1f} s of CPU, {peak / 2**30:.2f} GiB, {peak / count:.0f} bytes an image"


def deciding(file: Path, count: int) -> None:
    given = ImageFacts.read(file)
    with watched() as figures:
        kept, contradicting, dropped = facts.quarantine_and_drop(given, [str(one) for one in range(1000)], file.parent)
        kept = facts.take_missing_splits(kept, {"test": 0.01, "val": 0.01}, 0, file.parent)
    print(
        f"deciding on {shown(count, figures)}; kept {len(kept):,}, contradicting {len(contradicting):,}, copies {len(dropped):,}, test "
        f"{len(kept.of('test')):,}"
    )


def comparing(file: Path, count: int) -> None:
    given = ImageFacts.read(file)
    with watched() as figures:
        found = near_duplicates.find(given)
    print(f"near-duplicates of {shown(count, figures)}; pairs {len(found.pairs):,}")


def free(cache: DecodeCache, ends: list[int], row: int) -> None:
    cache.free(map(str, range(bisect_right(ends, row))))


def writing(count: int) -> None:
    """Write splits from squares of 17.4 kB in shards of 20 MB, where the store keeps the squares, and where a file beside them does."""
    preparation.SHARD_BYTES = 20 * 10**6
    generator, schema, chunk = np.random.default_rng(0), features().arrow_schema, 1000
    for place in ("in a store", "on this disk"):
        with tempfile.TemporaryDirectory() as folder:
            cache = DecodeCache(uri="", folder=Path(folder), way="")
            for start in range(0, count, chunk):
                names = [name_of(number) for number in range(start, start + chunk)]
                rows = [
                    {"image": {"bytes": generator.bytes(17_400)}, "label": 0, "key": name, "source": name}
                    for name in names
                ]
                with pa.ipc.new_stream(str(cache.squares(str(start // chunk))), schema) as writer:
                    writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                if place == "on this disk":
                    (Path(folder) / f"kept-{start}").hardlink_to(cache.squares(str(start // chunk)))
            write_facts(Path(folder) / "facts", count)
            decoded = ImageFacts.read(Path(folder) / "facts")
            of = generator.choice(len(SPLITS), count, p=[0.98, 0.01, 0.01, 0]).astype(np.int8)
            splits = {split: ImageFacts(decoded.table, decoded.rows, of).of(split) for split in SPLITS}
            squares, ends = preparation._open_squares(cache, map(str, range(count // chunk)))
            size, peak, ended = squares.data.nbytes, [0], threading.Event()

            def watch(folder: str = folder, peak: list[int] = peak, ended: threading.Event = ended) -> None:
                while not ended.wait(0.02):
                    files = [one.stat() for one in Path(folder).rglob("*.arrow") if one.exists()]
                    peak[0] = max(peak[0], sum(512 * one.st_blocks for one in files))

            watcher, began = threading.Thread(target=watch), time.perf_counter()
            watcher.start()
            preparation._write_splits(splits, squares, Path(folder), 1, partial(free, cache, ends))
            took = time.perf_counter() - began
            ended.set()
            watcher.join()
            print(
                f"writing {count:,}, squares kept {place}: {took:.1f} s, {peak[0] / 1e6:.0f} MB of disk at the peak, "
                f"{peak[0] / size:.2f} times the squares"
            )


def separating(file: Path, count: int) -> None:
    given = ImageFacts.read(file)
    with watched() as figures:
        groups = near_duplicates.groups(given)
        curation.take_missing_splits(given, {"train"}, DataSettings(), [(label,) for label in range(1000)], groups)
    took, used, peak, _ = figures
    print(f"separating {count:,}: {took:.1f} s, {used:.1f} s of CPU, {peak / count:.0f} bytes an image")


def scaling(count: int, ray_python: str) -> None:
    generator = np.random.default_rng(0)
    rows = [("", "processes", "images/s", "s before the first")]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "photos")
        for number in range(count):
            file = folder / f"class-{number % 3}" / f"{number:05d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(photo(generator, 1024, 768)).save(file, quality=90)
        files = sorted(folder.rglob("*.jpg"))
        began = time.perf_counter()
        for file in files:
            by_pillow(file.read_bytes())
        rows.append(("plain loop of Pillow", "1", f"{count / (time.perf_counter() - began):.1f}", ""))
        settings = DataSettings(source=f"imagefolder:{folder}", encoding="jpeg")
        for processes in (1, 2):
            target = Path(place, f"ours-{processes}")
            target.mkdir()
            began = time.perf_counter()
            preparation.prepare(settings, target, processes=processes)
            rows.append(("prepare", str(processes), f"{count / (time.perf_counter() - began):.1f}", ""))
        for processes in (1, 2) if ray_python else ():
            command = [ray_python, str(Path(__file__).with_name("prepare_by_ray.py")), str(folder), str(processes)]
            found = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            )
            if found["count"] != count:
                raise SystemExit(f"Ray made {found['count']} squares of {count} photos")
            rows.append(("Ray Data", str(processes), f"{count / found['took']:.1f}", f"{found['started']:.1f}"))
    print("\n".join(aligned(rows, right={1, 2, 3})))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of made-up facts; 0: decoding alone")
    parser.add_argument("--no-decoding", action="store_true")
    parts = ("listing", "deciding", "comparing", "writing", "separating", "scaling")
    parser.add_argument("--photos", type=int, default=1500, help="of scaling (default: %(default)s)")
    parser.add_argument(
        "--ray-python", default="", metavar="PYTHON", help="of an environment with ray[data] and Pillow"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=parts, default=parts[:3], help="what is measured besides decoding"
    )
    options = parser.parse_args()
    if not options.no_decoding:
        decoding(options.rounds)
    if not options.rows:
        return
    with tempfile.TemporaryDirectory() as folder:
        file, count = Path(folder) / "facts.arrow", options.rows
        write_facts(file, count)
        works: Mapping[str, Sequence[Callable[[], None]]] = {
            "listing": [partial(listing, "manifest", count), partial(listing, "folder", count)],
            "deciding": [partial(deciding, file, count)],
            "comparing": [partial(comparing, file, count)],
            "writing": [partial(writing, min(count, 20_000))],
            "separating": [partial(separating, file, count)],
            "scaling": [partial(scaling, options.photos, options.ray_python)],
        }
        for work in (work for part in options.parts for work in works[part]):
            process = multiprocessing.get_context("spawn").Process(target=work)
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
