"""The doctor for any training script: two lines, any number of processes, one page at the end.

    from trainer import doctor
    doctor.attach(model, "runs/profile")       # after the model is compiled or wrapped, before the loop

It watches torch itself, so the loop stays as it is: batches of a `DataLoader` while the model is in training mode, forward passes of the
model, `backward`, and steps of optimizers that have its weights. A step begins with the wait for a batch and ends as the next batch is
asked for, once an optimizer has stepped; accumulated micro-batches are one step. Under `torchrun` each process attaches, and the first
writes the page when all have ended. Scripts on Accelerate need nothing else; `hugging_face` and `lightning` give callbacks.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainer.api import LoopRecording, record
from trainer.devices.torch_private import around_each_batch, batches_left, workers_of
from trainer.io.errors import SettingsError

logger = logging.getLogger(__name__)

__all__ = ["Doctor", "attach", "hugging_face", "lightning"]


def attach(model: nn.Module, output: str | Path, *, name: str = "training") -> Doctor:
    """Record a training from now on, and write its page to `output`/report as the process ends, or at `finish`.

    Args:
        model: what is trained, on its device; hooks on a model that is compiled afterward would be compiled too.
        output: folder of the page and, in `evidence`, of what it was made of; processes of several machines need a folder that all see.
        name: of the training, for the page.

    Raises:
        SettingsError: another training is being recorded, or the name cannot be a file's.
    """
    if Doctor.attached is not None:
        raise SettingsError("doctor.attach: a training is being recorded already; call finish() of the first")
    return Doctor(model, output, name=name)


class Doctor:
    """Records one training of this process; `attach` makes it."""

    attached: ClassVar[Doctor | None] = None

    def __init__(self, model: nn.Module, output: str | Path, *, name: str) -> None:
        self._model, self._thread = model, threading.get_ident()
        inner = model
        while isinstance(further := getattr(inner, "module", getattr(inner, "_orig_mod", None)), nn.Module):
            inner = further
        self._weights = {id(parameter) for parameter in inner.parameters()}
        self.recording: LoopRecording = record(name, output, model=inner)
        """For spans and curves of your own: `recording.span("attention")`, `recording.log(loss=loss)`."""
        self._step: AbstractContextManager[object] | None = None
        self._updated = self._loading = (
            False  # whether an optimizer has stepped in this step; whether a batch is being loaded
        )
        self._forwards: list[_Opened] = []  # of calls of the model within one another
        self._updates: list[_Opened] = []
        self._evaluation, self._watching = ExitStack(), ExitStack()
        self._evaluates = False
        self._loader: Any = None
        self._count_ready: Callable[[], None] = lambda: None
        self.recording.__enter__()
        for handle in (
            model.register_forward_pre_hook(lambda _module, _inputs: self.begin_forward()),
            model.register_forward_hook(lambda _module, _inputs, _output: self.end_forward(), always_call=True),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ):
            self._watching.callback(handle.remove)
        self._watching.enter_context(around_each_batch(self._next_batch))
        self._watching.enter_context(_around_backward(self._backward))
        atexit.register(self._at_exit)
        Doctor.attached = self

    def finish(self, error: BaseException | None = None) -> str:
        """End the recording, and write the page in the first process; return its first sentence, empty in the others."""
        if Doctor.attached is self:
            Doctor.attached = None
            atexit.unregister(self._at_exit)
            self._watching.close()
            self._evaluation.close()
            if self._step is not None:
                self._end_step(None if self._updated and error is None else _NotUpdated())
            self.recording.__exit__(type(error) if error else None, error, None)
        return self.recording.verdict

    def _at_exit(self) -> None:
        if verdict := self.finish(getattr(sys, "last_value", None)):  # what ended the process, if it was an exception
            logger.warning("%s  %s", verdict, self.recording.report)

    @property
    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread

    # ---- steps and their batches

    def _next_batch(self, iterator: Any, load: Callable[[], Any]) -> Any:
        """Load a batch; one of the training begins a step, or belongs to the step that accumulates."""
        if not self._is_here or self._loading:
            return load()
        if self._updated:
            self._end_step()
        if not self._model.training:
            if self._step is None and not self._evaluates:
                self._evaluation.enter_context(self.recording.span("evaluate"))
                self._evaluates = True
            return load()
        self._end_evaluation()
        if batches_left(iterator) == 0:  # this call ends the epoch
            return load()
        if iterator is not self._loader:
            self._loader, workers = iterator, workers_of(iterator)
            self._count_ready = self.recording.watch_processes(iterator, workers)
        self.begin_step()
        self._loading = True
        try:
            with self.recording.span("data"):
                self._count_ready()
                batch = load()
        except (
            BaseException
        ) as ended:  # StopIteration where the number of batches was not known, or a loader that fails
            self._end_step(_NotUpdated())
            raise ended
        finally:
            self._loading = False
        self.recording.count_images(_size(batch))
        return batch

    def begin_step(self) -> None:
        """Begin a step unless there is one; the first batch of the training does, if the model is in training mode by then."""
        if self._step is None:
            self._end_evaluation()
            self._step = self.recording.step()
            self._step.__enter__()

    def _end_evaluation(self) -> None:
        self._evaluation.close()
        self._evaluates = False

    def _end_step(self, unfinished: BaseException | None = None) -> None:
        step, self._step, self._updated = self._step, None, False
        if step is not None:
            with suppress(_NotUpdated):
                step.__exit__(type(unfinished) if unfinished else None, unfinished, None)
                if unfinished is not None:
                    raise unfinished

    # ---- the parts of a step

    def begin_forward(self) -> None:
        """Count for the forward pass from here on; the model's own calls do."""
        if self._is_here:
            counts = self._step is not None and self._model.training and not self._forwards
            self._forwards.append(_opened(self.recording.span("forward")) if counts else None)

    def end_forward(self) -> None:
        """End what `begin_forward` has begun."""
        if self._is_here and self._forwards:
            _close(self._forwards.pop())

    def _backward(self) -> AbstractContextManager[object]:
        return self.recording.span("backward") if self._is_here and self._step is not None else _NOTHING

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_here:
            return
        span: _Opened = None
        own = any(id(parameter) in self._weights for group in optimizer.param_groups for parameter in group["params"])
        if self._step is not None and own and not self._updates:
            # A closure computes the gradients within the step, so they cannot be looked at before it.
            has_closure = any(given is not None for given in (*args[1:], kwargs.get("closure")))
            span = _opened(self.recording.span("optimizer", look=not has_closure))
            self._updated = True
        self._updates.append(span)

    def _after_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002  # as the library calls it
        if self._is_here and self._updates:
            _close(self._updates.pop())


_NOTHING = nullcontext()
_Opened = AbstractContextManager[object] | None
"""A span that has begun, or none: these hooks run in every step, where an `ExitStack` would cost some microseconds each."""


def _opened(span: AbstractContextManager[object]) -> _Opened:
    span.__enter__()
    return span


def _close(span: _Opened) -> None:
    if span is not None:
        span.__exit__(None, None, None)


class _NotUpdated(Exception):  # noqa: N818  # no error: the training ended between two updates
    """A step ended before an optimizer has stepped."""


def _size(batch: Any) -> int:
    """Return the number of images of a batch: the length of its first tensor; 0 where it has none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((size for size in map(_size, parts) if size), 0)


@contextmanager
def _around_backward(span: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Let every backward pass run within a context; `Tensor.backward` calls this function, too."""
    backward = torch.autograd.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        with span():
            backward(*args, **kwargs)

    torch.autograd.backward = watched
    try:
        yield
    finally:
        torch.autograd.backward = backward


# ---- callbacks of trainers; these libraries are no dependencies


def hugging_face(output: str | Path, *, name: str = "training") -> Any:
    """Return a callback for `transformers.Trainer(callbacks=[...])`; it logs the loss to the page's curves, too."""
    base: Any = importlib.import_module("transformers").TrainerCallback

    class DoctorCallback(base):  # type: ignore[misc]  # known as it runs
        doctor: Doctor | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:  # noqa: ARG002  # as the library calls it
            self.doctor = attach(model, output, name=name)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # as the library calls it
            if self.doctor is not None:
                self.doctor.begin_step()  # after an evaluation the model's mode is changed when the first batches are there

        def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, Any], **_: Any) -> None:  # noqa: ARG002  # as the library calls it
            if self.doctor is not None:
                known = {key: logs[key] for key in ("loss", "learning_rate") if isinstance(logs.get(key), float)}
                self.doctor.recording.log(**known)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002  # as the library calls it
            if self.doctor is not None:
                self.doctor.finish()

    return DoctorCallback()


def lightning(output: str | Path, *, name: str = "training") -> Any:
    """Return a callback for `lightning.Trainer(callbacks=[...])`."""
    base: Any = importlib.import_module("lightning.pytorch").Callback

    class DoctorCallback(base):  # type: ignore[misc]  # known as it runs
        doctor: Doctor | None = None

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:  # noqa: ARG002  # as the library calls it
            self.doctor = attach(pl_module, output, name=name)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002  # as the library calls it
            if self.doctor is not None:
                self.doctor.begin_forward()  # `training_step` need not call the module itself

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:  # noqa: ARG002  # as the library calls it
            if self.doctor is not None:
                self.doctor.end_forward()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002  # as the library calls it
            if self.doctor is not None:
                self.doctor.finish()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002  # as the library calls it
            if self.doctor is not None:
                self.doctor.finish(exception)

    return DoctorCallback()
