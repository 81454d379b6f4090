"""distill: train the student on what the teacher says, online or recorded, and on the labels."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer import artifacts, models
from trainer.config import DistillSettings
from trainer.data.dataset import PreparedDataset, open_dataset
from trainer.data.loader import Samples
from trainer.distillation.objective import DistillObjective
from trainer.distillation.recording import Recording, open_recording
from trainer.distillation.student import ProjectedStudent
from trainer.distillation.teacher import FrozenTeacher
from trainer.errors import SettingsError
from trainer.models import Classifier
from trainer.training.devices import Device
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
    recording = _open_recording(settings, teacher_outputs) if settings.reads_recording else None
    teacher_model = _load_teacher(teacher, data) if settings.needs_teacher and recording is None else None
    if recording is not None:
        parents["teacher_outputs"] = recording.fingerprint
    torch.manual_seed(settings.seed or 0)
    classifier = models.create(settings.student, data.classes, drop_path=settings.drop_path)
    view_size = _view_size(classifier, teacher_model, recording)
    model = _project(classifier, teacher_model, recording) if settings.feature_weight else classifier
    with open_session("distill", settings, data, parents=parents, model=student, evidence=evidence) as session:
        frozen = _freeze(teacher_model, settings, session.processes.device) if teacher_model is not None else None
        trained = session.train(
            "distill",
            DistillObjective(model, frozen, settings),
            Samples([data.split("train")]),
            settings,
            view_size=view_size,
            teacher_outputs=recording,
        )
        kept = trained.classifier if isinstance(trained, ProjectedStudent) else trained
        assert isinstance(kept, Classifier), "the objective's model is a Classifier or holds one"
        session.keep(kept)


def _open_recording(settings: DistillSettings, teacher_outputs: str | Path | None) -> Recording:
    """The recorded outputs, refused where the losses need more than they hold."""
    if teacher_outputs is None:
        raise SettingsError(
            "distill.teacher is recorded, but no recorded outputs were given; run the stage reinforce and give teacher_outputs"
        )
    recording = open_recording(teacher_outputs)
    held = recording.description
    if settings.needs_all_logits and held.top_k < held.classes:
        loss = f"distill.logit_loss={settings.logit_loss}" + (" with standardize_logits" * settings.standardize_logits)
        raise SettingsError(
            f"{loss} needs the teacher's logits of all {held.classes} classes, but {teacher_outputs} holds the "
            f"{held.top_k} largest of each view; record them again with reinforce.top_k={held.classes}, or set distill.teacher=online"
        )
    if settings.feature_weight and not held.features:
        raise SettingsError(
            f"distill.feature_weight is {settings.feature_weight:g}, but {teacher_outputs} holds no features; record them again with "
            "reinforce.features=true, or set distill.teacher=online"
        )
    return recording


def _load_teacher(teacher: str | Path, data: PreparedDataset) -> Classifier:
    model = models.load(teacher)
    models.check_labels(model, data.classes, f"teacher {teacher}")
    return model


def _freeze(teacher: Classifier, settings: DistillSettings, device: Device) -> FrozenTeacher:
    return FrozenTeacher(
        teacher,
        device,
        precision=settings.precision,
        batch_size=settings.teacher_batch,
        features=settings.feature_weight > 0,
    )


def _view_size(student: Classifier, teacher: Classifier | None, recording: Recording | None) -> int:
    """Edge of the views, in pixels: the larger input of both models, or that of the recorded views."""
    size = student.card.image_size
    if recording is None:
        return max(size, teacher.card.image_size) if teacher is not None else size
    recorded = recording.description.view_size
    if size > recorded:
        raise SettingsError(
            f"the student {student.card.architecture} takes images of {size} pixels, but the teacher's outputs were recorded on views of "
            f"{recorded}; record them again with reinforce.view_size={size}, or choose a student with a smaller input "
            "(distill.student)"
        )
    return recorded


def _project(student: Classifier, teacher: Classifier | None, recording: Recording | None) -> ProjectedStudent:
    if recording is not None:
        return ProjectedStudent(student, recording.description.features)
    assert teacher is not None, "a feature loss has a teacher or its recorded outputs"
    return ProjectedStudent(student, models.feature_size(teacher))
