"""warm_up: compile beforehand, by the first steps of each training; what they learn is thrown away.

The steps are real ones: the same code, models, shapes, precision and processes, on the first images of the data set. They take in
what a training does now and then too (a look at its weights, a line of the log, a checkpoint, a validation), so that afterward the
compile cache has all graphs that a training asks for. Where a compiler keeps them is its own affair (`NEURON_COMPILE_CACHE_URL`,
`TORCHINDUCTOR_CACHE_DIR`).
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from trainer.config import (
    DistillSettings,
    LowResolutionSettings,
    PretrainSettings,
    ReinforceSettings,
    TrainingSettings,
    WarmUpSettings,
)
from trainer.data.dataset import PreparedDataset, open_dataset
from trainer.devices.process_group import Processes, join_processes
from trainer.io import artifacts, storage
from trainer.io.artifacts import Draft
from trainer.io.base_models import StrictModel
from trainer.io.errors import SettingsError
from trainer.models import networks
from trainer.models.networks import Classifier, EmbeddingStatistics
from trainer.objectives.distillation.recording import placeholder_recording
from trainer.profiling.evidence import RankRecord
from trainer.profiling.recorder import Startup
from trainer.report.tracking.stage_runs import stage_run
from trainer.stages import distill, pretrain, reinforce
from trainer.stages.tuning.trials import place_of
from trainer.training.session import Session, shared_artifact
from trainer.training.sharding import decided, is_fsdp

logger = logging.getLogger(__name__)

FILE = "warm-up.json"  # the report, in the artifact

Part = TypeVar("Part", bound=TrainingSettings)


class Warmed(StrictModel):
    """The graphs compiled in the first steps of one training; of several processes, the most."""

    training: str  # `mae`, `finetune` or `distill`
    steps: Annotated[int, Field(ge=1)]
    graphs: Annotated[int, Field(ge=0)]
    """Compiled within the steps; of those that the cache had, torch's compiler still counts some."""
    compile_s: Annotated[float, Field(ge=0)]  # seconds until they were there, on XLA with those of the validation
    seconds: Annotated[float, Field(ge=0)]  # of all of it, with a checkpoint and a validation


def run(settings: WarmUpSettings, *, dataset: str | Path, warmed: str | Path) -> None:
    """Compile what the trainings will ask for, or raise a `SettingsError` if none is given; runs in every training process."""
    teacher, recorder, student = settings.pretrain, settings.reinforce, settings.distill
    if teacher is None or recorder is None or student is None:
        raise SettingsError(
            "warm_up has no trainings to compile for; set warm_up.enabled=true, and it takes those of pretrain and distill"
        )
    data = open_dataset(dataset, settings.splits)
    values, parents = settings.model_dump(mode="json"), {"dataset": data.fingerprint}
    with ExitStack() as stack:
        # Whether they are deterministic makes other graphs.
        processes = stack.enter_context(join_processes(deterministic=student.deterministic))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warm-up-")))
        draft = stack.enter_context(shared_artifact(processes, warmed, "warm_up", settings=values, parents=parents))
        distinct = artifacts.digest([values, parents, place_of(processes).model_dump(mode="json")])[:16]
        root = storage.join(artifacts.unfinished(warmed), f"warm-up-{distinct}")
        _clear(root, processes)  # what an earlier try left: from its checkpoint there would be no step left to do
        rehearsal = Rehearsal(data=data, dataset=dataset, processes=processes, folder=folder, root=root)
        done = list(rehearsal.trainings(teacher, recorder, student))
        _clear(root, processes)
        if processes.is_first:
            lines = ",\n".join(f"  {one.model_dump_json()}" for one in done)
            (draft.path / FILE).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
            draft.figures.update({one.training: one.model_dump(exclude={"training"}) for one in done})
            for one in done:
                what = f"{one.training}: {one.graphs} graphs in {one.compile_s:.1f} s, within {one.steps} steps"
                logger.info("warm_up  %s (%.1f s in all)", what, one.seconds)


def _clear(root: str, processes: Processes) -> None:
    if processes.is_first:
        storage.remove(root)
    processes.barrier("the removal of what a warm-up leaves")


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The first steps of a recipe's trainings, on one of its processes."""

    data: PreparedDataset
    dataset: str | Path  # URI of the data set
    processes: Processes
    folder: Path  # for temporary outputs
    root: str  # for checkpoints of all processes

    def trainings(
        self, teacher: PretrainSettings, recorder: ReinforceSettings, student: DistillSettings
    ) -> Iterator[Warmed]:
        """One training after the other, each from the model that the one before leaves; the same on every process."""
        model, _ = pretrain.start(teacher, self.data)
        if teacher.mae.epochs:
            began, session = time.perf_counter(), self._session("pretrain", teacher, teacher.mae)
            pretrain.pretrain(model, teacher.model_copy(update={"mae": _few(teacher.mae, session.data)}), session)
            yield self._warmed("mae", began)
        if teacher.finetune.epochs:
            began, session = time.perf_counter(), self._session("pretrain", teacher, teacher.finetune)
            few = teacher.model_copy(update={"finetune": _few(teacher.finetune, session.data)})
            model = pretrain.finetune(model, few, session)
            yield self._warmed("finetune", began)
        if student.epochs:
            began = time.perf_counter()
            self._distill(model, recorder, student)
            yield self._warmed("distill", began)

    def _distill(self, teacher: Classifier, recorder: ReinforceSettings, settings: DistillSettings) -> None:
        """Train a student of `teacher`, online, or of blank outputs of its shape where they are to be recorded."""
        if not teacher.card.labels:  # any statistics of the right shape give the same graph
            sizes = networks.feature_size(teacher), (networks.find_token_shape(teacher) or (0,))[-1]
            embedding, tokens = (EmbeddingStatistics(mean=(0.0,) * size, std=(1.0,) * size) for size in sizes)
            teacher.card = replace(teacher.card, embedding=embedding, tokens=tokens if sizes[1] else None)
        session, device = self._session("distill", settings, settings), self.processes.device
        samples = distill.open_samples(settings, session.data)
        student, _ = distill.start(settings, self.data)
        recording, online = None, [teacher] if settings.needs_teacher else []
        settings = decided("distill", settings, self.processes, student, online)
        sharing = self.processes if is_fsdp(settings, self.processes) else None
        if settings.reads_recording:
            described = reinforce.describe(recorder, self.data, self.dataset, teacher, samples, device)
            recording, online = placeholder_recording(self.folder / "teacher-outputs", described), []
        session.train(
            "distill",
            distill.make_objective(settings, student, online, recording, device, session.data.targets, sharing),
            samples,
            _few(settings, session.data),
            view_size=distill.view_size(student, online, recording),
            labeled=settings.head == "trained",
            labeled_share=settings.labeled_share,
            teacher_outputs=recording,
        )

    def _session(self, stage: str, settings: PretrainSettings | DistillSettings, part: TrainingSettings) -> Session:
        """Make the session of one training, with images for its first steps, without tracking or checkpoints."""
        with stage_run(stage, {}, active=False) as untracked:
            return Session(
                stage=stage,
                settings=settings,
                processes=self.processes,
                tracker=untracked,
                data=self.data.first(_steps(part) * part.batch_size),
                square=self.data.square,
                parents={"dataset": self.data.fingerprint},
                model=Draft(path=self.folder),
                evidence=Draft(path=self.folder),
                checkpoint_root=self.root,
                startup=Startup(),
            )

    def _warmed(self, training: str, began: float) -> Warmed:
        """Return the compilations of this process, or of another one, by its evidence."""
        evidence = self.folder / training / f"rank{self.processes.rank}.json"
        record = RankRecord.model_validate_json(evidence.read_bytes())
        compiled = record.compilations
        everyone = self.processes.gather(
            Warmed(
                training=training,
                steps=record.steps.count,
                graphs=sum(one.graphs for one in compiled),
                compile_s=round(sum(one.seconds for one in compiled) + record.compile_beside_s, 3),
                seconds=round(time.perf_counter() - began, 3),
            ),
            "what was compiled",
        )
        return max(everyone, key=lambda one: one.graphs)


def _steps(settings: TrainingSettings) -> int:
    """Steps after which losses have been read back twice, which is done once in `log_every` steps and an interval late."""
    return 2 * settings.log_every + 1


def _few(settings: Part, data: PreparedDataset) -> Part:
    """Return the training with few steps, the last of which is followed by a validation, and by a checkpoint if it writes any."""
    images = len(data.split("train"))
    epochs = math.ceil(_steps(settings) * settings.for_images(images).batch_size / images)
    quiet = settings.evidence.model_copy(update={"operators_steps": 0})
    # At full resolution alone: the first epochs, where they have a smaller input, compile for that by themselves.
    few = {"epochs": min(epochs, settings.epochs), "evidence": quiet, "low_resolution": LowResolutionSettings()}
    return settings.model_copy(update=few)
