"""Tune against an exhaustive search, from bad settings: `python tests/benchmarks/bench_tune.py [--small] [--photos FOLDER]`.

A distillation is set up as badly as people do it: eight loader processes on a few cores, fp32, batches of 16 images, the teacher in every
step. An exhaustive search measures every cell of a grid of settings with its loader; tune climbs its ladder from the bad ones. The results
of both are then measured again, in turns, because the best of many noisy measurements looks better than it is.

Printed are the given settings and those of either search, with images a second and the time of the whole distillation, and how much of the
best rate tune has reached in how much of the time.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tests.benchmarks.photos import write_photos
from trainer import config
from trainer.config import DataSettings, ModelSettings, TuneSettings
from trainer.data.dataset import open_dataset
from trainer.devices.process_group import join_processes
from trainer.io import artifacts
from trainer.models import networks
from trainer.profiling.recorder import Startup
from trainer.stages import prepare
from trainer.stages.tune import Subject, open_subject
from trainer.stages.tuning.ladder import Ladder, Workload
from trainer.stages.tuning.trials import Trials
from trainer.stages.tuning.tuning_schema import Candidate, Trial

ARCHITECTURE = "vit_tiny_patch16_224"
BAD = {"workers": 8, "batch_size": 16, "accumulation": 1, "precision": "fp32", "teacher": "online"}
GRID: Mapping[str, Sequence[object]] = {
    "workers": (0, 1, 2, 4, 8),
    "batch_size": (16, 32, 64),
    "accumulation": (1, 2),
    "precision": ("fp32", "bf16"),
    "teacher": ("online", "recorded"),
}


def model(edge: int, dim: int, depth: int) -> ModelSettings:
    """A vision transformer for images of `edge` pixels."""
    args = {"img_size": edge, "patch_size": 8, "embed_dim": dim, "depth": depth, "num_heads": 3}
    return ModelSettings(architecture=ARCHITECTURE, args=args)


def fill(folder: Path, photos: str, per_class: int, edge: int) -> None:
    """Prepare the photos, and make a teacher that knows their classes and nothing else."""
    source = Path(photos) if photos else write_photos(folder / "photos", classes=8, per_class=per_class)
    settings = DataSettings(source=f"imagefolder:{source}", image_size=edge + edge // 8, max_bad_fraction=1)
    prepare.run(settings, dataset=folder / "dataset")
    torch.manual_seed(0)
    teacher = networks.create(model(edge, 192, 6), open_dataset(folder / "dataset").classes)
    with artifacts.create(folder / "teacher", "model", settings={}) as draft:
        networks.save(teacher, draft.path)


def settings_of(options: argparse.Namespace) -> TuneSettings:
    """The section of a distillation that is set up badly."""
    tune = config.resolve("", [f"reinforce.views={options.views}", f"distill.epochs={options.epochs}"]).tune
    assert tune.distill is not None, "it is as the section distill"
    bad = BAD | {"workers": options.workers, "student": model(options.edge, 96, 4), "compile": "off"}
    limits = {"minutes": options.minutes, "fewest_steps": 1}
    return tune.model_copy(update={"distill": tune.distill.model_copy(update=bad), **limits})


def cells(start: Candidate) -> Iterator[Candidate]:
    """Every candidate of the grid."""
    for values in itertools.product(*GRID.values()):
        yield start.model_copy(update=dict(zip(GRID, values, strict=True)))


def reported(trials: Iterator[Trial], count: int) -> Iterator[Trial]:
    """The trials, each with a line of its own, since an exhaustive search takes long."""
    for number, trial in enumerate(trials, 1):
        settings = " ".join(f"{field}={getattr(trial.candidate, field)}" for field in GRID)
        print(f"{number:4}/{count}  {trial.images_per_second:10.1f} images/s  {settings}", file=sys.stderr, flush=True)
        yield trial


def exhaustive(start: Candidate, job: Workload, trials: Trials, most: int) -> tuple[Trial, float, int]:
    """The best cell, the seconds that it took to find it, and the number of cells."""
    grid = list(cells(start))[:most]
    measured = list(reported((trials.measure(cell, loads=True) for cell in grid), len(grid)))
    fitting = [trial for trial in measured if trial.ended == "measured"]
    return min(fitting, key=job.run_s), sum(trial.seconds for trial in measured), len(measured)


def again(
    candidates: Mapping[str, Candidate], job: Workload, trials: Trials, rounds: int
) -> dict[str, tuple[float, float]]:
    """Name of each candidate -> its images a second and the seconds of the distillation, medians over rounds in turns."""
    measured: dict[str, list[Trial]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, candidate in candidates.items():
            measured[name].append(trials.measure(candidate, loads=True))
    return {
        name: (
            statistics.median(trial.images_per_second for trial in each),
            statistics.median(job.run_s(trial) for trial in each),
        )
        for name, each in measured.items()
    }


def compare(subject: Subject, settings: TuneSettings, checkpoints: str, *, rounds: int, most: int) -> None:
    """Search both ways and print what came out."""
    trials = Trials(subject.training, subject.settings, subject.processes)
    job, start = subject.job(settings, trials.memory_limit), Candidate.of(subject.settings)
    found = Ladder(job=job, measure=trials.measure, limit_s=60 * settings.minutes)
    found.climb(start)
    best, seconds, count = exhaustive(start, job, trials, most)
    chosen = {"as given": start, "exhaustive": best.candidate, "tune": found.whole.candidate}
    measured = again(chosen, job, trials, rounds)
    for tried in found.tried:
        print(
            f"tune  {tried.trial.images_per_second:10.1f} images/s {tried.trial.seconds:6.1f} s  {tried.idea}: {tried.verdict}"
        )
    print(f"{'':12}{'images/s':>10}{'whole run':>12}{'search':>10}{'trials':>8}  settings")
    searched = {"as given": (0.0, 0), "exhaustive": (seconds, count), "tune": (found.seconds, len(found.tried))}
    for name, (rate, run_s) in measured.items():
        settings = " ".join(f"{field}={getattr(chosen[name], field)}" for field in GRID)
        print(f"{name:12}{rate:10.1f}{run_s:10.1f} s{searched[name][0]:8.1f} s{searched[name][1]:8d}  {settings}")
    rate, run = measured["tune"][0] / measured["exhaustive"][0], measured["exhaustive"][1] / measured["tune"][1]
    print(
        f"tune reached {rate:.0%} of the best rate and {run:.0%} of the shortest run in {found.seconds / seconds:.1%} of the time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", default="", help="an image folder; photos are made up without one")
    parser.add_argument("--edge", type=int, default=64, help="of the views, in pixels; default: %(default)s")
    parser.add_argument("--epochs", type=int, default=300, help="of the distillation; default: %(default)s")
    parser.add_argument("--views", type=int, default=30, help="that would be recorded; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of measuring again; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=60, help="that tune may search; default: %(default)s")
    parser.add_argument("--cells", type=int, default=1000, help="that the other search measures at most; default: all")
    parser.add_argument("--workers", type=int, default=8, help="loader processes to begin with; default: %(default)s")
    parser.add_argument("--per-class", type=int, default=60, help="made-up photos of each of eight classes")
    parser.add_argument("--small", action="store_true", help="a small distillation: minutes in place of an hour")
    options = parser.parse_args()
    if options.small:
        options.edge, options.epochs, options.views = 32, 60, 10
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # that is what is bad about it
    logging.getLogger("trainer").setLevel(logging.WARNING)
    settings = settings_of(options)
    with join_processes() as processes, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        fill(folder, options.photos, options.per_class, options.edge)
        places = {"dataset": folder / "dataset", "teacher": folder / "teacher", "teacher_outputs": None}
        data = open_dataset(folder / "dataset")
        subject = open_subject(settings, data, processes, Startup(), folder / "blank", **places)
        compare(subject, settings, str(folder / "checkpoints"), rounds=options.rounds, most=options.cells)


if __name__ == "__main__":
    main()
