"""Schedules: pure functions of the step."""

from __future__ import annotations

import math

from trainer.config import TrainingSettings


def learning_rate(step: int, *, peak: float, final: float, warmup_steps: int, total_steps: int) -> float:
    """Warm up linearly to `peak`, then follow a cosine down to `final` (Loshchilov & Hutter 2017, without restarts).

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
    """Count the optimiser steps that see `samples` x `epochs` samples; the last batch reaches a little further."""
    return math.ceil(settings.epochs * samples / settings.batch_size)


def learning_rate_at(step: int, settings: TrainingSettings, *, samples: int) -> float:
    """Return the learning rate that these settings give to a step of a training on `samples` samples."""
    total, peak = step_count(settings, samples), settings.peak_learning_rate()
    warmup = round(settings.warmup_epochs * samples / settings.batch_size)
    return learning_rate(
        step,
        peak=peak,
        final=peak * settings.final_learning_rate,
        warmup_steps=min(warmup, total // 2),
        total_steps=total,
    )


def is_validation_step(step: int, settings: TrainingSettings, samples: int) -> bool:
    """Return whether a training on `samples` samples validates after this step: the last one, and one every `validate_every_epochs`."""
    size, every = settings.batch_size, settings.validate_every_epochs * samples
    passes_one = bool(every) and (step + 1) * size // every > step * size // every
    return passes_one or step == step_count(settings, samples) - 1


def is_checkpoint_step(step: int, settings: TrainingSettings, samples: int) -> bool:
    """Return whether a training on `samples` samples keeps its state after this step: the last one, and one every `checkpoint_every`."""
    every = settings.checkpoint_every
    return bool(every) and ((step + 1) % every == 0 or step == step_count(settings, samples) - 1)


def validation_count(settings: TrainingSettings, samples: int) -> int:
    """Return how many steps of a training on `samples` samples `is_validation_step` names."""
    total, size, every = step_count(settings, samples), settings.batch_size, settings.validate_every_epochs * samples
    passed = min(total, total * size // every) if every else 0  # a step that passes several is one
    last_passes_none = not every or total * size // every == (total - 1) * size // every
    return passed + last_passes_none if total else 0


def checkpoint_count(settings: TrainingSettings, samples: int) -> int:
    """Return how many steps of a training on `samples` samples `is_checkpoint_step` names."""
    every = settings.checkpoint_every
    return math.ceil(step_count(settings, samples) / every) if every else 0
