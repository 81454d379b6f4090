import numpy as np
import pytest
import torch

from trainer.config import ViewSettings
from trainer.data.batch import Batch, Mixing, Recorded
from trainer.data.views.parameters import draw_views
from trainer.data.views.rendering import draw_mixing, make_views, mix
from trainer.devices import choose_device
from trainer.training.prefetch import Prefetcher, _moved, _parted, render

SETTINGS = ViewSettings(min_scale=0.5, color_jitter=0.3, mixup=1.0)


class Size:
    """What a feed asks of the views."""

    resident, fused = None, False

    size, settings = 12, SETTINGS


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    return choose_device()


def batch(number=0, **further):
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=generator)
    numbers = torch.full((4,), number)
    return Batch(images=images, labels=torch.arange(4), keys=torch.arange(4), numbers=numbers, **further)


def parameters():
    keys, numbers = np.arange(4, dtype=np.uint64), np.zeros(4, dtype=np.int64)
    mixing = draw_mixing(keys, numbers, np.array([1, 0, 3, 2]), np.array([1, 0, 3, 2]), seed=0, settings=SETTINGS)
    return draw_views(keys, numbers, stored=16, seed=0, settings=SETTINGS), mixing


def recorded():
    return Recorded(
        indices=torch.zeros(4, 2, dtype=torch.int64), logits=torch.ones(4, 2), rest=torch.zeros(4, 2), features=None
    )


def test_what_comes_out_is_what_went_in_one_ahead(device, timeline):
    drawn = []

    def stream():
        for number in range(3):
            drawn.append(number)
            yield batch(number, recorded=recorded(), label_weights=torch.full((4,), float(number)))

    feed = Prefetcher(stream(), Size(), device)
    with timeline.step(0):
        for number in range(3):
            taken = feed.next()
            assert drawn == list(range(number + 1))
            feed.preload()
            assert drawn == list(range(min(number + 2, 3)))
            assert torch.equal(taken.images, batch(number).images)
            assert torch.equal(taken.recorded.logits, torch.ones(4, 2))
            assert taken.recorded.features is None
            assert taken.label_weights.tolist() == [number] * 4
    (row,) = timeline.steps.array()
    columns = dict(zip(timeline.steps.columns, row, strict=True))
    assert columns["data"] > 0
    assert columns["to_device"] > 0


def test_what_is_sent_ahead_is_put_together_again():
    whole = batch(recorded=recorded(), mixing=parameters()[1], label_weights=torch.ones(4))
    tensors, held = _parted(whole)
    sent = iter([tensor + 1 for tensor in tensors])
    arrived = _moved(held.batch, lambda _: next(sent))
    assert torch.equal(arrived.label_weights, torch.full((4,), 2.0))
    assert torch.equal(arrived.labels, whole.labels + 1)
    assert torch.equal(arrived.recorded.logits, whole.recorded.logits + 1)
    assert torch.equal(arrived.mixing.share, whole.mixing.share + 1)
    assert next(sent, None) is None


def test_views_are_made_and_mixed_where_the_loader_left_them():
    views, mixing = parameters()
    made = make_views(batch().images, views, Size.size, SETTINGS)
    assert torch.equal(render(batch(), Size()).images, batch().images)
    assert torch.equal(render(batch(views=views), Size()).images, made)
    both = render(batch(views=views, mixing=mixing), Size())
    assert torch.equal(both.images, mix(made, mixing))
    assert both.views is None
    assert isinstance(both.mixing, Mixing)


def test_a_loader_that_fails_is_heard(device):
    def stream():
        yield batch()
        raise ValueError("a damaged image")

    feed = Prefetcher(stream(), Size(), device)
    feed.next()
    with pytest.raises(ValueError, match="a damaged image"):
        feed.preload()
