"""distill: train the student on the teacher's logits and the labels."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer import artifacts, models
from trainer.config import DistillSettings
from trainer.data.dataset import PreparedDataset, open_dataset
from trainer.data.loader import Samples
from trainer.distillation.objective import DistillObjective
from trainer.distillation.recording import Recording, open_recording
from trainer.distillation.teacher import FrozenTeacher
from trainer.errors import SettingsError
from trainer.models import Classifier
from trainer.training.session import open_session


def run(
    settings: DistillSettings,
    *,
    dataset: str | Path,
    teacher: str | Path,
    student: str | Path,
    evidence: str | Path,
    teacher_outputs: str | Path | None = None,
) -> None:
    """Distil the student; runs in every training process.

    Args:
        settings: section `distill`.
        dataset: input, a prepared data set.
        teacher: input, a model directory.
        student: output, a model directory.
        evidence: output, what the training recorded of itself.
        teacher_outputs: input, the teacher's recorded outputs; needed with `teacher=recorded`, and not read otherwise.

    Raises:
        TrainerError: as the parts that it calls.
    """
    data = open_dataset(dataset)
    parents = {"dataset": data.fingerprint, "teacher": artifacts.manifest(teacher, "model").fingerprint}
    recording = _open_recording(settings, teacher_outputs)
    teacher_model = _load_teacher(teacher, data) if recording is None and settings.needs_teacher else None
    if recording is not None:
        parents["teacher_outputs"] = recording.fingerprint
    with open_session("distill", settings, data, parents=parents, model=student, evidence=evidence) as session:
        torch.manual_seed(session.seed)
        model = models.create(settings.student, data.classes, drop_path=settings.drop_path)
        frozen, size = None, model.card.image_size
        if teacher_model is not None:
            size = max(size, teacher_model.card.image_size)
            frozen = FrozenTeacher(
                teacher_model,
                session.processes.device,
                precision=settings.precision,
                batch_size=settings.teacher_batch,
            )
        trained = session.train(
            "distill",
            DistillObjective(model, frozen, settings),
            Samples([data.split("train")]),
            settings,
            view_size=recording.description.view_size if recording else size,
            teacher_outputs=recording,
        )
        assert isinstance(trained, Classifier), "the objective's model is a Classifier"
        session.keep(trained)


def _open_recording(settings: DistillSettings, teacher_outputs: str | Path | None) -> Recording | None:
    if settings.teacher == "online" or not settings.needs_teacher:
        return None
    if teacher_outputs is None:
        raise SettingsError(
            "distill.teacher is recorded, but no recorded outputs were given; run the stage reinforce and give teacher_outputs"
        )
    return open_recording(teacher_outputs)


def _load_teacher(teacher: str | Path, data: PreparedDataset) -> Classifier:
    model = models.load(teacher)
    models.check_labels(model, data.classes, f"teacher {teacher}")
    return model
