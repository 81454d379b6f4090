"""reinforce: record the teacher's outputs on augmented views of every image, so that distillation needs no teacher in memory."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

from trainer.config import ReinforceSettings, ViewSettings
from trainer.data.dataset import PreparedDataset, open_dataset
from trainer.data.loader import Samples, Views, makes_views_on_device
from trainer.data.sampler import SHARD, WINDOW
from trainer.devices import Device
from trainer.devices.process_group import join_processes
from trainer.io import artifacts
from trainer.io.errors import SettingsError
from trainer.models import networks
from trainer.models.networks import Classifier
from trainer.objectives.distillation import recording, recording_report, shards
from trainer.objectives.distillation.frozen_teacher import FrozenTeacher
from trainer.objectives.distillation.recording import RecordingDescription
from trainer.objectives.distillation.reinforcement import Reinforcement, recording_digest
from trainer.objectives.distillation.shards import ShardStore
from trainer.report import tracking
from trainer.report.tracking.stage_runs import stage_run
from trainer.training.session import shared_artifact

logger = logging.getLogger(__name__)


def run(settings: ReinforceSettings, *, dataset: str | Path, teacher: str | Path, teacher_outputs: str | Path) -> None:
    """Record the teacher's outputs; runs in every process of the job.

    Raises:
        SettingsError: a headless teacher's embedding and patch tokens are not asked for, or the outputs exceed `largest_gib`.
        TrainingError: outputs of the named samples are not finite; what was recorded is kept.
    """
    data, teaching = open_dataset(dataset, settings.splits), artifacts.read(teacher, "model")
    model = networks.load(teaching)
    if model.card.labels:
        networks.check_labels(model, data.classes, f"teacher {teacher}", several=data.targets is not None)
    elif not settings.features and not settings.tokens:
        raise SettingsError(
            f"teacher {teacher}: has no head, so its embedding and its patch tokens are all that there is to record, but "
            "reinforce.features and reinforce.tokens are false; set reinforce.features=true"
        )
    parents = {"dataset": data.fingerprint, "teacher": teaching.fingerprint}
    values = settings.model_dump(mode="json")
    with (
        join_processes(deterministic=settings.deterministic) as processes,
        stage_run("reinforce", values, active=processes.is_first) as tracker,
    ):
        samples = open_samples(settings, data)
        description = describe(settings, data, dataset, model, samples, processes.device)
        if mistake := too_large(settings, description):
            raise SettingsError(mistake)
        if processes.is_first:
            logger.info("reinforce  will take %s", _size(description))
        job = Reinforcement(
            views=open_views(settings, description, samples, processes.device),
            teacher=FrozenTeacher(
                model,
                processes.device,
                precision=settings.precision,
                features=settings.features,
                tokens=settings.tokens,
                compile=settings.compile,
            ),
            description=description,
            shards=ShardStore(
                artifacts.unfinished(teacher_outputs), recording_digest(description, parents), description.record
            ),
            processes=processes,
            batch_size=settings.batch_size,
            workers="auto" if settings.workers is None else settings.workers,
        )
        with shared_artifact(processes, teacher_outputs, "teacher_outputs", settings=values, parents=parents) as draft:
            work, held = job.record(), job.assemble(draft.path)
            if processes.is_first:
                recording.write_description(draft.path, description, samples.keys)
                page = recording_report.render(description, held, work, parents)
                (draft.path / recording.REPORT).write_text(page, encoding="utf-8")
                draft.figures.update(recording_report.figures(description, held, work))
                tracker.metrics(0, tracking.numbers(draft.figures))
                tracker.file(draft.path / recording.REPORT)
        if processes.is_first:
            job.shards.remove()


def open_samples(settings: ReinforceSettings, data: PreparedDataset) -> Samples:
    """Open the images to record outputs of."""
    return Samples(data.training_splits(unlabeled=settings.records_unlabeled))


def open_views(
    settings: ReinforceSettings, description: RecordingDescription, samples: Samples, device: Device
) -> Views:
    """Open the teacher's views, equal to the pixel to those of a student (`TrainingSpec.views`)."""
    return Views(
        samples,
        size=description.view_size,
        seed=description.seed,
        settings=settings.augmentation or ViewSettings(),
        on_device=makes_views_on_device(settings.views_on or "auto", device.kind),
        decode_on=settings.decode_on or "cpu",
        exact=True,
        fused=device.kind == "cuda" and device.compiles_with(settings.compile),
    )


def describe(
    settings: ReinforceSettings,
    data: PreparedDataset,
    dataset: str | Path,
    teacher: Classifier,
    samples: Samples,
    device: Device,
) -> RecordingDescription:
    """Describe the outputs to record of a teacher on these samples; a `SettingsError` for some logits of images with several labels."""
    classes = len(teacher.card.labels)
    if data.targets is not None and isinstance(settings.top_k, int) and settings.top_k < classes:
        raise SettingsError(
            f"reinforce.top_k is {settings.top_k} of {classes} classes, but an image may have several labels, so each class is compared "
            "by itself; set reinforce.top_k=all"
        )
    described = RecordingDescription(
        samples=len(samples),
        unlabeled=samples.unlabeled,
        window=WINDOW * SHARD if len(samples) > WINDOW * SHARD else 0,
        views=settings.views,
        block=1,
        classes=classes,
        top_k=settings.logits(classes) if data.targets is None else classes,
        features=networks.feature_size(teacher) if settings.features else 0,
        feature_format=settings.feature_format,
        tokens=networks.token_shape(teacher) if settings.tokens else None,
        token_format=settings.token_format,
        seed=settings.seed or 0,
        view_size=settings.view_size or teacher.card.image_size,
        augmentation=(settings.augmentation or ViewSettings()).model_dump(mode="json"),
        decoder=recording.decoder_name(data, settings.decode_on, decoded=samples.decoded),
        teacher=teacher.card.architecture,
        precision="bf16" if device.uses_bf16(settings.precision) else "fp32",
        dataset=dict(artifacts.manifest(dataset, "dataset").settings),
    )
    return replace(described, block=shards.block_size(len(samples), described.record.itemsize))


def too_large(settings: ReinforceSettings, description: RecordingDescription) -> str:
    """Return why these outputs must not be recorded; empty if they may."""
    if description.gib <= settings.largest_gib:
        return ""
    return (
        f"reinforce would take {_size(description)}, but reinforce.largest_gib is {settings.largest_gib:g}; record fewer views "
        "(reinforce.views) or less of each (reinforce.tokens, reinforce.features), allow "
        f"reinforce.largest_gib={math.ceil(description.gib)}, or set distill.teacher=online"
    )


def _size(description: RecordingDescription) -> str:
    views = f"{description.views} views of {description.samples:,} images"
    return f"{description.gib:,.3g} GiB: {views}, {description.record.itemsize:,} bytes each"
