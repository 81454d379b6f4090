"""What checkpoints cost a training: `python tests/benchmarks/bench_checkpoints.py`.

The state is that of a whole training of the model: weights, AdamW's state, a moving average. Blocks of the same steps run with a checkpoint
at their beginning and without one, in turns; a block is long enough for the checkpoint to be written while it runs. `writing` is how long
that takes when nothing else runs; `waits` is what the step waits for the copy; `lost` is how much longer a block with a checkpoint takes,
so it holds both what waits and what the thread in the background takes away from the steps. The shares are of the time between two
checkpoints at the default interval, at this batch: a larger one makes them smaller. Below 2 % is the aim.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import NamedTuple

import timm
import torch
import torch.nn.functional as F

from trainer.config import TrainingSettings
from trainer.devices import choose_device
from trainer.devices.process_group import Processes
from trainer.io import storage
from trainer.training.checkpoints import Checkpoints
from trainer.training.optimizers import AveragedModel, make_optimizer, parameter_groups
from trainer.training.training_state import TrainingState, capture

_GROWTH = 1.5
"""How much longer a block is than writing took in the first one."""


class Cost(NamedTuple):
    """Seconds of a checkpoint."""

    waits: float
    lost: float


class Training:
    """Optimizer steps on random pixels."""

    def __init__(self, architecture: str, batch_size: int, image_size: int) -> None:
        self._device = choose_device()
        self._processes = Processes(rank=0, world_size=1, local_rank=0, device=self._device)
        self.model = timm.create_model(architecture, img_size=image_size).to(self._device.torch_device)
        groups = parameter_groups(self.model, weight_decay=0.05)
        self.optimizer = make_optimizer(groups, TrainingSettings(), self._processes)
        self.average = AveragedModel(self.model, 0.9999)
        self._images = torch.rand(batch_size, 3, image_size, image_size, device=self._device.torch_device)
        self._labels = torch.randint(1000, (batch_size,), device=self._device.torch_device)
        self.steps = 0

    def run(self, steps: int) -> float:
        """Seconds of so many steps."""
        began = time.perf_counter()
        for _ in range(steps):
            with self._device.autocast("auto"):
                loss = F.cross_entropy(self.model(self._images), self._labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.average.update(self.steps)
            self.steps += 1
        self._device.synchronize()
        return time.perf_counter() - began

    @property
    def state(self) -> TrainingState:
        """After the steps so far."""
        return capture(self.steps, self.model, self.optimizer, self.average.model, processes=self._processes)


def write_once(training: Training, checkpoints: Checkpoints) -> float:
    """Seconds that a checkpoint takes when nothing else runs; also makes the memory for the copy."""
    checkpoints.save(training.state)
    began = time.perf_counter()
    checkpoints.finish(needed=True)
    return time.perf_counter() - began


def measure(training: Training, checkpoints: Checkpoints, *, steps: int, rounds: int) -> tuple[float, list[Cost]]:
    """Seconds of a step, and what each checkpoint cost."""
    bare, costs = [training.run(steps)], []
    for _ in range(rounds):
        began = time.perf_counter()
        checkpoints.save(training.state)
        waits = time.perf_counter() - began
        block = waits + training.run(steps)
        ended = time.perf_counter()
        checkpoints.finish(needed=True)
        left = time.perf_counter() - ended
        bare.append(training.run(steps))
        # Of a write that outlasts its block, what is left is counted as lost too.
        costs.append(Cost(waits, block + left - (bare[-2] + bare[-1]) / 2))
    return statistics.median(bare) / steps, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", default="vit_base_patch16_224", help="timm's name of the model")
    parser.add_argument("--image-size", type=int, default=224, help="edge of an image, in pixels")
    parser.add_argument("--batch-size", type=int, default=8, help="images a step")
    parser.add_argument("--rounds", type=int, default=5, help="blocks with a checkpoint")
    parser.add_argument("--root", help="folder or URI for the checkpoints; a temporary folder by default")
    arguments = parser.parse_args()
    training = Training(arguments.architecture, arguments.batch_size, arguments.image_size)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(arguments.root or folder, "bench", settings={}, parents={}, keep=1)
        training.run(2)
        alone, step_s = write_once(training, checkpoints), training.run(3) / 3
        steps = max(2, round(_GROWTH * alone / step_s) + 1)
        size = sum(storage.files(checkpoints.uri).values())
        step_s, costs = measure(training, checkpoints, steps=steps, rounds=arguments.rounds)
        checkpoints.remove()
    interval = TrainingSettings().checkpoint_every
    waits, lost = (statistics.median(column) for column in zip(*costs, strict=True))
    print(f"{'':24}{'MiB':>8}{'step s':>9}{'writing s':>11}{'waits s':>9}{'lost s':>8}{'waits':>8}{'lost':>8}")
    shares = (seconds / (interval * step_s) for seconds in (waits, lost))
    print(
        f"{arguments.architecture:24}{size / 2**20:8.0f}{step_s:9.3f}{alone:11.2f}{waits:9.2f}{lost:8.2f}"
        + "".join(f"{share:8.2%}" for share in shares)
    )
    print(f"every {interval} steps of {arguments.batch_size} images; {len(costs)} checkpoints, {steps} steps a block")


if __name__ == "__main__":
    main()
