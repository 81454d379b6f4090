import itertools
import math
import multiprocessing
from contextlib import closing

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score

from trainer.config import ModelSettings, TrainingSettings
from trainer.data.batch import Mixing
from trainer.devices import choose_device
from trainer.devices.process_group import Processes
from trainer.models import networks
from trainer.training.classification import (
    ConfusedPairs,
    LabelSetLoss,
    ValidationBatches,
    asymmetric_loss,
    binary_cross_entropy,
    cross_entropy,
    label_loss,
    validate,
)

LOGITS = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 3, 0, 1])


def mixing(share):
    """Every sample with its right neighbor, as much of itself as `share` says."""
    partner = torch.arange(7).roll(-1)
    share = torch.as_tensor(share)
    return Mixing(partner, LABELS[partner], share, share, torch.zeros(7, 4))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_it_is_torchs_cross_entropy_with_label_smoothing(smoothing):
    theirs = F.cross_entropy(LOGITS, LABELS, label_smoothing=smoothing)
    assert float(cross_entropy(LOGITS, LABELS, smoothing=smoothing)) == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_mixed_labels_share_the_target(smoothing):
    """Zhang et al. 2018: the target is the same mixture of one-hot labels as the pixels are of images; softened as torch softens it."""
    share = torch.linspace(0, 1, 7)
    mixed = mixing(share)
    one_hot = F.one_hot(LABELS, 4).float()
    target = share[:, None] * one_hot + (1 - share[:, None]) * one_hot[mixed.partner]
    ours = cross_entropy(LOGITS, LABELS, mixed, smoothing=smoothing)
    assert float(ours) == pytest.approx(float(F.cross_entropy(LOGITS, target, label_smoothing=smoothing)), rel=1e-6)
    by_hand = 0.0
    for row, wanted in zip(LOGITS.double().tolist(), target.double().tolist(), strict=True):
        total = sum(math.exp(value) for value in row)
        soft = [(1 - smoothing) * part + smoothing / 4 for part in wanted]
        by_hand -= sum(part * (value - math.log(total)) for part, value in zip(soft, row, strict=True)) / 7
    assert float(ours) == pytest.approx(by_hand, rel=1e-5)


def test_a_sample_that_is_its_own_partner_keeps_its_label():
    own = Mixing(torch.arange(7), LABELS, torch.full((7,), 0.3), torch.full((7,), 0.3), torch.zeros(7, 4))
    assert float(cross_entropy(LOGITS, LABELS, own)) == pytest.approx(float(cross_entropy(LOGITS, LABELS)), rel=1e-6)


def test_it_is_computed_in_float32_from_half_precision():
    half = LOGITS.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = cross_entropy(half, LABELS, mixing(torch.linspace(0, 1, 7)), smoothing=0.1)
    assert ours.dtype == torch.float32
    whole = cross_entropy(half.float(), LABELS, mixing(torch.linspace(0, 1, 7)), smoothing=0.1)
    assert float(ours) == pytest.approx(float(whole), rel=1e-6)


def test_no_value_is_read_back():
    """Tensors without values stand in for those of a device: whatever waits for a value raises."""
    logits = LOGITS.to("meta").requires_grad_()
    mixed = Mixing(*(part.to("meta") for part in mixing(torch.linspace(0, 1, 7))))
    cross_entropy(logits, LABELS.to("meta"), mixed, smoothing=0.1).backward()
    assert logits.grad.shape == logits.shape


PARTLY = torch.tensor([0, -1, 2, -1, 3, 0, -1])
WEIGHTS = (PARTLY >= 0) * (7 / 4)
"""As the loader gives them where these are all the images of a step."""


def by_hand(logits, labels, partner=None, share=None, smoothing=0.0):
    """The mean over the samples with a label, one after the other in double precision."""
    terms = []
    for row, (values, label) in enumerate(zip(logits.double().tolist(), labels.tolist(), strict=True)):
        if label < 0:
            continue
        target = [smoothing / 4] * 4
        own = 1.0 if share is None else float(share[row])
        target[label] += (1 - smoothing) * own
        if share is not None:
            target[int(labels[partner[row]])] += (1 - smoothing) * (1 - own)
        total = math.log(sum(math.exp(value) for value in values))
        terms.append(sum(part * (total - value) for part, value in zip(target, values, strict=True)))
    return sum(terms) / len(terms) if terms else 0.0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_samples_without_a_label_do_not_count(smoothing):
    logits = LOGITS.clone().requires_grad_()
    loss = cross_entropy(logits, PARTLY, smoothing=smoothing, weights=WEIGHTS)
    assert loss.item() == pytest.approx(by_hand(LOGITS, PARTLY, smoothing=smoothing), rel=1e-6)
    theirs = F.cross_entropy(LOGITS, PARTLY, label_smoothing=smoothing, ignore_index=-1)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    loss.backward()
    assert (logits.grad[PARTLY < 0] == 0).all()
    assert (logits.grad[PARTLY >= 0] != 0).all()


def test_mixtures_without_labels_do_not_count():
    """A sample's partner is of its own kind; the fifth labeled one of an odd number would be its own."""
    partner, share = torch.tensor([2, 3, 0, 1, 5, 4, 6]), torch.linspace(0.1, 0.9, 7)
    mixed = Mixing(partner, PARTLY[partner], share, share, torch.zeros(7, 4))
    loss = cross_entropy(LOGITS, PARTLY, mixed, smoothing=0.1, weights=WEIGHTS)
    assert loss.item() == pytest.approx(by_hand(LOGITS, PARTLY, partner, share, 0.1), rel=1e-6)


def test_no_label_at_all_gives_zero_and_no_gradient():
    logits = LOGITS.clone().requires_grad_()
    loss = cross_entropy(logits, torch.full((7,), -1), smoothing=0.1, weights=torch.zeros(7))
    loss.backward()
    assert loss.item() == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (2, 2, 1, 2)], ids=str)
def test_the_mean_of_the_micro_batches_is_that_over_the_labeled_images_of_the_step(sizes):
    """As the loop weighs them, by their images; the second of two images has no label."""
    means = [
        len(labels) / 7 * cross_entropy(logits, labels, weights=weights)
        for logits, labels, weights in zip(LOGITS.split(sizes), PARTLY.split(sizes), WEIGHTS.split(sizes), strict=True)
    ]
    assert float(sum(means)) == pytest.approx(by_hand(LOGITS, PARTLY), rel=1e-6)


def test_a_mask_is_compiled_once_whatever_it_masks():
    """No value is read back and no shape depends on one, so a graph of one mask serves all."""
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(cross_entropy, backend=count, fullgraph=True, dynamic=False)
    for labels in (PARTLY, LABELS, torch.full((7,), -1)):
        weights = (labels >= 0) * (7 / max(1, int((labels >= 0).sum())))
        assert compiled(LOGITS, labels, weights=weights).item() == pytest.approx(by_hand(LOGITS, labels), rel=1e-6)
    assert len(graphs) == 1


TINY = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


class Images:
    in_memory = False

    def __init__(self, count, targets=None):
        self.targets = targets
        self.read_here = []  # indices that this process has read, and no copy of it in another one
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)
        self.labels = np.arange(count) % 3
        self.keys = np.arange(count, dtype=np.uint64)

    def __len__(self):
        return len(self.labels)

    def read(self, indices):
        self.read_here.extend(indices)
        return self.images[list(indices)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return networks.create(
        ModelSettings(architecture="vit_tiny_patch16_224", args=TINY), ["a", "b", "c"], drop_path=0.5
    )


def processes(rank=0, world_size=1):
    return Processes(rank=rank, world_size=world_size, local_rank=rank, device=choose_device())


def settings(micro_batch, world_size=1):
    """Of a training with micro-batches of this size."""
    return TrainingSettings(batch_size=2 * micro_batch * world_size, accumulation=2, precision="fp32")


def validation_of(model, split, processes, settings, workers=0, **options):
    with closing(ValidationBatches(split, processes, settings, workers)) as batches:
        return validate(model, batches, **options)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_figures_are_those_of_one_forward_pass(model, batch_size):
    split = Images(20)
    figures = validation_of(model.train(), split, processes(), settings(batch_size))
    assert model.training
    logits = model.eval()(split.images).detach()
    labels = torch.from_numpy(split.labels)
    assert figures["val_top1"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert figures["val_loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)


def test_processes_share_the_images_out_without_leaving_one(model, monkeypatch):
    split, seen = Images(11), []
    read = split.read
    split.read = lambda indices: (seen.extend(indices), read(indices))[1]
    monkeypatch.setattr(Processes, "gather", lambda self, value, what: [value])
    for rank in range(3):
        validation_of(model, split, processes(rank, 3), settings(2, 3))
    assert sorted(seen) == list(range(11))


def test_confused_classes_are_counted_over_all_processes(model, monkeypatch):
    split, parts = Images(40), []
    alone, together = ConfusedPairs(["a", "b", "c"]), ConfusedPairs(["a", "b", "c"])
    assert alone.records() is None
    validation_of(model, split, processes(), settings(4), confused=alone)
    answers = model.eval()(split.images).argmax(1).numpy()
    counts = {(one.label, one.answer): (one.images, one.of) for one in alone.records()}
    for label, answer in itertools.permutations(range(3), 2):
        wrong, of = int(((split.labels == label) & (answers == answer)).sum()), int((split.labels == label).sum())
        assert counts.get(("abc"[label], "abc"[answer]), (0, of)) == (wrong, of)
    shares = [one.images / one.of for one in alone.records()]
    assert shares == sorted(shares, reverse=True)

    monkeypatch.setattr(Processes, "gather", lambda self, value, what: (parts.append(value), parts)[1])
    for rank in (2, 1, 0):
        validation_of(model, split, processes(rank, 3), settings(2, 3), confused=together)
    assert set(together.records()) == set(alone.records())


SETS = np.array([[0, 0, 0], [1, 0, 1], [0, 1, 0]], dtype=np.uint8)
"""Of no class, of the first and the last one, of the second."""


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_of_sets_of_labels_the_figures_are_mean_average_precision_and_binary_cross_entropy(model, batch_size):
    split = Images(20, SETS)
    figures = validation_of(model, split, processes(), settings(batch_size))
    logits, wanted = model.eval()(split.images).detach(), SETS[split.labels]
    precisions = [average_precision_score(wanted[:, one], logits[:, one].numpy()) for one in range(3)]
    loss = F.binary_cross_entropy_with_logits(logits, torch.from_numpy(wanted).float(), reduction="none").sum(1).mean()
    assert figures == {"val_map": pytest.approx(np.mean(precisions)), "val_loss": pytest.approx(float(loss), rel=1e-5)}


def test_logits_that_are_not_finite_are_left_to_the_losses_to_report(model):
    """Else scikit-learn would end the training, in words that name neither step nor sample."""
    with torch.no_grad():
        model.network.head.bias.fill_(torch.nan)
    figures = validation_of(model, Images(5, SETS), processes(), settings(4))
    assert figures["val_map"] == 0
    assert math.isnan(figures["val_loss"])


def test_processes_measure_sets_of_labels_together(model, monkeypatch):
    split, parts = Images(11, SETS), []
    alone = validation_of(model, split, processes(), settings(4))

    def gather(self, value, what):
        if what != "the validation's logits":
            return [value]
        parts.append(value)
        return parts

    monkeypatch.setattr(Processes, "gather", gather)
    for rank in (2, 1, 0):  # the first process, which compares, comes last here, when the others' logits are there
        together = validation_of(model, split, processes(rank, 3), settings(2, 3))
    assert together == {name: pytest.approx(value, rel=1e-5) for name, value in alone.items()}


@pytest.mark.parametrize("in_memory", [False, True])
def test_loader_processes_read_the_images_that_are_not_in_memory(model, in_memory):
    split = Images(20)
    split.in_memory, read_here = in_memory, split.read_here
    alone = validation_of(model, split, processes(), settings(6))
    assert len(read_here) == 20
    read_here.clear()
    assert validation_of(model, split, processes(), settings(6), workers=2) == alone
    assert len(read_here) == 20 * in_memory
    assert multiprocessing.active_children() == []


def test_loader_processes_stay_between_validations(model):
    split = Images(20)
    split.in_memory = False
    alone = validation_of(model, split, processes(), settings(6))
    with closing(ValidationBatches(split, processes(), settings(6), workers=2)) as batches:
        figures, started = [], []
        for _ in range(3):
            figures.append(validate(model, batches))
            started.append({child.pid for child in multiprocessing.active_children()})
    assert figures == [alone] * 3
    assert started[0] == started[1] == started[2]
    assert len(started[0]) == 2
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("world_size", "expected"), [(1, 25), (2, 13)])
def test_a_batch_is_the_micro_batch_of_the_training(model, monkeypatch, world_size, expected):
    split, sizes = Images(100), []
    read = split.read
    split.read = lambda indices: (sizes.append(len(indices)), read(indices))[1]
    monkeypatch.setattr(Processes, "gather", lambda self, value, what: [value])
    validation_of(model, split, processes(0, world_size), TrainingSettings(batch_size=100, accumulation=4))
    assert sizes[0] == max(sizes) == expected


def test_it_is_broken_off_after_a_batch_and_equally_often_asked_on_all_processes(model):
    asked = []
    for rank in range(3):
        looks = []
        figures = validation_of(
            model.train(), Images(7), processes(rank, 3), settings(1, 3),
            should_stop=lambda looks=looks: looks.append(1) or len(looks) == 3,
        )  # fmt: skip
        asked.append(len(looks))
        assert figures is None, "two of the processes have no third image, but the first one has"
        assert model.training
    assert asked == [3, 3, 3]


# ---------------------------------------------------------------------------------------------------------------------
# Images with several labels

OF_SETS = 4 * torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
SETS = np.array([[0, 0, 0], [1, 0, 1], [0, 1, 0]], dtype=np.uint8)
INDICES = torch.tensor([0, 1, 2, 1, 0])
TARGETS = torch.from_numpy(SETS)[INDICES].float()


def test_the_binary_cross_entropy_is_torchs_summed_over_the_classes():
    theirs = F.binary_cross_entropy_with_logits(OF_SETS, TARGETS, reduction="none").sum(1)
    assert torch.allclose(binary_cross_entropy(OF_SETS.bfloat16().float(), TARGETS), theirs, rtol=2e-2)
    assert torch.equal(binary_cross_entropy(OF_SETS, TARGETS), theirs)


def test_the_asymmetric_loss_is_that_of_a_slow_loop_in_double_precision():
    """Ridnik et al. 2021, equations 4 to 7, with no focusing of positives, 4 of negatives and a margin of 0.05."""
    wanted = []
    for logits, targets in zip(OF_SETS.double().tolist(), TARGETS.tolist(), strict=True):
        total = 0.0
        for logit, target in zip(logits, targets, strict=True):
            p = 1 / (1 + math.exp(-logit))
            q = max(p - 0.05, 0)
            total -= math.log(p) if target else q**4 * math.log(1 - q)
        wanted.append(total)
    assert asymmetric_loss(OF_SETS, TARGETS).tolist() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_far_logits_have_finite_losses_and_gradients(logit):
    for loss in (binary_cross_entropy, asymmetric_loss):
        for target in (0.0, 1.0):
            logits = torch.full((1, 1), logit, requires_grad=True)
            value = loss(logits, torch.full((1, 1), target)).sum()
            (gradient,) = torch.autograd.grad(value, logits)
            assert value.isfinite()
            assert gradient.isfinite().all()


def test_labels_are_the_indices_of_sets_which_are_smoothed_and_mixed_as_one_hot_labels_are():
    partner, share = torch.arange(5).roll(1), torch.linspace(0, 1, 5)
    mixed = Mixing(partner, INDICES[partner], share, share, torch.zeros(5, 4))
    targets = share[:, None] * TARGETS + (1 - share[:, None]) * TARGETS[partner]
    targets = 0.9 * targets + 0.1 / 3
    ours = LabelSetLoss(SETS, "bce")(OF_SETS, INDICES, mixed, smoothing=0.1)
    assert float(ours) == pytest.approx(float(binary_cross_entropy(OF_SETS, targets).mean()), rel=1e-6)


def test_a_sample_without_a_label_weighs_nothing():
    labels, weights = INDICES.clone(), torch.full((5,), 5 / 4)
    labels[2], weights[2] = -1, 0
    known = labels >= 0
    ours = LabelSetLoss(SETS, "asymmetric")(OF_SETS, labels, weights=weights)
    assert float(ours) == pytest.approx(float(asymmetric_loss(OF_SETS[known], TARGETS[known]).mean()), rel=1e-6)


def test_the_loss_is_the_one_that_the_data_set_needs():
    assert label_loss(None, "bce") is cross_entropy
    assert isinstance(label_loss(SETS, "asymmetric"), LabelSetLoss)
