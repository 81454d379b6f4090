"""distill: train the student on the teacher's logits and the labels."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer import artifacts, models
from trainer.config import DistillSettings
from trainer.data.dataset import open_dataset
from trainer.data.loader import Samples
from trainer.distillation.objective import DistillObjective
from trainer.models import Classifier
from trainer.training.session import open_session


def run(
    settings: DistillSettings, *, dataset: str | Path, teacher: str | Path, student: str | Path, evidence: str | Path
) -> None:
    """Distil the student; runs in every training process.

    Args:
        settings: section `distill`.
        dataset: input, a prepared data set.
        teacher: input, a model directory.
        student: output, a model directory.
        evidence: output, what the training recorded of itself.

    Raises:
        TrainerError: as the parts that it calls.
    """
    data, teacher_model = open_dataset(dataset), models.load(teacher)
    models.check_labels(teacher_model, data.classes, f"teacher {teacher}")
    parents = {"dataset": data.fingerprint, "teacher": artifacts.read(teacher, "model").fingerprint}
    with open_session("distill", settings, data, parents=parents, model=student, evidence=evidence) as session:
        torch.manual_seed(session.seed)
        model = models.create(settings.student, data.classes, drop_path=settings.drop_path)
        trained = session.train(
            "distill",
            DistillObjective(model, teacher_model.to(session.processes.device.torch_device), settings),
            Samples([data.split("train")]),
            settings,
            view_size=max(model.card.image_size, teacher_model.card.image_size),
        )
        assert isinstance(trained, Classifier), "the objective's model is a Classifier"
        session.keep(trained)
