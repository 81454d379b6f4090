"""Settings that cannot work together, each with its message: asked before a run by settings alone, and by a stage that knows more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.config.loss_terms import RECORDED_BY
from trainer.config.settings import (
    TOP_K,
    DistillSettings,
    EvaluateSettings,
    PretrainSettings,
    ReinforceSettings,
    TrainingSettings,
    ViewSettings,
)


@dataclass(frozen=True, kw_only=True)
class KeptOutputs:
    """What is kept of the outputs of one teacher."""

    place: str = ""
    """URI of the recording; empty: `reinforce` is still to make it."""
    features: bool
    tokens: bool
    top_k: int | Literal["all"]
    classes: int | None = None
    """Of the teacher's head; 0 without a head, None if not known."""
    view_size: int | None = None
    """Edge of the views, in pixels; None if not known."""

    @property
    def subject(self) -> str:
        return self.place or "reinforce"

    def cure(self, setting: str) -> str:
        """Name the setting with which the recording would do."""
        return f"{'record them again with' if self.place else 'set'} {setting}"


def planned(reinforce: ReinforceSettings) -> KeptOutputs:
    """Return what `reinforce` is set to keep."""
    return KeptOutputs(
        features=reinforce.features,
        tokens=reinforce.tokens,
        top_k=TOP_K if reinforce.top_k is None else reinforce.top_k,
        view_size=reinforce.view_size or None,
    )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a run when its settings are compared; what is not known is None and conflicts with nothing."""

    distill: DistillSettings | None = None
    pretrain: PretrainSettings | None = None
    reinforce: ReinforceSettings | None = None
    """How the teacher's outputs will be recorded; None where they are there already."""
    evaluate: EvaluateSettings | None = None
    recorded: Sequence[KeptOutputs] = ()
    """What the distillation would learn from."""
    student_size: int | None = None
    """Edge of the student's input, in pixels."""
    headless: str = ""
    """The teacher, where it has no head."""
    multi_label: bool = False
    """Whether an image may have several labels."""


def conflicts(facts: Facts) -> list[str]:
    """List what cannot work, each with the setting that would."""
    distill = facts.distill
    found: list[str] = []
    if facts.headless and distill and distill.logit_weight:
        found.append(
            f"distill.logit_weight is {distill.logit_weight:g}, but {facts.headless}, so the teacher has no logits; set "
            "distill.logit_weight=0 and distill.feature_weight=1, and without labels distill.label_weight=0 and distill.head=probe"
        )
    if distill:
        for recorded in facts.recorded:
            found += _of_recorded(distill, recorded, facts)
    if distill and facts.reinforce:
        found += _of_views(distill, facts.reinforce)
    if facts.multi_label:
        found += _of_several_labels(facts)
    return found


def _of_recorded(distill: DistillSettings, recorded: KeptOutputs, facts: Facts) -> Iterator[str]:
    """Yield why a distillation cannot learn from recorded outputs."""
    if distill.block_weight:
        yield "what the teacher's blocks give is not recorded (distill.block_weight); set distill.teacher=online"
    for term, name in RECORDED_BY.items():
        if distill.weight(term) and not getattr(recorded, name):
            lacks = f"{recorded.place} holds no {name}" if recorded.place else f"reinforce.{name} is false"
            cure = recorded.cure(f"reinforce.{name}=true")
            yield f"distill.{term}_weight is {distill.weight(term):g}, but {lacks}; {cure}, or set distill.teacher=online"
    by_class = facts.multi_label and distill.logit_weight > 0
    is_short = recorded.top_k != "all" and (recorded.classes is None or recorded.top_k < recorded.classes)
    if (distill.needs_all_logits or by_class) and is_short:
        loss = (
            f"distill.logit.loss={distill.logit.loss}" + " with distill.logit.standardize" * distill.logit.standardize
        )
        loss += " of several labels an image (data.multi_label)" * by_class
        all_of = "" if recorded.classes is None else f"{recorded.classes} "
        yield (
            f"{loss} needs the teacher's logits of all {all_of}classes, but {recorded.subject} "
            f"{'holds' if recorded.place else 'keeps'} the {recorded.top_k} largest of each view; {recorded.cure('reinforce.top_k=all')}, "
            "or set distill.teacher=online"
        )
    if facts.student_size and recorded.view_size and facts.student_size > recorded.view_size:
        yield (
            f"distill.student takes images of {facts.student_size} pixels, but the views of {recorded.subject} have "
            f"{recorded.view_size}; {recorded.cure(f'reinforce.view_size={facts.student_size}')}, or choose a student with a smaller input"
        )


def _of_views(distill: DistillSettings, reinforce: ReinforceSettings) -> Iterator[str]:
    """Yield where a recording that is to be made would be of other images or views than the distillation's."""
    planned = dict(reinforce.augmentation or ViewSettings())
    others = [f"{name} ({planned[name]}, not {value})" for name, value in distill.views if planned[name] != value]
    if others:
        yield (
            f"reinforce.augmentation differs from distill.views in {', '.join(others)}, so the student would see other views than the "
            "teacher; leave it unset to use distill.views"
        )
    if distill.reads_unlabeled and not reinforce.records_unlabeled:
        yield (
            "reinforce.unlabeled is false, but distill.unlabeled is true, so nothing would be recorded of images without labels; leave it "
            "unset to use distill.unlabeled"
        )
    if reinforce.decode_on != distill.decode_on:
        yield (
            f"reinforce.decode_on is {reinforce.decode_on}, but distill.decode_on is {distill.decode_on}, which may give other pixels; "
            "leave both unset to use data.decode_on"
        )


def _of_several_labels(facts: Facts) -> Iterator[str]:
    """Yield what is not known of images with several labels."""
    distill, pretrain, evaluate = facts.distill, facts.pretrain, facts.evaluate
    if distill and distill.logit_weight and distill.logit.loss != "kl":
        yield (
            f"distill.logit.loss is {distill.logit.loss}, which is for images of one class, but the data set's may have several labels; "
            "set distill.logit.loss=kl"
        )
    if distill and distill.logit_weight and distill.logit.standardize:
        yield (
            "distill.logit.standardize is true, which compares the classes of an image with one another, but the data set's may have "
            "several labels; set it to false"
        )
    if distill and distill.head == "probe":
        yield "distill.head is probe, and no head is fitted to images of several labels; set distill.head=trained"
    if pretrain and pretrain.head != "classes":
        yield (
            f"pretrain.head is {pretrain.head}, and no head is fitted to images of several labels (data.multi_label); set "
            "pretrain.head=classes"
        )
    if evaluate and evaluate.gate.min_knn_accuracy:
        yield (
            f"evaluate.gate.min_knn_accuracy is {evaluate.gate.min_knn_accuracy:g}, and neighbors do not vote on images of several labels "
            "(data.multi_label); set it to 0"
        )
    if evaluate and evaluate.label_issues == "all":
        yield "evaluate.label_issues is all, and labels are not doubted where an image may have several (data.multi_label); set it to off"


def sharding_conflict(name: str, training: TrainingSettings, device: str) -> str:
    """Say why the weights of a training cannot be shared out on a kind of device; empty if they can."""
    if device != "xla" or training.sharding != "fsdp":
        return ""
    return f"{name}.sharding is fsdp, which torch does not have for XLA; set {name}.sharding=none, and {name}.zero=true to save memory"


def low_resolution_conflict(name: str, training: TrainingSettings, device: str) -> str:
    """Say why a training cannot begin with smaller images on a kind of device; empty if it can."""
    if device != "xla" or not training.low_resolution.epochs:
        return ""
    return (
        f"{name}.low_resolution.epochs is {training.low_resolution.epochs}, but on XLA each input size is compiled by itself; leave "
        f"{name}.low_resolution out"
    )
