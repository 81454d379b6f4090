import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import InterpolationMode, RandAugment
from torchvision.transforms.v2 import functional as reference

from trainer.config import ViewSettings
from trainer.data.views.operations import adjust_colour, apply_operations, channel_means
from trainer.data.views.parameters import OPERATIONS

BILINEAR = InterpolationMode.BILINEAR


def torchvisions(view, name, amount):
    """The same operation by torchvision; `amount` is signed and 1 is the largest."""
    size, straight = view.shape[-1], {"angle": 0.0, "scale": 1.0, "interpolation": BILINEAR}
    shear, shift = math.degrees(math.atan(0.3 * amount)), int(150 / 331 * size * amount)
    functions = {
        "identity": lambda: view,
        "shear_x": lambda: reference.affine(view, translate=[0, 0], shear=[shear, 0], center=[0, 0], **straight),
        "shear_y": lambda: reference.affine(view, translate=[0, 0], shear=[0, shear], center=[0, 0], **straight),
        "translate_x": lambda: reference.affine(view, translate=[shift, 0], shear=[0, 0], **straight),
        "translate_y": lambda: reference.affine(view, translate=[0, shift], shear=[0, 0], **straight),
        "rotate": lambda: reference.rotate(view, 30 * amount, interpolation=BILINEAR),
        "brightness": lambda: reference.adjust_brightness(view, 1 + 0.9 * amount),
        "colour": lambda: reference.adjust_saturation(view, 1 + 0.9 * amount),
        "contrast": lambda: reference.adjust_contrast(view, 1 + 0.9 * amount),
        "sharpness": lambda: reference.adjust_sharpness(view, 1 + 0.9 * amount),
        "posterize": lambda: reference.posterize(view, 8 - round(4 * abs(amount))),
        "solarize": lambda: reference.solarize(view, 255 * (1 - abs(amount))),
        "autocontrast": lambda: reference.autocontrast(view),
        "equalize": lambda: reference.equalize(view),
    }
    return functions[name]()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", ["smooth", "noise", "digits"])
def test_each_operation_is_torchvisions(images, operation, name, kind):
    views = images(4, 33, kind).clamp(10, 250)  # so that the contrast is not the largest already
    tolerance = 2 if name in {"colour", "contrast"} else 1  # theirs rounds down twice there: the grey and the result
    for magnitude in (2.0, 9.0, 10.0):
        ours = apply_operations(views.clone(), operation(name, 4), magnitude)
        for row, view in enumerate(views):
            theirs = torchvisions(view, name, magnitude / 10 * (-1 if row % 2 else 1))
            assert (ours[row].int() - theirs.int()).abs().max() <= tolerance
        if name != "identity" and kind == "noise":  # digits have no colour that could change
            assert not torch.equal(ours, views)


EXACT = {"identity", "translate_x", "translate_y", "posterize", "solarize", "equalize"}


@pytest.mark.parametrize("name", sorted(EXACT))
def test_operations_that_calculate_nothing_are_exact(images, operation, name):
    views = images(2, 48, "noise")
    ours = apply_operations(views.clone(), operation(name, 2), 7.0)
    for row, view in enumerate(views):
        assert torch.equal(ours[row], torchvisions(view, name, -0.7 if row else 0.7))


@pytest.mark.parametrize("name", ["posterize", "solarize", "equalize"])
@pytest.mark.parametrize("levels", [2, 7, 256])
def test_operations_of_torchvision_are_pillows_bit_by_bit(operation, name, levels):
    for size in (3, 17, 64):
        views = torch.randint(0, levels, (4, 3, size, size), generator=torch.Generator().manual_seed(size))
        views = (views * (255 // (levels - 1))).to(torch.uint8)
        for magnitude in (1.0, 3.3, 5.0, 7.7, 10.0):
            amount = magnitude / 10
            pillows = {
                "posterize": lambda image, amount=amount: ImageOps.posterize(image, 8 - round(4 * amount)),
                "solarize": lambda image, amount=amount: ImageOps.solarize(image, 255 * (1 - amount)),
                "equalize": ImageOps.equalize,
            }
            ours = apply_operations(views.clone(), operation(name, 4), magnitude)
            for view, changed in zip(views, ours, strict=True):
                expected = pillows[name](Image.fromarray(view.permute(1, 2, 0).numpy()))
                np.testing.assert_array_equal(changed.permute(1, 2, 0).numpy(), np.asarray(expected))


def test_the_operations_and_their_ranges_are_those_of_torchvision():
    space = RandAugment._AUGMENTATION_SPACE
    names = {"color": "colour", "auto_contrast": "autocontrast"}
    theirs = ["".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)[1:] for name in space]
    assert list(OPERATIONS) == [names.get(name, name) for name in theirs]
    largest = {name: magnitudes(31, 331, 331) for name, (magnitudes, _) in space.items()}
    assert [
        float(largest[name][-1]) for name in ("ShearX", "TranslateX", "Rotate", "Color", "Posterize", "Solarize")
    ] == (pytest.approx([0.3, 150, 30, 0.9, 4, 0]))


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"autocontrast", "equalize", "solarize"}))
def test_without_magnitude_an_operation_changes_nothing(images, operation, name):
    views = images(2, 32, "noise")
    assert torch.equal(apply_operations(views.clone(), operation(name, 2), 0.0), views)


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_a_channel_of_a_single_level_stays(images, operation, name):
    views = images(1, 32, "noise")
    views[:, 1] = 77
    changed = apply_operations(views.clone(), operation(name, 1), 5.0)
    assert (changed[:, 1] == 77).all()


def test_the_directions_are_opposite(images, operation):
    views = images(1, 32).expand(2, -1, -1, -1).clone()
    there, back = apply_operations(views.clone(), operation("translate_x", 2), 5.0)
    shift = int(150 / 331 * 32 * 0.5)
    assert torch.equal(there[..., shift:], views[0, ..., :-shift])
    assert torch.equal(back[..., :-shift], views[0, ..., shift:])
    assert not there[..., :shift].any()


def test_operations_follow_one_another_and_touch_only_the_views_that_drew_them(images, draw):
    views = images(3, 32, "noise")
    names = [["solarize", "posterize"], ["posterize", "solarize"], ["identity", "identity"]]
    parameters = draw(3, ViewSettings())._replace(
        operations=torch.tensor([[OPERATIONS.index(name) for name in row] for row in names]),
        negative=torch.zeros(3, 2, dtype=torch.bool),
    )
    changed = apply_operations(views.clone(), parameters, 6.0)
    assert torch.equal(changed[0], torchvisions(torchvisions(views[0], "solarize", 0.6), "posterize", 0.6))
    assert torch.equal(changed[1], torchvisions(torchvisions(views[1], "posterize", 0.6), "solarize", 0.6))
    assert torch.equal(changed[2], views[2])
    assert not torch.equal(changed[0], changed[1])


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
