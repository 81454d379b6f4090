"""The number by which a classifier is judged."""

import pytest

from trainer.report import scores


def test_figures_have_the_score_of_their_kind():
    assert (scores.name({"top5": 0.9, "top1": 0.5}), scores.score({"top1": 0.5})) == ("top1", 0.5)
    assert (scores.title({"map": 0.4}), scores.score({"map": 0.4})) == ("mAP", 0.4)


@pytest.mark.parametrize("found", [scores.name, scores.title, scores.score])
def test_figures_without_score_are_value_error_that_says_so(found):
    with pytest.raises(ValueError, match="there is no score among its figures, top1 or map"):
        found({"top5": 0.9})
