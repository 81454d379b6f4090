"""What the trainings of one stage share: the processes, the outputs, the tracked run, the checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from trainer import models, tracking
from trainer.artifacts import Draft
from trainer.config import DistillSettings, LoadingSettings, PretrainSettings, TrainingSettings
from trainer.data.dataset import PreparedDataset
from trainer.data.loader import Samples
from trainer.distillation.recording import Recording
from trainer.models import Classifier
from trainer.profiling.evidence import Recorder
from trainer.tracking import Tracker
from trainer.training.checkpoints import Checkpoints, checkpoint_root
from trainer.training.loop import Objective, Training, train
from trainer.training.outputs import shared_artifact
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
    loading: LoadingSettings
    """The stage's section, as far as it says who loads and who makes views."""
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
        teacher_outputs: Recording | None = None,
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
            teacher_outputs: recorded outputs, whose views are seen again.
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
            workers="auto" if self.loading.workers is None else self.loading.workers,
            views_on=self.loading.views_on or "auto",
            decode_on=self.loading.decode_on or "cpu",
            processes=self.processes,
            checkpoints=checkpoints,
            layer_decay=layer_decay,
            view_seed=teacher_outputs.description.seed if teacher_outputs else None,
            view_count=teacher_outputs.description.views if teacher_outputs else 0,
            teacher_outputs=teacher_outputs,
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
            shared_artifact(processes, evidence, "evidence", settings=values, parents=parents) as evidence_draft,
            shared_artifact(processes, model, "model", settings=values, parents=parents) as model_draft,
        ):
            session = Session(
                processes=processes,
                tracker=tracker,
                data=data,
                values=values,
                parents=parents,
                seed=settings.seed or 0,
                loading=settings,
                model=model_draft,
                evidence=evidence_draft,
                checkpoint_root=checkpoint_root(model),
            )
            yield session
        session.remove_checkpoints()
