"""timm's pretrained weights at one revision, and the rows of their heads that mean the data set's classes.

Shapes: K classes of the data set, L classes of the weights, D features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.models import PretrainedCfg

from trainer import hub, limits, models
from trainer.config import TIMM, ClassReference, ModelSettings, TimmWeights
from trainer.errors import ModelError
from trainer.models import Classifier, Origin

_NAMED = 5
"""Most classes that a message names."""
_FINETUNE = "let it be fine-tuned with a new head (pretrain.finetune.epochs)"


def pin(weights: TimmWeights) -> TimmWeights:
    """Add the revision that the Hub has now to weights without one, where it can be known."""
    _source(weights.name)
    return weights if weights.revision else weights._replace(revision=hub.weights_revision(weights.name) or "")


def load(weights: TimmWeights, args: Mapping[str, Any]) -> Classifier:
    """Build a timm model with all its pretrained weights, its own head's too; with another `img_size` positions are interpolated."""
    weights = pin(weights)
    name, revision = weights
    models.check_arguments(name, args)
    source = _source(name)
    overlay = None
    if revision and source.hf_hub_id:
        # custom_load says how the file is read, and timm resets it where another repository is given.
        repository = source.hf_hub_id.partition("@")[0]
        overlay = {"hf_hub_id": f"{repository}@{revision}", "custom_load": source.custom_load}
    try:
        network = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **args)
    except Exception as error:  # timm passes any argument on to any model, and the hub client raises its own kinds
        reason = limits.cut(" ".join(str(error).split()), 500)
        raise ModelError(
            f"{weights} cannot be built with the arguments {dict(args)}: {reason}; check the network "
            "and HF_TOKEN, and that pretrain.teacher.args leaves all weights but the positions as they are"
        ) from error
    origin = Origin(
        name=f"{TIMM}{name}",
        repository=source.hf_hub_id or str(source.url),
        revision=revision if source.hf_hub_id else "",
        license=source.license or "",
    )
    settings = ModelSettings(architecture=name, args=args)
    return models.wrap(network, settings, _labels(name, network), origin)


def outline(weights: TimmWeights, args: Mapping[str, Any]) -> Classifier:
    """Build what `load` would, on the meta device; no weights are fetched, so whether they fit the arguments is not known."""
    name = weights.name
    _source(name)
    models.check_arguments(name, args)
    with torch.device("meta"):
        try:
            network = timm.create_model(name, **args)
        except Exception as error:  # timm passes any argument on to any model
            raise ModelError(f"{TIMM}{name} cannot be built with the arguments {dict(args)}: {error}") from error
        return models.wrap(network, ModelSettings(architecture=name, args=args), _labels(name, network))


def _source(name: str) -> PretrainedCfg:
    """Return timm's entry for pretrained weights."""
    models.check_architecture(name)
    try:
        source: PretrainedCfg | None = timm.get_pretrained_cfg(name)
    except RuntimeError:  # the model has no weights by this tag
        source = None
    if source is None or not source.has_weights:
        known = timm.list_pretrained(f"{name.partition('.')[0]}*")[:_NAMED]
        raise ModelError(
            f"{TIMM}{name}: timm has no such weights" + (f"; similar: {', '.join(known)}" if known else "")
        )
    return source


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
    """Keep those rows of a network's head that mean the data set's classes, in their order.

    Args:
        model: with a head of L classes.
        label_map: which class of the model each of the data set's is, by name or index; empty where they have the same names.
        name: of the weights, for messages.
    """
    card = replace(model.card, labels=tuple(classes))
    rows = _rows(model.card.labels, classes, label_map, name)
    if rows == list(range(len(model.card.labels))):
        return Classifier(model.network, card)
    chosen = models.create(ModelSettings(architecture=card.architecture, args=card.args), classes).network
    weights, shapes = model.network.state_dict(), {key: value.shape for key, value in chosen.state_dict().items()}
    for key in filter(models.is_of_head(model.network), weights):
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
    known = {label: index for index, label in enumerate(labels)} | {index: index for index in range(len(labels))}
    meant = {name: label_map.get(name, name) for name in classes}
    missing = [given for given, reference in meant.items() if reference not in known]
    if missing:
        first = missing[0]
        raise ModelError(
            f"{name}: of the data set's {len(classes)} classes {len(missing)} are not among its {len(labels)} ({_listed(labels)}), first "
            f"{first!r}{f' as {meant[first]!r}' * (first in label_map)}; say with pretrain.label_map which of them it is, by name or "
            f"index, such as {{{first!r} = 0}}, or {_FINETUNE}"
        )
    rows = [known[reference] for reference in meant.values()]
    row, count = Counter(rows).most_common(1)[0]
    if count > 1:
        shared = [given for given, one in zip(classes, rows, strict=True) if one == row]
        raise ModelError(f"{name}: {_listed(shared)} would be the same class of it, {labels[row]!r}; {_FINETUNE}")
    return rows


def _listed(names: Sequence[str]) -> str:
    """Join a few of the names."""
    return ", ".join(repr(name) for name in names[:_NAMED]) + ", ..." * (len(names) > _NAMED)
