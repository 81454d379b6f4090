"""Probes of frozen embeddings against slow loops, scikit-learn and their own conditions."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from trainer.data.dataset import open_dataset
from trainer.devices import HOST, Device, choose_device
from trainer.evaluation import embeddings
from trainer.io.errors import ModelError
from trainer.models import networks

CLASSES, SIZE = 4, 6


def clusters(count, seed, spread=1.0):
    """Embeddings [N, D] around a center a class, far from the origin, and their labels."""
    centers = np.random.default_rng(0).normal(size=(CLASSES, SIZE))
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    values = centers[labels] + spread * random.normal(size=(count, SIZE)) + 3
    return values.astype(np.float32), labels.astype(np.int64)


BANK, BANK_LABELS = clusters(60, 1)
OTHERS, OTHER_LABELS = clusters(50, 2)


def votes_by_hand(embedding):
    """DINO's k-NN for one image, in loops."""

    def cosine(a, b):
        a, b = a.tolist(), b.tolist()
        product = sum(x * y for x, y in zip(a, b, strict=True))
        return product / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(x * x for x in b))

    near = sorted(((cosine(embedding, known), label) for known, label in zip(BANK, BANK_LABELS, strict=True)))[-20:]
    votes = [0.0] * CLASSES
    for similarity, label in near:
        votes[label] += math.exp(similarity / 0.07)
    return votes


def test_neighbors(monkeypatch):
    monkeypatch.setattr(embeddings, "_VOTES_TOGETHER", 7)
    votes = embeddings.nearest_neighbors(BANK, BANK_LABELS, OTHERS, CLASSES)
    assert np.allclose(votes, [votes_by_hand(embedding) for embedding in OTHERS], rtol=1e-5)
    # Neighbors are those of all cosines sorted in double precision.
    generator = np.random.default_rng(7)
    bank, others = (generator.normal(size=(count, 48)).astype(np.float32) for count in (3000, 200))
    labels = generator.integers(0, 9, len(bank))
    known, asked = (
        some / np.linalg.norm(some, axis=1, keepdims=True) for some in (bank.astype(float), others.astype(float))
    )
    cosines = asked @ known.T
    expected = np.zeros((len(others), 9))
    for row, nearest in enumerate(np.argsort(-cosines, axis=1)[:, : embeddings.NEIGHBORS]):
        np.add.at(expected[row], labels[nearest], np.exp(cosines[row, nearest] / embeddings.NEIGHBOR_TEMPERATURE))
    assert np.allclose(embeddings.nearest_neighbors(bank, labels, others, 9), expected, rtol=1e-5)
    # Of few known images all are neighbors.
    votes = embeddings.nearest_neighbors(BANK[:3], np.array([0, 2, 2]), OTHERS[:5], CLASSES)
    assert (votes[:, [1, 3]] == 0).all()
    assert (votes[:, [0, 2]] > 0).all()


def test_probe():
    # Its C is 1 / (penalty x N), on the same standardized embeddings.
    probe = embeddings.fit_probe(BANK, BANK_LABELS, OTHERS, OTHER_LABELS, CLASSES, penalties=(1e-2,))
    mean, std = BANK.astype(np.float64).mean(0), BANK.astype(np.float64).std(0)
    known = LogisticRegression(C=1 / (1e-2 * len(BANK)), tol=1e-8, max_iter=5000)
    known.fit((BANK - mean) / std, BANK_LABELS)
    logits = probe.logits(OTHERS)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    assert np.allclose(powers / powers.sum(1, keepdims=True), known.predict_proba((OTHERS - mean) / std), atol=2e-3)
    # The penalty is the one that is best on the validation split.
    alone = {}
    for penalty in embeddings.PENALTIES:
        probe = embeddings.fit_probe(BANK, BANK_LABELS, OTHERS, OTHER_LABELS, CLASSES, penalties=(penalty,))
        alone[penalty] = probe.val_top1
    probe = embeddings.fit_probe(BANK, BANK_LABELS, OTHERS, OTHER_LABELS, CLASSES)
    assert probe.val_top1 == pytest.approx((probe.logits(OTHERS).argmax(1) == OTHER_LABELS).mean())
    assert probe.val_top1 == pytest.approx(max(alone.values()), abs=0.021)  # one image, as fits begin with the last one
    assert probe.val_top1 > 0.5
    # A number that never varies does no harm.
    still = BANK.copy()
    still[:, 0] = 2.5
    probe = embeddings.fit_probe(still, BANK_LABELS, OTHERS, OTHER_LABELS, CLASSES)
    assert np.isfinite(probe.weight).all()
    assert np.isfinite(probe.bias).all()


def test_embedding_statistics():
    found = embeddings.statistics(BANK)
    for place in range(SIZE):
        column = [float(value) for value in BANK[:, place]]
        mean = sum(column) / len(column)
        std = math.sqrt(sum((value - mean) ** 2 for value in column) / len(column))
        assert found.mean[place] == pytest.approx(mean, rel=1e-6)
        assert found.std[place] == pytest.approx(std, rel=2e-4)  # the floor adds 1e-4 of the variance
    # A number that hardly varies stays a small target.
    still = BANK.copy()
    still[:, 2] = 5
    std = embeddings.statistics(still).std
    assert std[2] == pytest.approx(0.01 * math.sqrt(still.astype(np.float64).var(0).mean()), rel=1e-5)
    with pytest.raises(ModelError, match=r"the same for all training images"):
        embeddings.statistics(np.ones_like(BANK))


@pytest.mark.parametrize(("count", "most", "chosen"), [(3, 5, [0, 1, 2]), (5, 3, [0, 2, 4]), (10, 4, [0, 3, 6, 9])])
def test_images_are_chosen_from_all_over(count, most, chosen):
    assert embeddings.evenly_spaced(count, most) == chosen


def test_images_of_a_split_in_the_order_of_a_hash_are_chosen_by_files():
    assert embeddings.evenly_spaced(10, 4, run=2) == [0, 1, 8, 9]
    assert embeddings.evenly_spaced(9, 5, run=2) == [0, 1, 4, 5, 6]
    assert embeddings.evenly_spaced(10, 3, run=2) == [0, 1, 8]
    chosen = embeddings.evenly_spaced(10_800_000, 20_000, run=4096)
    assert 4 * 4096 < len(chosen) <= 20_000
    assert len({index // 4096 for index in chosen}) == 5


def test_each_split_gives_its_share_of_the_images():
    class Counted:
        def __init__(self, count, run):
            self.count, self.run = count, run

        def __len__(self):
            return self.count

    def chosen(most, *splits):
        return embeddings.spread([Counted(*split) for split in splits], most)

    assert chosen(9, (3, 1), (4, 4)) == [0, 1, 2, 3, 4, 5, 6]
    assert chosen(4, (2, 1), (6, 2)) == [0, 2, 3, 6]
    few, many = 5_000, 1_000_000
    found = chosen(10_000, (few, 1), (many, 4096))
    assert len(found) == 10_000
    assert sum(index < few for index in found) == 49, "0.5 %"
    assert chosen(4, (4, 1)) == [0, 1, 2, 3]


@dataclass
class Group:
    """Processes one after the other: what each says is known when the last is asked."""

    rank: int
    said: list
    device: Device
    world_size: int = 3
    local_world_size: int = 3

    def gather(self, value, what):
        assert what
        self.said.append(value)
        return self.said


@pytest.mark.parametrize("count", [2, 3, 10])
def test_images_dealt_to_processes_come_back_in_their_order(count, digits, teacher, monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    model, split, device = networks.load(teacher), open_dataset(digits).split("val"), choose_device().open()
    monkeypatch.setattr(embeddings, "FORWARD_BATCH", 4)
    indices, said = list(range(5, 5 + 2 * count, 2)), []
    for rank in range(2):
        said.append(embeddings.embed(model, split, indices[rank::3], device, 4))
    together = embeddings.embed_together(model, split, indices, Group(2, said, device))
    with torch.no_grad():
        wanted = model.pooled(split.read(indices)).numpy()
    assert np.allclose(together, wanted, atol=1e-5)


def test_a_gpu_gets_its_images_from_loader_processes(digits, teacher, monkeypatch):
    model, split, started = networks.load(teacher), open_dataset(digits).split("val"), []
    here = embeddings.embed(model, split, range(7), HOST, 3)
    assert split.in_memory, "so they are read here even for a GPU"
    make_loader = embeddings.make_loader
    monkeypatch.setattr(embeddings, "make_loader", lambda *a, **k: started.append(k["workers"]) or make_loader(*a, **k))
    monkeypatch.setattr(embeddings, "usable_cores", lambda: 4)
    device = replace(HOST, kind="cuda")  # its tensors stay on the CPU
    assert np.array_equal(embeddings.embed(model, split, range(7), device, 3), here)
    monkeypatch.setattr(type(split), "in_memory", False)
    assert np.array_equal(embeddings.embed(model, split, range(7), device, 3, sharing=2), here)
    assert started == [0, 1]


def test_an_embedding_that_is_not_finite_is_named(digits, teacher, monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    model, split = networks.load(teacher), open_dataset(digits).split("val")
    with torch.no_grad():
        model.network.norm.weight[0] = float("nan")
    with pytest.raises(
        ModelError, match=rf"gives an embedding that is not finite for 2 of 2 images, first for {split.names[3]}"
    ):
        embeddings.embed(model, split, [3, 4], choose_device().open(), 2)


class FirstOf:
    """The first of several processes, which knows what the others have."""

    is_first = True

    def __init__(self, parts):
        self.parts, self.world_size, self.rank, self.sent = parts, len(parts), 0, []

    def gather(self, value, what):
        return [value] * self.world_size

    def collect(self, own, what):
        start = sum(self.sent)
        self.sent.append(len(own))
        return [part[start : start + len(own)] for part in self.parts]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("bytes_at_a_time", [1, 24, 10**6])
def test_what_processes_compute_of_their_images_comes_together(monkeypatch, count, world_size, bytes_at_a_time):
    monkeypatch.setattr(embeddings, "_SENT_BYTES", bytes_at_a_time)
    values = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    ranks = [SimpleNamespace(rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [values[np.array(embeddings.dealt(range(count), rank), dtype=int)] for rank in ranks]
    first = FirstOf(parts)
    together = embeddings.collected(parts[0], count, first, "numbers")
    assert together.tolist() == values.tolist()
    assert max(first.sent, default=0) * 12 <= max(12, bytes_at_a_time)
