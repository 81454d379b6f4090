"""What the trainings of one stage share: the processes, the outputs that they write together, the tracked run, the checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.config import DistillSettings, PretrainSettings, TrainingSettings, WatchSettings
from trainer.data.dataset import PreparedDataset
from trainer.data.loader import RecordedOutputs, Samples, micro_batch_size
from trainer.devices.process_group import Processes, join_processes
from trainer.evaluation.metrics import measure_latency
from trainer.graph import STAGES, Kind
from trainer.io import artifacts, host, storage
from trainer.io.artifacts import Draft
from trainer.io.errors import OutputError, PreemptedError, SupersededError, TrainerError
from trainer.models import networks
from trainer.models.networks import Classifier
from trainer.models.served_student.preprocessing import Square
from trainer.profiling import live_status
from trainer.profiling.evidence import ContextRecord
from trainer.profiling.recorder import Recorder, Startup
from trainer.report.scores import val_name
from trainer.report.tracking.exporter import exported
from trainer.report.tracking.stage_runs import Tracker, stage_run
from trainer.training.checkpointing import Checkpointing
from trainer.training.checkpoints import Checkpoints, Dealing, compatible, root_is_shared
from trainer.training.classification import ValidationBatches, validate
from trainer.training.live_rules import LiveRules
from trainer.training.loop import Trainer
from trainer.training.metric_logger import MetricLogger
from trainer.training.sharding import decided
from trainer.training.spec import Objective, TrainingSpec, fit_batch, keep_micro_batches, why_micro_batches_count
from trainer.training.trace import Trace

logger = logging.getLogger(__name__)

FAILED = "evidence-of-failed"
"""Where a training that fails leaves its evidence, beside its checkpoints, with which it is removed in the end."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """The surroundings of a stage's trainings, on one of its processes."""

    stage: str
    settings: PretrainSettings | DistillSettings
    """The stage's whole section: a training depends on those before it."""
    processes: Processes
    tracker: Tracker
    data: PreparedDataset
    square: Square
    """How a photo became the squares of the data set."""
    parents: Mapping[str, str]
    model: Draft
    """The model directory in the making."""
    evidence: Draft
    """The evidence in the making."""
    checkpoint_root: str
    output: str | Path = ""
    """Where the model directory will be, if it is to be kept."""
    startup: Startup
    watch: WatchSettings = field(default_factory=WatchSettings)
    _fitted: dict[str, Any] = field(default_factory=dict)
    """Batch sizes lowered to the number of images. Part of the checkpoint's identity: a run started with the lowered size resumes it."""
    _trainings: list[Checkpoints] = field(default_factory=list)
    _measured: dict[str, float] = field(default_factory=dict)
    """What the last validation measured."""

    @property
    def seed(self) -> int:
        return self.settings.seed or 0

    @property
    def values(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json")

    def train(
        self,
        name: str,
        objective: Objective,
        samples: Samples,
        settings: TrainingSettings,
        *,
        view_size: int,
        layer_decay: float = 1.0,
        labeled: bool = True,
        labeled_share: float = 0.0,
        teacher_outputs: RecordedOutputs | None = None,
        context: ContextRecord | None = None,
    ) -> nn.Module:
        """Run the training `name`, record its evidence, and give the trained model.

        Args:
            layer_decay: factor of the learning rate from one block to the one below it.
            labeled: whether the model is a classifier, to be measured on the validation split.
            labeled_share: of the images of each step, where there are others too; 0: they come as all do.
            context: what only the stage knows of the training.

        Raises:
            TrainerError: as it ended; what was recorded is kept and its place named.
        """
        nested = name != self.stage
        section = f"{self.stage}.{name}" if nested else name
        fitted = fit_batch(section, settings, len(samples), self.processes)
        if fitted is not settings:
            batch = {"batch_size": fitted.batch_size}
            self._fitted.update({name: self.values[name] | batch} if nested else batch)
            settings = fitted
        settings = decided(section, settings, self.processes, objective.model)
        if self.processes.is_first and settings.precision == "bf16" and not self.processes.device.uses_bf16("bf16"):
            text = "this processor has no bf16 instructions, and emulated bf16 is 10 to 15 times slower than fp32; training in fp32"
            logger.warning("%s  precision=bf16 is not used: %s", name, text)
        checkpoints = Checkpoints(
            self.checkpoint_root,
            name,
            settings={**self.values, **self._fitted},
            parents=self.parents,
            section=STAGES[self.stage].section,
            keep=settings.checkpoint_keep,
            shared=root_is_shared(),
            output=self.output,
            before_write=self.tracker.keep,
        )
        self._trainings.append(checkpoints)
        asked = settings.accumulation
        if because := why_micro_batches_count(self.settings, objective.model):
            settings = keep_micro_batches(section, settings, checkpoints, self.processes, because=because)
        checkpoints.dealing = Dealing(self.processes.world_size * settings.accumulation, asked)
        spec = TrainingSpec(
            name=name,
            objective=objective,
            samples=samples,
            view_size=view_size,
            settings=settings,
            loading=self.settings,
            processes=self.processes,
            layer_decay=layer_decay,
            teacher_outputs=teacher_outputs,
            val_split=self.data.split("val") if labeled else None,
            labeled_share=labeled_share,
            pause_epochs=self.pause_epochs,
        )
        is_first = self.processes.is_first
        checkpointing = Checkpointing(checkpoints, self.tracker, rank=self.processes.rank)
        trace = Trace(
            context=self._context(spec, context or ContextRecord()),
            startup=self.startup,
            attempts=checkpointing.attempts.records,
        )
        metrics = MetricLogger(trace, self.tracker)
        shown_at = live_status.place(self.output, name) if self.output else ""
        rules = LiveRules(trace, self.watch, tracker=self.tracker, say=metrics.say, active=is_first, shown_at=shown_at)
        trainer = Trainer(spec, [metrics, rules, trace, checkpointing])
        kept = storage.join(checkpoints.uri, FAILED)
        try:
            trained = trainer.train()
        except (PreemptedError, SupersededError):
            raise  # it resumes, here or in the later attempt, whose evidence would stand there
        except BaseException as error:
            if not (is_first and trace.has_begun and self._keep_evidence(trace.recorder, kept)):
                raise
            logger.warning("%s  ended early; what it recorded is at %s", name, kept)
            if isinstance(error, TrainerError):
                raise type(error)(f"{error}; what it recorded is at {kept}") from error
            raise
        self._measured.update(trainer.measured)
        trace.recorder.write(self.evidence.path)
        self.startup.begin_again()
        return trained

    def _keep_evidence(self, recorder: Recorder, uri: str) -> bool:
        """Keep what was recorded of a training that fails, and return whether that is so."""
        try:
            artifacts.remove(uri)
            with artifacts.create(uri, "evidence", settings=self.values, parents=self.parents) as draft:
                recorder.write(draft.path)
        except (TrainerError, RuntimeError) as error:
            # What ended the training matters more, and may have been the device.
            logger.warning("%s  what it recorded could not be kept: %s", recorder.name, error)
            return False
        return True

    def _context(self, spec: TrainingSpec, known: ContextRecord) -> ContextRecord:
        labels, targets = spec.samples.labels, self.data.targets
        found = np.bincount(labels[labels >= 0], minlength=len(self.data.classes if targets is None else targets))
        counts: list[int] = (found if targets is None else found @ targets).tolist()
        return known.model_copy(
            update={
                "settings": spec.settings.model_dump(mode="json"),
                "total_steps": spec.total_steps,
                "low_resolution_steps": spec.low_resolution[0],
                "samples": len(spec.samples),
                "val_samples": len(self.data.split("val")),
                "labeled": int(found.sum()),
                "classes": dict(zip(self.data.classes, counts, strict=True)) if any(counts) else None,
                "micro_batch": micro_batch_size(spec.settings, self.processes.world_size),
                "parameters": networks.parameter_count(spec.objective.model),
            }
        )

    def keep(self, model: Classifier, settings: TrainingSettings) -> None:
        """Write the stage's result into its model directory, with its score on the validation split where it has a head.

        It is measured with `settings` where no training has done it.
        """
        if not self._measured and model.card.labels:
            on_device, split = model.to(self.processes.device.torch_device), self.data.split("val")
            with closing(ValidationBatches(split, self.processes, settings)) as batches:
                self._measured.update(validate(on_device, batches) or {})
        self.check_ours()
        if self.processes.is_first:
            threshold = None
            if self.data.targets is not None and model.card.labels:
                threshold = 0.5 if model.card.threshold is None else model.card.threshold
            model.card = card = replace(model.card, square=self.square, threshold=threshold)
            networks.save(model, self.model.path)
            parameters = networks.parameter_count(model)
            self.model.figures.update(architecture=card.architecture, parameters=parameters, image_size=card.image_size)
            if card.labels and (name := val_name(self._measured)):
                self.model.figures[name] = self._measured[name]
            if isinstance(settings, DistillSettings) and settings.latency_runs:
                image = torch.zeros(1, 3, card.image_size, card.image_size, dtype=torch.uint8)
                timed = measure_latency({"": model.cpu().eval()}, image, batch_sizes=[1], runs=settings.latency_runs)
                self.model.figures["latency_ms"] = timed[""][0].p50_ms

    def check_ours(self) -> None:
        """Raise `SupersededError`, before the outputs are written, where a later attempt at this stage writes them too."""
        for checkpoints in self._trainings:
            checkpoints.check_ours()

    @property
    def pause_epochs(self) -> float:
        """After how many epochs the training pauses; 0: it goes on to its end."""
        settings = self.settings
        return (
            settings.pause_epochs
            if isinstance(settings, DistillSettings) and settings.pause_epochs < settings.epochs
            else 0.0
        )

    def remove_checkpoints(self) -> None:
        if self.processes.is_first and not self.pause_epochs:
            for checkpoints in self._trainings:
                checkpoints.remove()


@contextmanager
def shared_artifact(
    processes: Processes, uri: str | Path, kind: Kind, *, settings: Mapping[str, Any], parents: Mapping[str, str]
) -> Iterator[Draft]:
    """Like `artifacts.create`, on every process of every machine.

    The first process makes the artifact, and notes how long after the launch and on what kind of device; all write into one directory.
    In a store there is no such directory: the processes of a machine write into a folder of theirs, which the first of them sends when
    all have written. Then the first process of all writes the manifest.

    Raises:
        OutputError: the directory cannot be written, or not all machines see it.
    """
    # Torchrun numbers the processes machine by machine.
    leader = processes.rank - processes.local_rank if storage.is_remote(uri) else 0
    with ExitStack() as stack:
        own: Draft | None = None
        if processes.is_first:
            own = stack.enter_context(artifacts.create(uri, kind, settings=settings, parents=parents))
            own.startup_seconds = round(host.seconds_since_launch(), 3)
            own.device = processes.device.kind
        elif processes.rank == leader:
            own = Draft(path=stack.enter_context(artifacts.folder_for(uri)))
        paths = processes.gather(own.path if own else Path(), f"the beginning of {kind} {uri}")
        draft = own or Draft(path=paths[leader])
        if not draft.path.is_dir():
            raise OutputError(
                f"{kind} {uri}: lies on the disk of the first machine, which this one does not see; give an output that all machines "
                "reach, such as s3://BUCKET/NAME"
            )
        yield draft
        processes.barrier(f"the end of {kind} {uri}")
        sent = artifacts.contribute(uri, draft.path) if own and not processes.is_first else {}
        for records in processes.gather(sent, f"the files of {kind} {uri}"):
            draft.remote_files.update(records)


@contextmanager
def open_session(
    stage: str,
    settings: PretrainSettings | DistillSettings,
    data: PreparedDataset,
    *,
    parents: Mapping[str, str],
    model: str | Path,
    evidence: str | Path,
    startup: Startup,
) -> Iterator[Session]:
    """Join the processes, start the stage's tracked run, make its two outputs; complete them when the block ends well.

    Args:
        model: output, the model directory.
        evidence: output, what the trainings recorded of themselves.
        startup: has counted what the stage has done so far.
    """
    values = settings.model_dump(mode="json")
    square = data.square  # a data set that does not say it is refused before anything is trained
    with ExitStack() as stack:
        with startup.part("join"):
            processes = stack.enter_context(join_processes(deterministic=settings.deterministic))
        root = artifacts.unfinished(model)
        identity = artifacts.digest({"settings": compatible(values), "parents": parents, "checkpoints": root})
        tracker = stack.enter_context(stage_run(stage, values, active=processes.is_first, training=identity[:16]))
        if processes.is_first:
            tracker = stack.enter_context(exported(tracker, stage))
        with (
            shared_artifact(processes, evidence, "evidence", settings=values, parents=parents) as evidence_draft,
            shared_artifact(processes, model, "model", settings=values, parents=parents) as model_draft,
        ):
            session = Session(
                stage=stage,
                settings=settings,
                processes=processes,
                tracker=tracker,
                data=data,
                square=square,
                parents=parents,
                model=model_draft,
                evidence=evidence_draft,
                checkpoint_root=root,
                output=model,
                startup=startup,
                watch=settings.watch or WatchSettings(),
            )
            yield session
            session.check_ours()
        session.remove_checkpoints()
