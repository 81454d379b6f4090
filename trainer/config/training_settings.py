"""What the settings of all trainings are made of: models, views, loading, evidence, rules that watch, optimiser and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from trainer.base_models import Fraction, NonNegative, NonNegativeFloat, Positive, Section
from trainer.config.checks import nearest
from trainer.thresholds import RuleSettings

Precision = Literal["auto", "fp32", "bf16"]
Compile = Literal["auto", "on", "off"]
Workers = NonNegative | Literal["auto"]
ViewsOn = Literal["auto", "cpu", "device"]
DecodeOn = Literal["cpu", "cuda"]


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


LOADING = frozenset({"workers", "views_on", "decode_on"})
"""Settings of `data` about loading prepared images; they do not change what `prepare` writes."""


class ModelSettings(Section):
    """A timm model."""

    architecture: str
    """Name of a timm model (`python -m timm.models` or timm.list_models())."""
    args: Mapping[str, int | float | str | bool] = {}
    """Further arguments of the model, such as `img_size`, `patch_size`, `embed_dim`, `depth`, `num_heads`."""


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
    """Their strength: 10 shears by 0.3, turns by 30 degrees, shifts by 45 % and changes colours by 90 %."""
    erasing: Fraction = 0.0
    """Probability of random erasing (Zhong et al. 2020): a rectangle of 2 to 33 % of the area gets the view's mean colour."""
    mixup: NonNegativeFloat = 0.0
    """Alpha of mixup's Beta distribution (Zhang et al. 2018); 0 turns it off."""
    cutmix: NonNegativeFloat = 0.0
    """Alpha of CutMix's Beta distribution (Yun et al. 2019); 0 turns it off. With both, each view gets one of them."""


class EvidenceSettings(Section):
    """What a training stage records about itself."""

    system_interval_s: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """Seconds between two samples of CPU cores, memory, disk, network and GPU."""
    operators_at: tuple[NonNegative, ...] = (20,)
    """Steps (counted from the start of this process) at which a window of torch.profiler opens."""
    operators_steps: NonNegative = 3
    """Length of each window in steps; 0 turns torch.profiler off."""
    tensors_every: NonNegative = 50
    """Minimum steps between two samples of weight, gradient and attention statistics; 0 turns them off."""
    tensors_budget: Fraction = 0.003
    """Largest share of the training's time that these samples may take; they become rarer where they would take more."""


def _rule_names(names: object) -> object:
    """Accept names of rules as a list or as comma-separated text."""
    listed = [name for name in names.replace(",", " ").split() if name] if isinstance(names, str) else names
    for name in listed if isinstance(listed, (list, tuple)) else ():
        if name not in RuleSettings.model_fields:
            raise ValueError(
                f"{name!r} is no rule{nearest(str(name), RuleSettings.model_fields)}; docs/rules.md has all"
            )
    return listed


RuleNames = Annotated[tuple[str, ...], BeforeValidator(_rule_names)]


class WatchSettings(Section):
    """Which rules are checked while a training runs, and how often."""

    stop_on: RuleNames = ()
    """Rules whose finding ends the training."""
    rules: RuleSettings = RuleSettings()
    """Thresholds of the rules."""
    interval_s: NonNegativeFloat = 10.0
    """Minimum seconds between two checks."""
    budget: Fraction = 0.001
    """Largest share of the training's time that checks may take; they become rarer where they would take more."""


class TrainingSettings(Section):
    """What every training loop shares."""

    epochs: NonNegative = 100
    """Passes over the training images; 0 skips this training."""
    batch_size: Annotated[int, Field(ge=2)] = 1024
    """Images per optimiser step, over all processes and accumulated micro-batches. If it does not divide evenly these differ by one image,
    and the gradient is still the mean over all images. Clamped to the number of images to train on."""
    accumulation: Positive = 1
    """Micro-batches per optimiser step on each process; more of them need less memory."""
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
    """`bf16` autocast or `fp32`; auto takes bf16 on GPUs that have it. A processor without bf16 instructions computes in fp32."""
    compile: Compile = "auto"
    """torch.compile; auto compiles on GPUs only."""
    gradient_compression: Literal["none", "bf16"] = "none"
    """Data type of gradients in the all-reduce; bf16 halves their bytes."""
    zero: bool = False
    """Shard the optimizer's state over the processes (ZeroRedundancyOptimizer)."""
    log_every: Positive = 10
    """Steps between two log lines, and between two points of each metric."""
    checkpoint_every: NonNegative = 500
    """Steps between two checkpoints; 0 writes none."""
    checkpoint_keep: Positive = 2
    """How many of the newest checkpoints to keep; the one that was best on the validation split is kept too."""
    validate_every_epochs: NonNegative = 10
    """Epochs between two validations; 0 validates at the end only."""
    views: ViewSettings = ViewSettings()
    """Augmentation."""
    evidence: EvidenceSettings = EvidenceSettings()
    """What the training records of itself."""

    def peak_learning_rate(self) -> float:
        """The learning rate after warm-up: `base_learning_rate` x `batch_size` / 256."""
        return self.base_learning_rate * self.batch_size / 256

    def for_images(self, images: int, parts: int = 1) -> Self:
        """These settings with a batch that so many images can fill, since a step sees no image twice.

        Args:
            images: how many there are to train on.
            parts: of which a clamped batch is a multiple, unless there are fewer images than parts.
        """
        if self.batch_size <= images:
            return self
        return self.model_copy(update={"batch_size": images - images % parts or images})

    def clamp_warning(self, section: str, images: int, fitted: Self) -> str:
        """What `for_images` has changed of `section`, as a line for the log."""
        return (
            f"{section}.batch_size = {self.batch_size} is larger than the {images} images to train on, and a step sees none of them twice; "
            f"it becomes {fitted.batch_size}, and the learning rate is scaled for that"
        )
