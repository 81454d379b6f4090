"""Teachers that timm does not have: models of the Transformers library, and modules that a function of the user's returns.

Both are taken as they are, for their logits alone: they are neither trained nor compared by their features. A model directory names the
function, or has the model's configuration, so it is opened wherever the same code is installed. A function is code that a directory
from elsewhere could choose, so it is called only where `TRAINER_MODULES` lists its module.

Shapes: B images, S the edge of the network's input, L classes of the module, K classes of the data set.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import ModuleWeights, TransformersWeights
from trainer.graph import MODULE, TRANSFORMERS
from trainer.io import limits
from trainer.io.errors import ModelError
from trainer.io.host import MODULES_VARIABLE

_CONFIG = "config"  # the argument that holds a Transformers configuration, as JSON
_NO_OTHER_CODE = (
    "_implementation",
    "auto_map",
    "quantization_config",
)  # ends of names of a configuration that are not kept


class CustomNetwork(nn.Module):
    """A module that takes normalized images [B, 3, S, S] and returns logits, or an object that has them in `logits`."""

    rows: Tensor

    def __init__(self, module: nn.Module, rows: Tensor) -> None:
        """Choose the module's classes `rows` [K], in this order."""
        super().__init__()
        self.module = module
        self.register_buffer("rows", rows)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [B, K]."""
        answer = self.module(images)
        logits: Tensor = getattr(answer, "logits", answer)
        return logits.index_select(1, self.rows)

    def get_classifier(self) -> tuple[nn.Module, ...]:
        """List the modules that make logits of pooled features, as timm's networks do: none is known."""
        return ()


@dataclass(frozen=True, kw_only=True)
class CustomModel:
    """A network from elsewhere, with the facts that it states of itself; others are None."""

    network: CustomNetwork
    args: Mapping[str, Any]
    labels: tuple[str, ...] | None
    image_size: int | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    revision: str = ""  # commit on the Hub


def is_custom(architecture: str) -> bool:
    """Return whether an architecture is none of timm's, by its prefix."""
    return architecture.startswith((MODULE, TRANSFORMERS))


def create(architecture: str, args: Mapping[str, Any], classes: int) -> CustomNetwork:
    """Build what a model directory describes, to take its weights, on torch's default device; a `ModelError` if its code is missing."""
    rows = torch.arange(classes)
    if architecture.startswith(TRANSFORMERS):
        return CustomNetwork(_from_config(architecture, args), rows)
    name = architecture.removeprefix(MODULE)
    with torch.device("cpu"):
        module = _call(name, args, pretrained=False)
    return CustomNetwork(module.to(torch.get_default_device()), rows)


def load(weights: ModuleWeights | TransformersWeights, args: Mapping[str, Any], *, pretrained: bool) -> CustomModel:
    """Build a network with its own weights and classes; unless `pretrained`, without reading the weights if possible.

    A `ModelError` if its code is not here or not allowed, there is no such model, or it does not make logits of images.
    """
    if isinstance(weights, TransformersWeights):
        return _of_transformers(weights, args, pretrained=pretrained)
    with torch.device("cpu"):  # whoever wrote the function need not know of others
        module = _call(weights.name, args, pretrained=pretrained)
    described: Any = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None) or {}
    labels = described.get("label_names")
    size = described.get("input_size")
    return CustomModel(
        network=CustomNetwork(module, torch.arange(0)),
        args=args,
        labels=tuple(labels) if labels else None,
        image_size=size[-1] if size else None,
        mean=described.get("mean"),
        std=described.get("std"),
    )


def count_classes(network: CustomNetwork, image_size: int, name: str) -> int:
    """Return how many classes L the module's logits have, by a gray image; raises a `ModelError` where it gives no logits."""
    at = next(network.module.parameters(), torch.empty(0))
    network.eval()
    try:
        with torch.no_grad():
            answer = network.module(torch.zeros(1, 3, image_size, image_size, device=at.device, dtype=torch.float32))
    except Exception as error:  # each module has its own words for it
        raise ModelError(
            f"{name}: takes no images of {image_size} pixels ({limits.cut(' '.join(str(error).split()), 300)}); set "
            "pretrain.teacher.image_size to the edge of its input"
        ) from error
    logits = getattr(answer, "logits", answer)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point():
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(f"{name}: returns {got} for one image instead of logits [1, classes]; let it return these")
    return int(logits.shape[1])


# ---- A function of the user's


def _call(name: str, args: Mapping[str, Any], *, pretrained: bool) -> nn.Module:
    """Call `MODULE:FUNCTION` with the arguments, and with `pretrained` if it has such a parameter."""
    function = _function(name)
    given = dict(args)
    if "pretrained" in inspect.signature(function).parameters:
        given["pretrained"] = pretrained
    try:
        module = function(**given)
    except Exception as error:  # the user's own code
        raise ModelError(
            f"{MODULE}{name} failed with the arguments {given}: {type(error).__name__}: {limits.cut(str(error), 300)}; "
            "mend it, or set pretrain.teacher.args to what it takes"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{MODULE}{name} returned a {type(module).__name__}; let it return a torch.nn.Module")
    return module.eval()


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    if not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ModelError(
            f"{MODULE}{name}: write it as {MODULE}PACKAGE.MODULE:FUNCTION, such as {MODULE}my_models:teacher"
        )
    if module not in os.environ.get(MODULES_VARIABLE, "").replace(",", " ").split():
        raise ModelError(
            f"{MODULE}{name} runs code of the module {module}, which is not allowed here; if you trust it, set {MODULES_VARIABLE}={module} "
            "in the environment, for a cluster in the image that has the module"
        )
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ModelError(
            f"{MODULE}{name}: {module} cannot be imported ({error}); install it, or put its folder into PYTHONPATH"
        ) from error
    if not callable(found):
        raise ModelError(f"{MODULE}{name}: {module} has no function {function}; name the one that returns the network")
    return found


# ---- Transformers


def _of_transformers(weights: TransformersWeights, args: Mapping[str, Any], *, pretrained: bool) -> CustomModel:
    if args:
        raise ModelError(f"{weights}: takes no arguments, got {dict(args)}; set pretrain.teacher.args={{}}")
    if weights.is_folder and not Path(weights.name).is_dir():
        raise ModelError(
            f"{weights}: there is no such folder on this machine; a model of the Hub is named as transformers:OWNER/NAME"
        )
    transformers = _library(str(weights))
    where = {"revision": weights.revision or None, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(weights.name, **where)
        processor = transformers.AutoImageProcessor.from_pretrained(weights.name, **where)
        kept = json.dumps({name: value for name, value in config.to_diff_dict().items() if not name.startswith("_")})
        if pretrained:
            module = transformers.AutoModelForImageClassification.from_pretrained(
                weights.name, **where, use_safetensors=True, dtype=torch.float32
            )
        else:
            module = _from_config(str(weights), {_CONFIG: kept})
    except (
        OSError,
        ValueError,
        KeyError,
        ImportError,
    ) as error:  # as the library says that there is none, or of another kind
        raise ModelError(
            f"{weights} is no image classifier that Transformers can load ({limits.cut(' '.join(str(error).split()), 300)}); check its "
            "name, the network and HF_TOKEN"
        ) from error
    labels = config.id2label
    given = processor.to_dict()
    size = given.get("crop_size") if given.get("do_center_crop") else given.get("size")
    edges = {edge for name, edge in (size or {}).items() if name in {"height", "width", "shortest_edge"} and edge}
    mean, std = _normalization(str(weights), processor)
    return CustomModel(
        network=CustomNetwork(module.eval(), torch.arange(0)),
        args={_CONFIG: kept},
        labels=tuple(labels[index] for index in sorted(labels)),
        image_size=edges.pop() if len(edges) == 1 else None,
        mean=mean,
        std=std,
        revision=getattr(config, "_commit_hash", None) or weights.revision,
    )


def _normalization(name: str, processor: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of pixels in [0, 1], R, G, B, with which a network's input is what its image processor makes of
    them; a `ModelError` where the processor does more.
    """

    def says(setting: str) -> Any:  # what a class of Transformers does not have, or leaves open, it does not do
        return getattr(processor, setting, None)

    if says("do_flip_channel_order"):
        raise ModelError(
            f"{name}: its image processor swaps red and blue (do_flip_channel_order), which is not supported; choose another teacher, or "
            "load it in a function of your own (module:PACKAGE:FUNCTION)"
        )
    scale = 255 * (says("rescale_factor") or 1 / 255) if says("do_rescale") else 255.0
    shift = 1.0 if says("rescale_offset") else 0.0  # EfficientNet's: pixels in [-1, 1]
    mean, std = (says("image_mean"), says("image_std")) if says("do_normalize") else ([0.0] * 3, [1.0] * 3)
    divided = says("image_std") if says("include_top") else [1.0] * 3  # EfficientNet's, once more by the same deviation
    return tuple((shift + one) / scale for one in mean), tuple(
        one * more / scale for one, more in zip(std, divided, strict=True)
    )


def _from_config(name: str, args: Mapping[str, Any]) -> nn.Module:
    """Build a Transformers classifier from the configuration in a model directory; no code but the library's is run."""
    transformers = _library(name)
    try:
        kept = json.loads(args[_CONFIG])
        # These could ask for code from elsewhere.
        kept = {
            key: value for key, value in kept.items() if not key.startswith("_") and not key.endswith(_NO_OTHER_CODE)
        }
        kept["id2label"] = {int(index): label for index, label in kept.get("id2label", {}).items()} or None
        config = transformers.AutoConfig.for_model(**{key: value for key, value in kept.items() if value is not None})
        module: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{name}: cannot be built from its configuration ({limits.cut(str(error), 300)}); make the model again"
        ) from error
    return module


def _library(name: str) -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            f"{name} needs the library transformers; pip install 'vit-distillation-pipeline[transformers]'"
        )
    import transformers  # here, since it takes seconds

    # In a log its progress bar is one long line.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # Transformers does not type its logging
    return transformers
