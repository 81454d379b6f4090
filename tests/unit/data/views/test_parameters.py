import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2

from trainer.config import ViewSettings
from trainer.data.views.parameters import OPERATIONS, draw_views

STRONG = ViewSettings(min_scale=0.3, color_jitter=0.4, randaugment_operations=3, erasing=0.5)
KEYS = np.array([5, 2**63 + 1, 77, 123456789], dtype=np.uint64)
NUMBERS = np.array([0, 1, 2, 3])


@pytest.mark.parametrize("change", [{"seed": 2}, {"numbers": NUMBERS + 4}, {"keys": KEYS + np.uint64(1)}])
def test_seed_number_and_key_each_give_other_draws(change):
    base = {"keys": KEYS, "numbers": NUMBERS, "seed": 1}
    one, two = (draw_views(**arguments, stored=64, settings=STRONG) for arguments in (base, base | change))
    assert not (one.box == two.box).all(1).any()
    assert not (one.color == two.color).any()


@pytest.mark.parametrize("off", ["min_scale", "flip", "color_jitter", "randaugment_operations", "erasing"])
def test_turning_one_part_off_changes_no_other_draw(draw, off):
    part = {"min_scale": "box", "flip": "mirror", "color_jitter": "color", "erasing": "erased"}.get(off, "operations")
    weaker = STRONG.model_copy(update={off: 1.0 if off == "min_scale" else 0})
    one, two = draw(200, STRONG)._asdict(), draw(200, weaker)._asdict()
    changed = {name for name in one if not torch.equal(one[name], two[name])}
    assert changed == ({part, "negative"} if part == "operations" else {part})


def test_more_operations_leave_the_first_as_they_are(draw):
    one, more = (draw(50, ViewSettings(randaugment_operations=count)).operations for count in (1, 4))
    assert torch.equal(one[:, 0], more[:, 0])
    assert not torch.equal(more[:, 0], more[:, 1])


def test_no_augmentation_is_the_whole_image_unchanged(draw):
    plain = draw(8, ViewSettings(min_scale=1, flip=False), stored=57)
    assert torch.equal(plain.box, torch.tensor([0, 0, 57, 57]).expand(8, 4))
    assert not plain.mirror.any()
    assert (plain.color == 1).all()
    assert plain.operations.shape == plain.negative.shape == (8, 0)
    assert not plain.erased.any()


def test_boxes(draw):
    left, top, width, height = draw(4000, ViewSettings(min_scale=0.2), stored=8).box.unbind(1)
    for first, length in ((left, width), (top, height)):
        places = first[length == 6]
        assert stats.chisquare(torch.bincount(places, minlength=3)).pvalue > 0.01
    # A box that never fits is the whole image as torchvisions.
    theirs = v2.RandomResizedCrop(1, scale=(1.0, 1.0), ratio=(1 / 50, 50))
    image = torch.zeros(3, 300, 300, dtype=torch.uint8)
    whole = np.mean([theirs.make_params([image])["width"] == 300 for _ in range(300)])
    ours = draw(300, ViewSettings(min_scale=1.0, max_aspect=50), stored=300).box
    assert whole > 0.9
    assert (ours[:, 2:] == 300).all(1).double().mean() > 0.9


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.6, 1.0)])
def test_boxes_are_distributed_like_torchvisions(draw, scale):
    torch.manual_seed(0)
    theirs = v2.RandomResizedCrop(1, scale=scale, ratio=(3 / 4, 4 / 3))
    image = torch.zeros(3, 300, 300, dtype=torch.uint8)
    drawn = [theirs.make_params([image]) for _ in range(3000)]
    ours = draw(6000, ViewSettings(min_scale=scale[0]), stored=300).box.double()
    for index, name in enumerate(("left", "top", "width", "height")):
        assert stats.ks_2samp(ours[:, index], [one[name] for one in drawn]).pvalue > 0.01, name
    areas = [one["width"] * one["height"] for one in drawn]
    assert stats.ks_2samp(ours[:, 2] * ours[:, 3], areas).pvalue > 0.01


def test_color_and_operations_are_uniform(draw):
    color = draw(4000, ViewSettings(color_jitter=0.4)).color
    for factors in color.unbind(1):
        assert stats.kstest(factors, stats.uniform(0.6, 0.8).cdf).pvalue > 0.01
    assert (np.abs(np.corrcoef(color.T.numpy()) - np.eye(3)) < 0.06).all()
    # Operations are uniform in both directions and independent.
    drawn = draw(14_000, ViewSettings(randaugment_operations=2))
    for place in (0, 1):
        counts = torch.bincount(drawn.operations[:, place], minlength=len(OPERATIONS))
        assert len(counts) == len(OPERATIONS) == 14
        assert stats.chisquare(counts).pvalue > 0.01
        assert 0.48 < drawn.negative[:, place].double().mean() < 0.52
    pairs = torch.bincount(drawn.operations[:, 0] * 14 + drawn.operations[:, 1], minlength=196)
    assert stats.chisquare(pairs).pvalue > 0.01


def test_rectangles_have_the_papers_sizes(draw):
    left, top, right, bottom = draw(4000, ViewSettings(erasing=0.3)).erased.double().unbind(1)
    erased = right > left
    assert 0.27 < erased.double().mean() < 0.33
    width, height = (right - left)[erased], (bottom - top)[erased]
    assert left.min() >= 0
    assert top.min() >= 0
    assert right.max() <= 1
    assert bottom.max() <= 1
    assert stats.kstest(width * height, stats.uniform(0.02, 1 / 3 - 0.02).cdf).pvalue > 0.01
    assert 0.29 < (width / height).min() < 0.4
    assert 2.5 < (width / height).max() < 3.4
