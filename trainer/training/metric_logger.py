"""Logs losses and metrics while a training runs, and how far it is; losses are read back without holding up the device.

Shapes: W processes, S steps, L losses.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Self

import torch
from torch import Tensor
from tqdm import tqdm

from trainer.devices import ReadBack
from trainer.devices.process_group import Processes
from trainer.io.errors import TrainingError
from trainer.io.formatting import estimated, listed
from trainer.io.host import AHEAD_VARIABLE
from trainer.report.scores import VAL_TITLES, val_name
from trainer.report.tracking.stage_runs import Tracker
from trainer.training.loop import Hook, Trainer
from trainer.training.spec import Losses, TrainingSpec
from trainer.training.trace import Trace

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = 30.0
"""Least time between two plain lines."""
_MAX_NAMES = 8
"""Samples that a message names."""


class ProgressBar:
    """Shows how far a training is, by a bar on a terminal, plain lines in a log; does nothing where it is not active."""

    def __init__(
        self,
        name: str,
        *,
        first_step: int,
        total_steps: int,
        images_per_step: int,
        active: bool,
        work: Callable[[int], float] = float,
    ) -> None:
        """Begin to count; `work` gives how much work so many first steps are, where they are not alike."""
        self._work = work
        self._name, self._first, self._total, self._images = name, first_step, total_steps, images_per_step
        self._active, self._start, self._last_line = active, time.monotonic(), -LINE_INTERVAL_S
        self._ahead = float(json.loads(os.environ.get(AHEAD_VARIABLE, "{}")).get(name, 0.0))
        self._scores = ""  # of the last validation
        self._scores_are_shown = True
        self._first_line: tuple[int, float] | None = None
        """Steps that were done by then, and when that was."""
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
            work=training.work,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._active and not self._scores_are_shown:
            logger.info("%s  %s", self._name, self._scores)

    def say(self, text: str) -> None:
        """Show a line of its own, above the bar where there is one."""
        if self._bar is not None:
            width = shutil.get_terminal_size().columns
            self._bar.write(textwrap.fill(text, width, subsequent_indent="    "), file=sys.stderr)
        elif self._active:
            logger.info("%s", text)

    def show_scores(self, scores: str) -> None:
        """Show what a validation has found, in the bar, or in the next plain line."""
        self._scores, self._scores_are_shown = scores, False
        if self._bar is not None:
            self._bar.set_postfix_str(scores)

    def show(
        self,
        step: int,
        values: Mapping[str, float],
        measured: Callable[[], float | None] = lambda: None,
        apart: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Show the numbers of a step, the speed and the time left.

        Args:
            measured: gives images a second within the steps, where they are measured. Where they are not, all images by all the time
                since the start are shown, and called `so far`.
            apart: gives images a second of loader and step, each by itself: the lower one is the limit.
        """
        if not self._active:
            return
        text = "  ".join([*(f"{name} {value:.4g}" for name, value in values.items()), *filter(None, [self._scores])])
        now, done = time.monotonic(), step + 1
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            all_s = self._left(now, done)[1]  # first, since a narrow terminal cuts the end off
            later = f"{estimated(all_s)} with later trainings" if all_s else ""
            self._bar.set_postfix_str("  ".join(filter(None, [later, text])))
            return
        if now - self._last_line < LINE_INTERVAL_S and done < self._total:
            return
        self._last_line, self._scores_are_shown = now, True
        rate, within_steps = (done - self._first) / max(now - self._start, 1e-9), measured()
        speed = f"{rate * self._images:.0f} images/s so far" if within_steps is None else f"{within_steps:.0f} images/s"
        speed += _rates(apart())
        left_s, all_s = self._left(now, done, within_steps)
        speed += f"  {left_s:.0f} s left" + (f", {estimated(all_s)} with the later trainings" if all_s else "")
        logger.info("%s  step %d/%d  %s  %s", self._name, done, self._total, text, speed)

    def _left(self, now: float, done: int, within_steps: float | None = None) -> tuple[float, float]:
        """Return the seconds that this training still takes, and with the later ones of the run; 0 where none is known."""
        # The first steps compile, which no later one does: the time left follows from the steps alone, then from what came after them.
        if self._first_line is not None and self._first_line[0] < done:
            begin, since = self._first_line
            seconds = now - since
        else:
            begin, self._first_line = self._first, (done, now)
            seconds = now - self._start if within_steps is None else (done - begin) * self._images / within_steps
        total = seconds * self._work(self._total) / (self._work(done) - self._work(begin))
        left_s = total * (1 - self._work(done) / self._work(self._total))
        return left_s, left_s + self._ahead * total if self._ahead else 0.0


def _rates(apart: Mapping[str, float]) -> str:
    return f" ({', '.join(f'{name} {rate:.0f}' for name, rate in apart.items())})" if apart else ""


class MetricLogger(Hook):
    """Logs losses every `log_every` steps; raises `TrainingError` where one that arrived is not finite.

    The losses of an interval leave the device together, those of all processes, and are taken in when they have arrived: at once on a CPU,
    on a GPU during the next interval. So the host waits for them only at the end, and before a checkpoint.
    """

    def __init__(self, trace: Trace, tracker: Tracker, *, shown: bool = True) -> None:
        """Log to the curves of a trace, to a tracker, and, where it is `shown`, by a progress bar."""
        self._trace, self._tracker, self._shown = trace, tracker, shown
        self._waiting: list[tuple[int, Mapping[str, Tensor]]] = []
        self._sent: _Losses | None = None

    @contextmanager
    def running(self, trainer: Trainer) -> Iterator[None]:
        spec = trainer.spec
        self._spec, self._processes = spec, trainer.processes
        self._tracker.follow(
            spec.name,
            trainer.first_step,
            spec.total_steps,
            spec.settings.batch_size,
            self._trace.recorder.images_per_second,
        )
        with ProgressBar.of(trainer.spec, trainer.first_step, active=self._shown) as self._progress:
            yield

    def after_step(self, step: int, losses: Losses) -> None:
        """Receive the losses of a step; at the end of an interval they are sent."""
        self._waiting.append((step, losses))
        if self._sent is not None and self._sent.arrived:
            self._publish()
        if (step + 1) % self._spec.settings.log_every == 0:
            self._send()

    def before_checkpoint(self) -> None:
        """Wait for all losses, and log them: a loss that is not finite ends the training before its weights are kept."""
        if self._waiting:
            # A GPU could not say who is missing.
            self._processes.barrier(f"the losses of step {self._waiting[-1][0] + 1}")
            self._send()
        self._publish()

    after_last_step = before_checkpoint

    def after_validation(self, step: int, scores: Mapping[str, float]) -> None:
        self._log(step, scores)
        if name := val_name(scores):
            self._progress.show_scores(f"validation {VAL_TITLES[name]} {scores[name]:.2%}")

    def say(self, text: str) -> None:
        """Show a line above the progress bar."""
        self._progress.say(text)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._trace.recorder.metrics(step, values)
        self._tracker.metrics(step, {f"{self._spec.name}/{name}": value for name, value in values.items()})

    def _send(self) -> None:
        self._publish()
        self._sent = _Losses(self._waiting, self._processes)
        self._waiting = []
        if self._sent.arrived:
            self._publish()

    def _publish(self) -> None:
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        table = sent.table()
        bad = (~torch.isfinite(table)).any(2)  # all processes see the same losses
        if bad.any():
            row = int(bad.any(0).nonzero()[0])
            ranks = bad[:, row].nonzero().flatten().tolist()
            names = [name for rank in ranks for name in self._spec.names(sent.steps[row], rank)]
            shown = listed(names, _MAX_NAMES)
            for at in range(
                max(0, row - 1), row + 1
            ):  # the last step whose losses are finite, and the first whose are not
                values = dict(zip(sent.names, table[:, at].mean(0).tolist(), strict=True))
                self._trace.recorder.metrics(sent.steps[at], values)
            raise TrainingError(
                f"{self._spec.name}: the loss is not finite at step {sent.steps[row] + 1} (process {', '.join(map(str, ranks))}; samples "
                f"{shown}); lower {self._spec.name} base_learning_rate or clip_norm, use precision=fp32, or look at these samples"
            )
        step, means = sent.steps[-1], table.mean((0, 1)).tolist()
        values = dict(zip(sent.names, means, strict=True)) | {"learning_rate": self._spec.learning_rate(step)}
        recorder = self._trace.recorder
        self._progress.show(step, values, recorder.images_per_second, recorder.rates_apart)
        self._log(step, values)


class _Losses:
    """The losses of some steps, of all processes, on their way to the host."""

    def __init__(self, waiting: Sequence[tuple[int, Mapping[str, Tensor]]], processes: Processes) -> None:
        self.steps = [step for step, _ in waiting]
        self.names = list(waiting[0][1])
        self._what, self._processes = f"the losses of step {self.steps[-1] + 1}", processes
        rows = [[losses[name] for name in self.names] for _, losses in waiting]
        if processes.device.is_lazy:  # what is computed here would be noted for the next step, and change its graph
            self._readback = ReadBack({str(number): loss for number, loss in enumerate(chain.from_iterable(rows))})
        else:
            own = torch.stack([torch.stack([loss.float() for loss in row]) for row in rows])
            everyone = own.new_zeros(processes.world_size, *own.shape)
            everyone[processes.rank] = own
            self._readback = ReadBack({"losses": processes.total(everyone, self._what)})

    @property
    def arrived(self) -> bool:
        """Whether they are to be read now, without waiting; all processes exchange them then, so where the device traces, at the next
        interval's end, for devices are not equally far.
        """
        return not self._processes.device.is_lazy and self._readback.arrived

    def table(self) -> Tensor:
        """The losses [W, S, L] on the host; waits for them."""
        arrived = self._readback.wait()
        if not self._processes.device.is_lazy:
            return arrived["losses"]
        own = torch.stack([*arrived.values()]).float().reshape(len(self.steps), len(self.names))
        return torch.stack(self._processes.gather(own, self._what))
