from __future__ import annotations

import numpy as np
import torch

from trainer.evaluation import slices
from trainer.evaluation.metrics import Answers

LABELS = np.arange(400) % 2


class Images:
    """Images of two cameras, dark and bright by turns of hundreds."""

    sources = tuple(f"photos/camera{index // 200}/{index}.png" for index in range(400))

    def __len__(self) -> int:
        return 400

    def read(self, indices: list[int]) -> torch.Tensor:
        levels = torch.tensor([(index // 100 % 2) * 100 + 20 + index % 7 for index in indices], dtype=torch.uint8)
        return levels.view(-1, 1, 1, 1).expand(-1, 3, 2, 2)


def answers(wrong: np.ndarray) -> Answers:
    predicted = np.where(wrong, 1 - LABELS, LABELS)
    return Answers(labels=LABELS, predicted=predicted, confidence=np.ones(400), label_confidence=np.ones(400))


def test_groups_whose_mistakes_differ_are_found_and_others_are_not():
    right = answers(np.zeros(400, dtype=bool))
    dark = np.arange(400) // 100 % 2 == 0
    wrong = dark & (np.arange(400) % 5 < 2)
    (found,) = slices.compared(Images(), None, right, answers(wrong))
    assert found.title.startswith("brightness")
    assert sum(group.images for group in found.groups) == 400
    assert [group.teacher for group in found.groups] == [group.images for group in found.groups]
    assert sum(group.images - group.student for group in found.groups) == wrong.sum()
    assert found.groups[0].student < 0.7 * found.groups[0].images
    assert found.groups[-1].student == found.groups[-1].images
    # By folder and by size.
    camera = np.arange(400) >= 200
    sizes = np.where(camera, 64, 512) + np.arange(400) // 11 % 10
    found = slices.compared(Images(), sizes, right, answers(camera & (np.arange(400) % 5 < 2)))
    assert [one.title.partition(" ")[0] for one in found] == ["folder,", "size"]
    assert [group.name for group in found[0].groups] == ["camera0", "camera1"]
    assert slices.compared(Images(), sizes, right, answers(np.arange(400) % 10 < 2)) == []
    assert slices.compared(Images(), sizes, right, right) == []


def test_a_difficult_class_is_no_difficult_group():
    groups, labels = np.repeat([0, 1], 100), np.repeat([0, 1], 100)
    labels[:10], labels[100:110] = 1, 0
    wrong = (labels == 1) & (np.arange(200) % 3 == 0)
    assert slices.chance(wrong, groups, labels) > 0.2
    assert slices.chance(wrong, groups, np.zeros(200, dtype=np.int64)) < 0.01
