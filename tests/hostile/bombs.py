"""Small inputs that ask for much: each is refused within a limit of memory that the system enforces. Prints name -> outcome as JSON."""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow  # noqa: F401  # what is loaded before the limit is set does not count
import torch
from PIL import Image

from components.launch import pools
from tests.hostile.targets import SIZE, TARGETS, _make_model, sign
from trainer import config
from trainer.data.dataset import decode_square
from trainer.data.sources import list_source, read_file
from trainer.io import artifacts, limits
from trainer.io.host import environment_variables
from trainer.models import networks
from trainer.models.served_student.preprocessing import decode

MAX_PIXELS = 42_000_000
MEMORY_BYTES = 400 * 2**20
"""More than this process has at its start: 8 bytes for each of `MAX_PIXELS` or 30 times a JSON file of 4 MiB, and the libraries' own."""
HUGE = 100 * 2**30
"""Bytes of a file that takes no room on the disk."""

Bomb = Callable[[], object]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        bombs = dict([*_images(), *_files(Path(name)), *_artifacts(Path(name))])
        warm_up(Path(name))
        limit = (
            int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize() + MEMORY_BYTES
        )
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        print(json.dumps({bomb: _outcome(work) for bomb, work in bombs.items()}))


def warm_up(folder: Path) -> None:
    Image.init()
    for name in ("image", "recipe"):
        for seed in TARGETS[name].seeds():
            TARGETS[name].read(seed, folder)


def _outcome(work: Bomb) -> tuple[str, float]:
    """How it ended, and after how many seconds."""
    start = time.monotonic()
    try:
        work()
        outcome = "read"
    except Exception as error:  # noqa: BLE001  # the test looks at what it is
        outcome = f"{type(error).__name__}: {error}"
    return outcome[:600], time.monotonic() - start


# ---------------------------------------------------------------------------------------------------------------------
# Images


def _images() -> Iterator[tuple[str, Bomb]]:
    zeros = squeezed(2 * MEMORY_BYTES)
    contents = {
        "PNG of many pixels": png(100_000, 100_000, zlib.compress(bytes(10**6))),
        "PNG with a huge color profile": png(SIZE, SIZE, b"", (b"iCCP", b"a\0\0" + zeros)),
        "PNG with a huge text": png(SIZE, SIZE, b"", (b"zTXt", b"a\0\0" + zeros)),
        "PNG with too many rows": png(SIZE, SIZE, zeros),
        "GIF of many pixels": b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(3) + b"," + bytes(20),
        "WebP of many pixels": b"RIFF"
        + struct.pack("<I", 30)
        + b"WEBPVP8X"
        + struct.pack("<II", 10, 0)
        + b"\xff\x3f\0" * 2
        + bytes(20),
        "PPM of many pixels": b"P6 100000 100000 255\n" + bytes(100),
        "TIFF with a tile of many pixels": tile(30_000),
        "JPEG of many pixels": jpeg(65_500),
        "JPEG of many scans": jpeg(SIZE) + b"\xff\xda" * 10_000,
        "icon of many pixels": icon(png(30_000, 30_000, zlib.compress(bytes(10**6)))),
    }
    for name, content in contents.items():
        yield name, lambda content=content: decode(content, max_pixels=MAX_PIXELS, min_edge=4)
    yield "as large as allowed", lambda: decode(_largest(), max_pixels=MAX_PIXELS, min_edge=4).close()
    yield "stored PNG of many pixels", lambda: decode_square(contents["PNG of many pixels"], SIZE)
    yield "stored JPEG of many pixels", lambda: decode_square(contents["JPEG of many pixels"], SIZE)
    yield (
        "stored PostScript",
        lambda: decode_square(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", SIZE),
    )


def png(width: int, height: int, rows: bytes, *parts: tuple[bytes, bytes]) -> bytes:
    """An RGBA PNG file; `parts` stand before the rows."""
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    whole = [(b"IHDR", header), *parts, (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in whole
    )


def squeezed(size: int) -> bytes:
    """So many zeros, compressed to a thousandth."""
    packer = zlib.compressobj(1)
    block = bytes(2**20)
    return b"".join(packer.compress(block) for _ in range(size // len(block))) + packer.flush()


def _largest() -> bytes:
    edge = int(MAX_PIXELS**0.5)
    return png(edge, edge, squeezed(2**20 * (edge * (4 * edge + 1) // 2**20 + 1)))


def tile(edge: int) -> bytes:
    """A TIFF file of a few pixels in a tile of many."""
    entries = [(256, 4, 1, SIZE), (257, 4, 1, SIZE), (258, 3, 1, 8), (259, 3, 1, 5), (262, 3, 1, 1), (277, 3, 1, 1)]
    entries += [(322, 4, 1, edge), (323, 4, 1, edge), (324, 4, 1, 200), (325, 4, 1, 100)]
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return (b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4)).ljust(200, b"\0") + b"\x80\0\x01" * 40


def jpeg(edge: int) -> bytes:
    """A JPEG file whose header has this edge."""
    buffer = io.BytesIO()
    Image.new("RGB", (SIZE, SIZE)).save(buffer, "JPEG")
    content = bytearray(buffer.getvalue())
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = struct.pack(">HH", edge, edge)
    return bytes(content)


def icon(content: bytes) -> bytes:
    """An ICO file around a PNG file."""
    return struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 32, 32, 0, 0, 1, 32, len(content), 22) + content


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _files(folder: Path) -> Iterator[tuple[str, Bomb]]:
    huge, pipe = folder / "huge.toml", folder / "pipe.toml"
    huge.touch()
    os.truncate(huge, HUGE)
    os.mkfifo(pipe)
    for kind, path in (("huge", huge), ("pipe", pipe), ("endless", Path("/dev/zero"))):
        yield f"{kind} image", lambda path=path: read_file(str(path))
        yield f"{kind} list", lambda path=path: list_source(f"manifest:{path}")
        yield f"{kind} pools", lambda path=path: _load_pools(path)
    yield "huge recipe", lambda: config.resolve(str(huge))
    yield "pipe recipe", lambda: config.resolve(str(pipe))
    nothings = b"[" + b"[]," * (4 * 2**20 // 3) + b"[]]"
    yield "many empty lists", lambda: limits.parse_json(nothings)
    yield "deep lists", lambda: limits.parse_json(b"[" * (4 * 2**20))
    yield "deep names", lambda: limits.parse_toml("a." * (limits.TOML_BYTES // 2) + "a=1")
    yield "many names", lambda: limits.parse_toml(f"{'a.' * limits.DOTS_IN_A_LINE}a=1\n" * 100)
    yield (
        "many unknown settings",
        lambda: config.resolve("", [f"distll.temperatur{number}=1" for number in range(20_000)]),
    )


def _load_pools(path: Path) -> None:
    with environment_variables({pools.POOLS_VARIABLE: str(path)}):
        pools.load()


# ---------------------------------------------------------------------------------------------------------------------
# Artifacts


def _artifacts(folder: Path) -> Iterator[tuple[str, Bomb]]:
    huge = made(folder / "huge manifest", _make_model)
    os.truncate(huge / artifacts.MANIFEST, HUGE)
    yield "huge manifest", lambda: artifacts.read(huge, "model")
    wide = made(folder / "wide model", _make_model)
    change(
        wide / networks.CONFIG, args={"img_size": 16, "patch_size": 8, "embed_dim": 16_000, "depth": 64, "num_heads": 1}
    )
    sign(wide, "model")
    yield "wide model", lambda: networks.load(wide)
    promise = made(folder / "header", _make_model)
    (promise / networks.WEIGHTS).write_bytes(struct.pack("<Q", 2**40) + b"{}")
    sign(promise, "model")
    yield "long header of weights", lambda: networks.load(promise)


def made(folder: Path, make: Callable[[Path], object]) -> Path:
    folder.mkdir()
    make(folder)
    return folder


def change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
