import pytest
import torch
from torchvision.transforms.v2 import functional as reference

from trainer.data.views.colour import adjust_colour, channel_means


def theirs(view, brightness, contrast, saturation):
    view = reference.adjust_contrast(reference.adjust_brightness(view, brightness), contrast)
    return reference.adjust_saturation(view, saturation)


@pytest.mark.parametrize("kind", ["smooth", "noise", "digits"])
def test_colour_is_torchvisions_where_nothing_is_cut_off(images, kind):
    views = (images(6, 32, kind) // 3) + 60  # 60..145
    factors = 0.7 + 0.6 * torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    for view, ours, factor in zip(views, adjust_colour(views, factors), factors.tolist(), strict=True):
        expected = theirs(view.float() / 255, *factor) * 255
        assert expected.min() > 0.5
        assert expected.max() < 254.5
        assert (
            ours.float() - expected
        ).abs().max() < 0.6  # half a level of rounding, and their weights of grey add up to 0.9999


def test_each_factor_alone_is_torchvisions_on_any_image(images):
    views = images(2, 40, "noise")
    functions = (reference.adjust_brightness, reference.adjust_contrast, reference.adjust_saturation)
    for place, function in enumerate(functions):
        for factor in (0.1, 0.6, 1.0, 1.4, 1.9):
            factors = torch.ones(2, 3)
            factors[:, place] = factor
            expected = torch.stack([function(view.float() / 255, factor) * 255 for view in views])
            assert (adjust_colour(views, factors).float() - expected).abs().max() < 0.6


def test_factors_of_one_change_nothing(images):
    views = images(3, 32, "noise")
    assert torch.equal(adjust_colour(views, torch.ones(3, 3)), views)


def test_a_factor_of_zero_is_black_a_flat_grey_or_grey(images):
    views = images(1, 32, "noise").expand(3, -1, -1, -1)
    black, flat, grey = adjust_colour(views, 1 - torch.eye(3))
    assert not black.any()
    assert flat.unique().numel() == 1
    assert torch.equal(grey[0], grey[1])
    assert torch.equal(grey[0], grey[2])


def test_colour_does_not_depend_on_the_batch_around_a_view(images):
    views, factors = images(5, 63, "noise"), torch.rand(5, 3, generator=torch.Generator().manual_seed(1)) * 2
    whole = adjust_colour(views, factors)
    for row in range(5):
        assert torch.equal(adjust_colour(views[[row]], factors[[row]])[0], whole[row])


def test_the_mean_of_a_large_view_is_exact(images):
    views = images(2, 701, "noise")  # its sum has more digits than float32
    sums = torch.tensor(views.flatten(2).numpy().sum(2, dtype="int64"))
    assert torch.equal(channel_means(views).view(2, 3), sums.float() / 701**2)
