"""What the order of a large set asks of nodes: `python tests/benchmarks/bench_windows.py [--images N] [--nodes N] [--node-disk BYTES ...]`.

Counts, by the sampler and the positions that trainings use, that all processes together read each image once in each epoch, and follows
one node, as all read the same windows: it fetches the files of a window and of those ahead at the speed of its disk, one after another,
evicts the least recently used ones where its cache is full, and trains where its window is there. The times are a model; nothing is read.

    python tests/benchmarks/bench_windows.py
    python tests/benchmarks/bench_windows.py --nodes 4 --cache 50e9 200e9 --disk 131e6 1e9
"""

from __future__ import annotations

import argparse
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from trainer.config import TrainingSettings
from trainer.data.loader import shard_positions
from trainer.data.sampler import AHEAD, SHARD, StatelessSampler
from trainer.io.formatting import aligned, duration, size


def main() -> None:
    """Count and simulate, and print a table."""
    parser = argparse.ArgumentParser(description="Simulate how nodes read a large set, window by window.")
    parser.add_argument("--images", type=float, default=11e6, help="default: %(default)g")
    parser.add_argument("--nodes", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=8, help="of a node (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8192, help="images of a step (default: %(default)s)")
    parser.add_argument("--bytes", type=float, default=17.4e3, help="of a stored image (default: %(default)g)")
    parser.add_argument("--rate", type=float, default=334, help="images a second and process (default: %(default)g)")
    parser.add_argument(
        "--disk", type=float, nargs="+", default=[131e6, 1e9], help="bytes a second (default: %(default)s)"
    )
    parser.add_argument(
        "--cache", type=float, nargs="+", default=[math.inf, 100e9], help="bytes of a node (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    options = parser.parse_args()
    count, world_size = int(options.images), options.nodes * options.processes
    begun = time.perf_counter()
    print(f"{count:,} images, {options.nodes} nodes of {options.processes} processes, {options.batch:,} images a step")
    least, most = times_read(count, options.batch, world_size)
    took = time.perf_counter() - begun
    print(
        f"each image is read {least} to {most} times in an epoch, by {world_size} processes together ({took:.0f} s)\n"
    )
    rows = [("disk a second", "cache", "epoch", "fetched", "longest wait", "waited", "epoch took")]
    for disk, cache in product(options.disk, options.cache):
        node = Node(file_bytes=SHARD * options.bytes, disk=disk, cache=cache)
        step_s = options.batch / (world_size * options.rate)
        for epoch, (fetched, waits, seconds) in enumerate(
            node.epochs(count, options.batch, step_s, options.epochs), start=1
        ):
            place = (size(disk), size(cache) if cache < math.inf else "all", str(epoch))
            rows.append((*place, size(fetched), f"{max(waits):.1f} s", duration(sum(waits)), duration(seconds)))
    print("\n".join(aligned(rows, right=range(7))))


def times_read(count: int, batch: int, world_size: int) -> tuple[int, int]:
    """Return how often an image is read in the first epoch, least and most, by all processes together."""
    settings, order = (
        TrainingSettings.model_validate({"batch_size": batch}),
        StatelessSampler(count, seed=0, paired=True),
    )
    read = np.zeros(count, dtype=np.int64)
    for step in range(math.ceil(count / batch)):
        for rank in range(world_size):
            for positions in shard_positions(settings, step=step, rank=rank, world_size=world_size):
                indices = (
                    order.take(positions.start, min(positions.stop, count)).indices if positions.start < count else []
                )
                np.add.at(read, indices, 1)
    return int(read.min()), int(read.max())


@dataclass(kw_only=True)
class Node:
    """A node that fetches files one after another, and trains on those that are there."""

    file_bytes: float
    disk: float
    cache: float

    def epochs(self, count: int, batch: int, step_s: float, epochs: int) -> Iterator[tuple[float, list[float], float]]:
        """Yield what each epoch fetches, in bytes, the wait of each step, in seconds, and the seconds of all steps."""
        order, held = (
            StatelessSampler(count, seed=0, paired=True),
            OrderedDict[int, float](),
        )  # file -> when it is there
        now = free = 0.0  # time of the training; when the disk has nothing more to write
        room = max(1, int(min(self.cache, 1e18) / self.file_bytes))
        for epoch in range(epochs):
            begun, fetched, waits = now, 0.0, list[float]()
            known: list[int] = []
            for step in range(epoch * count // batch, (epoch + 1) * count // batch):
                windows = [shards.tolist() for shards in order.windows(step * batch, 1 + AHEAD)]
                if windows[0] != known:
                    known = windows[0]
                    for file in (file for window in windows for file in window):
                        if file not in held:
                            free = held[file] = max(free, now) + self.file_bytes / self.disk
                            fetched += self.file_bytes
                    for window in reversed(windows):
                        for file in window:
                            held.move_to_end(file)
                    while len(held) > room:
                        held.popitem(last=False)
                there = max(held[file] for file in known)
                waits.append(max(0.0, there - now))
                now = max(now, there) + step_s
            yield fetched, waits, now - begun


if __name__ == "__main__":
    main()
