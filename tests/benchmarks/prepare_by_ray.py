"""Squares of photos by Ray Data, for `bench_prepare.py --ray-python`: `python tests/benchmarks/prepare_by_ray.py FOLDER PROCESSES`.

Runs in an environment of its own with `ray[data]` and Pillow. Prints as JSON the seconds until Ray had started, and those of all photos.
"""

import io
import json
import sys
import time
from typing import Any

import ray
from PIL import Image, ImageOps


def to_square(row: dict[str, Any]) -> dict[str, bytes]:
    """Crop, resize and encode an image as `bench_prepare.by_pillow` does."""
    square = ImageOps.fit(Image.fromarray(row["image"]), (256, 256), Image.Resampling.BICUBIC)
    encoded = io.BytesIO()
    square.save(encoded, "JPEG", quality=95, subsampling=0)
    return {"square": encoded.getvalue()}


def main() -> None:
    """Read the folder, and count the squares."""
    folder, processes = sys.argv[1], int(sys.argv[2])
    begun = time.perf_counter()
    ray.init(num_cpus=processes, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    started = time.perf_counter()
    count = sum(
        len(batch["square"]) for batch in ray.data.read_images(folder, mode="RGB").map(to_square).iter_batches()
    )
    print(json.dumps({"started": started - begun, "took": time.perf_counter() - started, "count": count}))


if __name__ == "__main__":
    main()
