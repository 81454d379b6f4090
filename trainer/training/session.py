"""What the trainings of one stage share: the processes, the outputs, the tracked run, the checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trainer import artifacts, models, storage, tracking
from trainer.artifacts import Draft, Kind
from trainer.config import DistillSettings, PretrainSettings, TrainingSettings
from trainer.data.dataset import PreparedDataset
from trainer.data.loader import Samples
from trainer.errors import OutputError
from trainer.models import Classifier
from trainer.profiling.evidence import Recorder
from trainer.tracking import Tracker
from trainer.training.checkpoints import Checkpoints, checkpoint_root
from trainer.training.loop import Objective, Training, train
from trainer.training.processes import Processes, join_processes
from trainer.training.validation import validate


@dataclass(frozen=True, kw_only=True)
class Session:
    """The surroundings of a stage's trainings, on one of its processes."""

    processes: Processes
    tracker: Tracker
    data: PreparedDataset
    values: Mapping[str, Any]
    """The stage's whole section: a training depends on those before it."""
    parents: Mapping[str, str]
    seed: int
    workers: int
    model: Draft
    """The model directory in the making."""
    evidence: Draft
    """The evidence in the making."""
    checkpoint_root: str
    _trainings: list[Checkpoints] = field(default_factory=list)

    def train(
        self,
        name: str,
        objective: Objective,
        samples: Samples,
        settings: TrainingSettings,
        *,
        view_size: int,
        layer_decay: float = 1.0,
        labelled: bool = True,
    ) -> nn.Module:
        """Run the training `name`, record its evidence, and give the trained model.

        Args:
            name: `mae`, `finetune` or `distill`.
            objective: what is learned.
            samples: from what.
            settings: how.
            view_size: edge of the views, in pixels.
            layer_decay: factor of the learning rate from one block to the one below it.
            labelled: whether the model is a classifier, to be measured on the validation split.
        """
        checkpoints = Checkpoints(
            self.checkpoint_root,
            name,
            settings=self.values,
            parents=self.parents,
        )
        self._trainings.append(checkpoints)
        measure = partial(
            validate,
            split=self.data.split("val"),
            processes=self.processes,
            batch_size=settings.batch_size,
            precision=settings.precision,
        )
        training = Training(
            name=name,
            objective=objective,
            samples=samples,
            view_size=view_size,
            settings=settings,
            seed=self.seed,
            workers=self.workers,
            processes=self.processes,
            checkpoints=checkpoints,
            layer_decay=layer_decay,
            validate=measure if labelled else None,
        )
        recorder = Recorder(
            settings.evidence,
            name=name,
            device=self.processes.device.torch_device,
            rank=self.processes.rank,
            world_size=self.processes.world_size,
        )
        trained = train(training, recorder, self.tracker)
        recorder.write(self.evidence.path)
        return trained

    def keep(self, model: Classifier) -> None:
        """Write the stage's result into its model directory."""
        if self.processes.is_first:
            models.save(model, self.model.path)
            self.model.figures.update(models.describe(model))

    def remove_checkpoints(self) -> None:
        """Drop the checkpoints of all trainings: the result is complete."""
        if self.processes.is_first:
            for checkpoints in self._trainings:
                checkpoints.remove()


@contextmanager
def open_session(
    stage: str,
    settings: PretrainSettings | DistillSettings,
    data: PreparedDataset,
    *,
    parents: Mapping[str, str],
    model: str | Path,
    evidence: str | Path,
) -> Iterator[Session]:
    """Join the processes, start the stage's tracked run, make its two outputs; complete them when the block ends well.

    Args:
        stage: `pretrain` or `distill`.
        settings: its section.
        data: what it learns from.
        parents: fingerprint of each input.
        model: output, the model directory.
        evidence: output, what the trainings recorded of themselves.

    Raises:
        TrainerError: as the parts that it calls.
    """
    values = settings.model_dump(mode="json")
    with (
        join_processes() as processes,
        tracking.stage_run(stage, values, active=processes.is_first) as tracker,
    ):
        with (
            _shared_artifact(processes, evidence, "evidence", settings=values, parents=parents) as evidence_draft,
            _shared_artifact(processes, model, "model", settings=values, parents=parents) as model_draft,
        ):
            session = Session(
                processes=processes,
                tracker=tracker,
                data=data,
                values=values,
                parents=parents,
                seed=settings.seed or 0,
                workers=settings.workers or 0,
                model=model_draft,
                evidence=evidence_draft,
                checkpoint_root=checkpoint_root(model),
            )
            yield session
        session.remove_checkpoints()


@contextmanager
def _shared_artifact(
    processes: Processes, uri: str | Path, kind: Kind, *, settings: Mapping[str, Any], parents: Mapping[str, str]
) -> Iterator[Draft]:
    """Like `artifacts.create`, on every process of every machine.

    The first process makes the artifact; all write into one directory. In a store there is no such directory: the processes of a machine
    write into a folder of theirs, which the first of them sends when all have written. Then the first process of all writes the manifest.
    """
    leader = processes.first_of_node if storage.is_remote(uri) else 0
    with ExitStack() as stack:
        own: Draft | None = None
        if processes.is_first:
            own = stack.enter_context(artifacts.create(uri, kind, settings=settings, parents=parents))
        elif processes.rank == leader:
            own = Draft(path=stack.enter_context(artifacts.folder_for(uri)))
        paths = processes.gather(own.path if own else Path())
        draft = own or Draft(path=paths[leader])
        if not draft.path.is_dir():
            raise OutputError(
                f"{kind} {uri}: lies on the disk of the first machine, which this one does not see; give an output that all machines "
                "reach, such as s3://BUCKET/NAME"
            )
        yield draft
        processes.barrier()
        sent = artifacts.contribute(uri, draft.path) if own and not processes.is_first else {}
        for records in processes.gather(sent):
            draft.contributed.update(records)
