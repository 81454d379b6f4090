import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as reference

from trainer.config import ViewSettings
from trainer.data.views.geometry import crop_batch, crop_by_products, crop_sample

SIZES = [(32, 32), (72, 64), (256, 224), (100, 224)]


def difference(one, two):
    return (one.int() - two.int()).abs().max().item()


@pytest.mark.parametrize(("stored", "size"), SIZES)
@pytest.mark.parametrize("kind", ["smooth", "noise", "digits"])
def test_one_by_one_and_by_products_give_the_same_bits(images, draw, stored, size, kind):
    pictures, drawn = images(6, stored, kind), draw(6, ViewSettings(min_scale=0.1), stored=stored)
    assert drawn.mirror.any()
    assert not drawn.mirror.all()
    assert torch.equal(crop_batch(pictures, drawn, size), crop_by_products(pictures, drawn, size))


@pytest.mark.parametrize(("stored", "size"), [(256, 32), (300, 24), (256, 8)])
def test_where_an_axis_is_shrunk_much_they_agree_within_one_level(images, draw, stored, size):
    pictures, drawn = images(6, stored, "noise"), draw(6, ViewSettings(min_scale=0.5), stored=stored)
    assert difference(crop_batch(pictures, drawn, size), crop_by_products(pictures, drawn, size)) <= 1


@pytest.mark.parametrize("crop", [crop_batch, crop_by_products])
def test_a_crop_does_not_depend_on_the_batch_around_it(images, draw, crop):
    pictures, drawn = images(5, 72, "noise"), draw(5, ViewSettings(), stored=72)
    whole = crop(pictures, drawn, 64)
    for row in range(5):
        alone = crop(pictures[[row]], type(drawn)(*(part[[row]] for part in drawn)), 64)
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize(("stored", "size"), SIZES)
def test_crops_are_torchvisions_for_the_same_box(images, draw, stored, size):
    pictures, drawn = images(4, stored, "noise"), draw(4, ViewSettings(flip=False), stored=stored)
    for picture, view, box in zip(pictures, crop_batch(pictures, drawn, size), drawn.box.tolist(), strict=True):
        left, top, width, height = box
        theirs = reference.resized_crop(picture, top, left, height, width, size=[size, size], antialias=True)
        assert torch.equal(view, theirs)


def test_crops_are_pillows_within_one_level(images, draw):
    pictures, drawn = images(4, 96, "noise"), draw(4, ViewSettings(flip=False), stored=96)
    for picture, view, box in zip(pictures, crop_by_products(pictures, drawn, 56), drawn.box.tolist(), strict=True):
        left, top, width, height = box
        cut = Image.fromarray(picture.permute(1, 2, 0).numpy()).crop((left, top, left + width, top + height))
        theirs = np.asarray(cut.resize((56, 56), Image.Resampling.BILINEAR))
        assert difference(view.permute(1, 2, 0), torch.from_numpy(theirs.copy())) <= 1


@pytest.mark.parametrize("crop", [crop_batch, crop_by_products])
def test_a_mirrored_crop_is_the_crop_mirrored(images, draw, crop):
    pictures, drawn = images(4, 72, "noise"), draw(4, ViewSettings(), stored=72)
    kept, mirrored = (crop(pictures, drawn._replace(mirror=torch.full((4,), flag)), 64) for flag in (False, True))
    assert torch.equal(mirrored, kept.flip(3))


@pytest.mark.parametrize("crop", [crop_batch, crop_by_products])
def test_without_augmentation_an_image_of_the_size_stays_as_it_is(images, draw, crop):
    pictures, drawn = images(3, 32, "noise"), draw(3, ViewSettings(min_scale=1, flip=False), stored=32)
    assert torch.equal(crop(pictures, drawn, 32), pictures)


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
def test_the_memory_layout_of_an_image_does_not_matter(images, mirror):
    planar = images(1, 80, "noise")[0]
    interleaved = planar.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    batch = torch.zeros(3, 3, 48, 48, dtype=torch.uint8)
    crop_sample(planar, (7, 3, 60, 50), mirror=mirror, out=batch[0])
    crop_sample(interleaved, (7, 3, 60, 50), mirror=mirror, out=batch[2])
    assert torch.equal(batch[0], batch[2])
    assert not batch[1].any()


def test_a_box_of_an_image_shrunk_while_it_was_decoded_shows_the_same_part(images):
    whole = images(1, 448)[0]
    half = torch.nn.functional.avg_pool2d(whole.float(), 2).round().byte()
    views = torch.empty(2, 3, 96, 96, dtype=torch.uint8)
    box = (51, 33, 301, 287)
    crop_sample(whole, box, mirror=True, out=views[0])
    crop_sample(half, [edge / 2 for edge in box], mirror=True, out=views[1])
    steepest = max(difference(whole[..., 1:], whole[..., :-1]), difference(whole[:, 1:], whole[:, :-1]))
    assert difference(*views) <= 2 * steepest + 1  # moved by half of its pixels, so by one stored pixel along each axis
