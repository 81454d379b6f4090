import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as reference

from trainer.config import ViewSettings
from trainer.data.randomness import uniform
from trainer.data.views import draw_mixing, make_views, mix

KEYS = np.array([5, 2**63 + 1, 77, 123456789], dtype=np.uint64)
STRONG = ViewSettings(min_scale=0.3, flip=True, color_jitter=0.4)


def smooth_images(count=4, size=40):
    """Photos have smooth parts; noise would only show how interpolations differ."""
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(count, 3, 5, 5, generator=generator) * 255
    return torch.nn.functional.interpolate(small, size=(size, size), mode="bicubic").clamp(0, 255).byte()


def views(images, keys, numbers, settings, *, seed=0, size=32):
    return make_views(images, keys, np.asarray(numbers), seed=seed, size=size, settings=settings)


def test_a_view_does_not_depend_on_the_batch_around_it():
    images = smooth_images()
    whole = views(images, KEYS, [0, 1, 2, 3], STRONG)
    for index in range(4):
        alone = views(images[index : index + 1], KEYS[index : index + 1], [index], STRONG)
        assert torch.equal(alone[0], whole[index])


@pytest.mark.parametrize("change", [{"numbers": [1] * 4}, {"seed": 1}, {"keys": KEYS + np.uint64(1)}])
def test_seed_key_and_number_each_give_other_views(change):
    arguments = {"keys": KEYS, "numbers": [0] * 4, "seed": 0} | change
    base = views(smooth_images(), KEYS, [0] * 4, STRONG)
    other = views(smooth_images(), arguments["keys"], arguments["numbers"], STRONG, seed=arguments["seed"])
    assert all(not torch.equal(one, two) for one, two in zip(base, other, strict=True))


def test_without_augmentation_the_image_stays_as_it_is():
    images = smooth_images(size=32)
    plain = ViewSettings(min_scale=1, flip=False, color_jitter=0)
    assert torch.equal(views(images, KEYS, [0] * 4, plain), images)


def test_half_of_the_views_are_mirrored():
    images = smooth_images(count=1, size=16).expand(400, -1, -1, -1)
    keys = np.arange(400, dtype=np.uint64)
    flipped = views(images, keys, [0] * 400, ViewSettings(min_scale=1, flip=True), size=16)
    mirrored = [torch.equal(view, images[0].flip(2)) for view in flipped]
    kept = [torch.equal(view, images[0]) for view in flipped]
    assert sum(mirrored) + sum(kept) == 400
    assert 160 < sum(mirrored) < 240


def test_crops_are_those_of_torchvision_for_the_same_box():
    images, settings = smooth_images(size=64), ViewSettings(min_scale=0.4, flip=False)
    ours = views(images, KEYS, [0] * 4, settings, size=64)
    for index, key in enumerate(KEYS):
        area, aspect, left, top = (float(uniform(0, key, 0, draw)) for draw in range(4))
        area, aspect = 0.4 + 0.6 * area, (4 / 3) ** (2 * aspect - 1)
        width, height = min((area * aspect) ** 0.5, 1), min((area / aspect) ** 0.5, 1)
        box = [round(top * (1 - height) * 64), round(left * (1 - width) * 64), round(height * 64), round(width * 64)]
        theirs = reference.resized_crop(images[index], *box, size=[64, 64], antialias=False)
        # torchvision cuts at whole pixels, so edges differ by half a pixel of a smooth image
        assert (ours[index].float() - theirs.float()).abs().mean() < 3
        assert 0.35 < width * height <= 1


def test_jitter_is_that_of_torchvision_for_the_same_factors():
    images = smooth_images(size=32)
    settings = ViewSettings(min_scale=1, flip=False, color_jitter=0.5)
    ours = views(images, KEYS, [0] * 4, settings)
    for index, key in enumerate(KEYS):
        brightness, contrast, saturation = (1 + 0.5 * (2 * float(uniform(0, key, 0, draw)) - 1) for draw in (5, 6, 7))
        image = reference.adjust_brightness(images[index].float() / 255, brightness)
        image = reference.adjust_saturation(reference.adjust_contrast(image, contrast), saturation)
        assert (ours[index].float() - image * 255).abs().max() < 1.5


def test_large_images_are_shrunk_without_aliasing():
    stripes = torch.zeros(1, 3, 256, 256, dtype=torch.uint8)
    stripes[..., ::2] = 255
    plain = ViewSettings(min_scale=1, flip=False)
    view = views(stripes, KEYS[:1], [0], plain, size=32)
    assert (view.float() - 127.5).abs().max() < 8


MIXED = ViewSettings(mixup=0.8, cutmix=1.0)


def test_both_members_of_a_pair_are_mixed_alike():
    mixing = draw_mixing(np.arange(64, 128), seed=1, settings=MIXED)
    for values in mixing:
        assert torch.equal(values[0::2], values[1::2])


def test_mixing_does_not_depend_on_where_a_batch_begins():
    whole = draw_mixing(np.arange(0, 64), seed=1, settings=MIXED)
    part = draw_mixing(np.arange(32, 64), seed=1, settings=MIXED)
    for one, two in zip(whole, part, strict=True):
        assert torch.equal(one[32:], two)


def test_nothing_is_mixed_unless_asked():
    assert draw_mixing(np.arange(8), seed=1, settings=ViewSettings()) is None


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixup_shares_follow_the_beta_distribution(alpha):
    mixing = draw_mixing(np.arange(0, 40_000, 2), seed=1, settings=ViewSettings(mixup=alpha))
    assert abs(float(mixing.share.mean()) - 0.5) < 0.02
    assert abs(float(mixing.share.var()) - 1 / (4 * (2 * alpha + 1))) < 0.01  # variance of Beta(a, a)


def test_mixup_is_the_weighted_mean_of_images_and_targets():
    images, targets = smooth_images(size=16), torch.eye(4)
    mixing = draw_mixing(np.arange(4), seed=1, settings=ViewSettings(mixup=1.0))
    mixed, mixed_targets = mix(images, targets, mixing)
    for index, partner in ((0, 1), (1, 0), (2, 3), (3, 2)):
        share = float(mixing.share[index])
        expected = share * images[index].float() + (1 - share) * images[partner].float()
        assert torch.allclose(mixed[index], expected, atol=1e-3)
        assert torch.allclose(mixed_targets[index], share * targets[index] + (1 - share) * targets[partner])


def test_cutmix_takes_a_box_from_the_partner_and_its_area_is_the_partners_share():
    size = 64
    images = torch.stack([torch.full((3, size, size), value, dtype=torch.uint8) for value in (10, 200)] * 50)
    targets = torch.eye(2).repeat(50, 1)
    mixing = draw_mixing(np.arange(100), seed=2, settings=ViewSettings(cutmix=1.0))
    mixed, mixed_targets = mix(images, targets, mixing)
    for index in range(100):
        own = images[index, 0, 0, 0].float()
        from_partner = (mixed[index, 0] != own).float()
        assert set(mixed[index].unique().tolist()) <= {10.0, 200.0}
        assert abs(float(from_partner.mean()) - (1 - float(mixed_targets[index, index % 2]))) < 0.05
        rows, columns = from_partner.any(1).sum(), from_partner.any(0).sum()
        assert from_partner.sum() == rows * columns
