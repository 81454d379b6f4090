"""What a core loads, beside torchvision's usual pipeline: `python tests/benchmarks/bench_data.py [--photos FOLDER]`.

Both make batches of augmented 224-pixel images from the same photos with one thread, in turns, in one process; the medians over rounds are
compared. Files are in the page cache. Both crop 8 to 100 % of the area and mirror half of the images.

- ours: prepared images (256 pixels, `--encoding`), decoded, cropped, resized and mirrored into a batch of bytes. The device
  normalizes; the second row does it here.
- torchvision: ImageFolder, RandomResizedCrop(224), RandomHorizontalFlip, ToTensor, Normalize, and the stacking of a batch. On the same
  prepared images, written to a folder, and on the photos as they were given, which ours has decoded and resized once, in `prepare`.

Then what one loader process hands over, of stored images that the device makes views of: in memory that it uses again, and in fresh memory
for each batch. The time is that of the clock. At last what a core reads of each encoding, for views that the device makes, in CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms
from torchvision.datasets import ImageFolder

from tests.benchmarks.photos import write_photos
from trainer.config import DataSettings, Encoding, ViewSettings
from trainer.data import batch_memory
from trainer.data import dataset as dataset_module
from trainer.data import loader as loader_module
from trainer.data.dataset import open_dataset
from trainer.data.loader import PREFETCHED, MicroBatches, Samples, Views, make_loader
from trainer.data.sampler import StatelessSampler
from trainer.data.views.parameters import draw_views
from trainer.data.views.rendering import crop_sample, finish_views
from trainer.stages import prepare

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SETTINGS = ViewSettings(min_scale=0.08, max_aspect=4 / 3)
STRONG = SETTINGS.model_copy(update={"color_jitter": 0.3, "randaugment_operations": 2, "erasing": 0.25})
BATCH = 32
LOADED = 256
"""Images of a batch that a loader process hands over."""

Lane = Callable[[int], object]


def prepared_samples(photos: Path, folder: Path, image_size: int, encoding: Encoding) -> Samples:
    """The training images that `prepare` makes of the photos, to be decoded at each read."""
    settings = DataSettings(
        source=f"imagefolder:{photos}", image_size=image_size, max_bad_fraction=1, encoding=encoding
    )
    prepare.run(settings, dataset=folder)
    dataset_module.IN_MEMORY_BYTES = 0
    return Samples([open_dataset(folder).split("train")])


def export(samples: Samples, folder: Path) -> Path:
    """The prepared images as an image folder with one class, JPEG of quality 95."""
    (folder / "all").mkdir(parents=True)
    for index in range(len(samples)):
        picture = Image.fromarray(samples.picture(index).permute(1, 2, 0).numpy())
        picture.save(folder / "all" / f"{index:06d}.jpg", quality=95, subsampling=0)
    return folder


def torchvision_lane(folder: Path, size: int) -> Lane:
    """Batches of ImageFolder's images, in an order drawn anew for each."""
    chain = [
        transforms.RandomResizedCrop(size),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    images = ImageFolder(str(folder), transforms.Compose(chain))

    def lane(number: int) -> Tensor:
        chosen = np.random.default_rng(number).integers(0, len(images), BATCH)
        return torch.stack([images[index][0] for index in chosen.tolist()])

    return lane


def our_lanes(samples: Samples, size: int) -> dict[str, Lane]:
    """Batches of our views, and the parts of making one."""
    views, order = Views(samples, size=size, seed=0, settings=SETTINGS), StatelessSampler(len(samples), 0)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) * 255 for values in (MEAN, STD))

    def batch(number: int) -> Tensor:
        return views.batch(order.take(number * BATCH, (number + 1) * BATCH)).images

    def normalized(number: int) -> Tensor:
        return batch(number).float().sub_(mean).div_(std)

    pictures = [samples.picture(index) for index in range(BATCH)]
    room = torch.empty(BATCH, size, size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)

    def draw(number: int) -> object:
        numbers = np.full(BATCH, number)
        return draw_views(samples.keys[:BATCH], numbers, stored=samples.image_size, seed=0, settings=SETTINGS)

    parameters = draw(0)
    drawn_strong = draw_views(
        samples.keys[:BATCH], np.zeros(BATCH, dtype=np.int64), stored=samples.image_size, seed=0, settings=STRONG
    )

    def decode(number: int) -> object:
        return [samples.picture((number * BATCH + index) % len(samples)) for index in range(BATCH)]

    def crop(_number: int) -> None:
        boxes, mirrors = parameters.box.tolist(), parameters.mirror.tolist()
        for picture, box, mirror, out in zip(pictures, boxes, mirrors, room, strict=True):
            crop_sample(picture, box, mirror=mirror, out=out)

    return {
        "ours": batch,
        "ours, normalized": normalized,
        "- draw": draw,
        "- decode": decode,
        "- crop, resize, mirror": crop,
        "- if asked for: jitter, RandAugment 2, erasing": lambda _number: finish_views(room, drawn_strong, STRONG),
    }


def measure(lanes: dict[str, Lane], *, rounds: int, batches: int) -> dict[str, float]:
    """Median seconds of CPU time an image, of each lane, in turns."""
    times: dict[str, list[float]] = {name: [] for name in lanes}
    for lane in lanes.values():
        lane(0)
    for turn in range(rounds):
        for name, lane in lanes.items():
            start = time.process_time()
            for number in range(batches):
                lane(turn * batches + number)
            times[name].append((time.process_time() - start) / (batches * BATCH))
    return {name: statistics.median(values) for name, values in times.items()}


def measure_loader(samples: Samples, size: int, *, rounds: int, batches: int) -> dict[str, float]:
    """Median images a second of one loader process, in turns."""
    pieces = {"memory used again": batch_memory.PIECES, "fresh memory": 0}
    rates: dict[str, list[float]] = {name: [] for name in pieces}
    with patch.object(loader_module, "memory_share", lambda: 0):
        views = Views(samples, size=size, seed=0, settings=SETTINGS, on_device=True)
    made = MicroBatches(views, StatelessSampler(len(samples), 0), count=LOADED)
    warm = 4 * PREFETCHED  # batches that are made before the clock starts, or in memory's first use
    for _ in range(rounds):
        for name, count in pieces.items():
            with patch.object(batch_memory, "PIECES", count):
                loader = make_loader(made, range(0, (warm + batches) * LOADED, LOADED), workers=1, pin_memory=False)
                for _ in range(warm):
                    next(loader)
                start = time.perf_counter()
                loaded = sum(1 for _ in loader)
                rates[name].append(loaded * LOADED / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def measure_encodings(photos: Path, folder: Path, image_size: int, *, rounds: int) -> dict[str, float]:
    """Median stored images a second of a core's CPU time, in turns."""
    readers: dict[str, Callable[[], object]] = {}
    room = torch.empty(LOADED, image_size, image_size, 3, dtype=torch.uint8)
    encodings: tuple[Encoding, ...] = ("jpeg", "fast-jpeg", "raw")
    for encoding in encodings:
        samples = prepared_samples(photos, folder / encoding, image_size, encoding)
        (split,) = samples.splits
        chosen = [index % len(samples) for index in range(LOADED)]
        readers[encoding] = partial(split._decode_into, room, chosen)
    times: dict[str, list[float]] = {encoding: [] for encoding in readers}
    for turn in range(rounds + 1):
        for encoding, read in readers.items():
            start = time.process_time()
            read()
            if turn:
                times[encoding].append((time.process_time() - start) / LOADED)
    return {encoding: 1 / statistics.median(values) for encoding, values in times.items()}


def show(seconds: dict[str, float], baselines: list[str]) -> None:
    print("| what | us an image | images/s a core | " + " | ".join(f"x {name}" for name in baselines) + " |")
    print("|---|---:|---:|" + "---:|" * len(baselines))
    for name, value in seconds.items():
        ratios = " | ".join("" if name.startswith("-") else f"{seconds[other] / value:.2f}" for other in baselines)
        print(f"| {name} | {value * 1e6:.0f} | {1 / value:,.0f} | {ratios} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--photos", type=Path, help="an image folder with one folder a class; without it photos are made up"
    )
    parser.add_argument("--per-class", type=int, default=100, help="made-up photos of each of four classes")
    parser.add_argument("--encoding", choices=["jpeg", "fast-jpeg", "raw"], default="fast-jpeg")
    parser.add_argument("--image-size", type=int, default=256, help="edge of the prepared images")
    parser.add_argument("--view-size", type=int, default=224, help="edge of the views")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=4, help="batches of 32 images a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        photos = options.photos or write_photos(folder / "photos", classes=4, per_class=options.per_class)
        samples = prepared_samples(photos, folder / "dataset", options.image_size, options.encoding)
        baselines = {
            "torchvision, prepared images": torchvision_lane(export(samples, folder / "exported"), options.view_size),
            "torchvision, original photos": torchvision_lane(photos, options.view_size),
        }
        lanes = {**our_lanes(samples, options.view_size), **baselines}
        print(f"{len(samples)} images of {photos if options.photos else 'made-up photos'}; {torch.__version__}")
        show(measure(lanes, rounds=options.rounds, batches=options.batches), list(baselines))
        rates = measure_loader(samples, options.view_size, rounds=min(options.rounds, 3), batches=5 * options.batches)
        print(f"\none loader process, batches of {LOADED}, images/s:")
        print(", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()))
        read = measure_encodings(photos, folder / "encodings", options.image_size, rounds=options.rounds)
        print("stored images a second and core, read for views that the device makes:")
        print(", ".join(f"{name} {rate:,.0f}" for name, rate in read.items()))


if __name__ == "__main__":
    main()
