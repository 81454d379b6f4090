"""Logs losses and metrics while a training runs; losses are read back without holding up the device.

Shapes: W processes, S steps, L losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from trainer.devices import ReadBack
from trainer.errors import TrainingError
from trainer.profiling.recorder import Recorder
from trainer.tracking.stage_runs import Tracker
from trainer.training.process_group import Processes
from trainer.training.progress_bar import ProgressBar
from trainer.training.spec import TrainingSpec

_NAMED = 8
"""Samples that a message names."""


class MetricLogger:
    """Logs losses every `log_every` steps, and checks that they are finite.

    The losses of an interval leave the device together, those of all processes, and are taken in when they have arrived: at once on a CPU,
    on a GPU during the next interval. So the host waits for them only at the end, and before a checkpoint.
    """

    def __init__(self, training: TrainingSpec, recorder: Recorder, tracker: Tracker, progress: ProgressBar) -> None:
        """Log a training.

        Args:
            training: whose losses these are.
            recorder: takes metrics into the evidence.
            tracker: takes them to MLflow.
            progress: shows them.
        """
        self._training, self._name, self._processes = training, training.name, training.processes
        self._recorder, self._tracker, self._progress = recorder, tracker, progress
        self._waiting: list[tuple[int, Mapping[str, Tensor]]] = []
        self._sent: _Losses | None = None

    def log(self, step: int, losses: Mapping[str, Tensor]) -> None:
        """Take a step's losses, scalars on the device; at the end of an interval they are sent.

        Raises:
            TrainingError: a loss that arrived is not finite.
        """
        self._waiting.append((step, losses))
        if self._sent is not None and self._sent.arrived:
            self._publish()
        if (step + 1) % self._training.settings.log_every == 0:
            self._send()

    def flush(self) -> None:
        """Before a checkpoint: wait for all losses, and pass them on.

        Raises:
            TrainingError: one of them is not finite.
            LostProcessError: a process did not come within the limit, or is gone.
        """
        if self._waiting:
            self._processes.barrier(
                f"the losses of step {self._waiting[-1][0] + 1}"
            )  # a GPU could not say who is missing
            self._send()
        self._publish()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Pass metrics on to the evidence and to MLflow."""
        self._recorder.metrics(step, values)
        self._tracker.metrics(step, {f"{self._name}/{name}": value for name, value in values.items()})
        if "val_top1" in values:
            self._progress.say(f"{self._name}  step {step + 1}  validation top-1 {values['val_top1']:.2%}")

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
        self._check_finite(table, sent.steps)
        step, means = sent.steps[-1], table.mean((0, 1)).tolist()
        values = dict(zip(sent.names, means, strict=True)) | {"learning_rate": self._training.learning_rate(step)}
        self._progress.show(step, values, self._recorder.images_per_second)
        self.metrics(step, values)

    def _check_finite(self, table: Tensor, steps: Sequence[int]) -> None:
        """Stop at the first step in which a loss of any process, [W, S, L], is not finite; all processes see the same losses."""
        bad = (~torch.isfinite(table)).any(2)
        if not bad.any():
            return
        row = int(bad.any(0).nonzero()[0])
        ranks = bad[:, row].nonzero().flatten().tolist()
        names = [name for rank in ranks for name in self._training.names(steps[row], rank)]
        shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        raise TrainingError(
            f"{self._name}: the loss is not finite at step {steps[row] + 1} (process {', '.join(map(str, ranks))}; samples {shown}); "
            f"lower {self._name} base_learning_rate or clip_norm, use precision=fp32, or look at these samples"
        )


class _Losses:
    """The losses of some steps, of all processes, on their way to the host."""

    def __init__(self, waiting: Sequence[tuple[int, Mapping[str, Tensor]]], processes: Processes) -> None:
        self.steps = [step for step, _ in waiting]
        self.names = list(waiting[0][1])
        self._what, self._processes = f"the losses of step {self.steps[-1] + 1}", processes
        rows = [[losses[name] for name in self.names] for _, losses in waiting]
        if processes.device.traces:  # what is computed here would be noted for the next step, and change its graph
            self._readback = ReadBack({str(number): loss for number, loss in enumerate(chain.from_iterable(rows))})
        else:
            self._readback = ReadBack({"losses": self._summed(_table(rows))})

    def _summed(self, own: Tensor) -> Tensor:
        """Those of all processes, [W, S, L], of one process's, [S, L]."""
        everyone = own.new_zeros(self._processes.world_size, *own.shape)
        everyone[self._processes.rank] = own
        return self._processes.total(everyone, self._what)

    @property
    def arrived(self) -> bool:
        """Whether they are to be read now, without waiting; all processes exchange them then, so where the device traces, at the next
        interval's end, for devices are not equally far.
        """
        return not self._processes.device.traces and self._readback.arrived

    def table(self) -> Tensor:
        """The losses [W, S, L] on the host; waits for them."""
        arrived = self._readback.wait()
        if not self._processes.device.traces:
            return arrived["losses"]
        own = torch.stack([*arrived.values()]).float().reshape(len(self.steps), len(self.names))
        return torch.stack(self._processes.gather(own, self._what))


def _table(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.stack([torch.stack([loss.float() for loss in row]) for row in rows])
