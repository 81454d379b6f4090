"""Schedules: pure functions of the step."""

from __future__ import annotations

import math

from trainer.config import TrainingSettings


def learning_rate(step: int, *, peak: float, final: float, warmup_steps: int, total_steps: int) -> float:
    """Linear warm-up to `peak`, then a cosine down to `final` (Loshchilov & Hutter 2017, without restarts).

    Args:
        step: 0 .. total_steps - 1.
        peak: learning rate at the end of the warm-up.
        final: learning rate at the last step.
        warmup_steps: steps of the warm-up; the first one has peak / warmup_steps.
        total_steps: steps of the training.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def step_count(settings: TrainingSettings, samples: int) -> int:
    """Optimiser steps that see `samples` x `epochs` samples; the last batch reaches a little further."""
    return math.ceil(settings.epochs * samples / settings.batch_size)


def learning_rate_at(step: int, settings: TrainingSettings, *, samples: int) -> float:
    """The learning rate that these settings give to a step of a training on `samples` samples."""
    total, peak = step_count(settings, samples), settings.peak_learning_rate()
    warmup = round(settings.warmup_epochs * samples / settings.batch_size)
    return learning_rate(
        step,
        peak=peak,
        final=peak * settings.final_learning_rate,
        warmup_steps=min(warmup, total // 2),
        total_steps=total,
    )


def validation_steps(settings: TrainingSettings, samples: int) -> set[int]:
    """The steps after which a training on `samples` samples measures: the last one, and one every `validate_every_epochs`."""
    total, size, every = step_count(settings, samples), settings.batch_size, settings.validate_every_epochs * samples
    regular = {-(-passed * every // size) - 1 for passed in range(1, total * size // every + 1)} if every else set()
    return {step for step in regular | {total - 1} if 0 <= step < total}


def checkpoint_steps(settings: TrainingSettings, samples: int) -> set[int]:
    """The steps after which a training on `samples` samples writes a checkpoint: the last one, and one every `checkpoint_every`."""
    total, every = step_count(settings, samples), settings.checkpoint_every
    return {*range(every - 1, total, every), total - 1} if every and total else set()
