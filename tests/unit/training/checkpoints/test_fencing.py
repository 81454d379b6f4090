from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer import storage
from trainer.errors import StorageError
from trainer.training.checkpoints import fencing


@pytest.fixture(params=["here", "in a store"])
def root(request, tmp_path):
    if request.param == "here":
        return str(tmp_path / "training")
    return request.getfixturevalue("object_store").uri("training")


def test_a_later_one_fences_off_the_one_before(root):
    assert fencing.newest(root) == 0
    first = fencing.claim(root)
    assert first.standing() == "newest"
    second = fencing.claim(root)
    assert (first.number, second.number) == (1, 2)
    assert (first.standing(), second.standing()) == ("superseded", "newest")


def test_each_number_is_claimed_once(root):
    with ThreadPoolExecutor(6) as threads:
        numbers = [one.number for one in threads.map(lambda _: fencing.claim(root), range(12))]
    assert sorted(numbers) == list(range(1, 13))


def test_a_number_that_a_checkpoint_has_is_taken(tmp_path):
    (tmp_path / "step-00000500-g004").mkdir()
    assert fencing.claim(str(tmp_path)).number == 5
    (tmp_path / ".step-00000600-g007").mkdir()
    (tmp_path / "evidence-of-failed").mkdir()
    assert fencing.claim(str(tmp_path)).number == 8


def test_a_claim_that_was_taken_over_is_lost(tmp_path):
    claimed = fencing.claim(str(tmp_path))
    (tmp_path / "generation-001").write_bytes(b"another")
    assert claimed.standing() == "superseded"
    assert not claimed.stake()


def test_a_claim_that_is_gone_says_nothing_of_a_later_one_and_is_made_again(root):
    fencing.claim(root)
    claimed = fencing.claim(root)
    storage.remove(root)
    assert claimed.standing() == "gone"
    assert claimed.stake()
    assert claimed.standing() == "newest"
    assert fencing.claim(root).number == 3


def test_who_begins_after_the_claims_were_lost_is_the_later_one_though_its_number_is_lower(root):
    fencing.claim(root)
    second = fencing.claim(root)
    storage.remove(root)
    assert fencing.claim(root).number == 1
    assert second.standing() == "superseded"


def test_an_answer_that_is_lost_does_not_cost_the_claim(object_store):
    object_store.lose_answer(method="PUT", path="generation-001")
    claimed = fencing.claim(object_store.uri("training"))
    assert claimed.number == 1
    assert claimed.standing() == "newest"


def test_a_store_that_refuses_is_told(object_store):
    object_store.answer(403, method="PUT")
    with pytest.raises(StorageError, match="refuses"):
        fencing.claim(object_store.uri("training"))
