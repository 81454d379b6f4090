"""Contradicted labels against the paper's formulas in slow loops, and on real digits of which some labels were changed."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.trained_digits import change_labels
from trainer.evaluation import label_issues
from trainer.evaluation.label_issues import contradicted, cross_validated
from trainer.models.served_student.student import to_probabilities


def by_hand(logits, labels):
    """Confident learning for one image after the other, in loops: row -> suggested class, and the normalized margins."""
    rows = [[float(value) for value in row] for row in logits]
    chances = []
    for row in rows:
        powers = [np.exp(value - max(row)) for value in row]
        chances.append([power / sum(powers) for power in powers])
    classes = len(rows[0])
    thresholds = []
    for label in range(classes):
        own = [chance[label] for chance, given in zip(chances, labels, strict=True) if given == label]
        thresholds.append(sum(own) / len(own) if own else float("inf"))
    found, margins = {}, {}
    for number, (chance, given) in enumerate(zip(chances, labels, strict=True)):
        confident = [label for label in range(classes) if chance[label] >= thresholds[label] - 1e-6]
        if not confident:
            continue
        suggested = max(confident, key=lambda label: chance[label])
        if suggested != given and max(chance) != chance[given]:
            found[number] = suggested
            margins[number] = chance[given] - max(value for label, value in enumerate(chance) if label != given)
    return found, margins


def made_up(count, classes, seed, wrong=0.2):
    """Logits around the true classes, and labels of which a share is another class."""
    generator = np.random.default_rng(seed)
    truth = generator.integers(0, classes, count)
    logits = generator.normal(size=(count, classes)) + 2 * np.eye(classes)[truth]
    labels = np.where(generator.random(count) < wrong, generator.integers(0, classes, count), truth)
    return logits.astype(np.float32), labels


@pytest.mark.parametrize("together", [7, 4096])
@pytest.mark.parametrize("classes", [2, 3, 12])
def test_contradicted_labels_are_those_of_the_papers_loop(monkeypatch, classes, together):
    monkeypatch.setattr(label_issues, "_TOGETHER", together)
    logits, labels = made_up(300, classes, seed=classes)
    labels[labels == classes - 1] = 0  # a class without an image, which is never suggested
    labels[5] = classes - 1
    if classes == 12:
        labels[5] = 0
    expected, margins = by_hand(logits, labels)
    assert len(expected) > 20
    found = contradicted(logits, labels)
    assert dict(zip(found.rows.tolist(), found.suggested.tolist(), strict=True)) == expected
    assert np.diff([margins[row] for row in found.rows.tolist()]).min() >= 0, "the worst comes first"
    powers = np.exp(logits.astype(np.float64))
    chances = powers / powers.sum(axis=1, keepdims=True)
    assert np.allclose(found.confidence, chances[found.rows, found.suggested])
    assert np.allclose(found.label_confidence, chances[found.rows, labels[found.rows]])


@pytest.mark.parametrize("classes", [2, 3, 10, 50])
def test_contradicted_labels_and_their_order_are_cleanlabs(classes):
    filters = pytest.importorskip("cleanlab.filter")  # an environment may be older than requirements/development.txt
    logits, labels = made_up(1500, classes, seed=classes)
    chances = to_probabilities(logits)
    expected = filters.find_label_issues(
        labels, chances, filter_by="confident_learning", return_indices_ranked_by="normalized_margin", n_jobs=1
    )
    # Where several classes are above their thresholds it takes the most probable class of all, be it above its own or not; the paper, and
    # we, the most probable of those above. So it contradicts a few labels that are just that.
    thresholds = np.array([chances[labels == label, label].mean() for label in range(classes)])
    own = np.where(chances >= thresholds - 1e-6, chances, -1).argmax(axis=1) == labels
    assert own[expected].sum() == (3 if classes == 50 else 0)
    assert len(expected) > 20
    assert contradicted(logits, labels).rows.tolist() == expected[~own[expected]].tolist()


def test_nothing_is_contradicted_of_nothing_or_where_model_agrees():
    for logits, labels in ((np.zeros((0, 3)), []), (10 * np.eye(3), [0, 1, 2]), (np.zeros((3, 3)), [0, 1, 2])):
        assert len(contradicted(logits, np.array(labels, dtype=np.int64)).rows) == 0


# ---------------------------------------------------------------------------------------------------------------------
# Cross-validation, on scikit-learn's digits as they are: their 64 pixels are the embedding


@pytest.fixture(scope="module")
def digits():
    """Pixels [N, 64], labels of which a twentieth was changed, and which ones."""
    known = load_digits()
    labels, flipped = change_labels(known.target, seed=0)
    return known.data.astype(np.float32), labels, flipped


def test_changed_labels_of_training_images_are_found(digits):
    pixels, labels, flipped = digits
    train, val = slice(0, 1200), slice(1200, None)
    logits, judged = cross_validated(pixels[train], labels[train], pixels[val], labels[val], 10)
    assert judged.all()
    found = contradicted(logits, labels[train])
    hits = flipped[train][found.rows]
    assert hits.mean() > 0.65, "precision; by chance it is 0.05"
    assert hits.sum() / flipped[train].sum() > 0.6, f"recall; by chance it is {len(found.rows) / 1200}"
    assert hits[:20].mean() > 0.9, "the worst come first"
    right = found.suggested == load_digits().target[train][found.rows]
    assert right[hits].mean() > 0.9


def test_no_image_is_judged_by_its_own_probe(digits, monkeypatch):
    pixels, labels, _ = digits
    labels = labels[:60].copy()
    labels[[3, 17]] = 10  # a class of two images
    labels[8] = 11  # and of one
    fits = []
    fit = label_issues.fit_probe

    def recorded(embeddings, own, *others, **options):
        fits.append((embeddings, own))
        return fit(embeddings, own, *others, **options)

    monkeypatch.setattr(label_issues, "fit_probe", recorded)
    logits, judged = cross_validated(pixels[:60], labels, pixels[60:90], labels[:30], 12)
    assert np.flatnonzero(~judged).tolist() == [8]
    assert len(fits) == 1 + label_issues.FOLDS
    seen = np.stack([[(pixels[row] == known).all(1).any() for known, _ in fits[1:]] for row in range(60)])
    assert (seen.sum(axis=1) == label_issues.FOLDS - 1).all(), "each image is left out once"
    for row in np.flatnonzero(judged):
        (fold,) = np.flatnonzero(~seen[row])
        assert labels[row] in fits[1 + fold][1]
    assert np.isfinite(logits).all()
