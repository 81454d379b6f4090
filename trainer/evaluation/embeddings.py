"""What a model without a head makes of images, how that is distributed over a data set, and what it knows of the classes.

Frozen embeddings are asked about classes by a linear probe, and by the vote of the nearest neighbors.

Shapes: N images, M other images, D numbers of an embedding, K classes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import scipy.optimize
import scipy.special
import torch
from torch import Tensor

from trainer.data.batch import to_device
from trainer.data.dataset import PreparedDataset, Split
from trainer.data.loader import StoredImages, make_loader
from trainer.devices import Device, ReadBack, full_float32
from trainer.devices.process_group import Processes, wait_limit_s
from trainer.evaluation.metrics import Ints
from trainer.io.errors import ModelError
from trainer.io.host import usable_cores
from trainer.models import networks
from trainer.models.networks import Classifier, EmbeddingStatistics

logger = logging.getLogger(__name__)

Embeddings = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

FORWARD_BATCH = (
    64  # images of a forward pass that shares a device with nothing else; a training's batch may be thousands
)
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # among which the validation split chooses, the simplest classifier first
MAX_IMAGES = 20_000  # images to which a probe is fitted at most, and among which neighbors are looked for

NEIGHBORS = 20  # k of DINO's table (Caron et al. 2021)
NEIGHBOR_TEMPERATURE = 0.07

_ITERATIONS = 300
_SENT_BYTES = 2**26  # that a process sends to the first one at a time
_VOTES_TOGETHER = 256
_LEAST_STD = 0.01
"""Smallest standard deviation of a number of the embedding, as a share of that of all: one that hardly varies is no target."""


def embed(
    model: Classifier,
    split: Split,
    indices: Sequence[int],
    device: Device,
    batch_size: int,
    *,
    moments: bool = False,
    sharing: int = 1,
) -> Embeddings:
    """Compute the pooled features of stored images in fp32, [N, D]; the model is moved to the device and stays there.

    With `moments`, mean and mean square of its T-dimensional patch tokens over an image's places follow, [N, D + 2 T]. A `ModelError` if a
    number is not finite.
    """

    def numbers(images: Tensor) -> Tensor:
        outputs = model.outputs(images, logits=False, features=True, tokens=moments)
        assert outputs.features is not None, "they were asked for"
        parts = [outputs.features.float()]
        if outputs.tokens is not None:
            tokens = outputs.tokens.float()
            parts += [tokens.mean((1, 2)), tokens.square().mean((1, 2))]
        return torch.cat(parts, 1)

    model.to(device.torch_device).eval()
    embeddings = in_batches(numbers, split, indices, device, batch_size, sharing=sharing)
    broken = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if len(broken):
        raise ModelError(
            f"{model.card.architecture}: gives an embedding that is not finite for {len(broken)} of {len(indices)} images, first for "
            f"{split.names[indices[int(broken[0])]]}; look at the model's weights, or train it again with a lower learning rate"
        )
    return embeddings


def in_batches(
    compute: Callable[[Tensor], Tensor],
    split: Split,
    indices: Sequence[int],
    device: Device,
    batch_size: int,
    *,
    sharing: int = 1,
) -> Embeddings:
    """Compute numbers of images as they are stored, fp32 [N, ...]: `compute` makes them of a batch, uint8 [B, 3, S, S] on the device.

    A GPU would wait for images that this process decodes, so loader processes do it, as many as there are cores for `sharing` processes.
    """
    parts = [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]
    workers = min((usable_cores() - 1) // sharing, len(parts)) if device.kind == "cuda" and not split.in_memory else 0
    loader = make_loader(
        StoredImages(split, device, batch_size),
        parts,
        workers=workers,
        pin_memory=device.pins_memory,
        timeout_s=wait_limit_s() / 2,
    )
    computed = []
    with closing(loader), device.inference(), full_float32():
        for batch in loader:
            computed.append(compute(to_device(batch.images, device.torch_device)).float())
            device.dispatch()
    arrived = ReadBack({str(number): part for number, part in enumerate(computed)}).wait().values()
    whole = [numbers[: len(part)] for numbers, part in zip(arrived, parts, strict=True)]
    return torch.cat(whole).numpy() if whole else np.empty((0, 0), dtype=np.float32)


def embed_together(
    model: Classifier, split: Split, indices: Sequence[int], processes: Processes, *, moments: bool = False
) -> Embeddings:
    """Compute `embed` with the images dealt to all processes; every process gets all of them, [N, D] or [N, D + 2 T]."""
    mine, sharing = dealt(indices, processes), processes.local_world_size
    own = embed(model, split, mine, processes.device, FORWARD_BATCH, moments=moments, sharing=sharing)
    return _in_order(processes.gather(own, "the embeddings"), len(indices))


def dealt(indices: Sequence[int], processes: Processes) -> Sequence[int]:
    """Return this process's part of the indices, dealt one after the other."""
    return indices[processes.rank :: processes.world_size]


def collected(own: Embeddings, count: int, processes: Processes, what: str) -> Embeddings:
    """Put together on the first process what all have computed of their `dealt` of `count` images, [N, ...]; on the others it is empty."""
    if processes.world_size == 1:
        return own
    rows = processes.gather(max(1, _SENT_BYTES // max(1, own[:1].nbytes)), what)[0]
    parts: list[list[Embeddings]] = [[] for _ in range(processes.world_size)]
    for start in range(0, -(-count // processes.world_size), rows):
        sent = processes.collect(own[start : start + rows], what)
        for part, of_process in zip(parts, sent, strict=processes.is_first):
            part.append(of_process)
    return _in_order([np.concatenate(part) for part in parts], count) if processes.is_first and count else own[:0]


def _in_order(parts: Sequence[Embeddings], count: int) -> Embeddings:
    together = np.empty((count, *parts[0].shape[1:]), dtype=np.float32)
    for place, part in enumerate(parts):
        if len(part):  # there may be fewer images than processes
            together[place :: len(parts)] = part
    return together


def evenly_spaced(count: int, most: int, run: int = 1) -> list[int]:
    """Choose at most so many of `count` images, evenly from the first to the last, or runs of neighbors (`Split.run`)."""
    if count <= most:
        return [*range(count)]
    runs = max(1, count // run)  # a last one that is shorter is left out
    chosen = np.linspace(0, runs - 1, min(runs, math.ceil(most / run))).round().astype(np.int64)
    found: list[int] = (chosen[:, None] * run + np.arange(run)).ravel()[:most].tolist()
    return found


def spread(splits: Sequence[Split], most: int) -> list[int]:
    """Choose at most so many images of several splits, numbered one after the other: of each its share, as `evenly_spaced` does."""
    ends = list(accumulate(map(len, splits), initial=0))
    total = max(ends[-1], 1)
    shares = [end * min(most, total) // total for end in ends]
    return [
        first + place
        for split, first, (begun, reached) in zip(splits, ends[:-1], pairwise(shares), strict=True)
        for place in evenly_spaced(len(split), reached - begun, split.run)
    ]


def statistics(embeddings: Embeddings) -> EmbeddingStatistics:
    """Compute mean and standard deviation of each number over the images."""
    values = embeddings.astype(np.float64)
    return _statistics(values.mean(0), values.var(0))


def token_statistics(moments: Embeddings) -> EmbeddingStatistics | None:
    """Compute the statistics of patch tokens over all places of all images from their moments [N, 2 T]; None without tokens."""
    if not moments.shape[1]:
        return None
    mean, square = np.split(moments.astype(np.float64).mean(0), 2)
    return _statistics(mean, np.maximum(square - mean**2, 0))


def _statistics(mean: Doubles, variance: Doubles) -> EmbeddingStatistics:
    """Return the statistics of each number.

    With s the root mean square of all standard deviations, (0.01 s)^2 is added to each variance: where a number hardly varies, the noise
    of rounding would become a target as large as the others.
    """
    std = np.sqrt(variance + _LEAST_STD**2 * variance.mean())
    if not variance.mean() > 0:
        raise ModelError(
            "the teacher's embedding is the same for all training images, so there is nothing to learn from it; give other weights "
            "(pretrain.weights)"
        )
    # Rounded to float32, in which they are used.
    return EmbeddingStatistics(mean=tuple(mean.astype(np.float32).tolist()), std=tuple(std.astype(np.float32).tolist()))


# ---- What embeddings know of the classes


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """A linear classifier of embeddings: logits = embedding x weight^T + bias."""

    weight: Doubles  # [K, D]
    bias: Doubles  # [K]
    penalty: float  # the one that was chosen
    val_top1: float  # accuracy on the validation split, by which it was chosen, as a fraction

    def logits(self, embeddings: Embeddings) -> Doubles:
        """Classify embeddings [M, D]: [M, K]."""
        result: Doubles = embeddings.astype(np.float64) @ self.weight.T + self.bias
        return result

    def head_of(self, model: Classifier, classes: Sequence[str]) -> Classifier:
        """Copy a model without a head, on the CPU, and make this its head; raises as `models.with_head` does."""
        weight, bias = torch.from_numpy(self.weight).float(), torch.from_numpy(self.bias).float()
        return networks.with_head(model.cpu(), classes, weight, bias)


def fit_probe(
    train: Embeddings,
    labels: Ints,
    val: Embeddings,
    val_labels: Ints,
    classes: int,
    penalties: Sequence[float] = PENALTIES,
    *,
    works: Callable[[], None] = lambda: None,
) -> LinearProbe:
    """Fit a linear probe by multinomial logistic regression, the usual measure of frozen embeddings (Radford et al. 2021, CLIP, by L-BFGS).

    Minimized is the mean cross-entropy + penalty / 2 x the weights' squared norm, over embeddings [N, D] that are standardized by the
    training images; mean and deviation then become part of the weights. The largest of the penalties that are best on the validation
    split [M, D] is taken. `works` is called at each step.
    """
    values = train.astype(np.float64)
    mean, std = values.mean(0), values.std(0)
    std = np.where(std > 0, std, 1.0)
    values = (values - mean) / std
    start, fitted = np.zeros((classes, values.shape[1] + 1)), []
    for penalty in penalties:
        start = _minimize(start, values, labels, penalty, works)
        weight = start[:, :-1] / std
        probe = LinearProbe(weight=weight, bias=start[:, -1] - weight @ mean, penalty=penalty, val_top1=0.0)
        right = probe.logits(val).argmax(1) == val_labels
        fitted.append(replace(probe, val_top1=float(right.mean()) if len(right) else 0.0))
    return max(fitted, key=lambda probe: probe.val_top1)


def add_probe(model: Classifier, data: PreparedDataset, processes: Processes, stage: str) -> Classifier:
    """Fit a linear classifier to a model's frozen embeddings of the labeled training images, the first process's on all, as its head."""
    train, val = data.split("train"), data.split("val")
    chosen = evenly_spaced(len(train), MAX_IMAGES, train.run)
    known = embed_together(model, train, chosen, processes)
    unknown = embed_together(model, val, range(len(val)), processes)
    fit = partial(fit_probe, known, train.labels[chosen], unknown, val.labels, len(data.classes))
    probe = processes.from_first(fit, "the linear probe")
    if processes.is_first:
        text = "%s  linear probe on %s images: validation top-1 %.2f%%, penalty %g"
        logger.info(text, stage, f"{len(chosen):,}", 100 * probe.val_top1, probe.penalty)
    return probe.head_of(model, data.classes)


def _minimize(start: Doubles, values: Doubles, labels: Ints, penalty: float, works: Callable[[], None]) -> Doubles:
    """Minimize from a point [K, D + 1], whose last column is the bias."""
    rows = np.arange(len(labels))

    def objective(flat: Doubles) -> tuple[float, Doubles]:
        works()
        point = flat.reshape(start.shape)
        weight = point[:, :-1]
        log_probabilities = scipy.special.log_softmax(values @ weight.T + point[:, -1], axis=1)
        loss = -log_probabilities[rows, labels].mean() + penalty / 2 * np.square(weight).sum()
        error = np.exp(log_probabilities)
        error[rows, labels] -= 1
        error /= len(labels)
        gradient = np.concatenate([error.T @ values + penalty * weight, error.sum(0)[:, None]], axis=1)
        return float(loss), gradient.ravel()

    found = scipy.optimize.minimize(
        objective, start.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS}
    )
    result: Doubles = found.x.reshape(start.shape)
    return result


def nearest_neighbors(bank: Embeddings, labels: Ints, embeddings: Embeddings, classes: int) -> Doubles:
    """Count the votes of the k nearest neighbors of embeddings for each class, [M, K] (Wu et al. 2018, as in DINO, Caron et al. 2021).

    Neighbors, of a bank [N, D] with labels int64 [N], are near by their cosine s; a vote weighs exp(s / 0.07). k is 20, or all there are.
    """
    known, k, votes = _unit(bank), min(NEIGHBORS, len(bank)), np.zeros((len(embeddings), classes))
    for start in range(0, len(embeddings), _VOTES_TOGETHER):
        cosines = _unit(embeddings[start : start + _VOTES_TOGETHER]) @ known.T
        nearest = np.argpartition(cosines, len(bank) - k, axis=1)[:, len(bank) - k :]
        weights = np.exp(np.take_along_axis(cosines, nearest, axis=1).astype(np.float64) / NEIGHBOR_TEMPERATURE)
        np.add.at(votes, (np.arange(start, start + len(weights))[:, None], labels[nearest]), weights)
    return votes


def _unit(embeddings: Embeddings) -> Embeddings:
    values = embeddings.astype(np.float64)
    lengths: Doubles = np.linalg.norm(values, axis=1, keepdims=True)
    return (values / np.maximum(lengths, 1e-12)).astype(np.float32)
