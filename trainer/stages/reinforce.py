"""reinforce: record the teacher's outputs on augmented views of every training image, so that distillation needs no teacher in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer import artifacts, models
from trainer.config import ReinforceSettings, ViewSettings
from trainer.data.dataset import open_dataset
from trainer.data.loader import Samples, Views
from trainer.data.order import Taken, partners
from trainer.data.views.mixing import mix, mixes
from trainer.distillation import recording
from trainer.distillation.recording import Description
from trainer.distillation.teacher import FrozenTeacher
from trainer.training.outputs import shared_artifact
from trainer.training.processes import join_processes


def run(
    settings: ReinforceSettings, *, dataset: str | Path, teacher: str | Path, teacher_outputs: str | Path
) -> None:
    """Record the teacher's outputs; runs in every process of the job.

    Args:
        settings: section `reinforce`.
        dataset: input, a prepared data set.
        teacher: input, a model directory.
        teacher_outputs: output, the records.

    Raises:
        TrainerError: as the parts that it calls.
    """
    data, model = open_dataset(dataset), models.load(teacher)
    models.check_labels(model, data.classes, f"teacher {teacher}")
    parents = {"dataset": data.fingerprint, "teacher": artifacts.read(teacher, "model").fingerprint}
    augmentation = settings.augmentation or ViewSettings()
    samples, seed = Samples([data.split("train")]), settings.seed or 0
    description = Description(
        samples=len(samples),
        views=settings.views,
        classes=len(data.classes),
        top_k=min(settings.top_k, len(data.classes)),
        features=0,
        seed=seed,
        view_size=settings.view_size or model.card.image_size,
        augmentation=augmentation.model_dump(mode="json"),
        decoder="pillow",
    )
    views = Views(samples, size=description.view_size, seed=seed, settings=augmentation)
    values = settings.model_dump(mode="json")
    with (
        join_processes() as processes,
        shared_artifact(processes, teacher_outputs, "teacher_outputs", settings=values, parents=parents) as draft,
    ):
        frozen = FrozenTeacher(model, processes.device, precision=settings.precision, batch_size=settings.batch_size)
        if processes.is_first:
            recording.write_description(draft.path, description)
        for number in range(processes.rank, settings.views, processes.world_size):
            others = partners(len(samples), seed, number) if mixes(augmentation) else None
            records = []
            for start in range(0, len(samples), settings.batch_size):
                indices = np.arange(start, min(start + settings.batch_size, len(samples)))
                numbers = np.full_like(indices, number)
                batch = views.batch(Taken(indices, numbers, None if others is None else others[indices]))
                images = mix(batch.images, batch.mixing) if batch.mixing else batch.images
                outputs = frozen(images.to(processes.device.torch_device))
                records.append(recording.summarize(outputs, description))
            (draft.path / recording.shard_name(number)).write_bytes(np.concatenate(records).tobytes())
