"""Every setting: its default, its meaning, its limits.

`Settings.for_stage` gives a stage its own section only, so that a changed distillation setting leaves a cached teacher valid.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from trainer.config.former_names import accepting_former_names
from trainer.config.loss_terms import RECORDED_VIEWS, TAUGHT
from trainer.config.rules import RULES_GROUP, RuleSettings
from trainer.config.search_space import parse_dimension
from trainer.graph import MODULE, PACKAGE, STAGES, TIMM, TRANSFORMERS
from trainer.io import limits
from trainer.io.base_models import Fraction, NonNegative, NonNegativeFloat, Positive, Section, nearest
from trainer.io.errors import SettingsError
from trainer.io.local_files import with_home

WAIT_VARIABLE = "TRAINER_WAIT_S"
"""Environment variable with the seconds for which a training process waits for the others, or for a loader process; 600 without it."""

DEVICE_VARIABLE = "TRAINER_DEVICE"  # environment variable that says where to train: auto, cpu, cuda or xla

Precision = Literal["auto", "fp32", "bf16"]
Compile = Literal["auto", "on", "max", "off"]
Sharding = Literal["auto", "none", "fsdp"]
GrayBits = Annotated[int, Field(ge=8, le=16)]
Workers = NonNegative | Literal["auto"]
ViewsOn = Literal["auto", "cpu", "device"]
DecodeOn = Literal["cpu", "cuda"]
Resident = Literal["auto", "on", "off"]
Encoding = Literal["auto", "raw", "fast-jpeg", "jpeg", "png"]
Outside = Literal["refuse", "read"]
FeatureFormat = Literal["fp16", "int8"]
LabelIssues = Literal["off", "held_out", "all"]
OnNearDuplicates = Literal["show", "separate", "refuse"]
MultiLabelLoss = Literal["bce", "asymmetric"]


def _is_auto(value: object) -> bool:
    """Return whether a choice is left to this version. Such settings are not serialized, so older artifacts keep their fingerprint."""
    return value in ("auto", None)


# ---------------------------------------------------------------------------------------------------------------------
# What trainings share


class LoadingSettings(Section):
    """What the stages that read views share."""

    seed: NonNegative | None = None
    """Seed of weights, order and views; default: `run.seed`."""
    workers: Workers | None = None
    """Loader processes; default: `data.workers`."""
    views_on: ViewsOn | None = None
    """Where views are made; default: `data.views_on`."""
    decode_on: DecodeOn | None = None
    """Where stored images are decoded; default: `data.decode_on`."""
    deterministic: bool | None = None
    """Use only deterministic operations on a GPU; default: `run.deterministic`."""


class ResidentSettings(LoadingSettings):
    """What the stages that train share."""

    resident: Annotated[Resident | None, Field(exclude_if=_is_auto)] = None
    """Whether a training's images lie in the device's memory; default: `data.resident`."""


LOADING = frozenset({"workers", "views_on", "decode_on", "resident"})
"""Settings of `data` about loading prepared images; they do not change what `prepare` writes."""
HOW_PREPARED = LOADING | {"keep_decoded"}
"""Settings of `data` that do not change what `prepare` writes."""


def _is_unset(value: object) -> bool:
    """Return whether a default is left empty. Such settings are not serialized, so older artifacts keep their fingerprint."""
    return value in ("", 0, None)


Deviation = Annotated[float, Field(gt=0)]


class ModelSettings(Section):
    """A timm model; a teacher may also be one of Transformers, or of a function of your own."""

    architecture: str
    """Name of a timm model (`python -m timm.models` or timm.list_models()); for a custom teacher the text of its `weights`."""
    args: Mapping[str, int | float | str | bool] = {}
    """Further arguments of the model, such as `patch_size`, `embed_dim`, `depth`, `num_heads`."""
    image_size: Annotated[int, Field(ge=0, le=2048)] = 0
    """Edge of the model's input, in pixels; 0 is the architecture's own."""
    mean: Annotated[tuple[float, float, float] | None, Field(exclude_if=_is_unset)] = None
    """Mean of each channel of the normalized input, with pixels in [0, 1]; default: what the architecture says."""
    std: Annotated[tuple[Deviation, Deviation, Deviation] | None, Field(exclude_if=_is_unset)] = None
    """Standard deviation of each channel, likewise."""


BUNDLED = "bundled:"  # what the name of a table of classes begins with that a recipe of this package brings
FOLDERS = "folders"  # the setting `data.hierarchy` where folders are the groups


_HOME = re.compile(r"^((?:imagefolder|manifest|transformers):|sqlite:///)?(~[^/]*)")


def _expanded(place: str) -> str:
    """Put the home directory in the place of `~`, since no shell does so behind a prefix such as `imagefolder:`, nor in a recipe."""
    return _HOME.sub(lambda found: (found[1] or "") + with_home(found[2]), place)


Place = Annotated[str, AfterValidator(_expanded)]
"""A path or URI."""


class TimmWeights(NamedTuple):
    """Pretrained weights of timm."""

    name: str
    """Of the model, with a tag or with timm's default one."""
    revision: str
    """A commit of their repository on the hub; empty for the newest one."""

    def __str__(self) -> str:
        return f"{TIMM}{self.name}" + (f"@{self.revision}" if self.revision else "")


class PackageWeights(NamedTuple):
    """Pretrained weights that a Python package brings."""

    name: str
    """Of timm's model that they are for."""

    def __str__(self) -> str:
        return f"{PACKAGE}{self.name}"


class TransformersWeights(NamedTuple):
    """A model of the Transformers library, with its weights."""

    name: str
    """On the Hub; or a folder that the library has written, as a path that begins with `/` or `.`."""
    revision: str
    """A commit on the Hub; empty for the newest one, and for a folder."""

    @property
    def is_folder(self) -> bool:
        return self.name.startswith(("/", "."))

    def __str__(self) -> str:
        return f"{TRANSFORMERS}{self.name}" + (f"@{self.revision}" if self.revision else "")


class ModuleWeights(NamedTuple):
    """A network that a function of the user's returns, with its weights."""

    name: str
    """`PACKAGE.MODULE:FUNCTION`."""

    def __str__(self) -> str:
        return f"{MODULE}{self.name}"


NamedWeights = TimmWeights | PackageWeights | TransformersWeights | ModuleWeights


class WeightsSettings(Section):
    """What a model starts from."""

    weights: Place = ""
    """Start from a model directory (path or URI), or from public weights of the same architecture: timm's `timm:NAME[@REVISION]`, REVISION
    being a commit (default: the newest), or `package:NAME` of an installed Python package. Empty starts from scratch. A teacher may also be
    `transformers:ID[@REVISION]` or `module:MODULE:FUNCTION`, which are not trained (docs/data.md)."""
    weights_file: Place = ""
    """A copy of the file of `timm:NAME` (path or URI of a .safetensors file), where the hub cannot be reached."""
    accept_license: Annotated[str, Field(exclude_if=_is_unset)] = ""
    """The license of `timm:NAME` that you have read and accept, as timm names it (`dinov3-license`), if it is not an open-source one."""

    @property
    def named_weights(self) -> NamedWeights | None:
        """Which named weights to start from; none for a model directory, or from scratch."""
        if self.weights.startswith(PACKAGE):
            return PackageWeights(self.weights.removeprefix(PACKAGE))
        if self.weights.startswith(MODULE):
            return ModuleWeights(self.weights.removeprefix(MODULE))
        if self.weights.startswith(TRANSFORMERS):
            name, _, revision = self.weights.removeprefix(TRANSFORMERS).partition("@")
            return TransformersWeights(name, revision)
        if not self.weights.startswith(TIMM):
            return None
        name, _, revision = self.weights.removeprefix(TIMM).partition("@")
        return TimmWeights(name, revision)

    def check_weights(self, section: str, field: str, architecture: str) -> None:
        """Make sure that public weights are for the architecture of the section's model; raises a `ValueError`."""
        given = self.named_weights
        named = next((text for text in (self.weights, architecture) if text.startswith((TRANSFORMERS, MODULE))), "")
        if named and section != "pretrain":
            raise ValueError(f"{named!r} can be a teacher only; choose one of timm's architectures, and its weights")
        if isinstance(given, TransformersWeights | ModuleWeights):
            name = str(given).partition("@")[0]
            if architecture != name:
                raise ValueError(
                    f"weights is {self.weights!r}, but {field}.architecture is {architecture!r}; set {section}.{field}.architecture={name}"
                )
        elif named and not self.weights:
            raise ValueError(
                f"{field}.architecture is {architecture!r}, but weights is empty; set {section}.weights={architecture}"
            )
        elif given and architecture not in (given.name, given.name.partition(".")[0]):
            raise ValueError(
                f"weights is {self.weights!r}, but {field}.architecture is {architecture!r}; set "
                f"{section}.{field}.architecture={given.name}, "
                f"and {section}.{field}.args to what differs from it, such as {{depth=6}}, or to {{}}"
            )
        if self.weights_file and not isinstance(given, TimmWeights):
            raise ValueError(
                f"weights_file is {self.weights_file!r}, which is a file of timm's weights, but weights is {self.weights!r}; "
                f"set {section}.weights={TIMM}NAME, or leave weights_file out"
            )
        if self.weights_file and not self.weights_file.endswith(".safetensors"):
            raise ValueError(
                f"weights_file is {self.weights_file!r}, but only a .safetensors file is read, since reading others may run code in them"
            )


class ViewSettings(Section):
    """Augmentation: the random view of an image that a training step sees."""

    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.35
    """Smallest share of the image's area that a random crop keeps; 1 turns cropping off."""
    max_aspect: Annotated[float, Field(ge=1)] = 4 / 3
    """Largest ratio of the crop's sides, either way."""
    flip: bool = True
    """Flip half of the views horizontally."""
    color_jitter: Fraction = 0.0
    """Largest relative change of brightness, contrast and saturation."""
    randaugment_operations: NonNegative = 0
    """RandAugment operations (Cubuk et al. 2020) applied to each view; 0 turns it off."""
    randaugment_magnitude: Annotated[float, Field(ge=0, le=10)] = 9.0
    """Their strength: 10 shears by 0.3, turns by 30 degrees, shifts by 45 % and changes colors by 90 %."""
    erasing: Fraction = 0.0
    """Probability of random erasing (Zhong et al. 2020): a rectangle of 2 to 33 % of the area gets the view's mean color."""
    mixup: NonNegativeFloat = 0.0
    """Alpha of mixup's Beta distribution (Zhang et al. 2018); 0 turns it off."""
    cutmix: NonNegativeFloat = 0.0
    """Alpha of CutMix's Beta distribution (Yun et al. 2019); 0 turns it off. With mixup too, each view gets one of the two."""


def _listed(names: object) -> object:
    """Accept names as a list or as comma-separated text."""
    return names.replace(",", " ").split() if isinstance(names, str) else names


def _rule_names(names: object, others: ValidationInfo) -> object:
    """Accept names of rules; those from outside of this package are checked once their modules are loaded, before the first stage."""
    listed = _listed(names)
    for name in listed if isinstance(listed, (list, tuple)) and not others.data.get("rules_from") else ():
        if name not in RuleSettings.model_fields and not entry_points(group=RULES_GROUP, name=name):
            raise ValueError(
                f"{name!r} is no rule{nearest(str(name), RuleSettings.model_fields)}; docs/rules.md has all"
            )
    return listed


RuleNames = Annotated[tuple[str, ...], BeforeValidator(_rule_names)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class WatchSettings(Section):
    """Which rules are checked while a training runs, and how often."""

    rules_from: Names = ()
    """Modules with rules of your own."""
    own_rules: Mapping[str, Mapping[str, Any]] = {}
    """Their thresholds."""
    stop_on: RuleNames = ()
    """Rules whose finding ends the training."""
    rules: RuleSettings = RuleSettings()
    """Thresholds of the rules."""
    log_steps: bool = False
    """Log a line for each step."""
    interval_s: NonNegativeFloat = 10.0
    """Minimum seconds between two checks."""
    budget: Fraction = 0.001
    """Largest share of the training's time that checks may take; they become rarer where they would take more."""


class LowResolutionSettings(Section):
    """A smaller input in the first epochs, and the network's own in those that finish: most of the gain for a part of the time."""

    epochs: NonNegative = 0
    """Number of first epochs, with a smaller input; 0: none."""
    image_size: NonNegative = 0
    """Edge of the smaller input in pixels: the same views, made smaller. For convolutional networks, and ViTs with
    `args={dynamic_img_size=true}`; not for `mae`, nor on XLA."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if bool(self.epochs) != bool(self.image_size):
            raise ValueError(
                f"low_resolution.epochs is {self.epochs}, but low_resolution.image_size is {self.image_size}; give both, or neither"
            )
        return self


class EvidenceSettings(Section):
    """What a training stage records about itself."""

    system_interval_s: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """Seconds between two samples of CPU cores, memory, disk, network and GPU."""
    operators_at: tuple[NonNegative, ...] = (20,)
    """Steps (counted from the start of this process) after which a window of torch.profiler opens."""
    operators_steps: NonNegative = 3
    """Length of each window in steps; 0 turns torch.profiler off."""
    tensors_every: NonNegative = 50
    """Minimum steps between two samples of weight, gradient and attention statistics; 0 turns them off."""
    tensors_budget: Fraction = 0.003
    """Largest share of the training's time for these samples; they become rarer if they would take more."""


class TrainingSettings(Section):
    """What every training loop shares."""

    epochs: NonNegative = 100
    """Passes over the training images; 0 skips this training."""
    batch_size: Annotated[int, Field(ge=2)] = 1024
    """Images per optimizer step, over all processes and accumulated micro-batches, which may differ by one image; the gradient is the mean
    over all images. At most the number of training images."""
    accumulation: Positive = 1
    """Micro-batches per optimizer step on each process; more of them need less memory."""
    activation_checkpointing: bool = False
    """Recompute activations within blocks in the backward pass instead of keeping them (Chen et al. 2016): the same numbers with less
    memory, for the time of another forward pass. Not for networks with batch normalization."""
    activation_memory_budget: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the activations' memory that a compiled model may keep (`compile`); below 1 the compiler recomputes the cheapest in the
    backward pass, at 0 everything."""
    base_learning_rate: Annotated[float, Field(gt=0)] = 5e-4
    """Peak learning rate at 256 images per step; scaled linearly with `batch_size` (Goyal et al. 2017)."""
    final_learning_rate: Fraction = 0.01
    """Learning rate at the end, as a share of the peak."""
    warmup_epochs: NonNegativeFloat = 5.0
    """Epochs of linear warm-up before the cosine decay."""
    weight_decay: NonNegativeFloat = 0.05
    """AdamW's weight decay; not applied to biases, norms, position embeddings and tokens."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay rate of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's decay rate of the second moment."""
    clip_norm: NonNegativeFloat = 1.0
    """Maximum norm of the gradient over all parameters; 0 turns clipping off."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of the exponential moving average (EMA) of the weights, which is then the result; 0 turns it off."""
    precision: Precision = "auto"
    """`bf16` autocast or `fp32`; auto takes bf16 on GPUs that have it. A processor without bf16 instructions computes in fp32. On a GPU
    convolutions in fp32 run in TF32, torch's default, except in `evaluate`."""
    compile: Compile = "auto"
    """torch.compile; auto compiles on GPUs only. `max` also times kernels of matrix products, which takes minutes, and replays CUDA graphs
    on a single GPU without accumulation; its rounding differs from run to run unless `run.deterministic`."""
    gradient_compression: Literal["none", "bf16"] = "none"
    """Data type of gradients in the all-reduce; bf16 halves their bytes."""
    zero: bool = False
    """Shard the optimizer's state over the processes (ZeroRedundancyOptimizer)."""
    sharding: Sharding = "auto"
    """`fsdp`: each process keeps a share of every weight, gradient and optimizer state, of an online teacher too, and gathers a block's
    weights while it computes (FSDP2). `none`: each process keeps whole models. auto shards what would take more than half of a process's
    memory. Not on XLA. See docs/performance.md."""
    log_every: Positive = 10
    """Steps between two log lines, and between two points of each metric."""
    checkpoint_every: NonNegative = 500
    """Steps between two checkpoints; 0 writes none."""
    checkpoint_keep: Positive = 2
    """How many of the newest checkpoints to keep."""
    validate_every_epochs: NonNegative = 10
    """Epochs between two validations; 0 validates at the end only. Not read for `mae`, which has no validation."""
    low_resolution: Annotated[LowResolutionSettings, Field(exclude_if=lambda value: not value.epochs)] = (
        LowResolutionSettings()
    )
    """A smaller input in the first epochs; not for masked autoencoders, nor on XLA, which compiles each size by itself."""
    views: ViewSettings = ViewSettings()
    """Augmentation."""
    evidence: EvidenceSettings = EvidenceSettings()
    """What the training records of itself."""

    @model_validator(mode="after")
    def _compiles_within_a_budget(self) -> Self:
        if self.activation_memory_budget < 1 and self.compile == "off":
            raise ValueError(
                f"activation_memory_budget is {self.activation_memory_budget:g}, which only a compiler keeps to, but compile is off; set "
                "compile=auto, or activation_memory_budget=1 and activation_checkpointing=true"
            )
        return self

    @model_validator(mode="after")
    def _finishes_at_its_own_resolution(self) -> Self:
        if 0 < self.epochs <= self.low_resolution.epochs:
            raise ValueError(
                f"low_resolution.epochs is {self.low_resolution.epochs} of {self.epochs} epochs, so none is left at the network's own "
                "resolution; make it smaller, or give the model that image_size"
            )
        return self

    def peak_learning_rate(self) -> float:
        return self.base_learning_rate * self.batch_size / 256

    def for_images(self, images: int, parts: int = 1) -> Self:
        """Return these settings with a batch that so many images can fill, since a step sees no image twice.

        A clamped batch is a multiple of `parts`, unless there are fewer images than parts.
        """
        if self.batch_size <= images:
            return self
        return self.model_copy(update={"batch_size": images - images % parts or images})

    def clamp_warning(self, section: str, images: int, fitted: Self) -> str:
        """Say what `for_images` has changed of `section`, as a line for the log."""
        return (
            f"{section}.batch_size = {self.batch_size} is larger than the {images} images to train on, and a step sees none of them twice; "
            f"it becomes {fitted.batch_size}, and the learning rate is scaled for that"
        )


# ---------------------------------------------------------------------------------------------------------------------
# The sections


class DataSettings(Section):
    """Which images, and how `prepare` stores them."""

    _renamed = accepting_former_names("data")

    source: Place = "digits"
    """`digits`, `imagefolder:PATH_OR_URI`, `manifest:FILE.csv` (or `.parquet`), `tar:FOLDER_OR_URI` or `hub:NAME[:CONFIG]`."""
    outside: Outside = "refuse"
    """Links and lines of a manifest that lead outside the source's folder; `read` them only from a source that you trust."""
    image_size: Annotated[int, Field(ge=8, le=2048)] = 256
    """Edge of the stored square images, in pixels."""
    fit: Literal["crop", "stretch"] = "crop"
    """How an image becomes square: `crop` its center, or `stretch` it."""
    encoding: Encoding = "auto"
    """How stored images are encoded: `raw`, as pixels (192 KiB for 256 x 256); `fast-jpeg`, quality 90 with halved color resolution,
    decoded by fast approximations; `jpeg`, with `jpeg_quality` and full color; `png`, exact. auto takes `raw` up to 20 GiB in all (4 GiB in
    a store) if the disk has three times that free, else `fast-jpeg`."""
    jpeg_quality: Annotated[int, Field(ge=50, le=100)] = 95
    """Quality of stored images with `encoding=jpeg`."""
    val_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    """Share of each class moved from train to validation if the source has no validation split."""
    test_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    """Share of each class moved from train to test if the source has no test split."""
    test_from: Literal["train", "val"] = "train"
    """Where a source without a test split gets it: a share of train, or the source's val (val is then taken from train)."""
    split_seed: NonNegative = 0
    """Seed of the splits, which follow image content; independent of `run.seed`, so that runs with other seeds share their splits."""
    min_images_per_class: Annotated[int, Field(ge=3)] = 3
    """Fewest valid labeled images of a class; `prepare` fails if one has fewer."""
    max_bad_fraction: Fraction = 0.01
    """Largest share of quarantined images; `prepare` fails above it."""
    near_duplicates: Annotated[OnNearDuplicates, Field(exclude_if=lambda value: value == "show")] = "show"
    """Look-alikes in different splits: `show` them on the data card, `refuse` the data, or `separate`: keep groups in one split where
    splits are taken from train, and drop look-alikes of the source's val or test from train."""
    gray_bits: Annotated[Literal["auto"] | GrayBits, Field(exclude_if=lambda value: value == "auto")] = "auto"
    """Bits that 16-bit grays use, such as 12 (X-rays, microscopes); the upper 8 of them are kept, in prediction too. auto is 16, and
    `prepare` fails if no image uses the highest bit."""
    keep_decoded: Annotated[Place, Field(exclude_if=_is_unset)] = ""
    """Folder or URI where decoded images stay, so that a later `prepare` decodes only new and changed files; empty: none stay."""
    max_pixels: Positive = 200_000_000
    """Images with more pixels (width x height) are quarantined before they are decoded, which takes about 10 bytes a pixel."""
    min_edge: Positive = 8
    """Images with a shorter edge are quarantined, in pixels."""
    workers: Workers = "auto"
    """Loader processes for each training process; 0 loads in the training process; auto measures at the start, and beside a GPU again after
    200 steps."""
    views_on: ViewsOn = "auto"
    """Where views are made from stored images: in the loader (`cpu`) or on the training device; auto takes the device if it is a GPU."""
    decode_on: DecodeOn = "cpu"
    """Where stored JPEG images are decoded: in the loader, or on the GPU (nvJPEG)."""
    resident: Annotated[Resident, Field(exclude_if=_is_auto)] = "auto"
    """Keep a training's images decoded in the memory of the device that makes their views. auto: on a GPU with room, at most 40 % of the
    memory that is free before the first step."""
    attributes: Annotated[Place, Field(exclude_if=_is_unset)] = ""
    """Table of facts about each class (`FILE.csv`, path or URI), such as energy or allergens: the first column names the class, each other
    column is an attribute. The registered student returns them with its answers."""
    multi_label: Annotated[bool, Field(exclude_if=_is_unset)] = False
    """Whether an image may have several labels, or none of the classes: `manifest:` separates them by `|` in its column `label`, a lone `|`
    is an image of no class; `hub:` has a column of lists of labels. Each class is trained and judged separately."""
    hierarchy: Annotated[Place, Field(exclude_if=_is_unset)] = ""
    """Groups above the classes: a table with the columns `class` and `parent` (`FILE.csv`, path or URI), or `folders` for the group folders
    of an image folder."""

    @model_validator(mode="after")
    def _source_fits(self) -> Self:
        if self.hierarchy == FOLDERS and not self.source.startswith("imagefolder:"):
            raise ValueError(
                f"hierarchy is {FOLDERS}, but source is {self.source!r}, which has none; give a table, data.hierarchy=FILE.csv"
            )
        if self.multi_label and not self.source.startswith(("manifest:", "hub:")):
            raise ValueError(
                f"multi_label is true, but source is {self.source!r}, which gives an image one label; list the images in a CSV file, "
                "data.source=manifest:FILE.csv, or give a data set with lists of labels, hub:NAME"
            )
        if self.multi_label and self.hierarchy:
            raise ValueError(
                f"multi_label is true, and hierarchy={self.hierarchy} is for answering with one class or group an image; leave it out"
            )
        return self


class MaeSettings(TrainingSettings):
    """Masked-autoencoder pretraining (He et al. 2022)."""

    epochs: NonNegative = 400
    """Passes over all training images, labeled or not; 0 skips pretraining."""
    base_learning_rate: Annotated[float, Field(gt=0)] = 1.5e-4
    """Peak learning rate at 256 images per step; scaled linearly with `batch_size`."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay rate of the second moment."""
    warmup_epochs: NonNegativeFloat = 40.0
    """Epochs of linear warm-up before the cosine decay."""
    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Share of the patches that are masked."""
    decoder_dim: Annotated[int, Field(ge=8)] = 512
    """Width of the decoder."""
    decoder_depth: Positive = 8
    """Blocks of the decoder."""
    decoder_heads: Positive = 16
    """Attention heads of the decoder."""
    normalize_targets: bool = True
    """Normalize the pixels of each target patch by its own mean and standard deviation."""
    views: ViewSettings = ViewSettings(min_scale=0.2)
    """Augmentation: crop and flip only, as in the paper."""

    @model_validator(mode="after")
    def _has_one_resolution(self) -> Self:
        if self.low_resolution.epochs:
            raise ValueError(
                "low_resolution is not for a masked autoencoder, which makes its patches at the network's own resolution; set "
                "mae.low_resolution.epochs=0 and mae.low_resolution.image_size=0"
            )
        return self


class LoraSettings(Section):
    """Low-rank adaptation (Hu et al. 2021)."""

    rank: Positive = 8
    """Rank of the update that each adapted layer learns."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The update is scaled by alpha / rank."""
    layers: tuple[str, ...] = ()
    """Which linear layers are adapted, by parts of their names such as `attn`, `qkv` or `fc1`; empty adapts all but the head."""


class FinetuneSettings(TrainingSettings):
    """Supervised fine-tuning of the teacher on the labeled training images."""

    epochs: NonNegative = 100
    """Passes over the labeled training images; 0 skips fine-tuning."""
    method: Literal["full", "head", "lora"] = "full"
    """Trained weights: all (`full`); the head on the frozen network in evaluation mode (`head`); or the head and low-rank updates of linear
    layers, merged at the end (`lora`). The last two need `weights` or `mae`."""
    lora: LoraSettings = LoraSettings()
    """For `method=lora`."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Layer-wise learning-rate decay: factor from one block to the one below it (BEiT, MAE)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Label smoothing: share of the target spread over all classes."""
    multi_label_loss: Annotated[MultiLabelLoss, Field(exclude_if=lambda value: value == "bce")] = "bce"
    """With `data.multi_label`: binary cross-entropy of each class (`bce`), or `asymmetric` (Ridnik et al. 2021), which weighs absent
    classes less."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Stochastic depth rate of the last block; it grows linearly from 0 at the first."""
    views: ViewSettings = ViewSettings(mixup=0.8, cutmix=1.0)
    """Augmentation."""


ClassReference = Annotated[int, Field(ge=0, strict=True)] | str
TrainingSplits = tuple[Literal["train", "val", "unlabeled"], ...]
"""The splits of a data set that a training opens; it never opens the test split."""


class PretrainSettings(WeightsSettings, ResidentSettings):
    """The teacher: masked-autoencoder pretraining, then fine-tuning; or given weights."""

    watch: WatchSettings | None = None
    """Rules checked while the trainings run; set from `profile` if that has a `stop_on`."""

    teacher: ModelSettings = ModelSettings(architecture="vit_base_patch16_224")
    """The teacher's model."""
    head: Literal["classes", "probe", "none"] = "classes"
    """`classes`: fine-tuned, or that of `weights`. `probe` keeps the network and fits a linear classifier to its embedding of the
    labeled training images: for few labels. `none` takes the teacher without a head and needs no label: its embedding, the pooled features,
    is taught (`distill.feature_weight`). Both serve backbones without a classifier, such as DINOv2, SigLIP and CLIP."""
    label_map: Mapping[str, ClassReference] = {}
    """Class of the data set -> class of `weights`, by name or index, where the names differ. These rows of the head are kept."""
    mae: MaeSettings = MaeSettings()
    """Masked-autoencoder pretraining."""
    finetune: FinetuneSettings = FinetuneSettings()
    """Supervised fine-tuning."""

    @property
    def splits(self) -> TrainingSplits:
        """The splits that are opened: none to learn from where the weights are taken as they are."""
        unlabeled = bool(self.mae.epochs) or self.head == "none"
        train = unlabeled or bool(self.finetune.epochs) or self.head == "probe"
        return (*(("train",) if train else ()), "val", *(("unlabeled",) if unlabeled else ()))

    @field_validator("label_map")
    @classmethod
    def _is_read_as_classes_are(cls, value: Mapping[str, ClassReference]) -> Mapping[str, ClassReference]:
        named = {limits.class_name(name): reference for name, reference in value.items()}
        if len(named) < len(value):
            raise ValueError("two of its names read the same; remove one of them")
        return named

    @model_validator(mode="after")
    def _weights_fit(self) -> Self:
        self.check_weights("pretrain", "teacher", self.teacher.architecture)
        if self.teacher.architecture.startswith((TRANSFORMERS, MODULE)):
            given = {"head": self.head, "mae.epochs": self.mae.epochs, "finetune.epochs": self.finetune.epochs}
            wanted = {"head": "classes", "mae.epochs": 0, "finetune.epochs": 0}
            if other := {name: value for name, value in given.items() if value != wanted[name]}:
                raise ValueError(
                    f"teacher is {self.teacher.architecture}, which is taken as it is, with its own head, but "
                    f"{' and '.join(f'{name}={value}' for name, value in other.items())}; set "
                    f"{' '.join(f'pretrain.{name}={wanted[name]}' for name in other)}, or choose one of timm's architectures"
                )
        if self.head != "classes":
            if self.finetune.epochs:
                what = (
                    "there is no classifier to fine-tune" if self.head == "none" else "the classifier alone is fitted"
                )
                raise ValueError(
                    f"head is {self.head}, so {what}, but finetune.epochs is {self.finetune.epochs}; set pretrain.finetune.epochs=0, or "
                    "head=classes"
                )
            if self.label_map:
                raise ValueError(
                    f"head is {self.head}, so no row of it can be chosen by label_map; leave label_map out"
                )
            if not self.weights and not self.mae.epochs:
                raise ValueError(
                    f"head is {self.head}, weights is empty and mae.epochs is 0, so the teacher would have learned nothing; give weights, "
                    "or pretrain it with pretrain.mae.epochs"
                )
            return self
        if not self.weights and not self.finetune.epochs:
            raise ValueError(
                "finetune.epochs is 0 and weights is empty, so the teacher would never see a label; give weights or let it be fine-tuned"
            )
        if self.finetune.epochs and self.finetune.method != "full" and not (self.weights or self.mae.epochs):
            raise ValueError(
                f"finetune.method is {self.finetune.method}, but weights is empty and mae.epochs is 0, so what is frozen would have "
                "learned nothing; give weights, pretrain with pretrain.mae.epochs, or set pretrain.finetune.method=full"
            )
        if self.label_map and not self.weights:
            raise ValueError(
                "label_map says what classes of weights mean, but weights is empty; give weights, or leave it out"
            )
        return self


TOP_K = 10  # logits that are recorded of a view where nothing else is said or needed


class ReinforceSettings(LoadingSettings):
    """The recording of the teacher's outputs on augmented views of every training image, made once for all distillations."""

    views: Positive = RECORDED_VIEWS
    """Views per image; epoch e of a distillation sees view e modulo `views`."""
    top_k: Positive | Literal["all"] | None = None
    """Largest logits to keep per view, with the sum of the rest; default: `all` with `data.multi_label` or if a loss of distill needs them,
    else 10."""
    features: bool = False
    """Keep the teacher's pooled features too, for a feature loss."""
    feature_format: FeatureFormat = "fp16"
    """Format of a feature: `fp16`, within 2^-11 of the number; or `int8`, half the bytes, in steps of 1/127 of the view's largest
    number."""
    tokens: bool = False
    """Keep the teacher's patch tokens too, for a token loss: h x w places of as many numbers as its features have."""
    token_format: FeatureFormat = "int8"
    """Format of a token: `int8`, in steps of 1/127 of the token's largest number; or `fp16`, within 2^-11 of the number."""
    largest_gib: Annotated[float, Field(gt=0)] = 100.0
    """Most GiB that all records may take; more are refused before anything is recorded."""
    augmentation: ViewSettings | None = None
    """Augmentation; default: `distill.views`."""
    unlabeled: bool | None = None
    """Record images without labels too; default: `distill.unlabeled`."""
    view_size: NonNegative = 0
    """Edge of the views, in pixels; 0 is the teacher's input size."""
    batch_size: Positive = 256
    """Images per forward pass of the teacher; a CPU splits them into parts of eight, except for a transformer in bf16."""
    precision: Precision = "auto"
    """`bf16` or `fp32`; auto takes bf16 on GPUs that have it. A processor without bf16 instructions computes in fp32."""
    compile: Compile = "auto"
    """torch.compile; auto compiles on GPUs only."""

    @property
    def records_unlabeled(self) -> bool:
        return self.unlabeled is not False

    @property
    def splits(self) -> TrainingSplits:
        return ("train", "unlabeled") if self.records_unlabeled else ("train",)

    def logits(self, classes: int) -> int:
        """Logits that are kept of each view where there are so many classes."""
        return classes if self.top_k == "all" else min(self.top_k or TOP_K, classes)


class SoftenedSettings(Section):
    """Of each loss between distributions over the classes."""

    loss: str
    temperature: Annotated[float, Field(gt=0)] = 2.0
    """Temperature T that softens both distributions; not of `hard`. From recorded outputs `kl` is exact for T = 1 and 2, close between and
    above, and rough below 1."""
    standardize: bool = False
    """Standardize the logits of both before they are compared, so that T counts in standard deviations (Sun et al. 2024); not of `hard`.
    Recorded outputs serve it as they serve `dkd`."""


class KlSettings(SoftenedSettings):
    """The divergence from the teacher's distribution."""

    loss: Literal["kl"] = "kl"


class HardSettings(Section):
    """The cross-entropy with the teacher's top class."""

    loss: Literal["hard"] = "hard"
    standardize: ClassVar = False


class DkdSettings(SoftenedSettings):
    """The divergence, decoupled around the true class."""

    loss: Literal["dkd"] = "dkd"
    alpha: NonNegativeFloat = 1.0
    """DKD's weight of the target-class term (TCKD)."""
    beta: NonNegativeFloat = 8.0
    """DKD's weight of the non-target-class term (NCKD)."""


class DistSettings(SoftenedSettings):
    """Correlations between the classes of an image, and between the images."""

    loss: Literal["dist"] = "dist"
    beta: NonNegativeFloat = 1.0
    """DIST's weight of the inter-class relation (between the classes of an image)."""
    gamma: NonNegativeFloat = 1.0
    """DIST's weight of the intra-class relation (between the images of a micro-batch, for each class)."""


LOGIT_LOSSES: Mapping[str, type[Section]] = {
    one.model_fields["loss"].default: one for one in (KlSettings, HardSettings, DkdSettings, DistSettings)
}


def _by_loss(values: Any, union: Callable[[Any], Any]) -> Any:
    """Check settings as those of the loss that they name, `kl` if none; by the union alone, messages would name the loss as a group."""
    loss = values.get("loss", "kl") if isinstance(values, Mapping) else None
    if not isinstance(loss, str) or loss not in LOGIT_LOSSES:
        return union(values)
    for name in sorted(values.keys() - LOGIT_LOSSES[loss].model_fields.keys()):
        if having := " or ".join(other for other, one in LOGIT_LOSSES.items() if name in one.model_fields):
            raise ValueError(
                f"{name} is {values[name]}, but loss is {loss}, which has none; leave distill.logit.{name} out, or set "
                f"distill.logit.loss={having}"
            )
    return LOGIT_LOSSES[loss].model_validate(values)


LogitSettings = Annotated[
    KlSettings | HardSettings | DkdSettings | DistSettings, Field(discriminator="loss"), WrapValidator(_by_loss)
]


class DistillSettings(WeightsSettings, ResidentSettings, TrainingSettings):
    """The student: loss = the sum of weight x loss over logits, features, tokens, blocks, similarities, labels."""

    _renamed = accepting_former_names("distill")

    watch: WatchSettings | None = None
    """Rules checked while the training runs; set from `profile` if that has a `stop_on`."""

    student: ModelSettings = ModelSettings(architecture="vit_tiny_patch16_224")
    """The student's model."""
    head: Literal["trained", "probe"] = "trained"
    """How the student's head is made: `trained` with the losses; or `probe`: the student learns the teacher's features without a label,
    then a linear classifier is fitted to its frozen embeddings of the labeled training images."""
    teacher: Literal["online", "recorded"] = "online"
    """`online` runs the teacher in every step; `recorded` reads the outputs that the stage `reinforce` recorded."""
    unlabeled: bool = True
    """Also learn from unlabeled images, from the teacher alone (for `dkd`, its top class is the label). An epoch is then a pass over all
    images. Not read if no loss needs the teacher."""
    labeled_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of labeled images in each step, if there are unlabeled images. Each kind then has separate epochs; a training epoch has as many
    images as the data set. 0 shuffles all together."""
    teacher_batch: NonNegative = 0
    """Images per forward pass of the online teacher; 0 chooses by device."""
    further_teachers: tuple[Place, ...] = ()
    """Model directories of further teachers, here or in a store. Logit and feature loss are the mean over all teachers; each has a
    projection, and PHI-S (Ranzinger et al. 2024) balances their pooled features."""
    further_recordings: tuple[Place, ...] = ()
    """With `teacher=recorded`: the recorded outputs of each further teacher, in the same order and with the same views."""
    teacher_weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Weight of each teacher in that mean, the pipeline's own first; empty: all have the same."""
    logit: LogitSettings = KlSettings()
    """Between logits: `kl` (Hinton et al. 2015), `hard` (DeiT's, Touvron et al. 2021), `dkd` (Zhao et al. 2022), `dist` (Huang et al.
    2022); recorded outputs serve `dkd` and `dist` only if they hold all logits (`reinforce.top_k`). With `data.multi_label` there is `kl`
    alone: the sum over the classes of the divergence of each one's two-way distribution."""
    logit_weight: NonNegativeFloat = 0.9
    """Weight of the logit loss; 0 turns it off."""
    feature_loss: Literal["cosine", "mse", "cosine_smooth_l1"] = "cosine"
    """Loss between pooled features and between patch tokens, after a linear projection of the student's that is trained and discarded.
    Features of a teacher without a head are standardized first. `cosine_smooth_l1` is UNIC's (Sariyildiz et al. 2024)."""
    feature_weight: NonNegativeFloat = 0.0
    """Weight of the loss between pooled features; 0 turns it off. Recorded outputs need `reinforce.features`."""
    token_weight: NonNegativeFloat = 0.0
    """Weight of the loss between patch tokens, place by place, on the teacher's grid; 0 turns it off. Recorded outputs need
    `reinforce.tokens`."""
    blocks: Mapping[NonNegative, NonNegative] = {}
    """Pairs of blocks that are compared, student -> teacher, counted from 0 as by timm's `forward_intermediates`: `{3=7,5=11}`. Only with
    the teacher online."""
    block_weight: NonNegativeFloat = 0.0
    """Weight of the feature loss between these blocks, place by place, mean over the pairs (FitNets, Romero et al. 2015); 0 turns it
    off."""
    similarity_weight: NonNegativeFloat = 0.0
    """Weight of SEED's loss (Fang et al. 2021), which needs no label: the student's similarities to a queue of earlier images follow the
    teacher's; 0 turns it off. Recorded outputs need `reinforce.features`."""
    similarity_queue: Positive = 65_536
    """Images in the queue; every checkpoint contains the teacher's features of them."""
    similarity_temperature: Annotated[float, Field(gt=0)] = 0.2
    """Temperature of the student's distribution."""
    similarity_teacher_temperature: Annotated[float, Field(gt=0)] = 0.01
    """Temperature of the teacher's distribution; lower values weigh the most similar images more."""
    distillation_token: bool = False
    """Train the head of a student's distillation token on the teacher's logits and that of its class token on labels, as DeiT does; the
    answer is the mean of both. For students such as `deit_tiny_distilled_patch16_224`."""
    label_weight: NonNegativeFloat = 0.1
    """Weight of the cross-entropy with the labels."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Stochastic depth rate of the student's last block."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing: share of the target spread over all classes."""
    multi_label_loss: Annotated[MultiLabelLoss, Field(exclude_if=lambda value: value == "bce")] = "bce"
    """With the labels of `data.multi_label`, as `pretrain.finetune.multi_label_loss`."""
    pause_epochs: Annotated[NonNegativeFloat, Field(exclude_if=_is_unset)] = 0.0
    """Epochs after which the training pauses and returns the student; the same settings with a larger value, or 0, resume from its
    checkpoint. 0 does not pause. Set by `search`."""
    latency_runs: Annotated[int, Field(ge=0, exclude_if=_is_unset)] = 0
    """Passes of one image by which the trained student's latency on the CPU is measured; 0 leaves it to `evaluate`. Set by `search`."""

    def weight(self, term: str) -> float:
        weight: float = getattr(self, f"{term}_weight")
        return weight

    @property
    def needs_teacher(self) -> bool:
        return any(map(self.weight, TAUGHT))

    @property
    def compares_features(self) -> bool:
        return self.feature_weight > 0 or self.similarity_weight > 0

    @property
    def reads_unlabeled(self) -> bool:
        """Whether images without labels are read: there is a teacher to say something of them."""
        return self.unlabeled and self.needs_teacher

    @property
    def splits(self) -> TrainingSplits:
        return ("train", "val", "unlabeled") if self.reads_unlabeled else ("train", "val")

    @property
    def reads_recording(self) -> bool:
        """Whether the student learns from recorded teacher outputs."""
        return self.teacher == "recorded" and self.needs_teacher

    @property
    def relates_images(self) -> bool:
        """Whether a loss compares the images of a micro-batch with one another, so that its size is a part of what is learned."""
        return self.logit_weight > 0 and self.logit.loss == "dist" and self.logit.gamma > 0

    @property
    def needs_all_logits(self) -> bool:
        """Whether the logit loss compares the logits of all classes, so that the largest ones alone are not enough."""
        return self.logit_weight > 0 and (self.logit.loss in ("dkd", "dist") or self.logit.standardize)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.check_weights("distill", "student", self.student.architecture)
        if self.head == "probe":
            self._check_probe()
        elif self.logit_weight == self.label_weight == 0:
            raise ValueError(
                "logit_weight and label_weight are both 0, so nothing teaches the student's head; give one of them a weight, or let a "
                "head be fitted afterward with head=probe"
            )
        if bool(self.blocks) != bool(self.block_weight):
            raise ValueError(
                f"blocks is {dict(self.blocks)}, but block_weight is {self.block_weight:g}; give both, such as blocks={{3=7}} and "
                "block_weight=1, or neither"
            )
        if self.block_weight and self.teacher == "recorded":
            raise ValueError(
                f"block_weight is {self.block_weight:g}, but teacher is recorded, and what blocks give is not recorded; set "
                "distill.teacher=online, or block_weight=0 and blocks={}"
            )
        places = [name for name in ("token", "block") if self.weight(name)]
        if places and self.student.args.get("patch_drop_rate"):
            raise ValueError(
                f"{places[0]}_weight is {self.weight(places[0]):g}, but distill.student.args drops patches in training (patch_drop_rate), "
                "and those that are left are at no place of the teacher's; set the one or the other to 0"
            )
        self._check_teachers()
        if self.distillation_token and not (self.logit_weight and self.label_weight):
            raise ValueError(
                f"distillation_token is true, but logit_weight is {self.logit_weight:g} and label_weight {self.label_weight:g}, and each "
                "of them teaches one of the two heads; give both a weight, or set distillation_token=false"
            )
        mixes = self.views.mixup > 0 or self.views.cutmix > 0
        if self.logit_weight and self.logit.loss == "dkd" and mixes:
            raise ValueError(
                "logit.loss is dkd, which needs one true class an image, but views.mixup or views.cutmix mixes them; "
                "set both to 0 or choose another logit.loss"
            )
        weights = {name: value for name, value in self.logit if name in ("alpha", "beta", "gamma")}
        if self.logit_weight and weights and not any(weights.values()):
            first, second = (f"logit.{name}" for name in weights)
            raise ValueError(
                f"logit.loss is {self.logit.loss}, but {first} and {second} are both 0; give one of them a weight"
            )
        return self

    def _check_teachers(self) -> None:
        count = len(self.further_teachers)
        if self.teacher_weights and len(self.teacher_weights) != count + 1:
            raise ValueError(
                f"teacher_weights has {len(self.teacher_weights)} weights for {count + 1} teachers; give one to the pipeline's own and to "
                "each of further_teachers, or to none"
            )
        if len(self.further_recordings) != (count if self.teacher == "recorded" else 0):
            raise ValueError(
                f"further_recordings has {len(self.further_recordings)} entries, but teacher is {self.teacher} with {count} "
                "further_teachers; give the recorded outputs of each with teacher=recorded, and none with teacher=online"
            )
        unshared = [name for name in TAUGHT if name not in ("logit", "feature") and self.weight(name)]
        if count and unshared:
            raise ValueError(
                f"{unshared[0]}_weight is {self.weight(unshared[0]):g}, but several teachers share only logit and feature loss; set it "
                "to 0, or further_teachers=[]"
            )
        if count and not self.needs_teacher:
            raise ValueError(
                "further_teachers are given, but no loss compares with a teacher; give logit_weight or feature_weight "
                "a weight"
            )

    def _check_probe(self) -> None:
        """Make sure that a student whose head is fitted afterward learns features, and nothing else; raises a `ValueError`."""
        given = [f"{name}={getattr(self, name):g}" for name in ("logit_weight", "label_weight") if getattr(self, name)]
        if given:
            raise ValueError(
                f"head is probe, so the student has no head while it is trained, but {' and '.join(given)}; set "
                "distill.logit_weight=0 and distill.label_weight=0, or head=trained"
            )
        if not self.compares_features:
            raise ValueError(
                "head is probe, but feature_weight and similarity_weight are 0, so nothing teaches the student's features; set "
                "distill.feature_weight=1"
            )
        if self.labeled_share:
            raise ValueError(
                f"head is probe, so no label is learned from, but labeled_share is {self.labeled_share:g}; set distill.labeled_share=0"
            )


class TuneSettings(Section):
    """Short trials of the distillation on the machines where it will run: faster settings, and a forecast of hours and dollars."""

    enabled: bool = False
    """Whether to run trials; a budget (`run.budget_usd`, `run.budget_hours`) turns it on."""
    search: bool = True
    """Whether to search for faster settings, or only measure the given ones."""
    apply: bool = False
    """Whether distill uses the settings found."""
    distill: DistillSettings | None = None
    """The distillation to tune; default: `distill`."""
    reinforce: ReinforceSettings | None = None
    """How the teacher's outputs would be recorded for it; default: `reinforce`."""
    minutes: Annotated[float, Field(gt=0)] = 10.0
    """Time limit of the search, which skips trials that would take more than a tenth of the distillation."""
    largest_batch_growth: Annotated[float, Field(ge=1)] = 4.0
    """Largest factor on `distill.batch_size`: a larger batch takes fewer steps, and the learning rate grows with it."""
    fewest_steps: Positive = 5_000
    """Minimum optimizer steps that a larger batch must leave: too few cost accuracy, which tune does not measure."""
    assumed_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Scaling efficiency assumed for doubling the nodes where it was not measured; forecasts that use it say so."""
    elsewhere: tuple[Place, ...] = ()
    """URIs of tunings of the same distillation on other pools or numbers of nodes: alternatives if the budget is exceeded."""
    budget_usd: NonNegativeFloat | None = None
    """Most dollars that the distillation may cost; default: `run.budget_usd`."""
    budget_hours: NonNegativeFloat | None = None
    """Most hours that the distillation may take; default: `run.budget_hours`."""

    @property
    def splits(self) -> TrainingSplits:
        return (self.distill or DistillSettings()).splits


class GateSettings(Section):
    """Conditions for promoting a student."""

    max_accuracy_drop: Fraction = 0.05
    """Largest drop of test top-1 (mAP with `data.multi_label`) from teacher to student, as a fraction."""
    min_accuracy: Fraction = 0.0
    """Smallest test top-1 (mAP with `data.multi_label`) of the student, as a fraction; 0 sets no limit."""
    min_knn_accuracy: Fraction = 0.0
    """Smallest test top-1 by nearest neighbors of the student's frozen embeddings among labeled training images, as a fraction; 0 sets no
    limit. Measured if set, or if the teacher has no head."""
    min_compression: NonNegativeFloat = 2.0
    """Smallest ratio of the teacher's parameters to the student's."""
    max_latency_ms: NonNegativeFloat = 0.0
    """Largest p95 latency of the student on the evaluating machine's CPU at the first of `latency_batch_sizes`; 0 sets no limit."""


class SearchSettings(Section):
    """A search for the settings of the distillation with which the student is most accurate on the validation split."""

    enabled: bool = False
    """Whether to search; the distillation then uses the settings found if they win by more than seeds differ."""
    space: Literal["auto"] | Mapping[str, str] = "auto"
    """Settings of `distill` by full name, and their values as text: `log(1e-4, 1e-2)`, `uniform(0, 0.4)`, `int(2, 8)` or
    `choice(kl, dist)`; or auto, a space for the losses of the recipe."""
    trials: Annotated[int, Field(ge=2)] = 16
    """Number of distillations begun, that of the recipe's own settings included."""
    parallel: Positive = 1
    """Trials that train at a time, each as a job of the run's size; on one machine they take turns."""
    sampler: Literal["tpe", "random"] = "tpe"
    """How settings are drawn: the tree-structured Parzen estimator (Bergstra et al. 2011) from the trials before, or at random."""
    rungs: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)] = (0.08, 0.25, 1.0)
    """Shares of the epochs after which trials are compared, the last one 1; the best resume (successive halving, Jamieson & Talwalkar
    2016)."""
    reduction: Annotated[int, Field(ge=2)] = 3
    """One in this many trials continues from each rung to the next."""
    finalists: Positive = 3
    """How many of the best settings are trained again with other seeds, beside the recipe's own."""
    seeds: Positive = 3
    """Trainings of each finalist, whose mean decides."""
    cost: Literal["none", "parameters", "latency"] = "none"
    """Cost of a student, if the space varies it: its parameters, or its latency for one image on the CPU of the machine that trained
    it. A trial continues where no other is both better and cheaper; of the finalists that pass `evaluate.gate` on validation the cheapest
    wins."""
    budget_hours: NonNegativeFloat | None = None
    """Most hours that the search may take; fewer trials are begun where a forecast exceeds it. Default, or 0: no limit."""
    budget_usd: NonNegativeFloat | None = None
    """Most dollars that the trials may cost, by the price of the machines where they train. Default, or 0: no limit."""
    distill: DistillSettings | None = None
    """The distillation to search around; default: `distill`."""
    gate: GateSettings | None = None
    """What a student has to pass where `cost` counts; default: `evaluate.gate`."""

    @field_validator("space")
    @classmethod
    def _has_dimensions(cls, value: Literal["auto"] | Mapping[str, str]) -> Literal["auto"] | Mapping[str, str]:
        if isinstance(value, str):
            return value
        if not value:
            raise ValueError("is empty; name a setting, such as distill.base_learning_rate=log(1e-4,1e-2), or set auto")
        for name, text in value.items():
            try:
                parse_dimension(text)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
        return value

    @field_validator("rungs")
    @classmethod
    def _rises_to_the_whole(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if value[-1] != 1 or any(low >= high for low, high in pairwise(value)):
            raise ValueError("has to rise, and to end with 1: the whole training")
        return value


class WarmUpSettings(Section):
    """Compile ahead of time: run the first steps of each training and throw them away, so that the compile cache is filled."""

    enabled: bool = False
    """Whether to compile ahead; useful where compiling takes long and the cache outlives the machine, as on Neuron pools."""
    pretrain: PretrainSettings | None = None
    """The trainings of the teacher; default: `pretrain`."""
    reinforce: ReinforceSettings | None = None
    """How the outputs are recorded that the student learns from; default: `reinforce`."""
    distill: DistillSettings | None = None
    """The training of the student; default: `distill`."""

    @property
    def splits(self) -> TrainingSplits:
        return "train", "val", "unlabeled"


class ProfileSettings(Section):
    """The report on the trainings, and the thresholds of its rules."""

    top_operators: Positive = 20
    """Rows of the operator table."""
    log_steps: bool = False
    """Log a line for each step of each training: seconds of loader, forward pass, backward pass and optimizer."""
    rules_from: Names = ()
    """Modules with rules of your own, functions of `(evidence, thresholds)`, which `TRAINER_MODULES` has to list; see docs/profiling.md."""
    own_rules: Mapping[str, Mapping[str, Any]] = {}
    """Thresholds of these rules, by the rule's name: `{slow_start={largest_s=30}}`."""
    stop_on: RuleNames = ()
    """Rules whose finding ends a training while it runs, such as `exploding_gradients`; see docs/rules.md."""
    rules: RuleSettings = RuleSettings()
    """Thresholds of each rule."""


class EvaluateSettings(Section):
    """How teacher and student are measured."""

    batch_size: Positive = 128
    """Images per forward pass."""
    latency_batch_sizes: Annotated[tuple[Positive, ...], Field(min_length=1)] = (1, 16)
    """Batch sizes at which latency and throughput are measured; the first one's latency is the gate's."""
    latency_runs: Annotated[int, Field(ge=10)] = 50
    """Timed forward passes for each batch size."""
    calibration_bins: Positive = 15
    """Bins of the expected calibration error."""
    worst_confusions: NonNegative = 8
    """Confused pairs of classes that the report shows with pictures."""
    answer_risk: Annotated[float, Field(ge=0, lt=1, exclude_if=_is_unset)] = 0.0
    """Largest share of images that the registered student may answer wrongly: where it is unsure of the class, it names a group of
    `data.hierarchy`, or nothing. 0 always names a class. Not read without a hierarchy."""
    label_issues: Annotated[LabelIssues, Field(exclude_if=lambda value: value == "held_out")] = "held_out"
    """Which labels are judged by the teacher (confident learning, Northcutt et al. 2021): `held_out`, val and test; `all`, train too, by
    cross-validation of a linear probe of its embedding; or `off`. Not read with `data.multi_label`."""
    gate: GateSettings = GateSettings()
    """Conditions for promotion."""

    @property
    def splits(self) -> tuple[Literal["train", "val", "test"], ...]:
        """The splits that are opened, but for a model without a head, which is asked about images of train as well."""
        train = self.label_issues == "all" or self.gate.min_knn_accuracy
        return ("train", "val", "test") if train else ("val", "test")


class ExportSettings(Section):
    """The student as an ONNX file: which variants of it are tried, and what they may lose."""

    enabled: bool = True
    """Whether to export; without, the registered model runs on torch. Needs the extra `export`."""
    int8: bool = True
    """Whether int8 variants are tried, too."""
    openvino: Annotated[bool, Field(exclude_if=_is_unset)] = False
    """Whether each variant is also tried in OpenVINO. Needs the package `openvino`, as does serving such a variant."""
    finetune_steps: Annotated[NonNegative, Field(exclude_if=lambda value: value == 100)] = 100
    """Steps of quantization-aware fine-tuning, 32 training images each, if no int8 variant keeps the student's answers; 0: none."""
    calibration_images: Positive = 128
    """Training images by which the ranges of int8 activations are chosen."""
    test_images: Annotated[Positive, Field(exclude_if=lambda value: value == 10_000)] = 10_000
    """Most validation images on which variants are compared, and most test images for the chosen variant."""
    max_accuracy_loss: Fraction = 0.01
    """Largest loss of validation top-1 (mAP with `data.multi_label`) of a variant against the student, as a fraction."""
    max_shift: Fraction = 0.05
    """Largest share of probability that a variant may move to other classes than the student, on average over the validation images. With
    `data.multi_label`: the largest difference of a class's probability, on average."""


def _model_name(name: str) -> str:
    """Check the name of a registered model as MLflow does, and the length that its databases take."""
    if not name.strip() or {"/", ":"} & set(name) or name == "." or name.startswith("..") or len(name) > 256:
        raise ValueError(
            f"must be a name that MLflow takes: 1 to 256 characters, without / and :, not . and not beginning with .., got {name!r}"
        )
    return name


def _alias(name: str) -> str:
    """Check an alias as MLflow does."""
    if not re.fullmatch(r"[\w\-]{1,255}", name) or name.lower() == "latest" or re.fullmatch(r"[vV]\d+", name):
        raise ValueError(
            "must be an alias that MLflow takes: 1 to 255 letters, digits, dashes and underscores, neither latest nor the number of a "
            f"version such as v1, got {name!r}; choose another one, such as champion"
        )
    return name


def _experiment(name: str) -> str:
    """Check the name of an experiment as MLflow does."""
    if not 0 < len(name) <= 500:
        raise ValueError(f"must be a name that MLflow takes: 1 to 500 characters, got {limits.cut(name, 60)!r}")
    return name


class RegisterSettings(Section):
    """The MLflow model."""

    model_name: Annotated[str, AfterValidator(_model_name)] = "vit-student"
    """Name of the registered model; the default is followed by the recipe's name, as in `vit-student-digits`."""
    alias: Annotated[str, AfterValidator(_alias)] = "champion"
    """Alias moved to the new version if the gate passed."""
    same_classes: bool = True
    """Whether the alias stays if its present version knows other classes than the new version; false moves it."""


class TrackingSettings(Section):
    """Where metrics and models are recorded."""

    enabled: bool = True
    """Whether training stages send their metrics to MLflow."""
    uri: Place = ""
    """MLflow tracking URI; where empty, `MLFLOW_TRACKING_URI`, or else a SQLite file beside the runs."""
    experiment: Annotated[str, AfterValidator(_experiment)] = "vit-distillation"
    """MLflow experiment."""


class RunSettings(Section):
    """Settings of the whole run."""

    seed: NonNegative = 0
    """Seed of every stage without its own."""
    device: Literal["auto", "cpu", "cuda", "xla"] = "auto"
    """Where models are trained and evaluated; auto takes a GPU if there is one."""
    deterministic: bool = False
    """Use only deterministic operations on a GPU, so that a resumed training ends with the same bits. Slower; not measured. A CPU is always
    deterministic."""
    reuse: bool = True
    """Reuse results of earlier runs beside the output with the same settings, inputs and code. On a cluster Kubeflow's cache does this."""
    budget_usd: NonNegativeFloat = 0.0
    """Most dollars that the distillation may cost; a higher forecast ends the run before the money is spent. 0 sets no limit."""
    budget_hours: NonNegativeFloat = 0.0
    """Most hours that the distillation may take; 0 sets no limit."""
    notify: str = ""
    """Receivers of findings and of the end of the run: `https://host/path` (signed JSON) or `alertmanager+http://host:9093`. Default: the
    environment variable `TRAINER_NOTIFY`, the place for Slack's secret address and the only one on a cluster (docs/profiling.md)."""

    @field_validator("notify")
    @classmethod
    def _is_an_address(cls, given: str) -> str:
        from trainer.io import notifications  # which loads what sends

        try:
            forms = [form for form, _ in notifications.addresses({notifications.ADDRESSES: given})]
        except SettingsError as error:
            raise ValueError(str(error)) from error
        if "slack" in forms:
            raise ValueError(f"Slack's address is a secret; set {notifications.ADDRESSES} in the environment instead")
        return given


# A model never registers virtual subclasses, so its field may be named like ABCMeta.register.
warnings.filterwarnings("ignore", message='Field name "register" in "Settings" shadows', category=UserWarning)


class Settings(Section):
    """All settings of a run."""

    run: RunSettings = RunSettings()
    """Settings of the whole run."""
    tracking: TrackingSettings = TrackingSettings()
    """Where metrics and models are recorded."""
    data: DataSettings = DataSettings()
    """Which images, and how `prepare` stores them."""
    warm_up: WarmUpSettings = WarmUpSettings()
    """Compilation ahead of time."""
    pretrain: PretrainSettings = PretrainSettings()
    """The teacher."""
    reinforce: ReinforceSettings = ReinforceSettings()
    """The teacher's recorded outputs."""
    tune: TuneSettings = TuneSettings()
    """Trials before the distillation."""
    search: SearchSettings = SearchSettings()
    """Trials of other settings of the distillation, for accuracy."""
    distill: DistillSettings = DistillSettings()
    """The student."""
    profile: ProfileSettings = ProfileSettings()
    """The report on the training."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """How teacher and student are measured."""
    export: ExportSettings = ExportSettings()
    """The student as an ONNX file."""
    register: RegisterSettings = RegisterSettings()
    """The MLflow model."""

    def with_distill(self, values: Mapping[str, Any]) -> Self:
        """Return these settings with another section `distill`, which `search` tries too."""
        distill = DistillSettings.model_validate(values)
        search = self.search if self.search.distill is None else self.search.model_copy(update={"distill": distill})
        return self.model_copy(update={"distill": distill, "search": search})

    def for_stage(self, stage: str) -> dict[str, Any]:
        """Return the JSON object that a stage gets: its own section, and nothing that it does not read."""
        name = STAGES[stage].section
        unread = LOADING if name == "data" else set()
        dumped: dict[str, Any] = getattr(self, name).model_dump(mode="json", exclude=unread)
        return dumped

    def deciding(self, stage: str) -> dict[str, Any]:
        """Return what of that decides the stage's result, as the manifests of its artifacts have it."""
        unread = HOW_PREPARED if STAGES[stage].section == "data" else set()
        return {name: value for name, value in self.for_stage(stage).items() if name not in unread}
