import pytest
import torch

from trainer.data.batch import Recorded
from trainer.distillation.losses import TeacherOutputs, all_logits, complete, top_class

LOGITS = torch.tensor([[0.5, 2.0, -1.0], [3.0, 3.0, 7.0]])


def recorded(count):
    values, indices = LOGITS.topk(count, dim=1)
    return Recorded(indices, values, torch.zeros(2, 2), torch.ones(2, 4))


def test_all_recorded_logits_come_back_in_their_places():
    whole = complete(recorded(3), 3)
    assert torch.equal(whole.logits, LOGITS)
    assert torch.equal(whole.features, torch.ones(2, 4))
    assert complete(recorded(2), 3) is None


def test_all_logits_are_those_of_either_kind():
    assert torch.equal(all_logits(TeacherOutputs(LOGITS), 3), LOGITS)
    assert torch.equal(all_logits(recorded(3), 3), LOGITS)
    with pytest.raises(AssertionError, match="3 logits are needed"):
        all_logits(recorded(2), 3)


def test_the_top_class_is_that_of_either_kind():
    assert top_class(TeacherOutputs(LOGITS)).tolist() == [1, 2]
    assert top_class(recorded(1)).tolist() == [1, 2]


def test_the_recorded_top_class_survives_rounding_to_equal_logits():
    rounded = Recorded(torch.tensor([[2, 0, 1]]), torch.tensor([[4.0, 4.0, 1.0]]), torch.zeros(1, 2), None)
    assert top_class(rounded).tolist() == [2]
