"""pretrain: make the teacher by masked-autoencoder pretraining, then fine-tuning; or take given weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from trainer.config import PretrainSettings
from trainer.data.dataset import PreparedDataset, open_dataset
from trainer.data.loader import Samples
from trainer.evaluation.embeddings import add_probe, embed_together, spread, statistics, token_statistics
from trainer.models import networks, pretrained
from trainer.models.networks import Classifier, EmbeddingStatistics
from trainer.objectives.pretraining import (
    FinetuneObjective,
    MaeObjective,
    MaskedAutoencoder,
    draw_reconstructions,
    freeze,
    merge_lora,
)
from trainer.profiling.recorder import Startup
from trainer.training.classification import label_loss
from trainer.training.session import Session, open_session

RECONSTRUCTIONS = "mae/reconstructions.png"  # where the picture stands in the evidence
_PICTURED = 8
MOST_EMBEDDED = 10_000  # training images by which an embedding is standardized, at most


def run(settings: PretrainSettings, *, dataset: str | Path, teacher: str | Path, evidence: str | Path) -> None:
    """Make the teacher; runs in every training process."""
    startup = Startup()
    with startup.part("fetch"):
        data = open_dataset(dataset, settings.splits)
        model, parents = start(settings, data)
    with open_session(
        "pretrain", settings, data, parents=parents, model=teacher, evidence=evidence, startup=startup
    ) as session:
        if settings.mae.epochs:
            pretrain(model, settings, session)
        if settings.finetune.epochs:
            model = finetune(model, settings, session)
        if settings.head == "none":
            embedding, tokens = measure_embedding(model, session)
            model.card = replace(model.card, embedding=embedding, tokens=tokens)
        elif settings.head == "probe":
            model = add_probe(model, session.data, session.processes, "pretrain")
        session.keep(model, settings.finetune)


def start(settings: PretrainSettings, data: PreparedDataset) -> tuple[Classifier, dict[str, str]]:
    """Make the model before training; returns it and the fingerprints of its origins."""
    torch.manual_seed(settings.seed or 0)
    parents = {"dataset": data.fingerprint}
    labels = data.classes if settings.head == "classes" else ()
    if not settings.weights:
        return networks.create(settings.teacher, labels), parents
    model, parents["weights"] = pretrained.start(settings, settings.teacher)
    if not labels:
        return networks.with_labels(model, labels), parents
    if settings.label_map or not settings.finetune.epochs:
        name = f"pretrain.weights {settings.weights}"
        model = pretrained.with_classes(model, data.classes, settings.label_map, name)
    if not settings.finetune.epochs:  # the head stays as it is
        networks.check_kind(model, f"pretrain.weights {settings.weights}", several=data.targets is not None)
    return model, parents


def pretrain(model: Classifier, settings: PretrainSettings, session: Session) -> None:
    """Train the network of `model` in place as a masked autoencoder, on labeled and unlabeled images."""
    torch.manual_seed(session.seed + 1)
    autoencoder = MaskedAutoencoder(model, settings.mae)
    samples = Samples(session.data.training_splits(unlabeled=True))
    objective = MaeObjective(autoencoder, session.seed)
    trained = session.train("mae", objective, samples, settings.mae, view_size=model.card.image_size, labeled=False)
    assert isinstance(trained, MaskedAutoencoder), "the objective's model is a MaskedAutoencoder"
    model.network = trained.encoder
    objective.release()
    if session.processes.is_first:
        split = session.data.split("val")
        count = min(_PICTURED, len(split))
        images = split.read(range(count)).to(trained.mask_token.device)
        keys = torch.from_numpy(split.keys[:count].view("int64"))
        picture = draw_reconstructions(trained, images, keys, seed=session.seed)
        (session.evidence.path / RECONSTRUCTIONS).write_bytes(picture)


def finetune(model: Classifier, settings: PretrainSettings, session: Session) -> Classifier:
    """Train on the labels, from the weights of `model`; gives another model."""
    torch.manual_seed(session.seed + 2)
    own = settings.finetune
    model = networks.with_labels(model, session.data.classes, drop_path=own.drop_path)
    freeze(model, own)
    trained = session.train(
        "finetune",
        FinetuneObjective(
            model,
            label_smoothing=own.label_smoothing,
            label_loss=label_loss(session.data.targets, own.multi_label_loss),
        ),
        Samples([session.data.split("train")]),
        own,
        view_size=model.card.image_size,
        layer_decay=own.layer_decay,
    )
    assert isinstance(trained, Classifier), "the objective's model is a Classifier"
    merge_lora(trained.network)
    return trained


def measure_embedding(model: Classifier, session: Session) -> tuple[EmbeddingStatistics, EmbeddingStatistics | None]:
    """Measure the distribution of the teacher's embedding, and of its patch tokens, over training images, to standardize them."""
    splits, has_tokens = session.data.training_splits(unlabeled=True), networks.find_token_shape(model) is not None
    chosen, first, parts = np.array(spread(splits, MOST_EMBEDDED)), 0, []
    for split in splits:
        own = chosen[(chosen >= first) & (chosen < first + len(split))] - first
        first += len(split)
        if len(own):
            parts.append(embed_together(model, split, own.tolist(), session.processes, moments=has_tokens))
    embeddings, moments = np.split(np.concatenate(parts), [networks.feature_size(model)], axis=1)
    return statistics(embeddings), token_statistics(moments)
