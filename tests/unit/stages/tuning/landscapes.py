"""Distillations that are made up: how fast each candidate would be on some machine, with what depends on what.

They are not made of the search's own guesses: factors are drawn widely, interact, and every candidate has its own luck.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, field

import numpy as np
import torch

from trainer.devices import Device
from trainer.stages.tuning.candidates import Workload
from trainer.stages.tuning.tuning_schema import Candidate, Trial

LUCK, NOISE = 0.02, 0.01
"""Spread of what a candidate's rate has of its own, and of what a measurement adds."""
TRIAL_S, OUTRUN_S = 10.0, 3.0


def device_of(kind, *, has_bf16=False):
    return Device(kind=kind, torch_device=torch.device(kind), backend="", has_bf16=has_bf16, compiles=kind == "cuda")


@dataclass
class Landscape:
    """One machine with one distillation, drawn from a seed."""

    seed: int
    device: str
    measured: list[Candidate] = field(default_factory=list)

    def __post_init__(self):
        draw = np.random.default_rng((self.seed, self.device == "cuda"))
        gpu = self.device == "cuda"
        self.world = int(draw.choice([1, 1, 2, 8])) if gpu else int(draw.choice([1, 1, 2]))
        self.cores = int(draw.choice([2, 4, 8, 16])) * self.world // (1 if gpu else min(self.world, 2))
        self.student = 10 ** draw.uniform(-4, -3 if gpu else -1.5)
        self.teacher = self.student * draw.uniform(0.3, 6)
        self.bf16 = draw.uniform(0.35, 0.8) if gpu else draw.uniform(0.4, 3.0)
        self.load = self.student * 10 ** draw.uniform(-1.5, 1.0)
        self.waiting = self.load * draw.choice([0.0, 0.0, 0.5])
        self.per_step = self.student * draw.uniform(0.5, 30)
        self.per_part = self.student * draw.uniform(0.1, 8)
        self.exchange = self.student * draw.uniform(1, 100) if self.world > 1 else 0.0
        self.compiled, self.compiling_s = draw.uniform(0.6, 1.02), draw.uniform(20, 90)
        self.crowding = draw.uniform(0.05, 0.6)
        self.batch = int(draw.choice([16, 64, 256])) * self.world
        self.most_held = self.batch * draw.choice([0.5, 1, 2, 4, 8])
        self.images = 10 ** draw.uniform(4, 5) / self.student / 10
        self.views = self.images * draw.choice([0.1, 0.5, 2.0])
        self.job = Workload(
            images=int(self.images),
            largest_batch=4 * self.batch,
            largest_batch_why="it has grown fourfold",
            device=device_of(self.device, has_bf16=gpu),
            world_size=self.world,
            nodes=2 if self.world == 8 else 1,
            most_workers=max(1, self.cores // self.local),
            recording_s=self.views * self.teacher * (self.bf16 if gpu else 1.0) / self.world,
            teacher_s=self.teacher * (self.bf16 if gpu else 1.0) / self.world,
        )
        self.start = self.any_candidate(draw)

    @property
    def local(self):
        """Processes on a machine."""
        return max(1, self.world // 2) if self.world == 8 else self.world

    def grid(self):
        """All candidates of an exhaustive search."""
        several = self.world > 1
        values = {
            "workers": [0, 1, 2, 4, 8],
            "batch_size": [self.batch, 2 * self.batch, 4 * self.batch],
            "accumulation": [1, 2, 4],
            "precision": ["fp32", "bf16"],
            "compile": ["off", "on"] if self.device == "cuda" else ["off"],
            "zero": [False, True] if several else [False],
            "gradient_compression": ["none", "bf16"] if self.job.nodes > 1 else ["none"],
            "teacher": ["online", "recorded"],
        }
        return [Candidate(**dict(zip(values, cell, strict=True))) for cell in itertools.product(*values.values())]

    def any_candidate(self, draw):
        """Settings that somebody might begin with."""
        cells = [cell for cell in self.grid() if cell.batch_size == self.batch]
        return cells[draw.integers(len(cells))]

    def parts(self, candidate):
        """Seconds of a step: computing, and waiting for data; and the teacher's share of the computing."""
        images = candidate.batch_size / self.world
        factor = self.bf16 if candidate.precision == "bf16" else 1.0
        asked = images * self.teacher * factor if candidate.teacher == "online" else 0.0
        learned = images * self.student * factor
        if candidate.compile == "on":
            learned, asked = learned * self.compiled, asked * self.compiled
        exchange = self.exchange * (0.6 if candidate.gradient_compression == "bf16" else 1.0)
        fixed = candidate.accumulation * self.per_part + self.per_step * (1.1 if candidate.zero else 1.0)
        computing = asked + learned + fixed + exchange
        workers = candidate.workers
        loading = images * (self.load + self.waiting)
        if self.device == "cpu":  # who computes for the loading takes a core away
            computing *= 1 + min(workers, self.load * images / computing) * self.local / self.cores * 0.9
        if workers * self.local > self.cores:
            computing *= 1 + self.crowding * (workers * self.local / self.cores - 1)
        able = min(workers, max(1, self.cores // self.local))
        data = loading if not workers else max(0.0, loading / able - computing) + 0.01 * computing
        return computing, data, asked

    def rate(self, candidate):
        """Images a second, without the noise of a measurement."""
        luck = np.random.default_rng((self.seed, zlib.crc32(str(candidate).encode()))).normal(1, LUCK)
        computing, data, _ = self.parts(candidate)
        return candidate.batch_size / (computing + data) * luck

    def fits(self, candidate):
        """Whether it has memory enough."""
        needs = candidate.held * (0.7 if candidate.precision == "bf16" else 1) * (0.9 if candidate.zero else 1)
        return needs <= self.most_held

    def startup_s(self, candidate):
        """Seconds before the second step."""
        return self.compiling_s if candidate.compile == "on" else 1.0

    def run_s(self, candidate):
        """Seconds of the whole distillation."""
        return self.job.fixed_s(candidate, self.startup_s(candidate)) + self.images / self.rate(candidate)

    def best_s(self):
        """What an exhaustive search finds, and how many candidates it measures."""
        grid = self.grid()
        return min(self.run_s(candidate) for candidate in grid if self.fits(candidate)), len(grid)

    def measure(self, candidate, rate_to_beat):
        """A trial."""
        self.measured.append(candidate)
        if not self.fits(candidate):
            return Trial(candidate=candidate, ended="out of memory", seconds=1.0)
        noise = np.random.default_rng((self.seed, len(self.measured))).normal(1, NOISE)
        rate = self.rate(candidate) * noise
        computing, data, asked = self.parts(candidate)
        is_outrun = rate < 0.8 * rate_to_beat
        loading = self.waiting if self.device == "cpu" else self.load + self.waiting
        wanted = loading * candidate.batch_size / self.world / computing
        return Trial(
            candidate=candidate,
            ended="outrun" if is_outrun else "measured",
            images_per_second=rate,
            low=0.98 * rate,
            high=1.02 * rate,
            steps=20,
            startup_s=self.startup_s(candidate),
            seconds=OUTRUN_S if is_outrun else TRIAL_S,
            shares={
                "data": data / (computing + data),
                "teacher_forward": asked / (computing + data),
                "optimizer": self.per_step / (computing + data),
            },
            workers=candidate.workers,
            advised_workers=0 if wanted < 0.03 else min(int(np.ceil(1.25 * wanted)), self.job.most_workers),
        )
