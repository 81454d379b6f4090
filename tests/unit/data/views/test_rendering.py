import math

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms.v2 import InterpolationMode, RandAugment
from torchvision.transforms.v2 import functional as reference

from trainer.config import ViewSettings
from trainer.data.batch import Mixing
from trainer.data.views.parameters import OPERATIONS, draw_views
from trainer.data.views.rendering import (
    adjust_color,
    apply_operations,
    channel_means,
    crop_batch,
    crop_by_products,
    crop_sample,
    draw_mixing,
    erase,
    fill_together,
    finish_views,
    make_views,
    mix,
    mixes,
)

STRONG = ViewSettings(min_scale=0.2, color_jitter=0.4, randaugment_operations=3, erasing=0.5)
KEYS = np.array([5, 2**63 + 1, 77, 123456789, 6, 7, 8, 9, 10, 11, 12, 13], dtype=np.uint64)
NUMBERS = np.arange(12) % 5
SIZES = [(32, 32), (72, 64), (256, 224), (100, 224)]

GOLDEN_BOXES = [[4, 23, 153, 188], [18, 20, 194, 169]]
GOLDEN_OPERATIONS = [[3, 8, 4], [10, 12, 11]]
GOLDEN_DIRECTIONS = [[False, True, True], [True, True, False]]
GOLDEN_COLORS = [[1.2069, 1.0389, 1.0386], [1.1492, 0.7817, 1.2347]]
GOLDEN_RECTANGLES = [[0.4235, 0.1905, 0.9117, 0.8022], [0.3493, 0.0171, 0.7137, 0.9161]]
GOLDEN_SUMS = [21257576, 21361960]


def views(pictures, keys, numbers, size, settings=STRONG, *, seed=0):
    drawn = draw_views(keys, numbers, stored=pictures.shape[-1], seed=seed, settings=settings)
    return make_views(pictures, drawn, size, settings)


@pytest.mark.parametrize(("stored", "size"), SIZES)
def test_view_does_not_depend_on_batch_around_it(images, stored, size):
    pictures = images(12, stored, "noise")
    whole = views(pictures, KEYS, NUMBERS, size)
    assert whole.dtype == torch.uint8
    assert whole.shape == (12, 3, size, size)
    for rows in ([0], [11], [3, 1], [5, 6, 7, 8, 9, 10, 11]):
        assert torch.equal(views(pictures[rows], KEYS[rows], NUMBERS[rows], size), whole[rows])


@pytest.mark.parametrize(("stored", "size"), SIZES)
@pytest.mark.parametrize("kind", ["smooth", "noise", "digits"])
def test_a_loaders_way_and_a_devices_way_agree(images, stored, size, kind):
    pictures = images(12, stored, kind)
    drawn = draw_views(KEYS, NUMBERS, stored=stored, seed=3, settings=STRONG)
    in_loader = torch.empty(12, size, size, 3, dtype=torch.uint8).permute(
        0, 3, 1, 2
    )  # interleaved, like decoders' pixels
    for picture, box, mirror, out in zip(pictures, drawn.box.tolist(), drawn.mirror.tolist(), in_loader, strict=True):
        interleaved = picture.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        crop_sample(interleaved, box, mirror=mirror, out=out)
    in_loader = finish_views(in_loader, drawn, STRONG)
    on_device = finish_views(crop_by_products(pictures, drawn, size), drawn, STRONG)
    assert torch.equal(in_loader, on_device)
    assert torch.equal(in_loader, make_views(pictures, drawn, size, STRONG))


def shortened(values, precision):
    """Float32 as a product with these flags sees it: of TF32 or bf16 the first 10 or 7 bits of the fraction are left, rounded."""
    dropped = {"tf32": 13, "bf16": 16}.get(precision, 0)
    bits = values.contiguous().view(torch.int32)
    return ((bits + (1 << dropped >> 1)) >> dropped << dropped).view(torch.float32)


@pytest.mark.parametrize("backend", [torch.backends.cuda, torch.backends.mkldnn], ids=["GPU", "AMX"])
def test_flags_that_shorten_products_change_no_view(images, short_products, monkeypatch, backend):
    """On a device that does what they allow, imitated: this processor may not have it."""
    pictures, multiply, seen = images(12, 256, "noise"), torch.Tensor.__matmul__, set()
    drawn = draw_views(KEYS, NUMBERS, stored=256, seed=3, settings=STRONG)
    expected = crop_by_products(pictures, drawn, 224)

    def product(left, right):
        seen.add(precision := backend.matmul.fp32_precision)
        return multiply(shortened(left, precision), shortened(right, precision))

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert torch.equal(crop_by_products(pictures, drawn, 224), expected)
    assert seen <= {"none", "ieee"}


def test_views_are_what_they_were_when_teachers_outputs_were_recorded():
    """Whoever changes these numbers makes recorded outputs worthless: raise the schema version of `teacher_outputs` with them."""
    settings, keys, numbers = STRONG.model_copy(update={"erasing": 1.0}), KEYS[:2], np.array([0, 7])
    drawn = draw_views(keys, numbers, stored=256, seed=3, settings=settings)
    assert drawn.box.tolist() == GOLDEN_BOXES
    assert drawn.operations.tolist() == GOLDEN_OPERATIONS
    assert drawn.negative.tolist() == GOLDEN_DIRECTIONS
    assert drawn.color.tolist() == [pytest.approx(row, abs=1e-4) for row in GOLDEN_COLORS]
    assert drawn.erased.tolist() == [pytest.approx(row, abs=1e-4) for row in GOLDEN_RECTANGLES]
    pictures = (torch.arange(2 * 3 * 256 * 256) % 251).to(torch.uint8).view(2, 3, 256, 256)
    shown = make_views(pictures, drawn, 224, settings.model_copy(update={"randaugment_operations": 0}))
    assert [int(view.int().sum()) for view in shown] == GOLDEN_SUMS


@pytest.mark.parametrize("change", [{"numbers": NUMBERS + 5}, {"seed": 1}, {"keys": KEYS + np.uint64(100)}])
def test_seed_key_and_number_each_give_other_views(images, change):
    pictures, base = images(12, 40), {"keys": KEYS, "numbers": NUMBERS, "seed": 0}
    one, two = (views(pictures, size=32, **arguments) for arguments in (base, base | change))
    assert all(not torch.equal(left, right) for left, right in zip(one, two, strict=True))


def test_without_augmentation_the_image_stays_as_it_is(images):
    pictures = images(12, 32, "noise")
    assert torch.equal(views(pictures, KEYS, NUMBERS, 32, ViewSettings(min_scale=1, flip=False)), pictures)


def test_stored_images_are_left_as_they_are(images):
    pictures = images(12, 32, "noise")
    before = pictures.clone()
    views(pictures, KEYS, NUMBERS, 32, STRONG.model_copy(update={"min_scale": 1.0}))
    assert torch.equal(pictures, before)


@pytest.mark.parametrize(("stored", "size"), SIZES)
def test_nothing_is_read_back_from_a_device(stored, size):
    drawn = draw_views(KEYS, NUMBERS, stored=stored, seed=3, settings=STRONG)
    on_device = torch.empty(12, 3, stored, stored, dtype=torch.uint8, device="meta")  # reading its pixels raises
    shown = make_views(on_device, drawn, size, STRONG)
    assert (shown.device.type, shown.shape, shown.dtype) == ("meta", (12, 3, size, size), torch.uint8)


@pytest.mark.gpu
@pytest.mark.parametrize(("stored", "size"), SIZES)
def test_a_gpu_makes_the_cpus_views_without_waiting(images, stored, size):
    pictures = images(12, stored)
    settings = STRONG.model_copy(
        update={"randaugment_operations": 1}
    )  # a later operation may enlarge a difference of one level
    drawn = draw_views(KEYS, NUMBERS, stored=stored, seed=3, settings=settings)
    on_gpu = pictures.cuda()
    make_views(on_gpu, drawn, size, settings)  # the first use of a kernel may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = make_views(on_gpu, drawn, size, settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (ours.cpu().int() - make_views(pictures, drawn, size, settings).int()).abs().max() <= 1


def test_rectangles(images):
    views = images(3, 40, "noise")
    boxes = torch.tensor([[0.25, 0.5, 0.75, 0.75], [0, 0, 0, 0], [0.9, 0.1, 1.0, 1.0]])
    erased = erase(views.clone(), boxes)
    for row, (columns, rows) in {0: (slice(10, 30), slice(20, 30)), 2: (slice(36, 40), slice(4, 40))}.items():
        expected = views[row].clone()
        expected[:, rows, columns] = views[row].double().mean((1, 2)).round().byte().view(3, 1, 1)
        assert torch.equal(erased[row], expected)
    assert torch.equal(erased[1], views[1])
    # Views are filled one by one or together to the same bits.
    views = images(4, 40, "noise")
    boxes = torch.tensor([[0.26, 0.5, 0.74, 0.75], [0, 0, 1, 1], [0.9, 0.1, 0.99, 1.0], [0, 0, 0, 0]])
    together = views.clone()
    fill_together(together, torch.arange(3), (boxes[:3] * 40).round().long())
    assert torch.equal(together, erase(views.clone(), boxes))


# ---------------------------------------------------------------------------------------------------------------------
# The crop


def difference(one, two):
    return (one.int() - two.int()).abs().max().item()


@pytest.mark.parametrize(("stored", "size"), SIZES)
@pytest.mark.parametrize("kind", ["smooth", "noise", "digits"])
def test_one_by_one_and_by_products_give_same_bits(images, draw, stored, size, kind):
    pictures, drawn = images(6, stored, kind), draw(6, ViewSettings(min_scale=0.1), stored=stored)
    assert drawn.mirror.any()
    assert not drawn.mirror.all()
    assert torch.equal(crop_batch(pictures, drawn, size), crop_by_products(pictures, drawn, size))


@pytest.mark.parametrize(("stored", "size"), [(256, 32), (300, 24), (256, 8)])
def test_where_axis_is_shrunk_much_they_agree_within_one_level(images, draw, stored, size):
    pictures, drawn = images(6, stored, "noise"), draw(6, ViewSettings(min_scale=0.5), stored=stored)
    assert difference(crop_batch(pictures, drawn, size), crop_by_products(pictures, drawn, size)) <= 1


@pytest.mark.parametrize(("stored", "size"), SIZES)
def test_crops_are_torchvisions_for_the_same_box(images, draw, stored, size):
    pictures, drawn = images(4, stored, "noise"), draw(4, ViewSettings(flip=False), stored=stored)
    for picture, view, box in zip(pictures, crop_batch(pictures, drawn, size), drawn.box.tolist(), strict=True):
        left, top, width, height = box
        theirs = reference.resized_crop(picture, top, left, height, width, size=[size, size], antialias=True)
        assert torch.equal(view, theirs)


@pytest.mark.parametrize("crop", [crop_batch, crop_by_products])
def test_a_mirrored_crop_is_the_crop_mirrored(images, draw, crop):
    pictures, drawn = images(4, 72, "noise"), draw(4, ViewSettings(), stored=72)
    kept, mirrored = (crop(pictures, drawn._replace(mirror=torch.full((4,), flag)), 64) for flag in (False, True))
    assert torch.equal(mirrored, kept.flip(3))


@pytest.mark.parametrize("crop", [crop_batch, crop_by_products])
def test_large_images_are_shrunk_without_aliasing(draw, crop):
    stripes = torch.zeros(1, 3, 256, 256, dtype=torch.uint8)
    stripes[..., ::2] = 255
    view = crop(stripes, draw(1, ViewSettings(min_scale=1, flip=False), stored=256), 32)
    assert (view.float() - 127.5).abs().max() < 8


def test_a_crop_reads_nothing_outside_of_its_box(draw):
    pictures = torch.full((2, 3, 64, 64), 255, dtype=torch.uint8)
    drawn = draw(2, ViewSettings())._replace(box=torch.tensor([[20, 10, 30, 40], [0, 24, 64, 40]]))
    pictures[0, :, 10:50, 20:50] = 7
    pictures[1, :, 24:, :] = 7
    for crop in (crop_batch, crop_by_products):
        assert (crop(pictures, drawn, 48) == 7).all()


@pytest.mark.parametrize("mirror", [False, True])
def test_memory_layout_of_image_does_not_matter(images, mirror):
    planar = images(1, 80, "noise")[0]
    interleaved = planar.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    batch = torch.zeros(3, 3, 48, 48, dtype=torch.uint8)
    crop_sample(planar, (7, 3, 60, 50), mirror=mirror, out=batch[0])
    crop_sample(interleaved, (7, 3, 60, 50), mirror=mirror, out=batch[2])
    assert torch.equal(batch[0], batch[2])
    assert not batch[1].any()


def test_a_box_survives_shrinking(images):
    whole = images(1, 448)[0]
    half = torch.nn.functional.avg_pool2d(whole.float(), 2).round().byte()
    views = torch.empty(2, 3, 96, 96, dtype=torch.uint8)
    box = (51, 33, 301, 287)
    crop_sample(whole, box, mirror=True, out=views[0])
    crop_sample(half, [edge / 2 for edge in box], mirror=True, out=views[1])
    steepest = max(difference(whole[..., 1:], whole[..., :-1]), difference(whole[:, 1:], whole[:, :-1]))
    assert difference(*views) <= 2 * steepest + 1  # moved by half of its pixels, so by one stored pixel along each axis


BOTH = ViewSettings(mixup=0.8, cutmix=1.0)


def drawn(count, settings, *, seed=1, first=0, number=0):
    """Samples first .. first + count - 1, each mixed with the next one and the last with itself."""
    keys = np.arange(first, first + count, dtype=np.uint64)
    partner = np.minimum(np.arange(count) + 1, count - 1)
    return draw_mixing(keys, np.full(count, number), partner, partner % 10, seed=seed, settings=settings)


def test_mixtures(images):
    assert not mixes(ViewSettings())
    assert mixes(ViewSettings(mixup=0.1))
    assert mixes(ViewSettings(cutmix=0.1))
    # Partners and their labels pass through.
    mixing = drawn(5, BOTH)
    assert mixing.partner.tolist() == mixing.labels.tolist() == [1, 2, 3, 4, 4]
    # A sample that is its own partner stays as it is.
    views = images(3, 16, "noise")
    rows = np.arange(3)
    mixing = draw_mixing(rows.astype(np.uint64), rows, rows, rows, seed=0, settings=BOTH)
    assert torch.equal(mix(views, mixing), views)


@pytest.mark.parametrize("change", [{"seed": 2}, {"first": 1000}, {"number": 1}])
def test_seed_key_and_number_each_give_other_mixtures(change):
    assert not (drawn(64, BOTH).share == drawn(64, BOTH, **change).share).any()


def test_mixtures_are_what_they_were_when_teachers_outputs_were_recorded():
    """As for views: a change of these numbers raises the schema version of `teacher_outputs`."""
    mixing = drawn(4, BOTH)
    assert mixing.share.tolist() == pytest.approx([0.8205, 0.9632, 0.1776, 0.2488], abs=1e-4)
    assert mixing.blend.tolist() == pytest.approx([0.8205, 1.0, 0.1776, 1.0], abs=1e-4)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixup_shares_follow_the_beta_distribution(alpha):
    mixing = drawn(5000, ViewSettings(mixup=alpha))
    assert stats.kstest(mixing.share.double(), stats.beta(alpha, alpha).cdf).pvalue > 0.01
    assert torch.equal(mixing.share, mixing.blend)
    assert not mixing.box.any()


def test_cutmix_boxes_cover_a_beta_share():
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
def test_cutmix_takes_its_share_of_the_partner(images, count):
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


def test_mixtures_do_not_depend_on_the_batch(images):
    views, mixing = images(6, 16, "noise"), drawn(6, BOTH)
    whole = mix(views, mixing)
    for row in range(6):
        partner = int(mixing.partner[row])
        one = Mixing(*(part[[row]] for part in mixing))._replace(partner=torch.tensor([1]))
        assert torch.equal(mix(views[[row, partner]], one)[0], whole[row])


# ---------------------------------------------------------------------------------------------------------------------
# Color and RandAugment

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
        "color": lambda: reference.adjust_saturation(view, 1 + 0.9 * amount),
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
    tolerance = 2 if name in {"color", "contrast"} else 1  # theirs rounds down twice there: the gray and the result
    for magnitude in (2.0, 9.0, 10.0):
        ours = apply_operations(views.clone(), operation(name, 4), magnitude)
        for row, view in enumerate(views):
            theirs = torchvisions(view, name, magnitude / 10 * (-1 if row % 2 else 1))
            assert (ours[row].int() - theirs.int()).abs().max() <= tolerance
        if name != "identity" and kind == "noise":  # digits have no color that could change
            assert not torch.equal(ours, views)


EXACT = {"identity", "translate_x", "translate_y", "posterize", "solarize", "equalize"}


@pytest.mark.parametrize("name", sorted(EXACT))
def test_operations_that_calculate_nothing_are_exact(images, operation, name):
    views = images(2, 48, "noise")
    ours = apply_operations(views.clone(), operation(name, 2), 7.0)
    for row, view in enumerate(views):
        assert torch.equal(ours[row], torchvisions(view, name, -0.7 if row else 0.7))


def test_operations_and_their_ranges_are_those_of_torchvision():
    space = RandAugment._AUGMENTATION_SPACE
    names = {"color": "color", "auto_contrast": "autocontrast"}
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


def test_operations_touch_only_views_that_drew_them(images, draw):
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
def test_color_is_torchvisions_where_nothing_is_cut_off(images, kind):
    views = (images(6, 32, kind) // 3) + 60  # 60..145
    factors = 0.7 + 0.6 * torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
    for view, ours, factor in zip(views, adjust_color(views, factors), factors.tolist(), strict=True):
        expected = theirs(view.float() / 255, *factor) * 255
        assert expected.min() > 0.5
        assert expected.max() < 254.5
        assert (
            ours.float() - expected
        ).abs().max() < 0.6  # half a level of rounding, and their weights of gray add up to 0.9999


def test_each_factor_alone_is_torchvisions_on_any_image(images):
    views = images(2, 40, "noise")
    functions = (reference.adjust_brightness, reference.adjust_contrast, reference.adjust_saturation)
    for place, function in enumerate(functions):
        for factor in (0.1, 0.6, 1.0, 1.4, 1.9):
            factors = torch.ones(2, 3)
            factors[:, place] = factor
            expected = torch.stack([function(view.float() / 255, factor) * 255 for view in views])
            assert (adjust_color(views, factors).float() - expected).abs().max() < 0.6


def test_color(images):
    views = images(1, 32, "noise").expand(3, -1, -1, -1)
    black, flat, gray = adjust_color(views, 1 - torch.eye(3))
    assert not black.any()
    assert flat.unique().numel() == 1
    assert torch.equal(gray[0], gray[1])
    assert torch.equal(gray[0], gray[2])
    # The mean of a large view is exact.
    views = images(2, 701, "noise")  # its sum has more digits than float32
    sums = torch.tensor(views.flatten(2).numpy().sum(2, dtype="int64"))
    assert torch.equal(channel_means(views).view(2, 3), sums.float() / 701**2)
