"""The doctor for any training: two lines in a script, any number of processes, one page at the end.

    from trainer import doctor
    doctor.attach(model, "runs/profile")       # after the model is compiled or wrapped, before the loop

It watches torch itself, so the loop stays as it is: batches of a `DataLoader` while the model is in training mode, forward passes of the
model, `backward`, and steps of optimizers that have its weights. A step begins with the wait for a batch and ends as the next batch is
asked for, once an optimizer has stepped; accumulated micro-batches are one step. Under `torchrun` each process attaches, and the first
writes the page when all have ended. Scripts on Accelerate need nothing else; `hugging_face` and `lightning` give callbacks. A loop over
something else than a `DataLoader` is recorded by `record`, which the package offers as `trainer.record`.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from trainer.config import EvidenceSettings, ProfileSettings
from trainer.devices.torch_private import (
    around_each_batch,
    batches_left,
    batches_ready,
    loader_processes,
    workers_of,
)
from trainer.io import artifacts, formatting
from trainer.io.errors import SettingsError, TrainerError
from trainer.io.local_files import with_home
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.recorder import LoaderStats, Recorder, Sources
from trainer.report.billing import make_bill, stage_bill
from trainer.stages import profile

logger = logging.getLogger(__name__)

__all__ = ["Doctor", "LoopRecording", "attach", "hugging_face", "lightning", "record"]

Batch = TypeVar("Batch")

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


def record(name: str, output: str | Path, *, model: nn.Module | None = None) -> LoopRecording:
    """Record a training loop of your own, and report what slows or spoils it.

        with trainer.record("segmentation", "profile", model=model) as recording:
            for images, targets in recording.steps(loader):
                with recording.span("forward"):
                    loss = criterion(model(images), targets)
                with recording.span("backward"):
                    loss.backward()
                with recording.span("optimizer"):
                    optimizer.step()
                recording.log(loss=loss.item())

    Args:
        name: of the training, for the report.
        output: directory for `report/report.html` and, in `evidence`, what it was made of.
        model: what is trained, on its device, not compiled and not wrapped. The span `optimizer` looks at its weights now and then;
            without it only time and machine are judged. The span `forward` looks at what its layers give.

    Raises:
        SettingsError: the name cannot be a file's.
    """
    if not _NAME.fullmatch(name):
        raise SettingsError(f"record: the name {name!r} must be of letters, digits, dots and dashes, 64 at most")
    return LoopRecording(name, Path(with_home(output)), model)


class _NoBatchLeft(Exception):  # noqa: N818  # no error: it ends the loop
    """There was no batch for the step that had begun."""


@contextmanager
def _within(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield


_RANKS = ".ranks"
"""Folder in the output where the other processes leave what they recorded, until the first one takes it into the evidence."""
_RANKS_WAIT_S = 60.0
"""Longest wait of the first process for the others' records."""


class LoopRecording:
    """Records the process that holds it; where several train together, started by `torchrun`, each records itself into one folder.

    It is a context manager: the first process writes the report when the block ends, also when it ends with an exception.
    """

    def __init__(self, name: str, output: Path, model: nn.Module | None) -> None:
        self.report = output / "report" / profile.REPORT  # the page, once the block has ended
        self.verdict = ""  # the page's first sentence, once the block has ended
        self._name, self._output, self._model = name, output, model
        parameter = None if model is None else next(model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        self._loader = LoaderStats()
        self._rank, self._world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        sources = Sources(model=model, attention=False, layers=not self._rank, loader=self._loader)
        self._recorder = Recorder(
            EvidenceSettings(), name=name, device=device, rank=self._rank, world_size=self._world_size, sources=sources
        )
        self._step = 0

    def __enter__(self) -> Self:
        if not self._rank:
            shutil.rmtree(self._output / _RANKS, ignore_errors=True)  # of an earlier recording
        self._recorder.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._recorder.__exit__(kind, error, trace)

        evidence, settings = self._output / "evidence", ProfileSettings()
        try:
            if self._rank:
                self._recorder.write(self._output / _RANKS)
                return
            if error is None:
                self._wait_for_ranks()
            with artifacts.create(evidence, "evidence", settings={}) as draft:
                if error is None and (others := self._output / _RANKS / self._name).is_dir():
                    shutil.copytree(others, draft.path / self._name)
                self._recorder.write(draft.path)
            shutil.rmtree(self._output / _RANKS, ignore_errors=True)
            recorded = read_evidence(evidence)
            bill = make_bill([stage_bill(self._name, artifacts.manifest(evidence, "evidence"), recorded)])
            values, parents = settings.model_dump(mode="json"), {"evidence": recorded.fingerprint}
            with artifacts.create(self.report.parent, "report", settings=values, parents=parents) as draft:
                verdict = profile.write(draft, settings, [recorded], bill)
                self.verdict = verdict.text
                draft.figures |= {"verdict": verdict.text, "outcome": verdict.outcome}
        except TrainerError as unwritten:
            if error is None:
                raise
            logger.warning("%s  the recording could not be written: %s", self._name, unwritten)  # `error` matters more

    def _wait_for_ranks(self) -> None:
        """Wait until the other processes have written their records; without some of them the training counts as failed."""
        missing, until = [*range(1, self._world_size)], time.monotonic() + _RANKS_WAIT_S
        while missing and time.monotonic() < until:
            folder = self._output / _RANKS / self._name
            missing = [rank for rank in missing if not (folder / f"rank{rank}.json").is_file()]
            time.sleep(0.05 if missing else 0)
        if missing:
            names = formatting.listed([*map(str, missing)], 8)
            why = f"process {names} left no record in {self._output} within {_RANKS_WAIT_S:.0f} s; use a folder that all machines see"
            self._recorder.fail(why)
            logger.warning("%s  %s", self._name, why)

    def steps(self, batches: Iterable[Batch], *, images: int | None = None) -> Iterator[Batch]:
        """Each batch in a step of its own, which begins with the wait for the batch. Call it once an epoch.

        A loop that is left by `break` has not ended its last step, which then counts as interrupted.

        Args:
            batches: such as a `DataLoader`, whose processes are watched too.
            images: in a batch of this process; `batches.batch_size` where not given.
        """
        images = images if images is not None else getattr(batches, "batch_size", None) or 0
        # Where the number of batches is known no step begins in vain, at the end.
        left = len(batches) if isinstance(batches, Sized) else None
        iterator = iter(batches)
        count_ready = self.watch_processes(iterator, batches.num_workers) if isinstance(batches, DataLoader) else None
        with suppress(_NoBatchLeft):
            while left != 0:
                with self.step(images=images * self._world_size):
                    with self.span("data"):
                        if count_ready is not None:
                            count_ready()
                        batch = self._next(iterator)
                    yield batch
                left = None if left is None else left - 1

    def watch_processes(self, iterator: object, workers: int) -> Callable[[], None]:
        """Watch the processes of a `DataLoader`, by its iterator; return what counts the batches that they have ready."""
        self._loader.workers = workers
        if not workers:
            return lambda: None
        self._loader.loader_processes([process.pid for process in loader_processes(iterator)])
        return lambda: self._loader.batches_ready(batches_ready(iterator))

    def count_images(self, images: int) -> None:
        """Add a micro-batch's images to those of the step; of this process, where all have as many."""
        self._recorder.timeline.count_images(images * self._world_size)

    @staticmethod
    def _next(iterator: Iterator[Batch]) -> Batch:
        try:
            return next(iterator)
        except StopIteration:
            raise _NoBatchLeft from None

    @contextmanager
    def step(self, *, images: int = 0) -> Iterator[None]:
        """Record one step, where `steps` does not fit the loop; `images` is how many it learns from, 0 where that is not known."""
        with self._recorder.timeline.step(self._step, images=images):
            yield
        self._step += 1

    def span(self, name: str, *, look: bool = True) -> AbstractContextManager[object]:
        """A part of a step, or of the time between steps.

        Args:
            look: whether the span `optimizer` may look at the weights and their gradients, and `forward` at what layers give.
            name: the rules know `data`, `to_device`, `forward`, `backward` and `optimizer` in steps, `evaluate` and `checkpoint` between
                them. The report shows any other under its name.
        """
        timeline, looks = self._recorder.timeline, self._recorder.tensor_sampler
        span = timeline.span(name)
        if not look or self._model is None or name not in ("forward", "optimizer") or not timeline.inside_step:
            return span
        around = looks.around_forward(self._step) if name == "forward" else looks.around_update(self._step, None)
        return span if isinstance(around, nullcontext) else _within(around, span)

    def log(self, **values: float) -> None:
        """Record points of the training's curves, such as `loss`; of the step that it is called in, or that has just ended."""
        step = self._step if self._recorder.timeline.inside_step else max(0, self._step - 1)
        self._recorder.metrics(step, values)


# ---- two lines in a script


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
        self._has_loaded = False  # before, a forward pass is a trial of the model
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
        self._has_loaded = True
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
        """Begin a step unless there is one."""
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
            # A trainer that loads ahead, or changes the model's mode after it has loaded, asked for this step's batch in another.
            if self._has_loaded and self._model.training:
                self.begin_step()
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
