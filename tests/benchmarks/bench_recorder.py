"""What the recorder costs a training step: `python tests/benchmarks/bench_recorder.py`.

The same steps run with and without the recorder, in turns, in one process. With it means all of it, with its default settings: marks,
processor times, the monitor's thread, looks at weights and attention. Only the windows of torch.profiler are off: they cost what they cost
(one to three seconds the first time) however long the training is, and stand apart in the last line. Each turn is a recording of its own.

`wall` and `processor` are medians of the paired differences between neighboring turns; on a machine with other work the wall clock
says little, and the processor time of the process, all its threads, says more. `account` is what the recorder says of itself in the
evidence, the sum of the three columns behind it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import doctor
from trainer.config import EvidenceSettings
from trainer.profiling.recorder import Recorder, Sources
from trainer.profiling.timeline import span

DIGITS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
PHASES = ("data", "to_device", "forward", "backward", "optimizer")

Range = Callable[[str], AbstractContextManager[None]]
Look = Callable[[Callable[[], object]], AbstractContextManager[None]]


class Turn(NamedTuple):
    """Seconds a step."""

    wall: float
    processor: float


class TrainingStep:
    """An optimizer step of a vision transformer on random pixels."""

    def __init__(self, batch_size: int, **args: int) -> None:
        self.model = timm.create_model("vit_tiny_patch16_224", **args)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._shape = (batch_size, 3, args.get("img_size", 224), args.get("img_size", 224))

    def __call__(self, within: Range, look: Look) -> None:
        with within("data"):
            images, labels = torch.rand(self._shape), torch.randint(10, self._shape[:1])
        with within("to_device"):
            images = images.to("cpu")
        with within("forward"):
            loss = F.cross_entropy(self.model(images), labels)
        with within("backward"):
            loss.backward()
        with look(lambda: self.model(images[:4])), within("optimizer"):
            self._optimizer.step()
            self._optimizer.zero_grad()


class EmptyStep:
    """The phases of a step with nothing in them."""

    model: nn.Module | None = None

    def __call__(self, within: Range, look: Look) -> None:
        for name in PHASES:
            with within(name):
                pass


Step = TrainingStep | EmptyStep


def nothing(_: object) -> AbstractContextManager[None]:
    return nullcontext()


def without(step: Step, count: int) -> Turn:
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(count):
        step(nothing, nothing)
    return Turn((time.perf_counter() - wall) / count, (time.process_time() - processor) / count)


def with_it(step: Step, count: int) -> tuple[Turn, dict[str, float]]:
    """A turn with the recorder, and the share of the steps' time that it says it costs, part by part."""
    settings = EvidenceSettings(operators_steps=0)
    recorder = Recorder(
        settings, name="distill", device=torch.device("cpu"), rank=0, world_size=1, sources=Sources(model=step.model)
    )
    wall, processor = time.perf_counter(), time.process_time()
    with recorder:
        for number in range(count):
            with recorder.timeline.step(number, images=128):
                step(span, lambda show, number=number: recorder.tensor_sampler.around_update(number, show))
    turn = Turn((time.perf_counter() - wall) / count, (time.process_time() - processor) / count)
    record = recorder.snapshot().ranks[0].record
    return turn, {part: seconds / record.steps.seconds for part, seconds in record.overhead.items()}


def measure(name: str, step: Step, *, rounds: int, seconds: float, fewest: int) -> str:
    """A row of the table, of turns that last about so many seconds."""
    without(step, 3)
    count = max(fewest, int(seconds / max(without(step, 5).wall, 1e-4)))  # an empty step takes as long as its marks
    plain, recorded, overheads = [], [], []
    for _ in range(rounds):
        plain.append(without(step, count))
        turn, parts = with_it(step, count)
        recorded.append(turn)
        overheads.append(parts)
    plain.append(without(step, count))
    extra = [
        [with_.wall - (before.wall + after.wall) / 2, with_.processor - (before.processor + after.processor) / 2]
        for (before, after), with_ in zip(itertools.pairwise(plain), recorded, strict=True)
    ]
    wall, processor = (statistics.median(column) for column in zip(*extra, strict=True))
    bare = Turn(*(statistics.median(column) for column in zip(*plain, strict=True)))
    parts = {part: statistics.median(turn[part] for turn in overheads) for part in ("marks", "tensors", "monitor")}
    cells = [f"{1e3 * bare.wall:12.3f}", f"{1e6 * wall:10.1f}", f"{1e6 * processor:11.1f}"]
    if step.model is not None:
        cells += [f"{wall / bare.wall:9.2%}", f"{processor / bare.processor:11.2%}"]
        cells += [f"{sum(parts.values()):9.2%}", *(f"{share:9.2%}" for share in parts.values())]
    return f"{name:24}" + "".join(cells)


def seconds_of_a_window(step: Step) -> float:
    """What the default window of torch.profiler costs in a training."""
    recorder = Recorder(EvidenceSettings(), name="distill", device=torch.device("cpu"), rank=0, world_size=1)
    with recorder:
        for number in range(40):
            with recorder.timeline.step(number):
                step(span, nothing)
    return recorder.snapshot().ranks[0].record.overhead["operators"]


def microseconds_of_the_doctor(*, turns: int = 25, steps: int = 300) -> tuple[float, float]:
    """Processor time of a small step in a loop of torch alone, and how much more it is where the doctor is attached; fastest turns."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(4 * steps, 64), torch.randint(4, (4 * steps,))), batch_size=4)

    def turn() -> float:
        began = time.thread_time()
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return 1e6 * (time.thread_time() - began) / steps

    turn()
    plain = min(turn() for _ in range(turns))
    with tempfile.TemporaryDirectory() as folder:
        watched = doctor.attach(model, folder)
        turn()
        attached = min(turn() for _ in range(turns))
        watched.finish()
    return plain, attached - plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns with the recorder")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a turn")
    parser.add_argument(
        "--steps", type=int, default=100, help="fewest of a turn, which begins with a look as a training does"
    )
    parser.add_argument("--batch-size", type=int, default=128, help="images a step of the digits' student")
    parser.add_argument("--doctor", action="store_true", help="only what trainer.doctor.attach costs a step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.doctor:
        plain, more = microseconds_of_the_doctor()
        print(f"doctor.attach: {more:.0f} us of processor time more a step, which takes {plain:.0f} us without it")
        return
    digits = TrainingStep(arguments.batch_size, **DIGITS)
    tiny = TrainingStep(8, img_size=64, num_classes=10)
    cases: dict[str, Step] = {"empty step": EmptyStep(), "digits' student": digits, "ViT-Ti, 64 px": tiny}
    print(f"{'':24}{'step ms':>12}{'wall us':>10}{'proc. us':>11}{'wall':>9}{'processor':>11}{'account':>9}", end="")
    print(f"{'marks':>9}{'tensors':>9}{'monitor':>9}")
    for name, step in cases.items():
        print(
            measure(name, step, rounds=arguments.rounds, seconds=arguments.seconds, fewest=arguments.steps), flush=True
        )
    print(f"one window of torch.profiler, opened and closed: {seconds_of_a_window(digits):.2f} s")


if __name__ == "__main__":
    main()
