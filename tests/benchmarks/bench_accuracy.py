"""What each part of the method gains in accuracy: `python tests/benchmarks/bench_accuracy.py COMPARISON [RECIPE] [--set KEY=VALUE ...]`.

Trains the variants of a comparison with several seeds on the same prepared data, and prints the top-1 of each on the test and the
validation split (mAP of images with several labels). Settings are chosen by validation; the test column is for what was chosen. Where the
folder of a former call is given as `--output`, what it has finished is kept.

    labels      the student: distilled; on the labels alone; the same with the regularization of the teacher's fine-tuning
    pretraining the teacher: pretrained as a masked autoencoder and fine-tuned; fine-tuned from scratch for as many epochs together
    unlabeled   the student of a teacher that knows half of the labels: on the labeled images; on all, in as many steps
    search      the student by the recipe's settings, and by those that a search has found: by Optuna's sampler and by random proposals,
                at equal cost; a study a seed, each measured with three seeds that no search has seen
    methods     the student by method: each of METHODS, and each `--variant "NAME: KEY=VALUE ..."`, with its processor time; with
                `--set distill.teacher=recorded` from outputs that are recorded once

    python tests/benchmarks/bench_accuracy.py labels digits
    python tests/benchmarks/bench_accuracy.py methods digits --only kl dkd --variant "kl at T = 4: distill.logit.temperature=4"
    python tests/benchmarks/bench_accuracy.py search digits --set distill.teacher=recorded
    python tests/benchmarks/bench_accuracy.py unlabeled grocery --set data.source=imagefolder:/photos/grocery --output runs/unlabeled
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainer import config
from trainer.data.dataset import open_dataset
from trainer.data.dataset_schema import SPLITS
from trainer.io import artifacts, limits
from trainer.report.scores import score, val_name
from trainer.stages.searching.search_schema import read_search

Scores = Mapping[str, Sequence[tuple[float, float]]]
"""Variant -> test and validation score of each seed, in percent."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A recipe, and where its stages write."""

    recipe: str
    overrides: Sequence[str]
    seeds: Sequence[int]
    jobs: int
    output: Path
    methods: Mapping[str, Sequence[str]]
    """Name -> settings, for the comparison `methods`."""

    @property
    def settings(self) -> config.Settings:
        """As the recipe and the overrides say."""
        return config.resolve(self.recipe, self.overrides)

    def stage(self, stage: str, made: str, *changes: str, **places: str) -> Path:
        """Run a stage, unless what it makes stands there already; places are names within the output."""
        target = self.output / made
        if not (target / artifacts.MANIFEST).exists():
            options = [
                text
                for name, place in places.items()
                for text in (f"--{name.replace('_', '-')}", str(self.output / place))
            ]
            command = [sys.executable, "-m", "trainer", "stage", stage, "--recipe", self.recipe, *options]
            command += ["--set", *self.overrides, *changes]
            log = self.output / f"{made}.log"
            is_continued = log.exists()  # so what the processes of the former call took is not known
            with log.open("w") as file:
                environment = {
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    # Of its own: beside the outputs they would be taken for those of one training whose settings have changed.
                    "TRAINER_CHECKPOINTS": str(self.output / "checkpoints" / made),
                }
                process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
                _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise SystemExit(f"{made}: exit code {process.returncode}; see {log}")
            seconds = math.nan if is_continued else usage.ru_utime + usage.ru_stime
            (self.output / f"{made}.seconds").write_text(f"{seconds:.1f}\n")
        return target

    def minutes(self, made: str) -> float:
        """Processor minutes of the stage that made this, and of its processes, which other work on the machine hardly changes.

        NaN of a stage that a former call began, or did not see end.
        """
        file = self.output / f"{made}.seconds"
        return float(file.read_text()) / 60 if file.exists() else math.nan

    def prepare(self, name: str = "data", *changes: str) -> None:
        self.stage("prepare", name, *changes, dataset=name)

    def pretrain(self, name: str, *changes: str, dataset: str = "data") -> None:
        self.stage("pretrain", name, *changes, dataset=dataset, teacher=name, evidence=f"{name}-evidence")

    def record(self) -> None:
        """What the teacher `teacher` says of its views, where students learn from that."""
        if self.settings.distill.teacher == "recorded":
            self.stage("reinforce", "outputs", dataset="data", teacher="teacher", teacher_outputs="outputs")

    def distill(self, name: str, *changes: str, dataset: str = "data") -> tuple[float, float]:
        """A student of this name, of the teacher `teacher`; its test and validation score."""
        places = {"dataset": dataset, "teacher": "teacher", "student": name, "evidence": f"{name}-evidence"}
        if self.settings.distill.teacher == "recorded" and dataset == "data":
            places["teacher_outputs"] = "outputs"
        self.stage("distill", name, *changes, **places)
        return self.score(name, teacher="teacher", dataset=dataset)

    def score(self, name: str, *, teacher: str, dataset: str = "data") -> tuple[float, float]:
        """Test and validation score of a model, in percent; a student's teacher is the one that it was made from."""
        made = f"{name}-evaluation"
        folder = self.stage("evaluate", made, dataset=dataset, teacher=teacher, student=name, evaluation=made)
        metrics = json.loads((folder / "metrics.json").read_text())
        figures = artifacts.manifest(self.output / name, "model").figures
        measured = val_name(figures)
        assert measured is not None, "a model with a head is measured when it is kept"
        return 100 * score(metrics["student"]["test"]), 100 * figures[measured]

    def scores(self, variants: Mapping[str, Callable[[int], tuple[float, float]]]) -> Scores:
        """Train and measure each variant with each seed."""
        with ThreadPoolExecutor(self.jobs) as pool:
            under_way = {name: [pool.submit(train, seed) for seed in self.seeds] for name, train in variants.items()}
            return {name: [one.result() for one in measured] for name, measured in under_way.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Comparisons


def labels(bench: Bench) -> Scores:
    bench.prepare()
    bench.pretrain("teacher")
    like = bench.settings.pretrain.finetune
    alone = ("distill.logit_weight=0", "distill.label_weight=1", "distill.unlabeled=false")
    regularized = (
        f"distill.label_smoothing={like.label_smoothing}",
        f"distill.drop_path={like.drop_path}",
        f"distill.views.mixup={like.views.mixup}",
        f"distill.views.cutmix={like.views.cutmix}",
    )
    return bench.scores(
        {
            "distilled": lambda seed: bench.distill(f"distilled-{seed}", f"distill.seed={seed}"),
            "labels alone": lambda seed: bench.distill(f"alone-{seed}", *alone, f"distill.seed={seed}"),
            "labels alone, regularized": lambda seed: bench.distill(
                f"regularized-{seed}", *alone, *regularized, f"distill.seed={seed}"
            ),
        }
    )


def pretraining(bench: Bench) -> Scores:
    """What a masked autoencoder adds to a teacher that is then fine-tuned."""
    bench.prepare()
    given = bench.settings.pretrain
    epochs = given.mae.epochs + given.finetune.epochs

    def pretrained(seed: int) -> tuple[float, float]:
        bench.pretrain(f"pretrained-{seed}", f"pretrain.seed={seed}")
        return bench.score(f"pretrained-{seed}", teacher=f"pretrained-{seed}")

    def from_scratch(seed: int) -> tuple[float, float]:
        changes = ("pretrain.mae.epochs=0", f"pretrain.finetune.epochs={epochs}", f"pretrain.seed={seed}")
        bench.pretrain(f"scratch-{seed}", *changes)
        return bench.score(f"scratch-{seed}", teacher=f"scratch-{seed}")

    return bench.scores(
        {
            f"{given.mae.epochs} epochs of pretraining, {given.finetune.epochs} of fine-tuning": pretrained,
            f"{epochs} of fine-tuning": from_scratch,
        }
    )


def unlabeled(bench: Bench) -> Scores:
    """What images without labels add, where half of the training images have lost theirs."""
    bench.prepare("data-labeled")
    manifest = bench.output / "half.csv"
    if not manifest.exists():
        remove_labels(bench.output / "data-labeled", manifest)
    bench.prepare("data", f"data.source=manifest:{manifest}")
    bench.pretrain("teacher", f"data.source=manifest:{manifest}")
    data, given = open_dataset(bench.output / "data"), bench.settings.distill
    few, whole = len(data.split("train")), len(data.split("train")) + len(data.split("unlabeled"))
    more = whole / few  # epochs over the labeled images for one over all
    on_labeled = (
        "distill.unlabeled=false",
        f"distill.epochs={round(given.epochs * more)}",
        f"distill.warmup_epochs={given.warmup_epochs * more}",
        f"distill.validate_every_epochs={round(given.validate_every_epochs * more)}",
    )
    return bench.scores(
        {
            f"{few:,} labeled images": lambda seed: bench.distill(
                f"labeled-{seed}", *on_labeled, f"distill.seed={seed}"
            ),
            f"all {whole:,} images": lambda seed: bench.distill(f"all-{seed}", f"distill.seed={seed}"),
        }
    )


METHODS = {
    "labels alone": "distill.logit_weight=0 distill.label_weight=1 distill.unlabeled=false",
    "kl": "distill.logit.loss=kl",
    "kl, standardized": "distill.logit.loss=kl distill.logit.standardize=true",
    "hard": "distill.logit.loss=hard",
    "dkd": "distill.logit.loss=dkd",
    "dist": "distill.logit.loss=dist",
    "kl and embedding": "distill.logit.loss=kl distill.feature_weight=1 distill.feature_loss=cosine_smooth_l1",
}
"""What `methods` compares; whatever else a recipe says of the student and its training is the same for all."""


def methods(bench: Bench) -> Scores:
    """What a student gains by each method, from one teacher."""
    bench.prepare()
    bench.pretrain("teacher")
    bench.record()

    def train(name: str, seed: int) -> tuple[float, float]:
        return bench.distill(student(name, seed), *bench.methods[name], f"distill.seed={seed}")

    return bench.scores({name: partial(train, name) for name in bench.methods})


def search(bench: Bench) -> Scores:
    """Compare the recipe's settings with those of a search, which the seed of a study alone makes different."""
    bench.prepare()
    bench.pretrain("teacher")
    bench.record()
    fresh = (1000, 1001, 1002)

    def measured(name: str, *changes: str) -> tuple[float, float]:
        every = [bench.distill(f"{name}-{seed}", *changes, f"distill.seed={seed}") for seed in fresh]
        return statistics.mean(test for test, _ in every), statistics.mean(val for _, val in every)

    def of_recipe(seed: int) -> tuple[float, float]:
        return measured("recipe")

    def found(sampler: str, seed: int) -> tuple[float, float]:
        made, places = f"search-{sampler}-{seed}", {"dataset": "data", "teacher": "teacher"}
        if bench.settings.distill.teacher == "recorded":
            places["teacher_outputs"] = "outputs"
        changes = ("search.enabled=true", f"search.sampler={sampler}", f"distill.seed={10 * seed}")
        result = read_search(bench.stage("search", made, *changes, search=made, **places))
        best = result.trials[result.best]
        print(
            f"{made}: {result.reason}; the halving cost {result.trainings:.1f} trainings, all {bench.minutes(made):.0f} processor "
            f"minutes; {best.values}",
            flush=True,
        )
        if not result.best:
            return of_recipe(seed)
        return measured(f"{made}-best", *(f"{name}={limits.toml_value(value)}" for name, value in best.values.items()))

    return bench.scores(
        {"recipe": of_recipe, "search": partial(found, "tpe"), "random search": partial(found, "random")}
    )


def student(method: str, seed: int) -> str:
    """Name the folder of a method's student."""
    return f"{re.sub('[^a-z0-9]+', '-', method.lower())}-{seed}"


def remove_labels(dataset: Path, manifest: Path) -> None:
    """Write a data set's stored images as files, and a manifest of them in which half of each class's training images have no label.

    Which half is decided by the smaller hashes of the images' keys; all stay in their splits.
    """
    data, folder = open_dataset(dataset), manifest.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in SPLITS:
        split = data.split(name)
        of_class: dict[int, list[int]] = defaultdict(list)
        for place, label in enumerate(split.labels.tolist()):
            of_class[label].append(place)
        for label, places in of_class.items():
            drawn = sorted(places, key=lambda place: hashlib.sha256(split.names[place].encode()).hexdigest())
            without = set(drawn[: len(drawn) // 2]) if name == "train" else set()
            for place in places:
                file = folder / f"{split.names[place]}.image"
                file.write_bytes(split.encoded(place))
                is_labeled = label >= 0 and place not in without
                rows.append((file, data.classes[label] if is_labeled else "", name if is_labeled else "unlabeled"))
    with manifest.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])


# ---------------------------------------------------------------------------------------------------------------------
# The table

COMPARISONS = {
    "labels": labels,
    "pretraining": pretraining,
    "unlabeled": unlabeled,
    "search": search,
    "methods": methods,
}


def table(scores: Scores, seeds: Sequence[int]) -> list[str]:
    """Score of each variant and seed on test and val, their means, and largest less smallest, as a table of Markdown."""
    heads = [f"{name}, {split}" for name in scores for split in ("test", "val")]
    columns = [[seed[split] for seed in scores[name]] for name in scores for split in (0, 1)]
    rows = [(str(seed), [column[place] for column in columns]) for place, seed in enumerate(seeds)]
    rows.append(("mean", [statistics.mean(column) for column in columns]))
    rows.append(("largest - smallest", [max(column) - min(column) for column in columns]))
    lines = [f"| seed | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    return [*lines, *(f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} |" for name, values in rows)]


def table_of_methods(bench: Bench, scores: Scores) -> list[str]:
    """One row a method: test score with its spread over the seeds and the mean's standard error by that (nan of one seed), validation
    top-1, and processor minutes of a distillation.

    The minutes are those of the seeds that were trained in one go; `nan` where there is none.
    """
    lines = [
        "| method | test | largest - smallest | standard error | val | processor minutes |",
        "|---|---|---|---|---|---|",
    ]
    for name, of_seeds in scores.items():
        test, val = ([seed[split] for seed in of_seeds] for split in (0, 1))
        taken = [bench.minutes(student(name, seed)) for seed in bench.seeds]
        known = [minutes for minutes in taken if not math.isnan(minutes)]
        minutes = statistics.mean(known) if known else math.nan
        error = statistics.stdev(test) / math.sqrt(len(test)) if len(test) > 1 else math.nan
        numbers = (statistics.mean(test), max(test) - min(test), error, statistics.mean(val), minutes)
        lines.append(f"| {name} | {' | '.join(f'{number:.1f}' for number in numbers)} |")
    return lines


def chosen_methods(only: Sequence[str], variants: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Choose some of `METHODS`, or all, and `NAME: KEY=VALUE ...` of one's own: name -> settings."""
    unknown = [name for name in only if name not in METHODS]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: no such method; there are {', '.join(METHODS)}")
    chosen = {name: settings for name, settings in METHODS.items() if not only or name in only}
    for variant in variants:
        name, colon, settings = variant.partition(":")
        if not colon or name in chosen:
            raise SystemExit(f"--variant {variant}: give it a name of its own, as in 'NAME: KEY=VALUE'")
        chosen[name] = settings
    return {name: shlex.split(settings) for name, settings in chosen.items()}


def main() -> None:
    """Train, measure, and print the table."""
    parser = argparse.ArgumentParser(description="Compare the accuracy of variants, with several seeds each.")
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("recipe", nargs="?", default="digits", help="default: %(default)s")
    parser.add_argument("--set", dest="overrides", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--jobs", type=int, default=1, help="how many train at a time, on a core each (default: 1)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep what is made there (default: thrown away)")
    parser.add_argument("--only", nargs="+", default=[], metavar="METHOD", help="of methods: these (default: all)")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME: KEY=VALUE ...", help="of methods: another one"
    )
    options = parser.parse_args()
    methods_chosen = chosen_methods(options.only, options.variant)
    with tempfile.TemporaryDirectory(prefix="accuracy-") as spare:
        output = (options.output or Path(spare)).resolve()
        output.mkdir(parents=True, exist_ok=True)
        given = ["tracking.enabled=false", *options.overrides]
        bench = Bench(
            recipe=options.recipe,
            overrides=given,
            seeds=options.seeds,
            jobs=options.jobs,
            output=output,
            methods=methods_chosen,
        )
        scores = COMPARISONS[options.comparison](bench)
        by_method = options.comparison == "methods"
        print("\n".join(table_of_methods(bench, scores) if by_method else table(scores, options.seeds)))


if __name__ == "__main__":
    main()
