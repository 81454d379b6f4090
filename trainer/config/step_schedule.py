"""Schedules: pure functions of the step."""

from __future__ import annotations

import math

from trainer.config import TrainingSettings


def step_count(settings: TrainingSettings, samples: int) -> int:
    """Count the optimizer steps that see `samples` x `epochs` samples; the last batch reaches a little further."""
    return math.ceil(settings.epochs * samples / settings.batch_size)


def learning_rate_at(step: int, settings: TrainingSettings, *, samples: int) -> float:
    """Warm up linearly to the peak, then follow a cosine down (Loshchilov & Hutter 2017, without restarts).

    Args:
        step: from 0 on; the first one has peak / warm-up steps, the last one the final learning rate.
        samples: to train on.
    """
    total, peak = step_count(settings, samples), settings.peak_learning_rate()
    warmup = min(round(settings.warmup_epochs * samples / settings.batch_size), total // 2)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress, final = (step - warmup) / max(1, total - 1 - warmup), peak * settings.final_learning_rate
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def low_resolution_steps(settings: TrainingSettings, samples: int) -> int:
    """Count the first steps of a training on `samples` samples, in which the network's input is smaller."""
    return settings.low_resolution.epochs * samples // settings.batch_size


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
