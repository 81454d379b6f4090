"""What a served student answers: `python tests/benchmarks/bench_serving.py [RUN]`, of the extra `serve` and of MLflow's own server.

Both servers have the same student, one after the other, on this machine, and are asked by as many clients as `--clients`, each of which
sends its next photo when the last one is answered. Then ours gets twice as many requests as it answered, at even distances, for
`--overload` seconds: which answers it gives, and whether its memory grows. The clients want a part of the machine, too.

    python tests/benchmarks/bench_serving.py runs/latest                 # registered and evaluated, as `make run` leaves it
    python tests/benchmarks/bench_serving.py runs/latest --edge 2000     # photos of 2000 x 1500 pixels
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import numpy as np
from PIL import Image

from tests import mlflow_server
from tests.benchmarks.photos import write_photos
from trainer.io.formatting import aligned
from trainer.stages.onnx_export import exporting

Ask = Callable[[aiohttp.ClientSession, int], Awaitable[int]]
"""Send photo number N; gives the status."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the server of an exported student with MLflow's.")
    parser.add_argument("run", nargs="?", default="runs/latest", help="a registered run (default: %(default)s)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16], help="default: 1 16")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement (default: %(default)s)")
    parser.add_argument(
        "--overload", type=float, default=60, help="seconds at twice the capacity (default: %(default)s)"
    )
    parser.add_argument(
        "--edge", type=int, default=640, help="longer edge of the made-up photos (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="serve a student that did not pass its gate, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serving-") as name:
        folder = Path(name)
        exporting.export(options.run, folder / "served", force=options.force)
        photos = read_photos(folder / "photos", options.edge)
        print(f"photos of {options.edge} pixels, {sum(map(len, photos)) / len(photos) / 1000:.0f} kB")
        rows = [("server", "clients", "photos/s", "p50 ms", "p95 ms", "p99 ms")]
        with ours(folder / "served", folder / "log") as address:
            for clients in options.clients:
                rows.append(asyncio.run(measured("serve", by_predict(address, photos), clients, options.seconds)))
            answers = asyncio.run(
                overloaded(address, by_predict(address, photos), 2 * float(rows[-1][2]), options.overload)
            )
        with mlflows(options.run, folder / "mlflow.log") as address:
            for clients in options.clients:
                rows.append(asyncio.run(measured("MLflow", by_invocation(address, photos), clients, options.seconds)))
    print("\n".join([*aligned(rows, right=range(1, 6)), "", *answers]))


def read_photos(folder: Path, edge: int, count: int = 32) -> list[bytes]:
    """JPEG files whose longer edge has so many pixels."""
    photos = []
    for file in sorted(write_photos(folder, classes=1, per_class=count).rglob("*.jpg")):
        with Image.open(file) as photo:
            buffer = io.BytesIO()
            photo.resize((edge, edge * 3 // 4)).save(buffer, "JPEG", quality=85)
            photos.append(buffer.getvalue())
    return photos


@contextmanager
def ours(export: Path, log: Path) -> Iterator[str]:
    """`vit-distill serve`; yields its address."""
    command = [sys.executable, "-m", "trainer", "serve", str(export), "--port", "0", "--force"]
    with log.open("w", encoding="utf-8") as stream, subprocess.Popen(command, stderr=stream) as process:
        try:
            while not (found := re.search(r"(http://\S+) serves", log.read_text(encoding="utf-8"))):
                assert process.poll() is None, log.read_text(encoding="utf-8")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()


@contextmanager
def mlflows(run: str, log: Path) -> Iterator[str]:
    """`mlflow models serve` of the registered student; yields its address."""
    registered = json.loads((Path(run) / "summary.json").read_text())["mlflow"]
    model = f"models:/{registered['model_name']}/{registered['model_version']}"
    folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": registered["tracking_uri"],
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    with mlflow_server.serving(
        folder / "mlflow", model, manager="local", log=log, folder=Path.cwd(), environment=environment
    ) as address:
        yield address


def by_predict(address: str, photos: Sequence[bytes]) -> Ask:

    async def ask(session: aiohttp.ClientSession, number: int) -> int:
        photo = photos[number % len(photos)]
        async with session.post(f"{address}/predict", data=photo, headers={"Content-Type": "image/jpeg"}) as answer:
            await answer.read()
            return answer.status

    return ask


def by_invocation(address: str, photos: Sequence[bytes]) -> Ask:
    """Send photos in base64, as MLflow's server takes them, and ask for as many labels."""
    texts = [base64.b64encode(photo).decode() for photo in photos]

    async def ask(session: aiohttp.ClientSession, number: int) -> int:
        content = {
            "dataframe_split": {"columns": ["image"], "data": [[texts[number % len(texts)]]]},
            "params": {"top_k": 5},
        }
        async with session.post(f"{address}/invocations", json=content) as answer:
            await answer.read()
            return answer.status

    return ask


def session() -> aiohttp.ClientSession:
    """Make a client without a limit of connections."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60))


async def measured(name: str, ask: Ask, clients: int, seconds: float) -> tuple[str, ...]:
    """Let clients ask one photo after the other; a row of the table."""
    numbers, times = itertools.count(), []

    async def client(asking: aiohttp.ClientSession, end: float, kept: list[float]) -> None:
        while time.monotonic() < end:
            start = time.monotonic()
            status = await ask(asking, next(numbers))
            assert status == 200, f"{name} answered {status}"
            kept.append(time.monotonic() - start)

    async with session() as asking:
        await asyncio.gather(
            *(client(asking, time.monotonic() + seconds / 5, []) for _ in range(clients))
        )  # a first time
        start = time.monotonic()
        await asyncio.gather(*(client(asking, start + seconds, times) for _ in range(clients)))
        rate = len(times) / (time.monotonic() - start)
    p50, p95, p99 = (f"{1000 * value:.1f}" for value in np.percentile(times, [50, 95, 99]))
    return name, str(clients), f"{rate:.1f}", p50, p95, p99


async def overloaded(address: str, ask: Ask, rate: float, seconds: float) -> list[str]:
    """Send requests at a rate, whether the others were answered or not; says what came back and what it cost in memory."""
    statuses: Counter[object] = Counter()
    memory = []

    async def one(asking: aiohttp.ClientSession, number: int) -> None:
        try:
            statuses[await ask(asking, number)] += 1
        except aiohttp.ClientError as error:
            statuses[type(error).__name__] += 1

    async with session() as asking, asyncio.TaskGroup() as tasks:
        start, number = time.monotonic(), 0
        while (now := time.monotonic() - start) < seconds:
            while number < rate * now:
                tasks.create_task(one(asking, number))
                number += 1
            if len(memory) < 20 * now / seconds:
                memory.append(await resident(asking, address))
            await asyncio.sleep(0.005)
    first, last = memory[len(memory) // 2], memory[-1]
    shown = ", ".join(f"{count:,} of {status}" for status, count in sorted(statuses.items(), key=str))
    return [
        f"{rate:.0f} requests a second for {seconds:g} s: {shown}",
        f"memory: {first / 2**20:.0f} MiB in the middle, {last / 2**20:.0f} MiB at the end",
    ]


async def resident(asking: aiohttp.ClientSession, address: str) -> float:
    """Bytes of memory that the server has."""
    async with asking.get(f"{address}/metrics") as answer:
        found = re.search(r"^process_resident_memory_bytes (\S+)", await answer.text(), flags=re.MULTILINE)
    assert found is not None
    return float(found[1])


if __name__ == "__main__":
    main()
