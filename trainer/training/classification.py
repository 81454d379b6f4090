"""Learning from labels: the cross-entropy with softened and mixed labels, in float32 whatever the precision of the forward pass.

Where an image may have several labels, each class is learned by itself: a loss is then summed over the classes. And quality on the
validation split while a model is trained, shared out over the processes.

Shapes: B samples, K classes, S different sets of labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.config import MultiLabelLoss, Precision, TrainingSettings
from trainer.data.batch import Batch, Mixing, to_device
from trainer.data.dataset import Split, Targets
from trainer.data.loader import StoredImages, make_loader
from trainer.devices import Device, ReadBack
from trainer.devices.process_group import Processes, wait_limit_s
from trainer.evaluation.metrics import mean_average_precision
from trainer.profiling.evidence import ConfusedRecord
from trainer.training.sharding import inference, is_fsdp

LabelLoss = Callable[[Tensor, Tensor, Mixing | None, float, Tensor | None], Tensor]
"""`cross_entropy`, or what is called with the same arguments."""

_FOCUS, _SHIFT = 4, 0.05
"""The asymmetric loss' focusing exponent of classes that an image is not of, and the probability that they may have for nothing."""


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mixing: Mixing | None = None,
    smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """-sum over classes of target x log softmax(logits), mean over the batch.

    The target of a sample is (1 - s) x one-hot + s / K (Szegedy et al. 2016), with the one-hot shared between its own label and its
    partner's where views are mixed (Zhang et al. 2018).

    Args:
        logits: [B, K].
        labels: int64 [B]; -1 for a sample without one.
        mixing: how the views were mixed, or None; a sample without a label has a partner without one (`trainer.data.sampler`).
        weights: of each sample in the mean, float32 [B], 0 for one without a label (`Batch.label_weights`); None where all have one.
    """
    log_probabilities = F.log_softmax(logits.float(), dim=1)
    loss = -_of(log_probabilities, labels)
    if mixing is not None:
        loss = mixing.share * loss - (1 - mixing.share) * _of(log_probabilities, mixing.labels)
    loss = (1 - smoothing) * loss - smoothing * log_probabilities.mean(1)
    return (loss if weights is None else weights * loss).mean()


def label_loss(targets: Targets | None, multi_label: MultiLabelLoss) -> LabelLoss:
    """Choose the loss with a data set's labels: the cross-entropy, or where an image may have several the one that is named."""
    return cross_entropy if targets is None else LabelSetLoss(targets, multi_label)


def _of(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the log probability of each sample's class, [B]; of any class where there is no label, which a weight of 0 then takes out."""
    return log_probabilities.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-sum over classes of y x log p + (1 - y) x log(1 - p), p the logit's sigmoid: [B] of logits and targets y in 0..1, [B, K]."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none").sum(1)


def asymmetric_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """-sum over classes of y x log p + (1 - y) x q^4 x log(1 - q), with q = max(p - 0.05, 0): [B] (Ridnik et al. 2021, equations 4 to 7).

    Classes that an image is not of, which are the many, count the less the surer that is, and nothing where p is below 0.05. The
    exponents are those that the paper takes for MS-COCO; its targets y are 0 or 1, and mixed ones weight the two terms.
    """
    positive = -F.logsigmoid(logits.float())
    shifted = (logits.float().sigmoid() - _SHIFT).clamp(min=0)
    negative = -(shifted**_FOCUS) * (1 - shifted).log()
    return (targets * positive + (1 - targets) * negative).sum(1)


class LabelSetLoss:
    """A loss with sets of labels, called as `cross_entropy` is: a label is the index of its set."""

    def __init__(self, targets: Targets, loss: MultiLabelLoss) -> None:
        """Take whether each class is one of each set, [S, K]."""
        self._targets = torch.from_numpy(targets)
        self._loss = asymmetric_loss if loss == "asymmetric" else binary_cross_entropy

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        mixing: Mixing | None = None,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Compute the mean over the batch; the arguments are as of `cross_entropy`, and so are the targets' smoothing and mixing."""
        targets = self._sets_of(labels)
        if mixing is not None:
            share = mixing.share.unsqueeze(1)
            targets = share * targets + (1 - share) * self._sets_of(mixing.labels)
        targets = (1 - smoothing) * targets + smoothing / logits.shape[1]
        loss = self._loss(logits, targets)
        return (loss if weights is None else weights * loss).mean()

    def _sets_of(self, labels: Tensor) -> Tensor:
        """Return the target of each label, [B, K]; of any set where there is no label, which a weight of 0 then takes out."""
        self._targets = self._targets.to(labels.device)
        return self._targets[labels.clamp(min=0)].float()


_CONFUSED_KEPT = 20  # pairs of classes in the record
_FEWEST_OF_CLASS = 5  # images of a class below which nothing is said of it


class ConfusedPairs:
    """Which classes the model of the last validation takes for which others; known to the first process."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = classes
        self._records: tuple[ConfusedRecord, ...] | None = None

    def records(self) -> tuple[ConfusedRecord, ...] | None:
        """Return the most frequent wrong answer to each class, the largest shares first; None before the first validation."""
        return self._records

    def count(self, labels: npt.NDArray[np.int64], answers: npt.NDArray[np.int64]) -> None:
        """Take the label and the answer of each image, in place of those of an earlier validation."""
        wrong = labels != answers
        pairs, images = np.unique(np.stack([labels[wrong], answers[wrong]]), axis=1, return_counts=True)
        of = np.bincount(labels, minlength=len(self._classes))[pairs[0]]
        order = [row for row in np.argsort(-images / of, kind="stable").tolist() if of[row] >= _FEWEST_OF_CLASS]
        names = [[self._classes[index] for index in side] for side in pairs.tolist()]
        self._records = tuple(
            ConfusedRecord(label=names[0][row], answer=names[1][row], images=int(images[row]), of=int(of[row]))
            for row in order[:_CONFUSED_KEPT]
        )


class ValidationBatches:
    """A process's batches of a split, for one validation after the other.

    Loader processes stay from one validation to the next, and have the first batches of the next one ready.
    """

    def __init__(self, split: Split, processes: Processes, settings: TrainingSettings, workers: int = 0) -> None:
        """Deal the split's images to the processes, in micro-batches of the training, which are known to fit the device's memory."""
        self.split, self.processes, self.settings = split, processes, settings
        size = -(-settings.batch_size // (processes.world_size * settings.accumulation))
        self.indices = range(processes.rank, len(split), processes.world_size)
        """Of this process's images."""
        parts = [list(self.indices[start : start + size]) for start in range(0, len(self.indices), size)]
        self.counts = [*map(len, parts)]
        """Of the images of each batch that count."""
        self.turns = -(-len(range(0, len(split), processes.world_size)) // size)
        """Batches of the process that has most."""
        if is_fsdp(settings, processes):
            # All take part in each forward pass: without images left, by some that do not count.
            filled = self.turns - len(parts)
            parts += [parts[-1] if parts else [0]] * filled
            self.counts += [0] * filled
        self._loader = make_loader(
            StoredImages(split, processes.device, size),
            chain.from_iterable(repeat(parts)) if parts else (),
            workers=0 if split.in_memory else min(workers, len(parts)),  # decoded images are only copied
            pin_memory=processes.device.pins_memory,
            timeout_s=wait_limit_s() / 2,  # before the other processes, which wait for this one, give up
        )

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        """Yield the batches of one validation, each with how many of its images count."""
        for count in self.counts:
            yield next(self._loader), count

    def close(self) -> None:
        """End the loader processes."""
        self._loader.close()


def validate(
    model: nn.Module,
    batches: ValidationBatches,
    *,
    should_stop: Callable[[], bool] | None = None,
    confused: ConfusedPairs | None = None,
) -> dict[str, float] | None:
    """Measure a classifier on a split; the same on every process.

    Args:
        model: takes uint8 images [B, 3, S, S], gives logits [B, K].
        should_stop: whether to stop before the end, for good; asked after each batch, equally often on all processes, and answers them
            alike.
        confused: takes the answers where each image has one label.

    Returns:
        `val_top1`, the top-1 accuracy, and `val_loss`, the cross-entropy; where images may have several labels `val_map`, the mean average
        precision, and in `val_loss` the binary cross-entropy, summed over the classes. None where it was stopped.
    """
    split, processes, precision = batches.split, batches.processes, batches.settings.precision
    training, device, counts = model.training, processes.device, batches.counts
    model.eval()
    measured: list[Tensor] = []
    answers: list[Tensor] = []
    own = iter(batches)
    for _ in range(batches.turns):
        batch, count = next(own, (None, 0))
        if batch is not None and split.targets is None:
            figures, answered = _measure(model, batch, count, device, precision)
            measured.append(figures)
            answers.append(answered)
        elif batch is not None:
            measured.append(_logits(model, batch, device, precision))
        del batch  # its memory is used again
        device.dispatch()
        if should_stop is not None and should_stop():
            model.train(training)
            return None
    model.train(training)
    sent = ReadBack({str(number): part for number, part in enumerate([*measured, *answers])})
    arrived = [*sent.wait().values()]
    arrived, arrived_answers = arrived[: len(measured)], arrived[len(measured) :]
    labels = split.labels[[*batches.indices]]
    if split.targets is not None:
        whole = [logits[:count] for logits, count in zip(arrived, counts, strict=True)]
        return _compare_sets(whole, labels, split.targets, processes)
    own_total = [0.0, 0.0]
    if arrived:  # summed in double precision
        own_total = torch.stack(arrived).double().sum(0).tolist()
    own_answers = np.concatenate(
        [np.empty(0, np.int64), *(part[:count].numpy() for part, count in zip(arrived_answers, counts, strict=True))]
    )
    everyone = processes.gather((own_total, labels, own_answers), "the validation's figures")
    totals, wanted, given = zip(*everyone, strict=True)
    correct, loss = (sum(column) for column in zip(*totals, strict=True))
    if confused is not None and processes.is_first:
        confused.count(np.concatenate(wanted), np.concatenate(given))
    return {"val_top1": correct / len(split), "val_loss": loss / len(split)}


def _measure(model: nn.Module, batch: Batch, count: int, device: Device, precision: Precision) -> tuple[Tensor, Tensor]:
    """Count the right answers and sum the losses of the first `count` images, float32 [2]; and the answers, [B]; on the device."""
    counts = to_device(torch.arange(len(batch.labels)) < count, device.torch_device)
    labels = to_device(batch.labels, device.torch_device)
    logits = _logits(model, batch, device, precision)
    with device.inference():
        answers = logits.argmax(1)
        right, loss = answers == labels, F.cross_entropy(logits, labels, reduction="none")
        return torch.stack([(right & counts).sum().float(), (loss * counts).sum()]), answers


def _logits(model: nn.Module, batch: Batch, device: Device, precision: Precision) -> Tensor:
    """Compute the logits of a batch, float32 [B, K] on the device."""
    images = to_device(batch.images, device.torch_device)
    with inference(model, device), device.autocast(precision):
        logits: Tensor = model(images)
    return logits.float()


def _compare_sets(
    logits: Sequence[Tensor], labels: npt.NDArray[np.int64], targets: Targets, processes: Processes
) -> dict[str, float]:
    """Compare this process' logits with the sets that its labels are of, together with those of the others."""
    own = np.concatenate([part.numpy() for part in logits]) if logits else np.empty((0, targets.shape[1]), np.float32)
    parts = processes.gather((own, labels), "the validation's logits")
    figures: dict[str, float] = {}
    if processes.is_first:
        found, wanted = np.concatenate([part for part, _ in parts]), targets[np.concatenate([of for _, of in parts])]
        loss = binary_cross_entropy(torch.from_numpy(found), torch.from_numpy(wanted).float())
        # Logits that are not finite cannot be ranked; the losses, which are read later, say of which step they are.
        is_ranked = bool(np.isfinite(found).all())
        figures = {
            "val_map": mean_average_precision(found, wanted) if is_ranked else 0.0,
            "val_loss": float(loss.double().mean()),
        }
    return processes.gather(figures, "the validation's figures")[0]
