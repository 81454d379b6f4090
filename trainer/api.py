"""The public API: load a model and ask it about photos, run a stage, record a training loop of one's own.

The names are there as `trainer.load_model`, `trainer.run_stage` and `trainer.record`. Importing this module imports neither torch nor timm.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from trainer import config
from trainer.config import EvidenceSettings, ProfileSettings
from trainer.graph import STAGES, Stage
from trainer.io import artifacts, formatting
from trainer.io.artifacts import Manifest
from trainer.io.errors import SettingsError, TrainerError
from trainer.io.host import environment_variables
from trainer.io.local_files import with_home
from trainer.predict.photo_classifier import PhotoClassifier, load_model
from trainer.report.billing import make_bill, stage_bill
from trainer.runner import local_run

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PhotoClassifier", "load_model", "record", "run_stage"]

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


def run_stage(
    name: str, *, recipe: str = "", overrides: str | Iterable[str] = (), processes: int = 0, **directories: str | Path
) -> dict[str, Manifest]:
    """Run one stage on given inputs, as `python -m trainer stage NAME` does.

    Args:
        name: of the stage, such as `evaluate`.
        recipe: takes the stage's settings from this recipe; the defaults without one.
        overrides: `key=value` settings, such as `distill.logit.temperature=2`.
        processes: how many processes train, in a stage that trains; 0: one for each GPU, or else one.
        directories: of each input and output, by the stage's keywords, such as `dataset` and `evaluation`.

    Returns:
        Keyword of each output -> its manifest, whose `figures` are the stage's main numbers.

    Raises:
        SettingsError: there is no such stage, a setting is wrong, or a directory is missing or not the stage's.
        TrainerError: as the stage.
    """
    stage = _stage(name, directories)
    settings = config.resolve(recipe, overrides)
    uris = {keyword: with_home(place) for keyword, place in directories.items()}
    given = {"recipe": recipe, "resolved": settings.model_dump(mode="json")}
    device = {config.DEVICE_VARIABLE: os.environ.get(config.DEVICE_VARIABLE, settings.run.device)}
    with local_run.only_stage_in(uris[keyword] for keyword in stage.outputs), environment_variables(device):
        local_run.run_stage(stage, settings.for_stage(name), uris, processes=processes, given=given)
    return {keyword: artifacts.manifest(uris[keyword], kind) for keyword, kind in stage.outputs.items()}


def _stage(name: str, directories: Mapping[str, object]) -> Stage:
    stage = STAGES.get(name)
    if stage is None:
        raise SettingsError(f"stage {name!r}: there is none of this name; choose from {', '.join(STAGES)}")
    needed = [*stage.inputs, *stage.outputs]
    known = [*needed, *stage.optional_inputs]
    missing = [keyword for keyword in needed if keyword not in directories]
    if missing:
        raise SettingsError(f"stage {name}: needs the directory {missing[0]}; give {', '.join(needed)}")
    foreign = sorted(directories.keys() - {*known})
    if foreign:
        raise SettingsError(f"stage {name}: has no directory {foreign[0]}; it takes {', '.join(known)}")
    return stage


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
        import torch

        from trainer.profiling.recorder import LoaderStats, Recorder, Sources
        from trainer.stages import profile

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
        from trainer.profiling.evidence_files import read_evidence
        from trainer.stages import profile

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
        from torch.utils.data import DataLoader

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
        from trainer.devices.torch_private import batches_ready, loader_processes

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
