import hashlib
import math
import tracemalloc
from functools import partial

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from scipy import stats

from trainer.data import sampler
from trainer.data.sampler import SampleSlice, StatelessSampler, partners, random_bits, uniform

PLAIN, PAIRED = {}, {"paired": True}


@pytest.mark.parametrize("settings", [PLAIN, PAIRED, {"views": 2}, {"views": 2, "paired": True}])
@pytest.mark.parametrize("count", [1, 2, 100, 101])
def test_an_epoch_has_every_sample_once(count, settings):
    order = StatelessSampler(count, seed=3, **settings)
    for epoch in range(3):
        taken = order.take(epoch * count, (epoch + 1) * count)
        assert sorted(taken.indices) == list(range(count))
        assert set(taken.numbers) == {epoch % settings.get("views", 3)}


@pytest.mark.parametrize("settings", [PLAIN, PAIRED])
def test_epochs_and_seeds_are_shuffled_differently(settings):
    orders = [
        tuple(StatelessSampler(50, seed, **settings).take(epoch * 50, epoch * 50 + 50).indices)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


@pytest.mark.parametrize("size", [1, 7, 64, 250])
@pytest.mark.parametrize("settings", [PAIRED, {"views": 2, "paired": True}])
def test_stream_does_not_depend_on_batch_size(size, settings):
    whole = StatelessSampler(101, seed=3, **settings).take(0, 500)
    order = StatelessSampler(101, seed=3, **settings)
    parts = [order.take(start, min(start + size, 500)) for start in range(0, 500, size)]
    for name in ("indices", "numbers", "partners"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(whole, name).tolist()


@pytest.mark.parametrize("settings", [PLAIN, PAIRED, {"views": 2, "paired": True}])
def test_going_on_needs_the_position_alone(settings):
    whole, rest = (StatelessSampler(101, seed=3, **settings).take(start, 400) for start in (0, 333))
    assert whole.indices[333:].tolist() == rest.indices.tolist()
    assert whole.numbers[333:].tolist() == rest.numbers.tolist()
    if settings:
        assert whole.partners[333:].tolist() == rest.partners.tolist()


def test_places_are_spread_evenly_over_epochs():
    firsts = [int(StatelessSampler(10, seed=9).take(epoch * 10, epoch * 10 + 1).indices[0]) for epoch in range(2000)]
    counts = np.bincount(firsts, minlength=10)
    assert counts.min() > 140
    assert counts.max() < 260


@pytest.mark.parametrize("count", [1, 2, 100, 101])
def test_partners_are_mutual_and_only_odd_sample_is_alone(count):
    partner = partners(count, 5, 3)
    assert partner[partner].tolist() == list(range(count))
    assert np.count_nonzero(partner == np.arange(count)) == count % 2


@pytest.mark.parametrize("count", [100, 101])
def test_epoch_shows_pairs_of_its_view_side_by_side(count):
    taken = StatelessSampler(count, seed=7, view_seed=11, paired=True).take(4 * count, 5 * count)
    assert taken.partners.tolist() == partners(count, 11, 4)[taken.indices].tolist()
    places = {int(index): place for place, index in enumerate(taken.indices)}
    gaps = [abs(places[int(partner)] - place) for place, partner in enumerate(taken.partners)]
    assert max(gaps) == 1
    assert sum(gap == 0 for gap in gaps) == count % 2


def test_recorded_views_come_again_with_same_pairs_in_another_order():
    order = StatelessSampler(60, seed=1, view_seed=2, views=3, paired=True)
    first, again = order.take(60, 120), order.take(60 * 4, 60 * 5)
    assert set(first.numbers) == set(again.numbers) == {1}
    pairs = [dict(zip(taken.indices.tolist(), taken.partners.tolist(), strict=True)) for taken in (first, again)]
    assert pairs[0] == pairs[1]
    assert first.indices.tolist() != again.indices.tolist()


def test_order_of_recorded_views():
    one, two = (StatelessSampler(60, seed, view_seed=2, paired=True).take(0, 60) for seed in (0, 1))
    assert one.indices.tolist() != two.indices.tolist()
    assert one.partners[np.argsort(one.indices)].tolist() == two.partners[np.argsort(two.indices)].tolist()
    # A batch that reaches over several epochs has the partners of each.
    taken = StatelessSampler(5, seed=3, paired=True).take(0, 15)
    for epoch in range(3):
        part = slice(5 * epoch, 5 * epoch + 5)
        assert taken.partners[part].tolist() == partners(5, 3, epoch)[taken.indices[part]].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Labeled samples and others

LABELED = np.arange(101) < 61
"""An odd number of samples has a label, an even number has none."""
SHARES = [0.0, 0.25, 0.5, 0.9]


def mixed_order(share=0.0, **settings):
    return StatelessSampler(101, seed=3, labeled=LABELED, labeled_share=share, **settings)


def parts_together(parts):
    fields = zip(*parts, strict=True)
    return [None if field[0] is None else np.concatenate(field).tolist() for field in fields]


@pytest.mark.parametrize("settings", [PLAIN, PAIRED], ids=str)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("size", [1, 7, 64])
def test_streams_do_not_depend_on_the_batch(size, share, settings):
    whole = mixed_order(share, **settings).take(0, 500)
    for first in (0, 333):
        order = mixed_order(share, **settings)
        parts = [order.take(start, min(start + size, 500)) for start in range(first, 500, size)]
        assert parts_together(parts) == parts_together(
            [SampleSlice(*(one if one is None else one[first:] for one in whole))]
        )


@pytest.mark.parametrize("settings", [PLAIN, PAIRED], ids=str)
def test_as_they_come_epoch_has_every_sample_once(settings):
    order = mixed_order(**settings)
    for epoch in range(3):
        taken = order.take(epoch * 101, (epoch + 1) * 101)
        assert sorted(taken.indices) == list(range(101))
        assert set(taken.numbers) == {epoch}


@pytest.mark.parametrize("share", SHARES[1:])
@pytest.mark.parametrize("settings", [PLAIN, {"views": 2, "paired": True}], ids=str)
def test_each_kind_has_its_share_of_batches(share, settings):
    order = mixed_order(share, **settings)
    for start in range(0, 1000, 40):
        assert LABELED[order.take(start, start + 40).indices].sum() == 40 * share
    taken = order.take(0, 2020)
    for kind in (LABELED, ~LABELED):
        chosen, members = kind[taken.indices], np.flatnonzero(kind)
        for epoch in range(chosen.sum() // len(members)):
            part = slice(epoch * len(members), (epoch + 1) * len(members))
            assert sorted(taken.indices[chosen][part]) == members.tolist()
            assert set(taken.numbers[chosen][part]) == {epoch % settings.get("views", 100)}


def test_fractional_shares_hold_over_batches():
    order = mixed_order(0.1)
    counts = [int(LABELED[order.take(start, start + 15).indices].sum()) for start in range(0, 1500, 15)]
    assert set(counts) == {1, 2}
    assert sum(counts) == 150


@pytest.mark.parametrize("share", SHARES)
def test_partners_are_of_one_kind_and_mutual_in_each_view(share):
    taken = mixed_order(share, paired=True, views=3).take(0, 1500)
    for number in range(3):
        partner = partners(101, 3, number, LABELED)
        assert partner[partner].tolist() == list(range(101))
        assert (LABELED[partner] == LABELED).all()
        assert np.count_nonzero(partner == np.arange(101)) == 1, "of 61 labeled samples one is alone, of 40 others none"
        chosen = taken.numbers == number
        assert taken.partners[chosen].tolist() == partner[taken.indices[chosen]].tolist()


def test_labeled_samples_pairs_are_same_without_others():
    for number in range(3):
        assert partners(61, 3, number).tolist() == partners(101, 3, number, LABELED)[:61].tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Windows

TWO_THIRDS = np.arange(1001) % 3 > 0
UNCHANGED = [
    ({}, "96a9cdda6a1d5db0"),
    ({"paired": True}, "7cbffcc37d2ee3bb"),
    ({"views": 2, "paired": True, "view_seed": 9}, "1abcba4c90eb3f09"),
    ({"labeled": TWO_THIRDS, "paired": True}, "c22a6dc173f1e59e"),
    ({"labeled": TWO_THIRDS, "labeled_share": 0.25, "paired": True, "views": 2}, "0b800b7803dbca39"),
    ({"labeled": TWO_THIRDS, "labeled_share": 0.25}, "ec2799e3f134aa2c"),
]
"""Settings -> SHA-256 of 2,677 positions, as they were before there were windows."""


@pytest.mark.parametrize(("settings", "digest"), UNCHANGED, ids=range(len(UNCHANGED)))
def test_set_of_one_window_keeps_its_order(settings, digest):
    taken = StatelessSampler(1001, 3, **settings).take(333, 3010)
    contents = b"".join(np.ascontiguousarray(one).tobytes() for one in taken if one is not None)
    assert hashlib.sha256(contents).hexdigest()[:16] == digest


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    count=strategies.integers(1, 90),
    shard=strategies.integers(1, 9),
    window=strategies.integers(1, 5),
    views=strategies.integers(0, 3),
    paired=strategies.booleans(),
    share=strategies.sampled_from([0.0, 0.3]),
    labeled=strategies.integers(0, 90),
    batch=strategies.integers(1, 40),
)
def test_windows(count, shard, window, views, paired, share, labeled, batch):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sampler, "SHARD", shard)
        patched.setattr(sampler, "WINDOW", window)
        mask = np.arange(count) < labeled
        make = partial(
            StatelessSampler, count, 3, view_seed=5, views=views, paired=paired, labeled=mask, labeled_share=share
        )
        whole = make().take(0, 2 * count)
        # Any cut gives the same positions: other batches, other processes, a resume.
        parts = [make().take(start, min(start + batch, 2 * count)) for start in range(0, 2 * count, batch)]
        assert parts_together(parts) == parts_together([whole])
        for position in range(0, 2 * count, batch):
            here = make().take(position, position + 1).indices // shard
            assert {*here.tolist()} <= {*make().windows(position, 1)[0].tolist()}
        streams = [mask, ~mask] if share and 0 < labeled < count else [np.ones(count, dtype=np.bool_)]
        for members in streams:
            chosen = members[whole.indices]
            indices = whole.indices[chosen]
            for first in range(0, len(indices) - members.sum() + 1, members.sum()):
                epoch = slice(first, first + members.sum())
                assert sorted(indices[epoch]) == np.flatnonzero(members).tolist()
                # A window is left for good when the next one begins.
                shards = indices[epoch] // shard
                begins, ends = (np.unique(one, return_index=True)[1] for one in (shards, shards[::-1]))
                opened = np.bincount(begins, minlength=len(shards) + 1).cumsum()
                left = np.bincount(len(shards) - ends, minlength=len(shards) + 1).cumsum()
                assert (opened - left).max() <= window
        if len(streams) == 1:  # the windows of two epochs, one after the other
            windows = make().windows(0, 2 * math.ceil(math.ceil(count / shard) / window))
            shards = [
                *dict.fromkeys(
                    zip((np.arange(2 * count) // count).tolist(), (whole.indices // shard).tolist(), strict=True)
                )
            ]
            listed = [(number // (len(windows) // 2), one) for number, of in enumerate(windows) for one in of.tolist()]
            assert sorted(listed) == sorted(shards)
            assert make().windows(2 * count - 1, 1)[0].tolist() == windows[-1].tolist()
        if paired:
            for number in {*whole.numbers.tolist()}:
                partner = partners(count, 5, number, mask)
                assert partner[partner].tolist() == list(range(count))
                assert (mask[partner] == mask).all()
                chosen = whole.numbers == number
                assert whole.partners[chosen].tolist() == partner[whole.indices[chosen]].tolist()
                some = range(count // 3, count // 3 + 1 + count // 2) if count > 2 else range(count)
                assert partners(count, 5, number, mask, some).tolist() == partner[some.start : some.stop].tolist()


def test_memory_is_that_of_windows():
    order = StatelessSampler(4_000_000, 3, paired=True)
    tracemalloc.start()
    try:
        taken = order.take(1_000_000, 1_000_256)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len({*(taken.indices // sampler.SHARD)}) > 32
    assert peak < 40e6, "an epoch's order and partners would be 64 MB"


def test_word_generator():
    assert int(random_bits(1234567)) == 6457827717110365317
    # Every word matters.
    base = (1, 2, 3, 4)
    draws = {int(random_bits(*base))}
    for place in range(4):
        for bit in (0, 17, 62):
            words = list(base)
            words[place] ^= 1 << bit
            draws.add(int(random_bits(*words)))
    assert len(draws) == 13
    # Numbers are uniform and uncorrelated.
    numbers = uniform(0, np.arange(200_000, dtype=np.uint64))
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
    neighbors = uniform(1, np.arange(200_000, dtype=np.uint64))
    assert abs(np.corrcoef(numbers, neighbors)[0, 1]) < 0.01
