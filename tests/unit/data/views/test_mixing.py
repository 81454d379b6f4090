import numpy as np
import pytest
import torch
from scipy import stats

from trainer.config import ViewSettings
from trainer.data.batch import Mixing
from trainer.data.views.mixing import draw_mixing, mix, mixes

BOTH = ViewSettings(mixup=0.8, cutmix=1.0)


def drawn(count, settings, *, seed=1, first=0, number=0):
    """Samples first .. first + count - 1, each mixed with the next one and the last with itself."""
    keys = np.arange(first, first + count, dtype=np.uint64)
    partner = np.minimum(np.arange(count) + 1, count - 1)
    return draw_mixing(keys, np.full(count, number), partner, partner % 10, seed=seed, settings=settings)


def test_views_are_mixed_only_if_asked():
    assert not mixes(ViewSettings())
    assert mixes(ViewSettings(mixup=0.1))
    assert mixes(ViewSettings(cutmix=0.1))


def test_a_draw_does_not_depend_on_the_batch_around_it():
    whole, part = drawn(64, BOTH), drawn(32, BOTH, first=32)
    for name in ("share", "blend", "box"):
        assert torch.equal(getattr(whole, name)[32:], getattr(part, name))


@pytest.mark.parametrize("change", [{"seed": 2}, {"first": 1000}, {"number": 1}])
def test_seed_key_and_number_each_give_other_mixtures(change):
    assert not (drawn(64, BOTH).share == drawn(64, BOTH, **change).share).any()


def test_mixtures_are_what_they_were_when_teachers_outputs_were_recorded():
    """As for views: a change of these numbers raises the schema version of `teacher_outputs`."""
    mixing = drawn(4, BOTH)
    assert mixing.share.tolist() == pytest.approx([0.8205, 0.9632, 0.1776, 0.2488], abs=1e-4)
    assert mixing.blend.tolist() == pytest.approx([0.8205, 1.0, 0.1776, 1.0], abs=1e-4)


def test_partners_and_their_labels_pass_through():
    mixing = drawn(5, BOTH)
    assert mixing.partner.tolist() == mixing.labels.tolist() == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixup_shares_follow_the_beta_distribution(alpha):
    mixing = drawn(5000, ViewSettings(mixup=alpha))
    assert stats.kstest(mixing.share.double(), stats.beta(alpha, alpha).cdf).pvalue > 0.01
    assert torch.equal(mixing.share, mixing.blend)
    assert not mixing.box.any()


def test_cutmix_boxes_cover_a_beta_share_before_they_are_cut_at_the_edge():
    mixing = drawn(5000, ViewSettings(cutmix=1.0))
    left, top, right, bottom = mixing.box.double().unbind(1)
    whole = (left > 0) & (top > 0) & (right < 1) & (bottom < 1)
    assert (mixing.blend == 1).all()
    assert (right - left)[whole] == pytest.approx((bottom - top)[whole], abs=1e-6)  # squares
    assert mixing.share.double() == pytest.approx(1 - (right - left) * (bottom - top), abs=1e-6)
    assert mixing.box.min() == 0
    assert mixing.box.max() == 1
    for low, high in ((left, right), (top, bottom)):
        middle = ((low + high) / 2)[(low > 0) & (high < 1)]
        assert abs(float(middle.mean()) - 0.5) < 0.01


def test_with_both_each_sample_gets_one_of_them():
    mixing = drawn(4000, BOTH)
    is_cutmix = mixing.box.any(1)
    assert 0.47 < is_cutmix.double().mean() < 0.53
    assert (mixing.blend[is_cutmix] == 1).all()
    assert (mixing.blend[~is_cutmix] < 1).all()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_mixup_is_the_weighted_mean_of_the_views(images, count):
    views, mixing = images(count, 16, "noise"), drawn(count, ViewSettings(mixup=1.0))
    mixed = mix(views, mixing)
    assert mixed.dtype == torch.uint8
    for row in range(count):
        share, partner = float(mixing.share[row]), int(mixing.partner[row])
        expected = share * views[row].float() + (1 - share) * views[partner].float()
        assert (mixed[row].float() - expected).abs().max() <= 0.5 + 1e-4


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_cutmix_takes_a_box_from_the_partner_whose_share_is_its_area(images, count):
    size = 64
    views, mixing = images(count, size, "noise"), drawn(count, ViewSettings(cutmix=1.0), seed=2)
    mixed = mix(views, mixing)
    for row in range(count):
        left, top, right, bottom = (round(edge * size) for edge in mixing.box[row].tolist())
        expected = views[row].clone()
        expected[:, top:bottom, left:right] = views[mixing.partner[row], :, top:bottom, left:right]
        assert torch.equal(mixed[row], expected)
        shown = 1 - (bottom - top) * (right - left) / size**2
        assert abs(shown - float(mixing.share[row])) < 2 / size  # the box is rounded to whole pixels


def test_a_sample_that_is_its_own_partner_stays_as_it_is(images):
    views = images(3, 16, "noise")
    rows = np.arange(3)
    mixing = draw_mixing(rows.astype(np.uint64), rows, rows, rows, seed=0, settings=BOTH)
    assert torch.equal(mix(views, mixing), views)


def test_partners_may_stand_behind_the_samples_and_a_mixture_does_not_depend_on_the_batch(images):
    views, mixing = images(6, 16, "noise"), drawn(6, BOTH)
    whole = mix(views, mixing)
    for row in range(6):
        partner = int(mixing.partner[row])
        one = Mixing(*(part[[row]] for part in mixing))._replace(partner=torch.tensor([1]))
        assert torch.equal(mix(views[[row, partner]], one)[0], whole[row])
