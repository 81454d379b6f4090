import numpy as np
import pytest

from trainer.data.order import SampleOrder


def test_an_epoch_has_every_sample_once():
    order = SampleOrder(101, seed=3)
    for epoch in range(3):
        indices, epochs = order.take(epoch * 101, (epoch + 1) * 101)
        assert sorted(indices) == list(range(101))
        assert set(epochs) == {epoch}


def test_epochs_and_seeds_are_shuffled_differently():
    orders = [tuple(SampleOrder(50, seed).take(epoch * 50, epoch * 50 + 50)[0]) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4


@pytest.mark.parametrize("size", [1, 7, 64, 250])
def test_the_stream_does_not_depend_on_the_batch_size(size):
    whole = SampleOrder(101, seed=3).take(0, 500)
    order = SampleOrder(101, seed=3)
    parts = [order.take(start, min(start + size, 500)) for start in range(0, 500, size)]
    for column in (0, 1):
        assert np.concatenate([part[column] for part in parts]).tolist() == whole[column].tolist()


def test_going_on_needs_the_position_alone():
    assert (
        SampleOrder(101, seed=3).take(333, 400)[0].tolist() == SampleOrder(101, seed=3).take(0, 400)[0][333:].tolist()
    )


def test_places_are_spread_evenly_over_epochs():
    firsts = [int(SampleOrder(10, seed=9).take(epoch * 10, epoch * 10 + 1)[0][0]) for epoch in range(2000)]
    counts = np.bincount(firsts, minlength=10)
    assert counts.min() > 140
    assert counts.max() < 260
