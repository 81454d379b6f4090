import numpy as np
import pytest
import torch

from trainer.config import TrainingSettings, ViewSettings
from trainer.data.loader import MicroBatches, Samples, make_loader, micro_batch_size, positions
from trainer.data.order import SampleOrder
from trainer.errors import DataError, SettingsError


class Images:
    """A split that is made up: image i is filled with the number i."""

    def __init__(self, count, first=0):
        self.numbers = np.arange(first, first + count)
        self.labels = self.numbers % 7
        self.keys = self.numbers.astype(np.uint64) * np.uint64(1_000_003)
        self.sources = [f"image-{number}" for number in self.numbers]

    def __len__(self):
        return len(self.numbers)

    def load(self):
        """Everything is in memory."""

    def read(self, indices):
        values = torch.from_numpy(self.numbers[list(indices)]).to(torch.uint8)
        return values.view(-1, 1, 1, 1).expand(-1, 3, 8, 8)


PLAIN = ViewSettings(min_scale=1, flip=False)


def batches(samples, settings, world_size=1, seed=0):
    return MicroBatches(
        samples,
        SampleOrder(len(samples), seed),
        size=8,
        seed=seed,
        settings=settings,
        count=micro_batch_size(settings, world_size),
    )


def step_of(settings, samples, step, world_size):
    """What all processes see in one step, in the global order."""
    source = batches(samples, settings, world_size)
    parts = {
        start: source[start]
        for rank in range(world_size)
        for start in positions(settings, first_step=step, last_step=step + 1, rank=rank, world_size=world_size)
    }
    return [parts[start] for start in sorted(parts)]


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 1), (1, 4), (4, 2), (3, 1)])
def test_a_step_has_the_same_samples_and_views_however_it_is_dealt(world_size, accumulation):
    samples = Samples([Images(50)])
    views = ViewSettings(min_scale=0.5, color_jitter=0.3, mixup=0.5, cutmix=0.5)
    alone = TrainingSettings(batch_size=48, views=views)
    shared = TrainingSettings(batch_size=48, accumulation=accumulation, views=views)
    for step in (0, 1, 5):
        (whole,) = step_of(alone, samples, step, 1)
        parts = step_of(shared, samples, step, world_size)
        assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
        assert torch.equal(torch.cat([part.keys for part in parts]), whole.keys)
        assert torch.equal(torch.cat([part.numbers for part in parts]), whole.numbers)
        assert torch.equal(torch.cat([part.mixing.share for part in parts]), whole.mixing.share)


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_processes_do_not_change_what_is_loaded(workers):
    settings = TrainingSettings(batch_size=16, views=ViewSettings(min_scale=0.5))
    source = batches(Samples([Images(50)]), settings)
    starts = list(positions(settings, first_step=2, last_step=8, rank=0, world_size=1))
    loaded = list(make_loader(source, iter(starts), workers=workers, pin_memory=False))
    assert [batch.keys.tolist() for batch in loaded] == [source[start].keys.tolist() for start in starts]
    assert all(torch.equal(batch.images, source[start].images) for batch, start in zip(loaded, starts, strict=True))


def test_several_splits_are_read_as_one():
    samples = Samples([Images(10), Images(0), Images(5, first=100)])
    assert len(samples) == 15
    indices = np.array([14, 0, 9, 10, 3])
    assert samples.read(indices)[:, 0, 0, 0].tolist() == [104, 0, 9, 100, 3]
    assert samples.labels[indices].tolist() == [104 % 7, 0, 2, 100 % 7, 3]
    assert [name.split()[1] for name in samples.names(indices)] == [
        "image-104",
        "image-0",
        "image-9",
        "image-100",
        "image-3",
    ]


def test_labels_and_keys_stay_with_their_images():
    batch = batches(Samples([Images(50)]), TrainingSettings(batch_size=64, views=PLAIN))[128]
    numbers = batch.images[:, 0, 0, 0].long()
    assert torch.equal(batch.labels, numbers % 7)
    assert torch.equal(batch.keys, numbers * 1_000_003)


def test_a_set_without_images_is_refused():
    with pytest.raises(DataError, match="no images to train on"):
        Samples([Images(0)])


def test_a_batch_that_can_not_be_dealt_is_refused_with_the_next_move():
    with pytest.raises(SettingsError, match=r"batch_size = 100 .* 3 processes x 2 .* multiple of 6"):
        micro_batch_size(TrainingSettings(batch_size=100, accumulation=2), 3)
    with pytest.raises(SettingsError, match=r"micro-batches of 5.*pairs.*multiple of 4"):
        micro_batch_size(TrainingSettings(batch_size=10, views=ViewSettings(mixup=1.0)), 2)
