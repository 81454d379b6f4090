"""What a GPU reaches, from stored photos to the update, and what holds it back: `make bench-gpu`, at most nine minutes.

Photos are made up, more than a cache holds. A lane trains once and is timed in three rounds after its stock of batches is used up
(`bench_distillation.Stopwatch`). Beside each rate stands its share of a ceiling: the images a second that the GPU could do if it did
nothing but move the step's bytes, as Inductor counts them (`tests/unit/training/test_bytes.py`), or nothing but its products, whichever
takes longer. The lanes that the aims need come first; what no time is left for is named.

- alone, recorded, online: our loop, as in `bench_distillation.py`; `resident` with the photos in the GPU's memory.
- timm: timm's own loader and tasks on the same photos, end to end; timm-ready, timm-online: its step with ready batches.
- reinforce: recording the teacher's outputs, decoding included.

`--smoke` runs every part with the smallest sizes, on whatever device there is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from torch import nn

from tests.benchmarks import bench_distillation as lanes
from tests.benchmarks.bench_distillation import Bench, Case, EnoughError, Stopwatch
from tests.benchmarks.photos import photo
from trainer.config import DEVICE_VARIABLE, DataSettings, Encoding, ModelSettings, Resident
from trainer.data.dataset import open_dataset
from trainer.data.loader import MicroBatches, make_loader
from trainer.data.views import fused, rendering
from trainer.io import artifacts
from trainer.io.host import usable_cores
from trainer.models import networks
from trainer.objectives.distillation.recording import open_recording
from trainer.profiling.recorder import LoaderStats
from trainer.stages import prepare
from trainer.training.loop import Trainer
from trainer.training.trace import Trace

CLASSES, EDGE = 100, 256
TINY, SMALL, BASE, LARGE = (f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large"))
MEGABYTES = {TINY: 104.7, SMALL: 207.8, BASE: 415.6}
"""Bytes an image that forward and backward pass move in bf16; of ViT-B twice those of ViT-S, whose tokens are half as wide."""
RESERVE_S = 45
"""A part is not begun with less than this left."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A line of the table."""

    lane: str
    student: str = TINY
    teacher: str = LARGE
    batch: int = 256
    compile: str = "on"
    resident: bool = False


PARTS = (
    Part(lane="alone"),
    Part(lane="timm"),
    Part(lane="alone", student=SMALL),
    Part(lane="recorded"),
    Part(lane="timm-ready"),
    Part(lane="alone", student=BASE),
    Part(lane="timm-online"),
    Part(lane="online"),
    Part(lane="reinforce"),
    Part(lane="timm-ready", student=SMALL),
    Part(lane="alone", student=SMALL, compile="max"),
    Part(lane="alone", resident=True),
    Part(lane="alone", batch=1024),
    Part(lane="alone", student=SMALL, batch=1024),
    Part(lane="online", teacher=BASE),
    Part(lane="online", teacher=BASE, student=SMALL),
)


def write_squares(folder: Path, label: int, count: int) -> None:
    """Write made-up photos of one class, as large as they are stored."""
    generator, place = np.random.default_rng(label), folder / f"class-{label:03d}"
    place.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(photo(generator, EDGE, EDGE)).save(place / f"{number:05d}.jpg", quality=90)


def fill(folder: Path, images: int, encoding: Encoding) -> None:
    """Make photos, the data set, and teachers with random weights."""
    each = images // CLASSES or 6
    work = [(folder / "photos", label, each) for label in range(images // each)]
    if images < CLASSES:
        for one in work:
            write_squares(*one)
    else:
        with multiprocessing.get_context("spawn").Pool(usable_cores()) as pool:
            pool.starmap(write_squares, work)
    prepare.run(DataSettings(source=f"imagefolder:{folder / 'photos'}", encoding=encoding), dataset=folder / "dataset")


def open_folder(folder: Path, teacher: str) -> Path:
    """Return a folder with the data set, a teacher, and its recorded outputs, as the lanes read them."""
    place = folder / teacher
    if not place.exists():
        place.mkdir()
        (place / "dataset").symlink_to(folder / "dataset")
        torch.manual_seed(1)
        model = networks.create(ModelSettings(architecture=teacher), open_dataset(place / "dataset").classes)
        with artifacts.create(place / "teacher", "model", settings={}) as draft:
            networks.save(model, draft.path)
    return place


def timm_end_to_end(bench: Bench) -> Stopwatch:
    """timm's loader, which augments on the CPU and normalizes on the GPU, and the step of its training script."""
    student, case, device = bench.student().to(bench.device), bench.case, bench.device
    images = create_dataset("", root=str(bench.folder / ".." / "photos"), is_training=True)
    loader = create_loader(
        images, (3, 224, 224), case.batch_size, is_training=True, num_workers=min(usable_cores(), 16), device=device
    )  # fmt: skip
    task: nn.Module = ClassificationTask(student.network, nn.CrossEntropyLoss(), device=device, verbose=False)
    task.to(device).train()
    if device.type == "cuda":
        task.compile()
    optimizer = create_optimizer_v2(student.network, opt="adamw", lr=1e-4, weight_decay=0.05)
    stopwatch = Stopwatch(device, case.steps)
    endless = (pair for _ in iter(int, 1) for pair in loader)
    for _ in range(0 if device.type == "cpu" else 4 * lanes.MOST_FED):  # what was loaded while it compiled
        next(endless)
    while not stopwatch.is_over():
        pictures, labels = next(endless)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=case.precision == "bf16"):
            loss = task(pictures, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return stopwatch


def lane_of(bench: Bench, part: Part) -> Stopwatch:
    """Train in a lane; what was timed."""
    alone = bench.settings(
        logit_weight=0.0, label_weight=1.0, compile=part.compile if bench.device.type == "cuda" else "off"
    )
    if part.lane == "recorded" and not artifacts.exists(bench.folder / "outputs"):
        lanes.record(bench)
    run: dict[str, Callable[[], Stopwatch]] = {
        "alone": lambda: lanes.our_loop(bench, alone, None, None),
        "recorded": lambda: lanes.our_loop(bench, bench.settings(), None, open_recording(bench.folder / "outputs")),
        "online": lambda: lanes.our_loop(bench, bench.settings(), bench.frozen(), None),
        "timm": lambda: timm_end_to_end(bench),
        "timm-ready": lambda: lanes.timm_loop(bench, distills=False),
        "timm-online": lambda: lanes.timm_loop(bench, distills=True),
        "reinforce": lambda: lanes.timed_recording(bench),
    }
    return run[part.lane]()


# ---------------------------------------------------------------------------------------------------------------------
# The ceilings, and the causes


def milliseconds(device: torch.device, work: Callable[[], object], times: int = 20) -> float:
    """Time of a piece of work, after three that are not timed."""
    for _ in range(3):
        work()
    begin = lanes.now(device)
    for _ in range(times):
        work()
    return 1e3 * (lanes.now(device) - begin) / times


def hardware(device: torch.device, size: int) -> tuple[float, float]:
    """Print and return what the device moves, bytes a second, and multiplies, operations a second."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    block, matrix = (
        torch.empty(size * size * 16, dtype=torch.uint8, device=device),
        torch.randn(size, size, device=device, dtype=kind),
    )
    other = torch.empty_like(block)
    moved = 2 * block.nbytes / milliseconds(device, lambda: other.copy_(block)) * 1e3
    done = 2 * size**3 / milliseconds(device, lambda: matrix @ matrix) * 1e3
    host = torch.empty(50 * 2**20, dtype=torch.uint8)
    copied = host.nbytes / milliseconds(torch.device("cpu"), host.clone, 5) * 1e3
    print(f"memory {moved / 1e9:,.0f} GB/s, products {done / 1e12:,.1f} TFLOP/s, host copies {copied / 1e9:.1f} GB/s, "
          f"{usable_cores()} cores, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")  # fmt: skip
    return moved, done


def causes(bench: Bench, batches: int) -> Iterator[str]:
    """What a step waits for: the loader alone by processes, and the loop by its own evidence."""
    views = bench.training(bench.settings(logit_weight=0.0, label_weight=1.0), None, None)
    made = MicroBatches(views.views, views.order, count=bench.case.batch_size)
    for workers in sorted({1, max(1, bench.workers // 2), max(1, bench.workers), max(1, usable_cores() - 1)}):
        warm, size, stats = 2 * workers + 2, bench.case.batch_size, LoaderStats(workers=workers)
        pins = bench.processes.device.pins_memory
        feed = make_loader(
            made, range(0, (warm + batches) * size, size), workers=workers, pin_memory=pins, observer=stats
        )
        for _ in range(warm):
            next(feed)
        began = time.perf_counter()
        count = sum(1 for _ in feed)
        rate = count * size / (time.perf_counter() - began)
        yield f"loader alone, {workers:2d} processes: {rate:9,.0f} images/s handed over, {stats.images_per_second or 0:9,.0f} made"
    batch, drawing = made[0], views.views
    if batch.views is not None and bench.device.type == "cuda":
        images = batch.images.to(bench.device)
        for name, way in (("one by one", rendering), ("fused", fused)):
            make = partial(way.make_views, images, batch.views, drawing.size, drawing.settings)
            yield f"views, {name:10} {milliseconds(bench.device, make):8.2f} ms for {len(images)}"
    training = bench.training(bench.settings(logit_weight=0.0, label_weight=1.0), None, None)
    stopwatch, trace = Stopwatch(bench.device, bench.case.steps), Trace()
    trainer = Trainer(replace(training, objective=lanes.TimedObjective(training.objective, stopwatch)), [trace])
    stopwatch.loader = trainer.loader
    with suppress(EnoughError):
        trainer.train()
    steps = trace.recorder.timeline.steps
    phases = ("seconds", "data", "to_device", "forward", "backward", "optimizer")
    for column in (*phases, "host_seconds", "host_data_seconds", "host_delayed_seconds"):
        yield f"loop, {column:22} {1e3 * statistics.median(steps.column(column)[-bench.case.steps :]):8.2f} ms"
    rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in trace.recorder.rates_apart().items())
    yield f"loop, images/s apart: {rates}; batches ready {statistics.median(steps.column('queued')[-bench.case.steps :])}"
    yield "data and host_data_seconds above 0, and no batch ready: the loader. host_seconds = seconds: the host. Neither: the GPU."


# ---------------------------------------------------------------------------------------------------------------------
# The table


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Print the ceilings, a line for each lane, and the causes."""
    ends = time.monotonic() + 60 * options.minutes
    device, smoke = torch.device(options.device), options.smoke
    moved, done = hardware(device, 64 if smoke else 8192)
    fill(folder, 24 if smoke else options.images, options.encoding)
    print(
        f"{options.images if not smoke else 24:,} photos of {EDGE} x {EDGE} pixels, stored as {options.encoding}; {options.precision}\n"
    )
    print(
        f"{'student':8}{'lane':16}{'teacher':9}{'batch':>6}{'images/s':>10}{'slowest':>10}{'fastest':>10}{'MFU':>8}{'ceiling':>9}"
    )
    left_out = []
    for part in PARTS:
        if time.monotonic() + RESERVE_S > ends and not smoke:
            left_out.append(part)
            continue
        case = case_of(part, options)
        with lanes.opened(case, open_folder(folder, case.teacher)) as bench:
            laps = lane_of(bench, part).laps
            rates = [case.batch_size * (case.steps // len(laps)) / lap for lap in laps]
            middle, ours = statistics.median(rates), part.lane not in {"reinforce"}
            share = ""
            if ours and not smoke:
                highest = min(moved / (1e6 * MEGABYTES[part.student]), done / lanes.train_flops(bench))
                share = f"{lanes.utilization(bench, middle):>8}{middle / highest:9.0%}"
            names = [name.split("_")[1] for name in (part.student, part.teacher)]
            taught = names[1] if part.lane in {"recorded", "online", "timm-online", "reinforce"} else ""
            kind = part.lane + " max" * (part.compile == "max") + " resident" * part.resident
            print(
                f"{names[0]:8}{kind:16}{taught:9}{case.batch_size:6d}"
                + "".join(f"{rate:10,.0f}" for rate in (middle, min(rates), max(rates)))
                + share,
                flush=True,
            )
    if left_out:
        print(f"no time was left for {', '.join(f'{part.lane} {part.student} {part.batch}' for part in left_out)}")
    print()
    case = case_of(PARTS[0], options)
    if time.monotonic() + RESERVE_S / 2 < ends or smoke:
        with lanes.opened(case, open_folder(folder, case.teacher)) as bench:
            for line in causes(bench, 4 if smoke else 30):
                print(line, flush=True)


def case_of(part: Part, options: argparse.Namespace) -> Case:
    resident: Resident = "on" if part.resident and options.device == "cuda" else "off"
    shared = {"precision": options.precision, "decode_on": "cpu", "resident": resident}
    if options.smoke:
        return Case(teacher="test_vit", student="test_vit", batch_size=4, steps=3, **shared)
    steps = 3 * max(4, 10_000 // part.batch)
    return Case(teacher=part.teacher, student=part.student, batch_size=part.batch, steps=steps, **shared)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=9, help="within which all is to end; default: %(default)s")
    parser.add_argument("--images", type=int, default=20_000, help="made-up photos; default: %(default)s")
    parser.add_argument(
        "--encoding", choices=("raw", "fast-jpeg", "jpeg"), default="fast-jpeg", help="default: %(default)s"
    )
    parser.add_argument("--smoke", action="store_true", help="the smallest sizes, on a CPU too")
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.precision = "bf16" if options.device == "cuda" else "fp32"
    if options.device == "cpu" and not options.smoke:
        sys.exit(
            "error: torch finds no GPU on this machine; --smoke tries the benchmark with the smallest sizes on a CPU"
        )
    os.environ[DEVICE_VARIABLE] = options.device
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
