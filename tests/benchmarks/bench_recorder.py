"""What the recorder costs a training step: `python tests/benchmarks/bench_recorder.py`.

The same steps of a small ViT's training run with and without the recorder, in turns, in one process; the monitor samples as in a
training and the operator window is closed, as it is for all but a few steps. Beside it: the cost of the marks alone, on an empty step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import timm
import torch
import torch.nn.functional as F

from trainer.config import EvidenceSettings
from trainer.profiling.recorder import Recorder

Range = Callable[[str], AbstractContextManager[None]]
Step = Callable[[Range], None]


def make_recorder() -> Recorder:
    """A recorder with the default settings, but without the operator window."""
    settings = EvidenceSettings(operators_steps=0)
    return Recorder(settings, name="distill", device=torch.device("cpu"), rank=0, world_size=1)


def make_training_step(batch_size: int) -> Step:
    """One optimiser step of the digits student on random pixels."""
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step(within: Range) -> None:
        with within("data"):
            images, labels = torch.rand(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))
        with within("to_device"):
            images = images.to("cpu")
        with within("forward"):
            loss = F.cross_entropy(model(images), labels)
        with within("backward"):
            loss.backward()
        with within("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def empty_step(within: Range) -> None:
    """The ranges of a step with nothing in them."""
    for name in ("data", "to_device", "forward", "backward", "optimizer"):
        with within(name):
            pass


def without(_: str) -> AbstractContextManager[None]:
    """A range that does nothing."""
    return nullcontext()


def timed_plain(step: Step, count: int) -> float:
    """Seconds a step without a recorder."""
    start = time.perf_counter()
    for _ in range(count):
        step(without)
    return (time.perf_counter() - start) / count


def timed_recorded(step: Step, count: int, recorder: Recorder) -> float:
    """Seconds a step with it."""
    start = time.perf_counter()
    for number in range(count):
        with recorder.timeline.step(number, images=128):
            step(recorder.timeline.range)
    return (time.perf_counter() - start) / count


def measure(name: str, step: Step, *, rounds: int, count: int) -> str:
    """A row of the table: medians over rounds, and the median of the differences within a round."""
    plain, recorded = [], []
    timed_plain(step, count)
    with make_recorder() as recorder:
        for _ in range(rounds):
            plain.append(timed_plain(step, count))
            recorded.append(timed_recorded(step, count, recorder))
    extra = statistics.median(with_it - bare for bare, with_it in zip(plain, recorded, strict=True))
    bare = statistics.median(plain)
    share = f"{100 * extra / bare:8.2f} %" if bare > 1e-4 else "         -"
    return f"{name:24}{bare * 1e6:14.1f}{statistics.median(recorded) * 1e6:14.1f}{extra * 1e6:14.1f}  {share}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of each measurement")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step of the training")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure("empty step", empty_step, rounds=arguments.rounds, count=2000),
        measure("digits student", make_training_step(arguments.batch_size), rounds=arguments.rounds, count=20),
    ]
    print(f"{'':24}{'without us':>14}{'with us':>14}{'cost us':>14}  {'cost':>10}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
