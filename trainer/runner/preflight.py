"""Checks before the first stage: the revision of the weights, and what would otherwise end a late stage.

Teacher and student are built on the meta device, without memory or weights. Classes and images are looked at where listing the source
is cheap. torch is imported inside, since recipes are resolved without it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.config import (
    DistillSettings,
    PretrainSettings,
    Settings,
    TimmWeights,
    TrainingSettings,
    TransformersWeights,
    WeightsSettings,
    distill_with,
    search_space,
)
from trainer.config.conflicts import Facts, conflicts, low_resolution_conflict, planned, sharding_conflict
from trainer.data import class_tables, sources
from trainer.data.dataset_schema import UNLABELED
from trainer.data.sources import SourceListing
from trainer.io import artifacts, limits, notifications, storage
from trainer.io.base_models import Section
from trainer.io.costs import Machines
from trainer.io.errors import ModelError, SettingsError, TrainerError
from trainer.models.served_student.onnx_network import OPENVINO
from trainer.profiling.rules import own
from trainer.report import forecast, tracking
from trainer.stages.onnx_export import missing_package

if TYPE_CHECKING:
    from torch import nn

    from trainer.models.networks import Classifier

logger = logging.getLogger(__name__)

_SOME_CLASSES = ("a", "b")  # for heads where the data set's classes are not known yet


def checked(settings: Settings, *, trains_here: bool, processes: int = 1, device: str = "") -> Settings:
    """Refuse what would end a late stage, and fix the revision of timm's weights.

    Args:
        trains_here: whether this machine trains, so that its devices and files count.
        processes: that share a step.
        device: kind of the devices that trainings run on; empty where it is as `run.device` says.
    """
    settings = pinned(settings)
    own.check(settings.profile)
    notifications.addresses(os.environ)
    trainings = {"pretrain.finetune": settings.pretrain.finetune, "distill": settings.distill}
    for name, training in {"pretrain.mae": settings.pretrain.mae, **trainings}.items():
        for conflict in (low_resolution_conflict, sharding_conflict):
            if mistake := conflict(name, training, device or settings.run.device):
                raise SettingsError(mistake)
    if settings.export.enabled and (missing := missing_package()):
        raise SettingsError(
            f"export.enabled needs the package {missing}; pip install 'vit-distillation-pipeline[export]', or set export.enabled=false"
        )
    if settings.export.enabled and settings.export.openvino and missing_package(OPENVINO):
        raise SettingsError(
            f"export.openvino needs the package {OPENVINO}; pip install {OPENVINO}, or set export.openvino=false"
        )
    if trains_here:
        from trainer.devices import check_device

        check_device(settings.run.device)

    source = settings.data.source
    listing = (
        sources.list_source(source, outside=settings.data.outside, multi_label=settings.data.multi_label)
        if _is_listed(settings)
        else None
    )
    if listing and (fitting := listing.fitting_recipe()):
        logger.info("data.source: %s", fitting)
    class_tables.read_tags(settings.data, listing)
    classes = listing.classes if listing else ()
    for further in settings.distill.further_teachers:
        if trains_here or storage.is_remote(further):
            artifacts.manifest(further, "model")
    teacher, trained = build_teacher(settings.pretrain, classes, trains_here=trains_here)
    student = build_student(settings.distill, classes, trains_here=trains_here)
    if settings.search.enabled:
        _check_searched_students(settings, classes, trains_here=trains_here)
    _check_compared(settings, teacher, student)
    _check_sizes(settings, teacher, student)
    _check_batches(settings, listing, {**trained, "distill": student}, processes)
    return settings


def _check_searched_students(settings: Settings, classes: Sequence[str], *, trains_here: bool) -> None:
    """Build each student that a search names, on the meta device, and try a step."""
    distill = settings.search.distill or settings.distill
    for name, dimension in search_space(settings.search).items():
        for value in dimension.options if name.startswith("distill.student") else ():
            with _tried(f"search.space: {name}={value}"):
                build_student(distill_with(distill, {name: value}), classes, trains_here=trains_here)


def check_budgets(settings: Settings, place: Machines | None) -> None:
    """Raise a `BudgetError` where dollars are limited on machines whose price is not known."""
    forecast.check_budget(place, settings.run.budget_usd)
    if settings.search.enabled:
        forecast.check_budget(place, settings.search.budget_usd, "search")


def warn_of_other_classes(settings: Settings) -> None:
    """Warn where the student will be registered but not get the alias, for the version there knows other classes; where both are known.

    Raises:
        TrackingError: MLflow refuses, or does not answer.
    """
    if tracking.uri() is None or not settings.register.same_classes or not _is_listed(settings):
        return
    data, name, alias = settings.data, settings.register.model_name, settings.register.alias

    def classes() -> Sequence[str]:
        return sources.list_source(data.source, outside=data.outside, multi_label=data.multi_label).classes

    if stays := tracking.other_classes(name, alias, classes):
        logger.warning("register.alias=%s will stay: %s; %s", alias, stays, tracking.ALIAS_ADVICE)


def _is_listed(settings: Settings) -> bool:
    """Return whether the source is listed before it is prepared: else that takes long, or fetches the source."""
    kind, _, place = settings.data.source.partition(":")
    return kind != "hub" and not storage.is_remote(place)


def pinned(settings: Settings) -> Settings:
    """Return the settings with the revision that timm's weights have now, so that every process, retry and later run loads the same."""
    changed: dict[str, WeightsSettings] = {}
    for name in ("pretrain", "distill"):
        section: WeightsSettings = getattr(settings, name)
        weights = section.named_weights
        if isinstance(weights, TimmWeights | TransformersWeights) and not weights.revision and not section.weights_file:
            from trainer.models import pretrained

            changed[name] = section.model_copy(update={"weights": str(pretrained.pin(weights))})
    sections: dict[str, Section] = {**changed}
    for name in ("warm_up", "tune", "search"):  # which may have the same sections
        part: Section = getattr(settings, name)
        same = {one: new for one, new in changed.items() if getattr(part, one, None) == getattr(settings, one)}
        sections[name] = part.model_copy(update=same)
    return settings.model_copy(update=sections)


def build_student(settings: DistillSettings, classes: Sequence[str], *, trains_here: bool) -> Classifier:
    """Build the student on the meta device and try a step."""
    from trainer.models import networks, pretrained

    with _tried("distill.student"):
        labels, drop_path = classes or _SOME_CLASSES, settings.drop_path
        if settings.weights and _is_readable(settings, trains_here=trains_here):
            given = pretrained.check(settings, settings.student)
            pretrained.check_same(given, settings.student, f"distill.weights {settings.weights}")
            student = networks.with_labels(given, labels, drop_path=drop_path)
        else:
            student = networks.create(settings.student, labels, drop_path=drop_path)
        if settings.activation_checkpointing:
            networks.checkpoint_activations(student)
        _step(student)
        _check_low_resolution(student, settings)
    return student


def _is_readable(settings: WeightsSettings, *, trains_here: bool) -> bool:
    """Return whether the weights can be looked at from here: they are public, in a store, or on the machine that trains."""
    place = settings.weights_file or ("" if settings.named_weights else settings.weights)
    return not place or trains_here or storage.is_remote(place)


def build_teacher(
    settings: PretrainSettings, classes: Sequence[str], *, trains_here: bool
) -> tuple[Classifier | None, dict[str, nn.Module]]:
    """Build the teacher on the meta device and try each of its trainings.

    Returns:
        The teacher, none where its weights cannot be read from here; and what each of its trainings trains, by the training's name.
    """
    import torch

    from trainer.models import networks, pretrained
    from trainer.objectives.pretraining import MaskedAutoencoder, freeze

    labels = classes or _SOME_CLASSES
    with _tried("pretrain.teacher"):
        if not settings.weights:
            model = networks.create(settings.teacher, labels)
        elif _is_readable(settings, trains_here=trains_here):
            model = pretrained.check(settings, settings.teacher)
        else:
            return None, {}
        if settings.head != "classes":
            networks.check_takes_probe(model, labels)
            model = networks.with_labels(model, () if settings.head == "none" else labels)
        elif classes and settings.weights and (settings.label_map or not settings.finetune.epochs):
            name = f"pretrain.weights {settings.weights}"
            model = pretrained.with_classes(model, classes, settings.label_map, name)
        _step(model)
    trained: dict[str, nn.Module] = {}
    if settings.finetune.epochs:
        with _tried("pretrain.finetune"):
            model = networks.with_labels(model, labels, drop_path=settings.finetune.drop_path)
            adapted = networks.with_labels(model, model.card.labels)
            freeze(adapted, settings.finetune)
            if settings.finetune.activation_checkpointing:
                networks.checkpoint_activations(adapted)
            _step(adapted)
            _check_low_resolution(adapted, settings.finetune)
        trained["pretrain.finetune"] = adapted
    if settings.mae.epochs:
        with _tried("pretrain.mae"):
            autoencoder = MaskedAutoencoder(model, settings.mae)
            if settings.mae.activation_checkpointing:
                networks.checkpoint_activations(autoencoder)
            size = model.card.image_size
            patches = autoencoder.encoder.patch_embed.num_patches
            autoencoder(torch.empty(2, 3, size, size, dtype=torch.uint8), torch.empty(2, patches))
        trained["pretrain.mae"] = autoencoder
    return model, trained


def _check_compared(settings: Settings, teacher: Classifier | None, student: Classifier) -> None:
    """Make sure that what is compared beside logits is there in both, and what is recorded in the teacher."""
    from trainer.models import networks
    from trainer.objectives.distillation.objective import check_compared

    with _tried("distill.student"):
        check_compared(student, settings.distill, student=True)
        if settings.distill.head == "probe":
            networks.check_takes_probe(student, student.card.labels)
    if teacher is None:
        return
    with _tried("pretrain.teacher"):
        check_compared(teacher, settings.distill, student=False)
        if settings.distill.reads_recording and settings.reinforce.features:
            networks.feature_size(teacher)
        if settings.distill.reads_recording and settings.reinforce.tokens:
            networks.token_shape(teacher)


def _check_sizes(settings: Settings, teacher: Classifier | None, student: Classifier) -> None:
    """Make sure that no view is larger than the stored image that it is cut from, and no input larger than a recorded view.

    A teacher with given weights may enlarge images, since those of some data sets are smaller than any network with public weights takes.
    """
    stored = settings.data.image_size
    sizes = {"pretrain.teacher": teacher.card.image_size} if teacher is not None else {}
    sizes["distill.student"] = student.card.image_size
    recorded = settings.reinforce.view_size or sizes.get("pretrain.teacher")
    if settings.distill.reads_recording and recorded:
        kept = replace(planned(settings.reinforce), view_size=recorded)
        facts = Facts(distill=settings.distill, recorded=[kept], student_size=student.card.image_size)
        if mistakes := conflicts(facts):
            raise SettingsError("\n".join(mistakes))
        sizes["reinforce.view_size"] = recorded
    if settings.pretrain.weights and sizes.get("pretrain.teacher", 0) > stored:
        enlarged = sizes.pop("pretrain.teacher")
        if recorded == enlarged:
            sizes.pop("reinforce.view_size", None)
        logger.warning(
            "pretrain.teacher enlarges images of %d pixels to %d: right where they are no larger; otherwise set data.image_size=%d",
            stored, enlarged, enlarged,
        )  # fmt: skip
    name, largest = max(sizes.items(), key=lambda item: item[1])
    if largest > stored:
        raise SettingsError(
            f"{name} asks for views of {largest} pixels, but data.image_size stores images of {stored}; set data.image_size={largest}, or "
            "choose a smaller input (image_size of the model)"
        )


def _check_batches(
    settings: Settings, listing: SourceListing | None, trained: Mapping[str, nn.Module], processes: int
) -> None:
    """Make sure that each process has enough images in each of its micro-batches, as far as the images and the models are known.

    Name the trainings whose batch will be clamped even if all images of the source could be trained on.
    """
    from torch import nn

    from trainer.training.spec import check_micro_batches

    counts = [*listing.counts.items()] if listing else []
    unlabeled = sum(count for (_, label), count in counts if label == UNLABELED)
    labeled = sum(count for (split, label), count in counts if split == "train" and label != UNLABELED)
    trainings: list[tuple[str, TrainingSettings, int]] = [
        ("pretrain.mae", settings.pretrain.mae, labeled + unlabeled),
        ("pretrain.finetune", settings.pretrain.finetune, labeled),
        ("distill", settings.distill, labeled + unlabeled * settings.distill.reads_unlabeled),
    ]
    trainings = [entry for entry in trainings if entry[1].epochs]
    for name, training, most in trainings:
        if listing and training.batch_size > most:
            has = f"{settings.data.source} has {most} images for it before val and test are taken"
            text = "%s.batch_size = %d, but %s; it will be clamped to those that are left"
            logger.warning(text, name, training.batch_size, has)
    for name, training, most in trainings:
        try:
            fitted = training.for_images(most) if listing else training
            check_micro_batches(trained.get(name, nn.Identity()), fitted, processes)
        except SettingsError as error:
            raise SettingsError(f"{name}.{error}") from error


@contextmanager
def _tried(name: str) -> Iterator[None]:
    """Build on the meta device, and say in a `TrainerError` which settings are wrong where that fails."""
    import torch

    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    except TrainerError as error:
        named = str(error) if str(error).startswith(name.partition(".")[0]) else f"{name}: {error}"
        raise type(error)(named) from error
    except Exception as error:  # each network has its own words for what does not fit
        reason = limits.cut(" ".join(str(error).split()) or type(error).__name__, 500)
        raise ModelError(f"{name}: a step cannot be computed with these settings ({reason}); change them") from error


def _check_low_resolution(model: Classifier, settings: TrainingSettings) -> None:
    from trainer.models import networks

    if settings.low_resolution.epochs:
        networks.check_input_size(model, settings.low_resolution.image_size)


def _step(model: Classifier) -> None:
    import torch

    size = model.card.image_size
    model(torch.empty(2, 3, size, size, dtype=torch.uint8))
