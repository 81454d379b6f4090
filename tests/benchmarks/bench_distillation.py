"""What distilling costs a step, beside its alternatives: `make bench`, or `python tests/benchmarks/bench_distillation.py --help`.

All lanes train the same student on the same prepared photos with the same batch size and precision, in turns, in one process, and
the medians over rounds are compared. Our lanes run the real loop: loading, decoding, augmentation, evidence. The other
lanes get their batches ready-made, which favors them.

- alone: our loop, the student learns from the labels.
- recorded: our loop with recorded teacher outputs.
- online: our loop with the teacher in it.
- timm: timm's `LogitDistillationTask` and the step of its training script (autocast, AdamW, `loss.item()`).
- timm-alone: the same script's step without a teacher.
- bare: a loop written by hand around the step of `alone`, with the same loader.
- teacher: the teacher's inference on ready-made batches.
- reinforce: recording the teacher's outputs, with loading, decoding, augmentation and writing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from timm.layers import Attention
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask, LogitDistillationTask
from torch import nn
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from tests.benchmarks.photos import write_photos
from trainer.config import (
    DEVICE_VARIABLE,
    DataSettings,
    DecodeOn,
    DistillSettings,
    ModelSettings,
    Precision,
    ReinforceSettings,
    Resident,
    ResidentSettings,
    ViewSettings,
)
from trainer.data import dataset as dataset_module
from trainer.data import loader as loader_module
from trainer.data.batch import Batch
from trainer.data.dataset import open_dataset
from trainer.data.loader import MicroBatches, Samples, Views, make_loader, positions
from trainer.devices import choose_device
from trainer.devices.process_group import Processes, join_processes
from trainer.io import artifacts
from trainer.io.errors import SettingsError, TrainerError
from trainer.models import networks
from trainer.objectives.distillation.frozen_teacher import FrozenTeacher
from trainer.objectives.distillation.objective import DistillObjective
from trainer.objectives.distillation.recording import Recording, open_recording
from trainer.objectives.distillation.reinforcement import UnitBatches, batches_of_units, record_batches
from trainer.objectives.distillation.shards import Unit
from trainer.profiling.recorder import LoaderStats
from trainer.report.tracking.stage_runs import Tracker
from trainer.stages import prepare, reinforce
from trainer.training.checkpointing import Checkpointing
from trainer.training.checkpoints import Checkpoints
from trainer.training.classification import cross_entropy
from trainer.training.cpu_kernels import use_fast_kernels
from trainer.training.loop import Trainer
from trainer.training.metric_logger import MetricLogger
from trainer.training.optimizers import make_optimizer, parameter_groups
from trainer.training.prefetch import Prefetcher
from trainer.training.spec import Losses, Objective, TrainingSpec
from trainer.training.trace import Trace

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "L4": 121e12, "A10G": 70e12}
"""Dense bf16 operations a second, from the makers' data sheets; the model FLOPs utilization is a share of these."""

WARM_UP = 3
"""Steps of each lane that are not timed: they compile, and fill caches."""

MOST_FED = 20
"""Further steps that are not timed because the loader's stock may feed them, for each loader process at most. A loader that has not used it
up by then is less than a tenth slower than the step."""

ROUNDS_IN_A_LANE = 3
TOP_K = 10
CLASSES = 100
TEMPERATURE, LOGIT_WEIGHT = 2.0, 0.9


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured."""

    teacher: str
    student: str
    batch_size: int
    precision: Precision
    steps: int
    """Timed steps of each lane in a round."""
    decode_on: DecodeOn
    """What decodes the photos in our lanes."""
    resident: Resident = "off"
    """Whether they lie in the GPU's memory in our lanes, where a real training set would not fit."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the lanes share."""

    case: Case
    folder: Path
    processes: Processes

    @property
    def device(self) -> torch.device:
        return self.processes.device.torch_device

    @property
    def workers(self) -> int:
        """Loader processes: none on a processor, which the training itself keeps busy."""
        return 12 if self.device.type == "cuda" else 0

    @property
    def classes(self) -> tuple[str, ...]:
        return open_dataset(self.folder / "dataset").classes

    def settings(self, **changes: object) -> DistillSettings:
        """The distillation's settings, for one step more than is timed, and two to warm up."""
        values = {
            "student": {"architecture": self.case.student},
            "epochs": 10_000,
            "batch_size": self.case.batch_size,
            "precision": self.case.precision,
            "logit": {"temperature": TEMPERATURE},
            "logit_weight": LOGIT_WEIGHT,
            "label_weight": 1 - LOGIT_WEIGHT,
            "checkpoint_every": 0,
            "validate_every_epochs": 0,
            "seed": 0,
            "workers": self.workers,
            "evidence": {"operators_steps": 0},
        }
        return DistillSettings.model_validate(values | changes)

    def student(self) -> networks.Classifier:
        torch.manual_seed(0)
        return networks.create(ModelSettings(architecture=self.case.student), self.classes)

    def teacher(self) -> networks.Classifier:
        return networks.load(self.folder / "teacher")

    def frozen(self) -> FrozenTeacher:
        return FrozenTeacher(self.teacher(), self.processes.device, precision=self.case.precision)

    def ready_batches(self, count: int) -> list[Batch]:
        """Batches on the device, made beforehand."""
        training = self.training(self.settings(logit_weight=0.0, label_weight=1.0), None, None)
        batches = MicroBatches(training.views, training.order, count=self.case.batch_size)
        made = iter([batches[index * self.case.batch_size] for index in range(count)])
        return list(self.on_device(made, training.views, count))

    def on_device(self, batches: Iterator[Batch], views: Views, count: int) -> Iterator[Batch]:
        """`count` batches with their views on the device, each sent while the one before is worked at."""
        feed = Prefetcher(batches, views, self.processes.device)
        for _ in range(count):
            yield feed.next()
            feed.preload()

    @property
    def most_steps(self) -> int:
        return WARM_UP + MOST_FED * self.workers + self.case.steps + 2

    def loader(self, batches: Dataset[Batch], starts: Iterable[object]) -> tuple[Iterator[Batch], Stopwatch]:
        """The micro-batches at `starts`, and a stopwatch for what is done with them."""
        stats = LoaderStats(workers=self.workers)
        pins = self.device.type == "cuda"
        loader = make_loader(batches, starts, workers=self.workers, pin_memory=pins, observer=stats)
        return loader, Stopwatch(self.device, self.case.steps, stats)

    def training(
        self, settings: DistillSettings, teacher: FrozenTeacher | None, recording: Recording | None
    ) -> TrainingSpec:
        samples = Samples([open_dataset(self.folder / "dataset").split("train")])
        student = self.student()
        return TrainingSpec(
            name="distill",
            objective=DistillObjective(student, [] if teacher is None else [teacher], settings),
            samples=samples,
            view_size=student.card.image_size,
            settings=settings,
            loading=ResidentSettings(workers=self.workers, decode_on=self.case.decode_on, resident=self.case.resident),
            processes=self.processes,
            teacher_outputs=recording,
        )


class EnoughError(Exception):
    """Ends a training that has been timed long enough."""


class Stopwatch:
    """Times the steps of a lane that follow those that warm up, and those that the loader's stock feeds."""

    def __init__(self, device: torch.device, steps: int, loader: LoaderStats | None = None) -> None:
        self._device, self._steps, self.loader = device, steps, loader or LoaderStats()
        self._lap = steps // ROUNDS_IN_A_LANE if steps % ROUNDS_IN_A_LANE == 0 else steps
        self._calls, self._last, self._began = 0, math.inf, 0.0
        self.laps: list[float] = []
        """Seconds of each of `ROUNDS_IN_A_LANE` parts of the timed steps, where these can be divided so."""

    @property
    def seconds(self) -> float:
        return sum(self.laps)

    def is_over(self) -> bool:
        """Before each step: begin to time if this is the first that counts; whether the last one was before."""
        if self._last == math.inf and self._is_steady:
            self._began, self._last = now(self._device), self._calls + self._steps
        elif self._last - self._calls < self._steps and (self._last - self._calls) % self._lap == 0:
            ended = now(self._device)
            self.laps.append(ended - self._began)
            self._began = ended
            if self._calls == self._last:
                return True
        self._calls += 1
        return False

    @property
    def _is_steady(self) -> bool:
        """Whether the next steps show how fast the loader is.

        Its processes fill their queue while the first steps compile. Once each was handed a new batch, a queue that is more than half
        full is that of a loader that keeps up; a slower one empties it.
        """
        past, workers, ready = self._calls - WARM_UP, self.loader.workers or 0, self.loader.ready
        return past >= MOST_FED * workers or (past > workers and (ready > workers or ready < 1))


class TimedObjective:
    """An objective that ends the training when its steps have been timed."""

    def __init__(self, objective: Objective, stopwatch: Stopwatch) -> None:
        self._objective, self._stopwatch = objective, stopwatch
        self.model, self.left_out = objective.model, objective.left_out
        self.forward_for_hooks, self.end_step = objective.forward_for_hooks, objective.end_step
        self.compile = objective.compile

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        if self._stopwatch.is_over():
            raise EnoughError
        return self._objective(model, batch)


def timed_recording(bench: Bench) -> Stopwatch:
    """Time to record the teacher's outputs on the timed batches, with loading, decoding and augmentation."""
    training = bench.training(bench.settings(logit_weight=0.0, label_weight=1.0), None, None)
    views, size, samples = training.views, bench.case.batch_size, len(training.samples)
    number = math.ceil(bench.most_steps / math.ceil(samples / size))
    parts = batches_of_units((Unit(view=view, first=0, count=samples, block=0) for view in range(number)), size)
    loader, stopwatch = bench.loader(UnitBatches(views, size), parts)
    images = (batch.images for batch in bench.on_device(loader, views, bench.most_steps))
    records = record_batches(images, bench.frozen(), open_recording(bench.folder / "outputs").description)
    while not stopwatch.is_over():
        next(records)
    return stopwatch


def now(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


LANES = ("alone", "recorded", "online", "timm", "timm-alone", "bare", "teacher", "reinforce")

Lane = Callable[[], float]
"""Images a second of a round."""


def our_loop(
    bench: Bench, settings: DistillSettings, teacher: FrozenTeacher | None, recording: Recording | None
) -> Stopwatch:
    """Time steps in the real loop."""
    training = bench.training(settings, teacher, recording)
    stopwatch = Stopwatch(bench.device, bench.case.steps)
    trace, tracker = Trace(), Tracker()
    # A folder of its own: in a shared one it is noted that the training before was ended, by the same error at the same step.
    checkpoints = Checkpoints(tempfile.mkdtemp(dir=bench.folder), "distill", settings={}, parents={})
    hooks = [MetricLogger(trace, tracker), trace, Checkpointing(checkpoints, tracker)]
    trainer = Trainer(replace(training, objective=TimedObjective(training.objective, stopwatch)), hooks)
    stopwatch.loader = trainer.loader
    with suppress(EnoughError):
        trainer.train()
    return stopwatch


def bare_loop(bench: Bench, settings: DistillSettings) -> Stopwatch:
    """The step of `alone`, written by hand around the same loader."""
    training = bench.training(settings, None, None)
    model = training.objective.model.to(bench.device).train()
    use_fast_kernels(model, bench.processes.device, settings.precision)
    groups = parameter_groups(model, weight_decay=settings.weight_decay)
    optimizer = make_optimizer(groups, settings, bench.processes)
    batches = MicroBatches(training.views, training.order, count=settings.batch_size)
    starts = positions(settings, first_step=0, last_step=bench.most_steps, rank=0, world_size=1)
    loader, stopwatch = bench.loader(batches, starts)
    for batch in bench.on_device(loader, training.views, bench.most_steps):
        if stopwatch.is_over():
            break
        with bench.processes.device.autocast(settings.precision):
            loss = cross_entropy(model(batch.images), batch.labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return stopwatch


def timm_loop(bench: Bench, *, distills: bool) -> Stopwatch:
    """timm's task with the step of its training script, on batches that are ready and normalized."""
    student = bench.student().to(bench.device)
    network, criterion = student.network, nn.CrossEntropyLoss()
    if distills:
        task: nn.Module = LogitDistillationTask(
            network,
            bench.teacher().network,
            criterion=criterion,
            distill_loss_weight=LOGIT_WEIGHT,
            task_loss_weight=1 - LOGIT_WEIGHT,
            temperature=TEMPERATURE,
            device=bench.device,
            verbose=False,
        )
    else:
        task = ClassificationTask(network, criterion, device=bench.device, verbose=False)
    task.to(bench.device).train()
    if bench.device.type == "cuda":
        task.compile()
    optimizer = create_optimizer_v2(network, opt="adamw", lr=1e-4, weight_decay=0.05)
    ready = [(student.preprocess(batch.images), batch.labels) for batch in bench.ready_batches(2)]
    stopwatch, batches = Stopwatch(bench.device, bench.case.steps), cycle(ready)
    while not stopwatch.is_over():
        images, labels = next(batches)
        with torch.autocast(bench.device.type, dtype=torch.bfloat16, enabled=bench.case.precision == "bf16"):
            loss = task(images, labels)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return stopwatch


def bare_teacher(bench: Bench) -> Stopwatch:
    """The teacher's inference on batches that are ready."""
    teacher, ready = bench.frozen(), [batch.images for batch in bench.ready_batches(2)]
    stopwatch, batches = Stopwatch(bench.device, bench.case.steps), cycle(ready)
    while not stopwatch.is_over():
        teacher(next(batches))
    return stopwatch


# ---------------------------------------------------------------------------------------------------------------------
# Set-up


@contextmanager
def opened(case: Case, folder: Path) -> Iterator[Bench]:
    """What the lanes share, in a folder that `fill` has filled."""
    # A real training set would not fit into memory: decode at each read.
    dataset_module.IN_MEMORY_BYTES, loader_module.memory_share = 0, lambda: 0
    with join_processes() as processes:
        yield Bench(case=case, folder=folder, processes=processes)


def fill(folder: Path, photos: str, classes: int, teacher: str) -> None:
    """A data set of photos and a teacher with random weights, which costs as much as a trained one."""
    if not photos:
        write_photos(folder / "photos", classes=classes, per_class=5)
    source = f"imagefolder:{photos or folder / 'photos'}"
    prepare.run(DataSettings(source=source, encoding="fast-jpeg"), dataset=folder / "dataset")
    torch.manual_seed(1)
    model = networks.create(ModelSettings(architecture=teacher), open_dataset(folder / "dataset").classes)
    with artifacts.create(folder / "teacher", "model", settings={}) as draft:
        networks.save(model, draft.path)


def record(bench: Bench) -> None:
    """The teacher's outputs on one view of every training image, by the real stage."""
    settings = ReinforceSettings.model_validate(
        {
            "views": 1,
            "top_k": TOP_K,
            "augmentation": ViewSettings(),
            "precision": bench.case.precision,
            "seed": 0,
            "workers": bench.workers,
            "decode_on": bench.case.decode_on,
        }
    )
    folder = bench.folder
    reinforce.run(settings, dataset=folder / "dataset", teacher=folder / "teacher", teacher_outputs=folder / "outputs")


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def lanes(bench: Bench) -> dict[str, Lane]:
    """What is measured in turns; each gives images a second."""
    case = bench.case
    recording = open_recording(bench.folder / "outputs")
    alone = bench.settings(logit_weight=0.0, label_weight=1.0)
    images = case.batch_size * case.steps
    timed: dict[str, Callable[[], Stopwatch]] = {
        "alone": lambda: our_loop(bench, alone, None, None),
        "recorded": lambda: our_loop(bench, bench.settings(), None, recording),
        "online": lambda: our_loop(bench, bench.settings(), bench.frozen(), None),
        "timm": lambda: timm_loop(bench, distills=True),
        "timm-alone": lambda: timm_loop(bench, distills=False),
        "bare": lambda: bare_loop(bench, alone),
        "teacher": lambda: bare_teacher(bench),
        "reinforce": lambda: timed_recording(bench),
    }
    return {name: partial(rate_of, lane, images) for name, lane in timed.items()}


def rate_of(lane: Callable[[], Stopwatch], images: int) -> float:
    return images / lane().seconds


def in_turns(rates: dict[str, Lane], rounds: int) -> dict[str, list[float]]:
    """Images a second of each lane, round by round; every other round runs backwards."""
    measured: dict[str, list[float]] = {name: [] for name in rates}
    for number in range(rounds):
        for name in list(rates)[:: -1 if number % 2 else 1]:
            measured[name].append(rates[name]())
            print(f"round {number + 1}, {name}: {measured[name][-1]:.1f} images/s", file=sys.stderr)
            gc.collect()
    return measured


BARS = (
    ("recorded / alone", "recorded", "alone", 0.95),
    ("recorded / timm", "recorded", "timm", 3.5),
    ("online / timm", "online", "timm", 1.1),
    ("alone / bare loop", "alone", "bare", 0.98),
    ("reinforce / teacher", "reinforce", "teacher", 0.95),
    ("alone / timm-alone", "alone", "timm-alone", 1.5),
)
"""What is compared: title, lane, the other lane, and what the ratio must reach; the last one on a GPU."""


def ratio(measured: dict[str, list[float]], lane: str, other: str) -> float:
    """Median over the rounds of the ratio within a round, which a machine that slows down for a while changes little."""
    return statistics.median(a / b for a, b in zip(measured[lane], measured[other], strict=True))


def peak_memory(options: argparse.Namespace, case: Case, folder: Path, lane: str) -> float:
    """MiB that a process of its own holds at most while it trains in a lane."""
    command = [sys.executable, __file__, "--lane", lane, "--folder", str(folder), "--precision", case.precision]
    command += ["--teacher", case.teacher, "--student", case.student, "--batch-size", str(case.batch_size)]
    command += ["--device", options.device, "--decode-on", case.decode_on]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(answer.stdout.splitlines()[-1]))


def held_now(device: torch.device) -> float:
    """The most MiB that this process, or its GPU, has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    # Not getrusage's figure, which begins with what the parent held.
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return float(kib) / 1024


def train_flops(bench: Bench) -> float:
    """Operations of the student's forward and backward pass for one image: three times the forward pass's."""
    student = bench.student()
    for module in student.modules():
        if isinstance(module, Attention):
            module.fused_attn = False  # whose operations would not be counted
    image = torch.zeros(1, 3, student.card.image_size, student.card.image_size, dtype=torch.uint8)
    with FlopCounterMode(display=False) as counter:
        student(image)
    return 3.0 * counter.get_total_flops()


def utilization(bench: Bench, rate: float) -> str:
    """Model FLOPs utilization: the student's operations a second as a share of the GPU's peak; the teacher's are not counted."""
    if bench.device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(bench.device)
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    return f"{rate * train_flops(bench) / peak:8.1%}" if peak else f"  {name}: peak not known"


# ---------------------------------------------------------------------------------------------------------------------
# The table


def show(options: argparse.Namespace, case: Case, folder: Path) -> None:
    """Measure a case and print its table."""
    print(f"\n{case.teacher} -> {case.student}, batch {case.batch_size}, {case.precision}, {options.rounds} rounds")
    print(f"{options.photos or 'synthetic photos'}, decoded on {case.decode_on}\n")
    with opened(case, folder) as bench:
        if not artifacts.exists(folder / "outputs"):  # what they hold changes no time
            record(bench)
        chosen = {name: lane for name, lane in lanes(bench).items() if name in options.lanes}
        measured = in_turns(chosen, options.rounds)
        print(f"{'lane':12}{'images/s':>10}{'slowest':>10}{'fastest':>10}{'  MFU' if options.device == 'cuda' else ''}")
        for name, rates in measured.items():
            middle = statistics.median(rates)
            share = utilization(bench, middle) if name not in {"teacher", "reinforce"} else ""
            print(f"{name:12}{middle:10.1f}{min(rates):10.1f}{max(rates):10.1f}{share}")
        size = open_recording(folder / "outputs").description.record.itemsize
    print(f"\n{'comparison':24}{'ratio':>8}{'bar':>8}")
    for title, lane, other, bar in BARS:
        if not {lane, other} <= measured.keys():
            continue
        reached = ratio(measured, lane, other)
        judged = options.device == "cuda" or other != "timm-alone"
        verdict = f"{bar:8.2f}  {'reached' if reached >= bar else 'MISSED'}" if judged else ""
        print(f"{title:24}{reached:8.2f}{verdict}")
    print(f"{'bytes a view':24}{size:8d}{64:8d}  {'reached' if size <= 64 else 'MISSED'}")
    for lane in ("alone", "recorded", "online", "timm") if options.memory else ():
        print(f"{'peak MiB, ' + lane:24}{peak_memory(options, case, folder, lane):8.0f}")


def main() -> None:
    """Print a table for each precision."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--photos", default="", help="an image folder; photos are made up without one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--decode-on",
        choices=("cpu", "cuda"),
        default="cpu",
        help="what decodes our lanes' photos; default: %(default)s",
    )
    parser.add_argument("--teacher", default="vit_base_patch16_224", help="default: %(default)s")
    parser.add_argument("--student", default="vit_tiny_patch16_224", help="default: %(default)s")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=("bf16", "fp32"),
        help="default: both; on a processor without bf16 instructions, which timm's lanes would emulate and ours avoid, only fp32",
    )
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a lane in a round; default: %(default)s")
    parser.add_argument("--classes", type=int, default=CLASSES, help="of made-up photos; default: %(default)s")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure the lanes' memory")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=LANES, help="default: all")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lane", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ[DEVICE_VARIABLE] = options.device
    try:
        options.precision = precisions(options.precision)
    except TrainerError as error:
        sys.exit(f"error: {error}")
    cases = [
        Case(
            teacher=options.teacher,
            student=options.student,
            batch_size=options.batch_size,
            precision=precision,
            steps=options.steps,
            decode_on=options.decode_on,
        )
        for precision in options.precision
    ]
    try:
        measure(options, cases)
    except TrainerError as error:
        sys.exit(f"error: {error}")


def precisions(wanted: list[Precision] | None) -> list[Precision]:
    """Those to measure: both where none are named and the device has both; complains before photos are made."""
    if choose_device().uses_bf16("bf16"):
        return wanted or ["bf16", "fp32"]
    if wanted and "bf16" in wanted:
        raise SettingsError(
            "--precision bf16: this processor has no bf16 instructions, so our lanes would compute in fp32 and timm's in emulated bf16, "
            "which takes 10 to 15 times as long; use --precision fp32"
        )
    return ["fp32"]


def measure(options: argparse.Namespace, cases: list[Case]) -> None:
    """Print a table for each case; or, as a process of its own, what one lane holds at most."""
    if options.lane:
        with opened(cases[0], options.folder) as bench:
            lanes(bench)[options.lane]()
            print(held_now(bench.device))
        return
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), options.photos, options.classes, options.teacher)
        for case in cases:
            show(options, case, Path(folder))


if __name__ == "__main__":
    main()
