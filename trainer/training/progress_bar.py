"""How far a training is: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from tqdm import tqdm

from trainer.training.spec import TrainingSpec

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = 5.0
"""Least time between two plain lines."""


class ProgressBar:
    """Shows the steps of one training; does nothing where it is not active."""

    def __init__(self, name: str, *, first_step: int, total_steps: int, images_per_step: int, active: bool) -> None:
        """For the steps first_step .. total_steps - 1 of the training `name`."""
        self._name, self._first, self._total, self._images = name, first_step, total_steps, images_per_step
        self._active, self._start, self._last_line = active, time.monotonic(), -LINE_INTERVAL_S
        self._bar = (
            tqdm(total=total_steps, initial=first_step, desc=name, unit="step", dynamic_ncols=True)
            if active and sys.stderr.isatty()
            else None
        )

    @classmethod
    def of(cls, training: TrainingSpec, first_step: int, *, active: bool = True) -> Self:
        """Show the steps of a training from `first_step` on, in its first process."""
        return cls(
            training.name,
            first_step=first_step,
            total_steps=training.total_steps,
            images_per_step=training.settings.batch_size,
            active=active and training.processes.is_first,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def say(self, text: str) -> None:
        """Show a line of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self._active:
            logger.info("%s", text)

    def show(self, step: int, values: Mapping[str, float], measured: Callable[[], float | None] = lambda: None) -> None:
        """Show the numbers of a step, the speed and the time left.

        Args:
            step: the last one that ended.
            values: its numbers.
            measured: gives images a second within the steps, where they are measured. Where they are not, all images by all the time
                since the start are shown, and called `so far`.
        """
        if not self._active:
            return
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self._bar is not None:
            self._bar.update(step + 1 - self._bar.n)
            self._bar.set_postfix_str(text)
            return
        now, done = time.monotonic(), step + 1
        if now - self._last_line < LINE_INTERVAL_S and done < self._total:
            return
        self._last_line = now
        rate, within_steps = (done - self._first) / max(now - self._start, 1e-9), measured()
        logger.info(
            "%s  step %d/%d  %s  %s  %.0f s left",
            self._name,
            done,
            self._total,
            text,
            f"{rate * self._images:.0f} images/s so far" if within_steps is None else f"{within_steps:.0f} images/s",
            (self._total - done) / rate,
        )
