"""Teachers and students: networks, nearly all of timm, that take raw images, and the directories that hold them.

A `Classifier` takes uint8 images of any size, resizes and normalizes them for its own network, and returns logits; so a teacher and a
student with different input sizes and statistics share one batch. One without labels has no head, and returns its embedding: the pooled
features that a head would read. A model directory holds `config.json` and `model.safetensors`; nothing
in it is unpickled. What timm does not know or refuses, and what does not make a model, is a `ModelError`.

Shapes: B images, C = 3 channels, H x W pixels, K classes, D pooled features.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

import safetensors.torch
import timm
import torch
from pydantic import BeforeValidator, TypeAdapter
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from trainer.config import ModelSettings
from trainer.graph import TIMM
from trainer.io import artifacts, limits, storage
from trainer.io.artifacts import Artifact
from trainer.io.errors import ModelError, StorageError
from trainer.models import custom_networks
from trainer.models.served_student.preprocessing import Square, with_present_names
from trainer.models.served_student.torch_network import Preprocessing

CONFIG = "config.json"
WEIGHTS = "model.safetensors"

CHANNELS = 3  # of every image: red, green and blue
_RESERVED = frozenset(
    {"cache_dir", "checkpoint_path", "device", "dtype", "exportable", "features_only", "no_jit", "num_classes"}
    | {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "scriptable"}
)
"""Arguments of timm about how a model is built rather than what it is; `checkpoint_path` would read any file that it names."""
_LEFT_OUT = ("embedding", "tokens", "temperature", "threshold")  # what a model's description has only where it is known


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Pretrained weights from elsewhere."""

    name: str  # as the setting `weights` names them, without the revision
    repository: str  # where they are published: a repository of the hub, or a URL; or the file that they were read from
    revision: str  # commit of the repository, or SHA-256 of the file; empty where it is not known
    license: str  # as timm knows it; empty where it does not


@dataclass(frozen=True, kw_only=True)
class EmbeddingStatistics:
    """How a model's embedding is distributed over a data set's training images."""

    mean: tuple[float, ...]  # of each of its D numbers
    std: tuple[float, ...]  # standard deviation of each, positive

    def __post_init__(self) -> None:
        """Check a description from elsewhere, since embeddings are divided by it."""
        if len(self.mean) != len(self.std):
            raise ValueError(f"embedding has {len(self.mean)} means and {len(self.std)} standard deviations")
        if not all(map(math.isfinite, (*self.mean, *self.std))) or any(one <= 0 for one in self.std):
            raise ValueError("embedding must have finite means and positive standard deviations")


_SIZES = {"depth": "depth", "embed_dim": "width"}  # arguments that say how large a model is -> what people call them


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Everything but the weights that is needed to build and feed a model."""

    architecture: str
    args: Mapping[str, int | float | str | bool]
    labels: tuple[str, ...]  # name of each class, in the order of the logits; empty for a model without a head
    image_size: int  # edge of the network's input, in pixels
    mean: tuple[float, float, float]  # mean of each channel of the normalized input, with pixels in [0, 1]
    std: tuple[float, float, float]  # standard deviation of each channel, with pixels in [0, 1]
    interpolation: Literal["bilinear"] = "bilinear"
    """How a square is resized to the network's input, with antialiasing; older directories lack it, and mean this one."""
    square: Annotated[Square | None, BeforeValidator(with_present_names)] = None
    """How a photo becomes the square that the model was trained and measured on; None before that, and in older directories."""
    origin: Origin | None = None  # the weights that its training began with; None where it began from scratch
    embedding: EmbeddingStatistics | None = None
    """Of a teacher without a head, so that its embedding can be standardized; left out of the file where there is none."""
    tokens: EmbeddingStatistics | None = None
    """The same of its patch tokens, of all places together; None also where it has no map of them, and in older directories."""
    temperature: float | None = None
    """By which the logits are divided for probabilities, as `evaluate` has fitted it; None where it has not: 1."""
    threshold: float | None = None
    """Probability above which a class is named, of a model for images that may have several labels: it says of each class by itself how
    probable that is. As `evaluate` has chosen it, 0.5 before that; None for a model that chooses between its classes."""

    def __post_init__(self) -> None:
        """Check the size, since a description from elsewhere may ask for any."""
        if not 0 < self.image_size <= limits.MODEL_ARGUMENT:
            raise ValueError(f"image_size must be from 1 to {limits.MODEL_ARGUMENT:,}, got {self.image_size}")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be a positive number, got {self.temperature}")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be from 0 to 1, got {self.threshold}")

    @property
    def title(self) -> str:
        """Name the model for people, by what two of one architecture differ in: `vit_tiny_patch16_224, depth 4, width 96, 32 px`."""
        sizes = [f"{word} {self.args[name]}" for name, word in _SIZES.items() if name in self.args]
        return ", ".join([self.architecture, *sizes, f"{self.image_size} px"])


MapShape = tuple[int, int, int]  # height and width of a map, in places, and numbers of each place


class ModelOutputs(NamedTuple):
    """A network's outputs for B images, as far as they were asked for; maps of h x w places have the channels last."""

    logits: Tensor | None = None  # [B, K]; in distilled training those of the class token
    distilled: Tensor | None = None  # [B, K] of the distillation token, in distilled training only (`train_distilled`)
    features: Tensor | None = None  # pooled features that the head reads, [B, D]
    tokens: Tensor | None = None  # patch tokens: the last map, after the final norm, [B, h, w, D]
    blocks: tuple[Tensor, ...] = ()  # what blocks give, each [B, h, w, D] with its own h, w, D


class Classifier(nn.Module):
    """A network with its preprocessing: raw images to logits, or to the embedding where it has no head."""

    def __init__(self, network: nn.Module, card: ModelCard) -> None:
        super().__init__()
        self.network = network
        self.card = card
        self.preprocess = Preprocessing(card.image_size, card.mean, card.std, card.interpolation)
        self.trains_head_alone = False
        """Whether the network stays in evaluation mode in a training too: without dropout, with the running statistics that it has."""

    def train(self, mode: bool = True) -> Self:
        """As torch's, but for `trains_head_alone`."""
        super().train(mode)
        if self.trains_head_alone:
            self.network.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Classify raw images [B, 3, H, W] (0..255): logits [B, K]; without a head the embedding [B, D]."""
        logits: Tensor = self.network(self.preprocess(images))
        return logits

    def outputs(
        self,
        images: Tensor,
        *,
        logits: bool = True,
        features: bool = False,
        tokens: bool = False,
        blocks: Sequence[int] = (),
    ) -> ModelOutputs:
        """Compute the wanted outputs of raw images [B, 3, H, W] in one forward pass.

        Logits and features together come from a network whose head reads its pooled features; `feature_size` refuses others, and
        `token_shape` and `block_shapes` those without tokens or blocks.
        """
        network: Any = self.network
        pooled, last, maps = None, None, {}
        if not features and not tokens and not blocks:
            answer = self(images)
        else:
            if blocks:
                last, found = network.forward_intermediates(self.preprocess(images), indices=[*blocks])
                maps = dict(zip(sorted({*blocks}), found, strict=True))
            else:
                last = network.forward_features(self.preprocess(images))
            pooled = network.forward_head(last, pre_logits=True) if features else None
            answer = None
            if logits:
                heads = _heads(network)
                answer = network.forward_head(last) if pooled is None or len(heads) > 1 else heads[0](pooled)
        own, distilled = answer if isinstance(answer, tuple) else (answer, None)
        taken = tuple(maps[block].permute(0, 2, 3, 1) for block in blocks)
        return ModelOutputs(own, distilled, pooled, self._map(last) if tokens else None, taken)

    def pooled(self, images: Tensor) -> Tensor:
        """Compute the pooled features [B, D] before the head, of raw images [B, 3, H, W]."""
        features = self.outputs(images, logits=False, features=True).features
        assert features is not None, "they were asked for"
        return features

    def _map(self, last: Any) -> Tensor | None:
        """Bring a last block's output, [B, N, D], [B, D, h, w] or [B, h, w, D], to [B, h, w, D] without prefix tokens, or to None."""
        network: Any = self.network
        if not isinstance(last, Tensor):
            return None
        if last.ndim == 3:
            last = last[:, getattr(network, "num_prefix_tokens", 0) :]
            edge = math.isqrt(last.shape[1])
            return last.unflatten(1, (edge, edge)) if last.shape[1] == edge * edge > 1 else None
        if getattr(network, "output_fmt", "NCHW") != "NHWC":
            last = last.permute(0, 2, 3, 1)
        return last if last.shape[1] == last.shape[2] > 1 else None


def create(settings: ModelSettings, labels: Sequence[str], *, drop_path: float = 0.0) -> Classifier:
    """Build an untrained model with a head for `labels`, or without one if there are none; the weights follow torch's generator."""
    if custom_networks.is_custom(settings.architecture):
        raise ModelError(
            f"architecture {settings.architecture!r}: is taken as it is, as a teacher, and neither trained nor given another head; choose "
            "one of timm's architectures"
        )
    architecture, args = settings.architecture, arguments(settings)
    further: dict[str, Any] = {"drop_path_rate": drop_path} if drop_path else {}
    try:
        network: Any = timm.create_model(architecture, **{**args, "num_classes": len(labels), **further})
    except Exception as error:  # timm passes any argument on to any model
        raise ModelError(
            f"architecture {architecture!r} with the arguments {dict(args)} cannot be built: {error}"
        ) from error
    if not network.default_cfg["classifier"]:
        raise ModelError(f"architecture {architecture!r}: has no head for classes; choose another one")
    return wrap(network, settings, labels)


def wrap(
    network: nn.Module, settings: ModelSettings, labels: Sequence[str], origin: Origin | None = None
) -> Classifier:
    """Wrap a timm network that was built from these settings with the preprocessing that timm knows for it."""
    data_config, args = timm.data.resolve_data_config(model=network), arguments(settings)
    if data_config["input_size"][0] != CHANNELS:
        raise ModelError(
            f"architecture {settings.architecture!r}: takes images of {data_config['input_size'][0]} channels, but every image has "
            f"{CHANNELS}; choose another one"
        )
    card = ModelCard(
        architecture=settings.architecture,
        args=args,
        labels=tuple(labels),
        image_size=int(args.get("img_size", settings.image_size or data_config["input_size"][-1])),
        mean=settings.mean or tuple(data_config["mean"]),
        std=settings.std or tuple(data_config["std"]),
        origin=origin,
    )
    return Classifier(network, card)


def arguments(settings: ModelSettings) -> dict[str, int | float | str | bool]:
    """Check a model's name and arguments, and return those for timm: with `img_size` where the weights' shapes depend on it."""
    name, args, size = settings.architecture, dict(settings.args), settings.image_size
    check_architecture(name)
    if reserved := sorted(_RESERVED & args.keys()):
        raise ModelError(f"architecture {name!r}: the argument {reserved[0]} is not for models; leave it out")
    for argument, value in args.items():
        if isinstance(value, int | float) and not abs(value) <= limits.MODEL_ARGUMENT:
            raise ModelError(
                f"architecture {name!r}: the argument {argument} must be at most {limits.MODEL_ARGUMENT:,}, got {value}"
            )
    if args.get("in_chans", CHANNELS) != CHANNELS:
        raise ModelError(
            f"architecture {name!r}: in_chans is {args['in_chans']}, but every image has {CHANNELS} channels, a gray one three equal ones; "
            "leave in_chans out of the arguments"
        )
    if not size:
        return args
    if args.get("img_size", size) != size:
        raise ModelError(
            f"architecture {name!r}: image_size is {size}, but args.img_size is {args['img_size']}; leave one of them out"
        )
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return args | {"img_size": size} if config is not None and config.fixed_input_size else args


def check_architecture(architecture: str) -> None:
    """Make sure that timm has a model of this name; the error names similar ones."""
    if not timm.is_model(architecture):
        name = architecture.rpartition(":")[2].removeprefix("timm/")
        if timm.is_model(name):
            raise ModelError(
                f"architecture {architecture!r}: is a name of weights; set architecture={name}, and weights={TIMM}{name} to begin with them"
            )
        close = timm.list_models(f"*{architecture.split('.')[0].split('_')[0]}*")[:5]
        advice = f"; similar: {', '.join(close)}" if close else ""
        raise ModelError(f"architecture {architecture!r}: timm has no such model{advice}")


def with_labels(model: Classifier, labels: Sequence[str], *, drop_path: float = 0.0) -> Classifier:
    """Copy the weights into a model for `labels`, for training, with this stochastic depth; the head is new where the labels differ.

    Without `labels` the copy has no head. Measurements of the given model do not hold for the copy.
    """
    settings = ModelSettings(architecture=model.card.architecture, args=model.card.args)
    network = create(settings, labels, drop_path=drop_path).network
    weights = model.network.state_dict()
    if tuple(labels) != model.card.labels:
        # Between a model with a head and one without, a normalization in it comes or goes too.
        of_head = is_of_head(network if labels else model.network, whole=not labels or not model.card.labels)
        kept = {name: value for name, value in weights.items() if not of_head(name)}
        weights = {name: value for name, value in network.state_dict().items() if of_head(name)} | kept
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:  # such as EfficientViT's (MSRA), of whose head timm names but a part
        raise ModelError(
            f"architecture {model.card.architecture!r} cannot be taken without its head: timm does not name all of its weights; choose "
            "another one"
        ) from error
    unknown: dict[str, Any] = dict.fromkeys(_LEFT_OUT)
    return Classifier(network, replace(model.card, labels=tuple(labels), **unknown))


@torch.no_grad()
def with_head(model: Classifier, labels: Sequence[str], weight: Tensor, bias: Tensor) -> Classifier:
    """Copy a headless model, with a linear head: weight [K, D], bias [K]; a `ModelError` if its own head is not one linear layer."""
    headed = with_labels(model, labels)
    _check_linear_head(headed)
    network: Any = headed.network
    network.get_classifier().weight.copy_(weight)
    network.get_classifier().bias.copy_(bias)
    return headed


def is_of_head(network: nn.Module, *, whole: bool = False) -> Callable[[str], bool]:
    """Return a test for the names of the head's weights (timm's models may have several heads); `whole` includes a head's normalization."""
    default_config: Any = network.default_cfg
    names = default_config["classifier"]
    names = {names} if isinstance(names, str) else {*names}
    if whole:
        modules = _heads(network)
        names |= {name for name, module in network.named_modules() if any(module is one for one in modules)}
    prefixes = tuple(f"{name}." for name in names)
    return lambda name: name.startswith(prefixes)


def checkpoint_activations(model: nn.Module) -> None:
    """Let a timm network drop the activations within its blocks and compute them again in the backward pass (Chen et al. 2016).

    A `ModelError` if timm cannot do so with this network, or its running statistics would count each batch twice.
    """
    network: Any = next((part for part in model.modules() if hasattr(part, "set_grad_checkpointing")), None)
    reason = "cannot do so in timm"
    if batch_norms(model):
        reason = "has batch normalization, whose running statistics would count each batch twice"
    elif network is not None:
        with suppress(AssertionError):  # by which timm says that this network cannot
            network.set_grad_checkpointing()
            return
    raise ModelError(
        f"activation_checkpointing is true, but {type(network or model).__name__} {reason}; set it to false, lower the memory with "
        "accumulation, or choose another architecture"
    )


def parameter_count(model: nn.Module) -> int:
    """Count the weights."""
    return sum(parameter.numel() for parameter in model.parameters())


def feature_size(model: Classifier) -> int:
    """Return the length D of the pooled features that the head reads (a `ModelError` if it reads others), or of a headless embedding."""
    if not model.card.labels:
        with _shown_gray(model) as image:
            shape = model(image).shape
        if len(shape) != 2:
            raise ModelError(
                f"architecture {model.card.architecture!r} without its head gives {tuple(shape[1:])} numbers an image, not one row of "
                "pooled features; choose another one, or args with a global_pool"
            )
        return int(shape[1])
    size = _size_of_features(model)
    if size is None:
        raise ModelError(
            f"architecture {model.card.architecture!r} cannot be compared by its features: its logits are not made of them by its head; "
            "set distill.feature_weight=0 and reinforce.features=false, or choose another architecture"
        )
    return size


def token_shape(model: Classifier) -> MapShape:
    """Return the shape of a model's patch tokens; raises a `ModelError` if there are none (`find_token_shape`)."""
    shape = find_token_shape(model)
    if shape is None:
        raise ModelError(
            f"architecture {model.card.architecture!r} with an input of {model.preprocess.size} pixels has no patch tokens to compare: its "
            "last block gives no square map of several places of which its logits are made; set distill.token_weight=0 and "
            "reinforce.tokens=false, or choose another architecture or a larger image_size"
        )
    return shape


def find_token_shape(model: Classifier) -> MapShape | None:
    """Return the shape of a model's patch tokens; None if its last block gives no map, or its logits are made of something else."""
    if not hasattr(model.network, "forward_features"):
        return None
    with _shown_gray(model) as image:
        outputs = model.outputs(image, tokens=True)
        if outputs.tokens is None or not _is_its_answer(outputs, model, image):
            return None
    _, height, width, numbers = outputs.tokens.shape
    return height, width, numbers


def _is_its_answer(outputs: ModelOutputs, model: Classifier, image: Tensor) -> bool:
    """Return whether the logits beside other outputs are those that the model gives alone; on the meta device they may be."""
    return image.is_meta or (outputs.logits is not None and torch.allclose(outputs.logits, model(image), atol=1e-4))


def block_shapes(model: Classifier, blocks: Sequence[int]) -> list[MapShape]:
    """Return the shapes of these blocks' outputs, counted from 0 as in timm; a `ModelError` if timm does not give one beside the logits."""
    name, network = f"architecture {model.card.architecture!r}", cast(Any, model.network)
    if not hasattr(network, "forward_intermediates"):
        raise ModelError(
            f"{name} does not give what its blocks give; set distill.block_weight=0 and distill.blocks={{}}"
        )
    with _shown_gray(model) as image:
        count = len(network.forward_intermediates(model.preprocess(image), intermediates_only=True))
        if missing := [block for block in blocks if block >= count]:
            raise ModelError(
                f"{name} has blocks 0 to {count - 1}, but distill.blocks names {missing[0]}; name one of these"
            )
        try:
            outputs, reason = model.outputs(image, blocks=blocks), "other logits beside it"
        except Exception as error:  # noqa: BLE001  # each network has its own words for what it cannot do
            outputs, reason = ModelOutputs(), limits.cut(str(error), 200)
        if not outputs.blocks or not _is_its_answer(outputs, model, image):
            raise ModelError(
                f"{name}: timm does not give what its blocks {[*blocks]} give ({reason}); set distill.block_weight=0 and "
                "distill.blocks={}, name other blocks, or choose another architecture"
            )
    return [(height, width, numbers) for _, height, width, numbers in (block.shape for block in outputs.blocks)]


def train_distilled(model: Classifier) -> None:
    """Let the network give the logits of its class and distillation tokens apart while it is trained (DeiT), else their mean.

    A `ModelError` if it has no distillation token.
    """
    network: Any = model.network
    if not hasattr(network, "set_distilled_training"):
        raise ModelError(
            f"architecture {model.card.architecture!r} has no distillation token; set distill.distillation_token=false, or choose a "
            "student with one, such as deit_tiny_distilled_patch16_224"
        )
    network.set_distilled_training(True)


def _heads(network: Any) -> tuple[nn.Module, ...]:
    """Return the modules that make logits of pooled features; a network with several, such as LeViT's, averages their logits."""
    found = network.get_classifier()
    return found if isinstance(found, tuple) else (found,)


def head_of_features(model: Classifier) -> nn.Module | None:
    """Find the one module from pooled features to logits; None in a network with several, or that ends in another way."""
    heads = _heads(model.network)
    return heads[0] if len(heads) == 1 and _size_of_features(model) is not None else None


def _size_of_features(model: Classifier) -> int | None:
    """Return the length D of the pooled features [B, D] that each head reads; None where the logits are not made of them alone, as VOLO's
    are not, or the head reads a map, as ResNetV2's does.
    """
    heads, calls = _heads(model.network), list[tuple[Tensor, Tensor]]()
    if not heads:
        return None
    with _shown_gray(model) as image:
        with ExitStack() as hooks:
            for head in heads:
                hooks.enter_context(head.register_forward_hook(lambda _, given, said: calls.append((given[0], said))))
            logits = model(image)
        if len(calls) != len(heads) or any(given.ndim != 2 for given, _ in calls):
            return None
        pooled = model.pooled(image)
        if any(given.shape != pooled.shape for given, _ in calls):
            return None
        if image.is_meta:  # there are no numbers to compare: what one head gives has to be the answer itself
            is_answer = len(heads) > 1 or calls[0][1] is logits
        else:
            is_answer = _is_its_answer(model.outputs(image, features=True), model, image)
        return pooled.shape[1] if is_answer else None


def check_takes_probe(model: Classifier, labels: Sequence[str]) -> None:
    """Raise a `ModelError` where a linear probe cannot become the head of this model, once it has none; the weights do not matter."""
    _check_linear_head(with_labels(with_labels(model, ()), labels))


def _check_linear_head(model: Classifier) -> None:
    if not isinstance(head_of_features(model), nn.Linear):
        raise ModelError(
            f"architecture {model.card.architecture!r} cannot take a linear probe as its head, which is not one linear layer of the pooled "
            "features; train the head (distill.head=trained, pretrain.head=classes), or choose another architecture"
        )


@contextmanager
def input_size(model: Classifier, size: int) -> Iterator[None]:
    """Let a model's network take images of `size` pixels in the block."""
    own, model.preprocess.size = model.preprocess.size, size
    try:
        yield
    finally:
        model.preprocess.size = own


def check_input_size(model: Classifier, size: int) -> None:
    """Raise a `ModelError` where a model's network does not take images of `size` pixels too, or they are not smaller than its own."""
    name, own = f"architecture {model.card.architecture!r}", model.card.image_size
    if size >= own:
        raise ModelError(
            f"{name}: low_resolution.image_size is {size}, but its own input has {own} pixels; choose a smaller one"
        )
    try:
        with input_size(model, size), _shown_gray(model) as image:
            model(image)
    except Exception as error:  # each network has its own words for it
        raise ModelError(
            f"{name}: takes no images of {size} pixels beside its own {own} ({limits.cut(str(error), 200)}); leave low_resolution out, "
            "give it another size, or, to a ViT, args={dynamic_img_size=true}"
        ) from error


@contextmanager
def _shown_gray(model: Classifier) -> Iterator[Tensor]:
    """Give a gray image [1, 3, S, S] beside the weights, for forward passes of the block, which are those of an evaluation."""
    size, was_training = model.card.image_size, model.training
    model.eval()
    try:
        with torch.no_grad():
            yield torch.full((1, 3, size, size), 128, dtype=torch.uint8, device=next(model.parameters()).device)
    finally:
        model.train(was_training)


def save(model: Classifier, directory: Path) -> None:
    """Write `config.json` and `model.safetensors` into an artifact in the making."""
    card = {name: value for name, value in asdict(model.card).items() if value is not None or name not in _LEFT_OUT}
    (directory / CONFIG).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.network.state_dict().items()}
    # safetensors' own writing into a file hides the reason when the disk is full.
    (directory / WEIGHTS).write_bytes(safetensors.torch.save(tensors))


def load(source: str | Path | Artifact) -> Classifier:
    """Open a model directory, by its URI or already read, on the CPU, in evaluation mode, without drawing a random number.

    Its weights are the file, mapped into memory, which the machine's processes share until one changes a weight.
    """
    path = (source if isinstance(source, Artifact) else artifacts.read(source, "model")).path
    card = _outline(path).card
    with _fitting(path, card):
        with _Uninitialized(), torch.random.fork_rng(devices=[]):
            network = _described(card)
        weights, wanted = safetensors.torch.load_file(path / WEIGHTS), network.state_dict()
        network.load_state_dict({name: value.to(wanted[name].dtype) for name, value in weights.items()}, assign=True)
    return Classifier(network, card).eval()


def _described(card: ModelCard) -> nn.Module:
    """Build the network of a model directory, to take its weights."""
    if custom_networks.is_custom(card.architecture):
        return custom_networks.create(card.architecture, card.args, len(card.labels))
    return create(ModelSettings(architecture=card.architecture, args=card.args), card.labels).network


class _Uninitialized(TorchFunctionMode):
    """Leaves parameters as allocated, neither written nor drawn. The meta device would leave out tables such as Swin's masks, too."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Skip what changes a parameter in place, by a method or by a function of `torch.nn.init`: their names end alike."""
        given = kwargs or {}
        target, name = args[0] if args else given.get("tensor"), func.__name__
        writes = name.endswith("_") and not name.endswith("__")
        if writes and name != "requires_grad_" and isinstance(target, nn.Parameter):
            return target
        return func(*args, **given)


def outline(uri: str | Path) -> Classifier:
    """Open and check a model directory on the meta device, without memory for weights; a remote one without fetching them."""
    if not storage.is_remote(uri):
        return _outline(artifacts.read(uri, "model").path)
    files = artifacts.manifest(uri, "model").files
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        try:
            for name in files.keys() & {CONFIG, WEIGHTS}:
                # The description, or the header of the weights, in a sparse file of the whole file's size.
                file, path, size = storage.join(uri, name), Path(folder) / name, files[name]["size"]
                end = min(size, limits.JSON_BYTES)
                if name == WEIGHTS:
                    header = int.from_bytes(storage.read_bytes(file, 0, 8), "little")
                    end = 8 + min(header, limits.WEIGHTS_HEADER_BYTES)
                path.write_bytes(storage.read_bytes(file, 0, end))
                os.truncate(path, size)
            return _outline(Path(folder))
        except ModelError as error:
            raise ModelError(str(error).replace(folder, str(uri))) from error


def _outline(path: Path) -> Classifier:
    try:
        content = storage.read_json(path / CONFIG)
        card = TypeAdapter(ModelCard).validate_python(content)
    except (StorageError, ValueError) as error:
        raise ModelError(
            f"model {path}: {CONFIG} is not the description of a model ({limits.cut(str(error), 500)}); make it again"
        ) from error
    with _fitting(path, card):
        given = _shapes(path / WEIGHTS)
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            # Without memory, since the description may ask for any amount of it.
            network = _described(card)
        wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        for name in sorted({*given, *wanted}):
            if given.get(name) != wanted.get(name):
                raise ValueError(
                    f"{name}: its shape is {given.get(name, 'missing')} instead of {wanted.get(name, 'none')}"
                )
        found = Classifier(network, card).to("meta")
        if card.embedding is not None and len(card.embedding.mean) != feature_size(found):
            raise ValueError(
                f"its embedding has {feature_size(found)} numbers, and statistics of {len(card.embedding.mean)}"
            )
        if card.tokens is not None and len(card.tokens.mean) != token_shape(found)[-1]:
            raise ValueError(
                f"its tokens have {token_shape(found)[-1]} numbers, and statistics of {len(card.tokens.mean)}"
            )
        return found


@contextmanager
def _fitting(path: Path, card: ModelCard) -> Iterator[None]:
    """Turn errors of the block about weights that do not fit a model directory's description into a `ModelError`."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
        raise ModelError(
            f"model {path}: {WEIGHTS} does not fit {card.architecture} ({limits.cut(str(error), 500)}); make it again"
        ) from error


def _shapes(weights: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of each tensor in a safetensors file from its header."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > limits.WEIGHTS_HEADER_BYTES:
        raise ValueError(f"its header has {size:,} bytes, more than {limits.WEIGHTS_HEADER_BYTES:,}")
    with safetensors.safe_open(weights, "pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  # not a mapping


def check_labels(model: Classifier, classes: Sequence[str], name: str, *, several: bool) -> None:
    """Make sure that a model's logits mean the data set's classes (`several`: each by itself); the error names the first difference."""
    labels = model.card.labels
    advice = "give a model that was fine-tuned on this data set, or fine-tune it (pretrain.finetune.epochs)"
    if len(labels) != len(classes):
        raise ModelError(f"{name}: has {len(labels)} classes, but the data set has {len(classes)}; {advice}")
    for index, (label, wanted) in enumerate(zip(labels, classes, strict=True)):
        if label != wanted:
            raise ModelError(f"{name}: its class {index} is {label!r}, but the data set's is {wanted!r}; {advice}")
    check_kind(model, name, several=several)


def check_kind(model: Classifier, name: str, *, several: bool) -> None:
    """Make sure that a model with a head chooses between its classes, or says of each by itself, as the data set's images need it."""
    if (model.card.threshold is not None) == several:
        return
    kinds = "chooses one of its classes", "says of each class by itself whether it is there"
    has, needed = kinds[not several], "may have several labels" if several else "have one label each"
    raise ModelError(
        f"{name}: {has}, but the data set's images {needed} (data.multi_label); fine-tune it on this data set (pretrain.finetune.epochs)"
    )


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return a model's batch normalizations, of any number of dimensions."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
