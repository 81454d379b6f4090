"""reinforce: record the teacher's outputs on augmented views of every training image, so that distillation needs no teacher in memory."""

from __future__ import annotations

from pathlib import Path

from trainer import artifacts, models, tracking
from trainer.config import ReinforceSettings, ViewSettings
from trainer.data.dataset import PreparedDataset, open_dataset
from trainer.data.loader import Samples, Views, makes_views_on_device
from trainer.distillation import recording, recording_report, shards
from trainer.distillation.recording import Description
from trainer.distillation.reinforcement import Reinforcement, plan_of
from trainer.distillation.shards import Shelf
from trainer.distillation.teacher import FrozenTeacher
from trainer.models import Classifier
from trainer.training.checkpoints import checkpoint_root
from trainer.training.devices import Device
from trainer.training.outputs import shared_artifact
from trainer.training.processes import join_processes


def run(settings: ReinforceSettings, *, dataset: str | Path, teacher: str | Path, teacher_outputs: str | Path) -> None:
    """Record the teacher's outputs; runs in every process of the job.

    Args:
        settings: section `reinforce`.
        dataset: input, a prepared data set.
        teacher: input, a model directory.
        teacher_outputs: output, the records.

    Raises:
        TrainingError: the teacher's outputs are not finite; the samples are named, and what was recorded is kept.
        TrainerError: as the parts that it calls.
    """
    data, model = open_dataset(dataset), models.load(teacher)
    models.check_labels(model, data.classes, f"teacher {teacher}")
    parents = {"dataset": data.fingerprint, "teacher": artifacts.manifest(teacher, "model").fingerprint}
    samples, values = Samples([data.split("train")]), settings.model_dump(mode="json")
    with (
        join_processes() as processes,
        tracking.stage_run("reinforce", values, active=processes.is_first) as tracker,
    ):
        description = _describe(settings, data, dataset, model, len(samples), processes.device)
        job = Reinforcement(
            views=Views(
                samples,
                size=description.view_size,
                seed=description.seed,
                settings=_augmentation(settings),
                on_device=makes_views_on_device(settings.views_on or "auto", processes.device.kind),
                decode_on=settings.decode_on or "cpu",
            ),
            teacher=FrozenTeacher(
                model,
                processes.device,
                precision=settings.precision,
                features=settings.features,
                compile=settings.compile,
            ),
            description=description,
            shelf=Shelf(checkpoint_root(teacher_outputs), plan_of(description, parents), description.record),
            processes=processes,
            batch_size=settings.batch_size,
            workers="auto" if settings.workers is None else settings.workers,
        )
        with shared_artifact(processes, teacher_outputs, "teacher_outputs", settings=values, parents=parents) as draft:
            work = job.record()
            held = job.assemble(draft.path)
            if processes.is_first:
                recording.write_description(draft.path, description, samples.keys)
                figures = recording_report.figures(description, held, work)
                draft.figures.update(figures)
                page = recording_report.render(description, held, work, parents)
                (draft.path / recording.REPORT).write_text(page, encoding="utf-8")
                tracker.metrics(0, tracking.numbers(figures))
                tracker.files(draft.path / recording.REPORT)
        if processes.is_first:
            job.shelf.remove()


def _augmentation(settings: ReinforceSettings) -> ViewSettings:
    return settings.augmentation or ViewSettings()


def _describe(
    settings: ReinforceSettings,
    data: PreparedDataset,
    dataset: str | Path,
    teacher: Classifier,
    samples: int,
    device: Device,
) -> Description:
    return Description(
        samples=samples,
        views=settings.views,
        block=shards.block_size(samples),
        classes=len(data.classes),
        top_k=min(settings.top_k, len(data.classes)),
        features=models.feature_size(teacher) if settings.features else 0,
        seed=settings.seed or 0,
        view_size=settings.view_size or teacher.card.image_size,
        augmentation=_augmentation(settings).model_dump(mode="json"),
        decoder=recording.decoder_name(data, settings.decode_on),
        teacher=teacher.card.architecture,
        precision="bf16" if device.uses_bf16(settings.precision) else "fp32",
        dataset=dict(artifacts.manifest(dataset, "dataset").settings),
    )
