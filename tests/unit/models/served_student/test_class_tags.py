"""Levels, answers and attributes of a small hierarchy, against a walk through it for each image."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trainer.models.served_student.class_tags import LEVELS, TAGS, ClassTags

LABELS = ("gala", "granny", "kiwi", "milk", "oat")
PARENTS = {"gala": "apple", "granny": "apple", "apple": "fruit", "kiwi": "fruit", "milk": "drinks", "oat": "drinks"}
ATTRIBUTES = {"energy": (57.0, 58.0, 61.0, 50.0, None), "allergens": ("none", "none", "none", "milk", "oats")}
FOOD = ClassTags(labels=LABELS, attributes=ATTRIBUTES, parents=PARENTS)


def climb(probabilities: np.ndarray, threshold: float) -> tuple[str | None, float]:
    """The rule, node by node: go up from the most probable class until a name is sure enough."""
    name = LABELS[int(np.argmax(probabilities))]
    while True:
        below = [label for label in LABELS if name in (label, PARENTS.get(label), PARENTS.get(PARENTS.get(label, "")))]
        sure = sum(float(probabilities[LABELS.index(label)]) for label in below)
        if sure > threshold:
            return name, sure
        if name not in PARENTS:
            return None, sure
        name = PARENTS[name]


def drawn(count: int = 200) -> np.ndarray:
    return np.random.default_rng(0).dirichlet([0.4] * 5, count)


def test_answers_by_level():
    assert FOOD.paths == (
        ("fruit", "apple", "gala"), ("fruit", "apple", "granny"), ("fruit", "kiwi"), ("drinks", "milk"), ("drinks", "oat"),
    )  # fmt: skip
    assert [level.names for level in FOOD.levels] == [
        ("fruit", "drinks"), ("apple", "kiwi", "milk", "oat"), ("gala", "granny", "kiwi", "milk", "oat"),
    ]  # fmt: skip
    assert FOOD.levels[1].of_class.tolist() == [0, 0, 1, 2, 3]
    assert [level.names for level in ClassTags(labels=LABELS).levels] == [LABELS]
    # Without a threshold the answer is the class to the last bit of its attributes.
    probabilities = drawn()
    columns = FOOD.columns(probabilities)
    best = probabilities.argmax(axis=1)
    assert columns["answer"].tolist() == [LABELS[index] for index in best]
    assert columns["energy"].tolist() == [ATTRIBUTES["energy"][index] for index in best]
    assert columns["allergens"].tolist() == [ATTRIBUTES["allergens"][index] for index in best]
    np.testing.assert_array_equal(columns["confidence"], probabilities.max(axis=1))
    assert None in columns["energy"].tolist(), "the oats' energy is not known"
    known = FOOD.columns(probabilities[best != LABELS.index("oat")])["energy"]
    assert known.dtype == np.float64


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.8, 0.95, 1.0])
def test_answers_walk_up_from_the_best_class(threshold):
    probabilities = drawn()
    columns = FOOD.answering(risk=0.1, threshold=threshold).columns(probabilities)
    expected = [climb(row, threshold) for row in probabilities]
    assert columns["answer"].tolist() == [name for name, _ in expected]
    np.testing.assert_allclose(columns["confidence"], [sure for _, sure in expected], atol=1e-12)
    if 0 < threshold < 1:
        assert {None, "fruit", "apple", "gala"} <= set(columns["answer"]), "the draws reach every level"


def test_a_groups_values_come_from_its_classes():
    probabilities = np.array([[0.6, 0.2, 0.1, 0.1, 0.0], [0.0, 0.0, 0.1, 0.5, 0.4], [0.3, 0.0, 0.2, 0.3, 0.2]])
    columns = FOOD.answering(risk=0.1, threshold=0.7).columns(probabilities)
    assert columns["answer"].tolist() == ["apple", "drinks", None]
    assert columns["energy"][0] == pytest.approx(0.75 * 57 + 0.25 * 58)
    assert columns["energy"][1] == 50.0, "what is not known of a class weighs nothing"
    assert columns["allergens"].tolist() == ["none", "milk; oats", None]
    assert columns["energy"][2] is None
    assert columns["confidence"].tolist() == pytest.approx([0.8, 0.9, 0.5])


def test_confidence_never_falls_on_way_up_nor_exceeds_one():
    labels = tuple(map(str, range(40)))
    parents = {label: "rare" if int(label) % 5 == 0 else "usual" for label in labels}
    tags = ClassTags(labels=labels, parents=parents | {"rare": "all", "usual": "all"})
    probabilities = np.random.default_rng(0).dirichlet([0.05] * 40, 3000)
    usual = probabilities.copy()
    usual[:, ::5] *= 1e-17  # with these, another order of the same sum changes its last bit
    top, group, _ = (level.sums(usual).max(axis=1) for level in tags.levels)
    assert (top < group).any()
    assert tags.levels[0].sums(probabilities).max() > 1
    for given in (probabilities, usual):
        confidences = tags.confidences(given)
        assert (np.diff(confidences, axis=1) <= 0).all()
        assert confidences.max() <= 1


def test_what_is_written_is_read_again(tmp_path):
    tags = FOOD.answering(risk=0.1, threshold=0.75)
    tags.write(tmp_path)
    assert ClassTags.of(json.loads((tmp_path / TAGS).read_text())) == tags


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attributes": {"energy": [1.0]}}, "has 1 values for 5 classes"),
        ({"attributes": {"energy": [1.0, "2", None, None, None]}}, "neither all numbers nor all texts"),
        ({"attributes": {"energy": [True, False, None, None, None]}}, "neither all numbers nor all texts"),
        ({"attributes": 3}, "does not hold attributes"),
        ({"labels": [1, 2, 3, 4, 5]}, "a label is no text"),
        ({"parents": {"gala": "apple", "apple": "gala"}}, "in a circle"),
        ({"parents": {"gala": 1}}, "a name in the hierarchy is no text"),
        ({"parents": {f"{n}": f"{n + 1}" for n in range(LEVELS)} | {"gala": "0"}}, "below more than 31 groups"),
        ({"threshold": 2.0}, "must be from 0 to 1, got 2.0"),
        ({"threshold": "1"}, "must be from 0 to 1, got '1'"),
        ({"risk": float("nan")}, "must be from 0 to 1, got nan"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, changed, message):
    FOOD.write(tmp_path)
    content = json.loads((tmp_path / TAGS).read_text())
    with pytest.raises(ValueError, match=message):
        ClassTags.of({**content, **changed})
    with pytest.raises(ValueError, match="does not hold attributes"):
        ClassTags.of({name: value for name, value in content.items() if name != "parents"})
