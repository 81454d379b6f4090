"""A training loop that is not this project's, recorded and reported on as ours are."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import nn

from trainer import artifacts
from trainer.billing import make_bill, stage_bill
from trainer.config import EvidenceSettings, ProfileSettings
from trainer.errors import TrainerError
from trainer.profiling.evidence import read_evidence
from trainer.profiling.recorder import Recorder, Sources
from trainer.stages import profile

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")


class _NoBatchLeft(Exception):  # noqa: N818  # no error: it ends the loop
    """There was no batch for the step that had begun."""


class LoopRecording:
    """Records the process that holds it; where several train together, let the first one record.

    It is a context manager: the report is written when the block ends, also when it ends with an exception.
    """

    def __init__(self, name: str, output: Path, model: nn.Module | None) -> None:
        self.report = output / "report" / profile.REPORT
        """The page, once the block has ended."""
        self.verdict = ""
        """The page's first sentence, once the block has ended."""
        self._name, self._output, self._model = name, output, model
        parameter = None if model is None else next(model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        sources = Sources(model=model, attention=False)
        self._recorder = Recorder(EvidenceSettings(), name=name, device=device, rank=0, world_size=1, sources=sources)
        self._step = 0

    def __enter__(self) -> Self:
        self._recorder.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._recorder.__exit__(kind, error, trace)
        evidence, settings = self._output / "evidence", ProfileSettings()
        try:
            with artifacts.create(evidence, "evidence", settings={}) as draft:
                self._recorder.write(draft.path)
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

    def steps(self, batches: Iterable[Batch], *, images: int | None = None) -> Iterator[Batch]:
        """Each batch in a step of its own, which begins with the wait for the batch. Call it once an epoch.

        A loop that is left by `break` has not ended its last step, which then counts as interrupted.

        Args:
            batches: such as a `DataLoader`.
            images: in a batch; `batches.batch_size` where not given.
        """
        images = images if images is not None else getattr(batches, "batch_size", None) or 0
        # Where the number of batches is known no step begins in vain, at the end.
        left = len(batches) if isinstance(batches, Sized) else None
        iterator = iter(batches)
        with suppress(_NoBatchLeft):
            while left != 0:
                with self.step(images=images):
                    with self.span("data"):
                        batch = self._next(iterator)
                    yield batch
                left = None if left is None else left - 1

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

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A part of a step, or of the time between steps.

        Args:
            name: the rules know `data`, `to_device`, `forward`, `backward` and `optimizer` in steps, `evaluate` and `checkpoint` between
                them. The report shows any other under its name.
        """
        timeline = self._recorder.timeline
        if self._model is not None and name == "optimizer" and timeline.inside_step:
            with self._recorder.tensor_sampler.around_update(self._step, lambda: None), timeline.span(name):
                yield
        else:
            with timeline.span(name):
                yield

    def log(self, **values: float) -> None:
        """Record points of the training's curves, such as `loss`; of the step that it is called in, or that has just ended."""
        step = self._step if self._recorder.timeline.inside_step else max(0, self._step - 1)
        self._recorder.metrics(step, values)
