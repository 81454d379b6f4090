"""distill: train the student on what the teacher says, online or recorded, of images with and without labels, and on the labels."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from trainer.config import DistillSettings
from trainer.config.conflicts import Facts, conflicts
from trainer.data.batch import Batch
from trainer.data.dataset import PreparedDataset, Targets, open_dataset
from trainer.data.loader import Samples, Views
from trainer.data.sampler import SampleSlice
from trainer.devices import Device
from trainer.devices.process_group import Processes
from trainer.evaluation.embeddings import FORWARD_BATCH, add_probe, spread
from trainer.io import artifacts
from trainer.io.errors import SettingsError
from trainer.models import networks, pretrained
from trainer.models.networks import Classifier
from trainer.objectives.distillation.frozen_teacher import BALANCED_IMAGES, FrozenTeacher
from trainer.objectives.distillation.objective import (
    DistillObjective,
    ProjectedStudent,
    check_compared,
    prepared_student,
)
from trainer.objectives.distillation.recording import (
    Recording,
    RecordingDescription,
    check_fits,
    check_joined,
    open_recording,
)
from trainer.profiling.evidence import ContextRecord
from trainer.profiling.recorder import Startup
from trainer.training.session import open_session
from trainer.training.sharding import decided, is_fsdp

logger = logging.getLogger(__name__)

_FEW_LABELED = 8  # labeled images in a step, in the mean; with as many, one step in three thousand has none


def run(
    settings: DistillSettings,
    *,
    dataset: str | Path,
    teacher: str | Path,
    student: str | Path,
    evidence: str | Path,
    teacher_outputs: str | Path | None = None,
) -> None:
    """Distill the student; runs in every training process. With `teacher=recorded` only the teacher's manifest is read.

    Raises:
        SettingsError: recorded outputs are missing, or they or the teacher lack what a loss or the student needs.
        ArtifactError: the recorded outputs are not of this teacher, data set or augmentation.
        ModelError: the student or the teacher lacks features, patch tokens or blocks to compare, or a distillation token.
    """
    startup = Startup()
    with startup.part("fetch"):
        data = open_dataset(dataset, settings.splits)
        several = data.targets is not None
        _refuse(Facts(distill=settings, multi_label=several))
        teaching = artifacts.manifest(teacher, "model")
        classifier, weights = start(settings, data)
        check_compared(classifier, settings, student=True)
        parents = {"dataset": data.fingerprint, "teacher": teaching.fingerprint}
        if weights:
            parents["weights"] = weights
        for number, further in enumerate(settings.further_teachers, start=2):
            parents[f"teacher_{number}"] = artifacts.manifest(further, "model").fingerprint
        recording: Recording | None = None
        teachers: list[Classifier] = []
        mass: dict[str, float] | None = None
        if settings.reads_recording:
            if teacher_outputs is None:
                raise SettingsError(
                    "distill.teacher is recorded, but no recorded outputs were given; run the stage reinforce and give teacher_outputs"
                )
            places = [teacher_outputs, *settings.further_recordings]
            pairs = zip(places, [teacher, *settings.further_teachers], strict=True)
            held = [check_fits(uri, settings, data=data, dataset=dataset, teacher=one) for uri, one in pairs]
            check_joined(places, held)
            headless = f"the teacher whose outputs {' and '.join(map(str, places))} holds has no head"
            facts = Facts(
                distill=settings,
                recorded=[description.kept(place) for place, description in zip(places, held, strict=True)],
                student_size=classifier.card.image_size,
                headless="" if any(description.classes for description in held) else headless,
                multi_label=several,
            )
            _refuse(facts)  # before the records are fetched
            recording = open_recording(*places)
            parents["teacher_outputs"] = recording.fingerprint
            for number, one in enumerate(recording.further, start=2):
                parents[f"teacher_outputs_{number}"] = one.fingerprint
            figures = artifacts.manifest(teacher_outputs, "teacher_outputs").figures.get("mass", {})
            mass = {temperature.removeprefix("t"): of_it["mean"] for temperature, of_it in figures.items()}
        elif settings.needs_teacher:
            teachers = load_teachers(settings, teacher, data)
    with open_session(
        "distill", settings, data, parents=parents, model=student, evidence=evidence, startup=startup
    ) as session:
        samples = open_samples(settings, data)
        if session.processes.is_first:
            _log_counts(samples, settings)
        size = view_size(classifier, teachers, recording)
        settings = decided("distill", settings, session.processes, classifier, teachers)
        sharing = session.processes if is_fsdp(settings, session.processes) else None
        device = session.processes.device
        objective = make_objective(settings, classifier, teachers, recording, device, data.targets, sharing)
        if settings.further_teachers and settings.compares_features:
            objective.balance(_first_views(settings, samples, size, recording), session.processes.device)
        trained = session.train(
            "distill",
            objective,
            samples,
            settings,
            view_size=size,
            labeled=settings.head == "trained",
            labeled_share=settings.labeled_share,
            teacher_outputs=recording,
            context=ContextRecord(
                teacher_val_top1=teaching.figures.get("val_top1"),
                teacher_val_map=teaching.figures.get("val_map"),
                recorded_mass=mass,
            ),
        )
        kept = trained.classifier if isinstance(trained, ProjectedStudent) else trained
        assert isinstance(kept, Classifier), "the objective's model is a Classifier or holds one"
        if settings.head == "probe":
            kept = add_probe(kept, session.data, session.processes, "distill")
        session.keep(kept, settings)


def start(settings: DistillSettings, data: PreparedDataset) -> tuple[Classifier, str]:
    """Make the student before training; returns it and the fingerprint of its initial weights, empty without any.

    Its head is new unless the weights' classes are the data set's; a head that is fitted afterward is missing still.
    """
    if settings.head == "probe":
        with torch.device("meta"):
            networks.check_takes_probe(networks.create(settings.student, ()), data.classes)
    torch.manual_seed(settings.seed or 0)
    labels = data.classes if settings.head == "trained" else ()
    if not settings.weights:
        return networks.create(settings.student, labels, drop_path=settings.drop_path), ""
    model, fingerprint = pretrained.start(settings, settings.student)
    pretrained.check_same(model, settings.student, f"distill.weights {settings.weights}")
    return networks.with_labels(model, labels, drop_path=settings.drop_path), fingerprint


def open_samples(settings: DistillSettings, data: PreparedDataset) -> Samples:
    """Open the student's images: labeled training images, and unlabeled ones if there is a teacher."""
    return Samples(data.training_splits(unlabeled=settings.reads_unlabeled))


def _log_counts(samples: Samples, settings: DistillSettings) -> None:
    """Log the number of images of each kind, and warn if steps may lack labeled ones."""
    labeled = len(samples) - samples.unlabeled
    logger.info("distill  %s labeled and %s unlabeled images", f"{labeled:,}", f"{samples.unlabeled:,}")
    in_a_step = settings.batch_size * labeled / len(samples)
    if samples.unlabeled and settings.label_weight and not settings.labeled_share and in_a_step < _FEW_LABELED:
        text = (
            "distill  of %d images in a step %.1f are labeled in the mean, and a step without any counts as 0 in the curve of the label "
            "loss; hold a share of them in each step with distill.labeled_share"
        )
        logger.warning(text, settings.batch_size, in_a_step)


def load_teachers(settings: DistillSettings, teacher: str | Path, data: PreparedDataset) -> list[Classifier]:
    """Load the pipeline's teacher and the further ones: those with a head must know the data set's classes."""
    places = [teacher, *settings.further_teachers]
    loaded = [networks.load(place) for place in places]
    for place, model in zip(places, loaded, strict=True):
        if model.card.labels:
            networks.check_labels(model, data.classes, f"teacher {place}", several=data.targets is not None)
        if len(loaded) > 1:
            check_compared(model, settings, student=False)
    if not any(model.card.labels for model in loaded):
        _refuse(Facts(distill=settings, headless=f"teacher {' and '.join(map(str, places))} has no head"))
    return loaded


def _refuse(facts: Facts) -> None:
    if mistakes := conflicts(facts):
        raise SettingsError("\n".join(mistakes))


def _first_views(
    settings: DistillSettings, samples: Samples, size: int, recording: Recording | None
) -> Iterator[Batch]:
    """Yield the first view of some images of each split, or its recorded output, in batches on the CPU."""
    unmixed = settings.views.model_copy(update={"mixup": 0.0, "cutmix": 0.0})
    views = Views(samples, size=size, seed=settings.seed or 0, settings=unmixed, exact=True)
    chosen = np.array(spread(samples.splits, BALANCED_IMAGES))
    for start in range(0, len(chosen), FORWARD_BATCH):
        indices = chosen[start : start + FORWARD_BATCH]
        numbers = np.zeros_like(indices)
        if recording is None:
            yield views.batch(SampleSlice(indices, numbers, None))
        else:
            none = torch.empty(0, dtype=torch.int64)
            yield Batch(none, none, none, none, recorded=recording.read(indices, numbers))


def make_objective(
    settings: DistillSettings,
    student: Classifier,
    teachers: Sequence[Classifier],
    recording: Recording | None,
    device: Device,
    targets: Targets | None = None,
    sharing: Processes | None = None,
) -> DistillObjective:
    """Make what is learned, on its device, from teachers that are online or from recorded outputs; a teacher is changed.

    `targets` are the data set's (`PreparedDataset.targets`), `sharing` the processes that share out the weights of a teacher.
    """
    spoken_of: Sequence[Classifier | RecordingDescription] = teachers
    if recording is not None:
        spoken_of = [one.description for one in (recording, *recording.further)]
    # The projections start the same whether the teacher is online or recorded.
    torch.manual_seed((settings.seed or 0) + 1)
    model = prepared_student(student, settings, *spoken_of) if spoken_of else student
    frozen = [
        FrozenTeacher(
            teacher,
            device,
            precision=settings.precision,
            batch_size=settings.teacher_batch,
            features=settings.compares_features,
            tokens=settings.token_weight > 0,
            blocks=[*settings.blocks.values()],
            compile=settings.compile,
            sharing=sharing,
        )
        for teacher in teachers
    ]
    return DistillObjective(model, frozen, settings, targets)


def view_size(student: Classifier, teachers: Sequence[Classifier], recording: Recording | None) -> int:
    """Return the edge of the views, in pixels: that of the recorded ones, or the largest input of the student and its teachers."""
    if recording is not None:
        return recording.description.view_size
    return max(model.card.image_size for model in (student, *teachers))
