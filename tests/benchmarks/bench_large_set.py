"""A large set end to end, as machines with a store read it: `python tests/benchmarks/bench_large_set.py s3://BUCKET/FOLDER [--images N]`.

Writes made-up photos of 32 pixels into tar files, and runs the stages of a run on them, each as a process of its own with an empty cache:
prepare, pretrain, reinforce, distill and evaluate, which hand on what they make by the store. Prints what each took: time, images a second,
the memory of its largest process, and what it has fetched; with more than 262,144 images to learn from, window by window. What is in the
store stays there: remove it.

    pip install 'moto[server]' && moto_server -p 5555 &      # a store in memory
    export AWS_ENDPOINT_URL_S3=http://127.0.0.1:5555 AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x AWS_DEFAULT_REGION=us-east-1
    curl -X PUT $AWS_ENDPOINT_URL_S3/photos && python tests/benchmarks/bench_large_set.py s3://photos/large
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import simplejpeg

from trainer.io import artifacts, storage
from trainer.io.formatting import aligned, duration, size

_IN_TAR = 4000  # photos
_CLASSES, _EDGE = 10, 32


def main() -> None:
    """Run the stages, and print a table."""
    parser = argparse.ArgumentParser(description="Prepare a large set, and train and evaluate on it, by a store.")
    parser.add_argument("folder", help="of an object store, such as s3://BUCKET/FOLDER")
    parser.add_argument("--images", type=float, default=400_000, help="default: %(default)g")
    parser.add_argument("--processes", type=int, default=2, help="of a training (default: %(default)s)")
    parser.add_argument("--cache-gib", default="100", help="TRAINER_CACHE_GIB (default: %(default)s)")
    parser.add_argument("--set", dest="overrides", action="extend", nargs="+", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="photos-") as photos:
        write_photos(Path(photos), int(options.images))
        rows = list(run(photos, options))
    print("\n" + "\n".join(aligned([COLUMNS, *rows], right=range(1, 5))))


def run(photos: str, options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Run the stages; a row of the table for each."""
    given = [
        *(f"data.source=tar:{photos}", "data.encoding=fast-jpeg", "data.val_fraction=0.03", "data.test_fraction=0.03"),
        *("pretrain.mae.epochs=0", "pretrain.finetune.epochs=1", "pretrain.finetune.warmup_epochs=0.1"),
        *("reinforce.views=1", "distill.teacher=recorded", "distill.epochs=1", "distill.warmup_epochs=0.1"),
        *("pretrain.finetune.batch_size=512", "distill.batch_size=512", *options.overrides),
    ]
    for stage, (made, read) in STAGES.items():
        row = (stage, *measured(stage, made, read, options.folder, given, options))
        print("  ".join(row), flush=True)
        yield row


COLUMNS = ("stage", "took", "images/s", "largest process", "fetched and kept")
STAGES: Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "prepare": ({"dataset": "dataset"}, ()),
    "pretrain": ({"teacher": "teacher", "evidence": "pretrain-evidence"}, ("dataset",)),
    "reinforce": ({"teacher-outputs": "outputs"}, ("dataset", "teacher")),
    "distill": ({"student": "student", "evidence": "distill-evidence"}, ("dataset", "teacher", "teacher-outputs")),
    "evaluate": ({"evaluation": "evaluation"}, ("dataset", "teacher", "student")),
}
"""Stage -> its outputs, as option and name, and the options of its inputs."""
_NAMES = {option: name for made, _ in STAGES.values() for option, name in made.items()}


def write_photos(folder: Path, count: int) -> None:
    """Write photos in tar files with their labels: noise around a color that says the class."""
    colors = np.random.default_rng(0).integers(40, 216, (_CLASSES, 3))
    for number, first in enumerate(range(0, count, _IN_TAR)):
        with tarfile.open(folder / f"{number:05d}.tar", mode="w") as tar:
            for index in range(first, min(first + _IN_TAR, count)):
                noise = np.random.default_rng(index).integers(-40, 40, (_EDGE, _EDGE, 3))
                content = simplejpeg.encode_jpeg((colors[index % _CLASSES] + noise).astype(np.uint8), quality=80)
                for suffix, held in (("jpg", content), ("cls", b"%d" % (index % _CLASSES))):
                    member = tarfile.TarInfo(f"{index:09d}.{suffix}")
                    member.size = len(held)
                    tar.addfile(member, io.BytesIO(held))


def measured(
    stage: str,
    made: Mapping[str, str],
    read: tuple[str, ...],
    folder: str,
    given: list[str],
    options: argparse.Namespace,
) -> tuple[str, ...]:
    """Run a stage on a machine of its own, as far as its cache goes; what it took."""
    places = {option: storage.join(folder, _NAMES[option]) for option in (*read, *made)}
    command = [sys.executable, "-m", "trainer", "stage", stage, "--recipe", "digits"]
    command += [text for option, place in places.items() for text in (f"--{option}", place)]
    if stage != "prepare":
        command += ["--processes", str(options.processes)]
    with tempfile.TemporaryDirectory(prefix="large-set-") as cache:
        environment = {
            **os.environ,
            "TRAINER_CACHE": cache,
            "TRAINER_CACHE_GIB": options.cache_gib,
            "TRAINER_CHECKPOINTS": storage.join(folder, f"checkpoints-{stage}"),
            "OMP_NUM_THREADS": "1",
        }
        begun = time.monotonic()
        with Path(cache).with_suffix(".log").open("w") as log:
            process = subprocess.Popen([*command, "--set", *given], env=environment, stdout=log, stderr=log)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{stage}: exit code {process.returncode}; see {log.name}")
        seconds = time.monotonic() - begun
        kept = sum(file.stat().st_size for file in Path(cache).rglob("*") if file.is_file())
    Path(log.name).unlink()
    count = artifacts.manifest(storage.join(folder, "dataset"), "dataset").figures
    images = sum(count[split] for split in ("train", "val", "test")) if stage == "prepare" else count["train"]
    if stage == "evaluate":
        images = count["test"]
    return duration(seconds), f"{images / seconds:,.0f}", size(1024 * usage.ru_maxrss), size(kept)


if __name__ == "__main__":
    main()
