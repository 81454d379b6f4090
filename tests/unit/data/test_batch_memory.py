"""The memory of a batch is used again when nobody reads it any more, and not before."""

import os
import random

import torch
from torch.utils.data import Dataset

from trainer.data.batch import Batch
from trainer.data.batch_memory import PIECES, BatchMemory, empty_images
from trainer.data.loader import PREFETCHED, make_loader

SIZE = 160  # of more bytes than a tensor that travels by its numbers


class Numbered(Dataset):
    """Batch i, of one to three images, is filled with the number i."""

    def __getitem__(self, number):
        images = empty_images(number % 3 + 1, SIZE).fill_(number % 256)
        nothing = torch.zeros(len(images), dtype=torch.int64)
        return Batch(images=images.permute(0, 3, 1, 2), labels=nothing, keys=nothing, numbers=nothing)


def shared_file(tensor):
    """The file behind a tensor's shared memory."""
    file, _ = tensor.untyped_storage()._share_fd_cpu_()  # which stays the storage's
    return os.fstat(file).st_ino


def numbers_in(batch):
    return set(batch.images.unique().tolist())


def test_dropped_memory_is_used_again():
    files = [shared_file(batch.images) for batch in make_loader(Numbered(), range(60), workers=2, pin_memory=False)]
    # Of each process: what it prefetches, what the training has, and each piece three times at most, since batches differ in size.
    assert len(set(files)) <= 2 * (PREFETCHED + 2) * 3
    assert len(set(files[-20:])) <= 2 * (PREFETCHED + 2)

    # As into page-locked memory, or where there are no images.
    memory = BatchMemory(2)
    for images in (torch.zeros(10), None):
        memory.allocate(1, 10)
        pieces = memory.taken()
        assert pieces == (PIECES,), "the first one of the second process"
        memory.free_with(images, pieces)


def test_shared_memory_that_does_not_do():
    # A tensor there takes messages between the two processes, for which a loader process that computes is late.
    (batch,) = make_loader(Numbered(), [3], workers=1, pin_memory=False)
    assert batch.images.is_shared()
    assert not any(tensor.is_shared() for tensor in (batch.labels, batch.keys, batch.numbers))
    batch.labels.add_(1)  # as a training may
    assert batch.labels.tolist() == [1]
    # Memory that is too small for a batch is replaced.
    memory = BatchMemory(1)
    small = memory.allocate(0, 10)
    memory.free_with(None, memory.taken())
    large = memory.allocate(0, 1000)
    assert (small.nbytes(), large.nbytes(), memory.taken()) == (10, 1000, (0,))
    # With all pieces in use a batch gets memory of its own.
    memory = BatchMemory(1)
    storages = [memory.allocate(0, 10) for _ in range(PIECES + 2)]
    assert len({storage.data_ptr() for storage in storages}) == PIECES + 2
    assert memory.taken() == tuple(range(PIECES))
    # Without loader processes batches are not shared.
    (batch,) = make_loader(Numbered(), [5], workers=0, pin_memory=False)
    assert not batch.images.is_shared()
    assert numbers_in(batch) == {5}


def test_kept_batches_stay():
    kept = list(make_loader(Numbered(), range(4 * PIECES), workers=1, pin_memory=False))
    assert [numbers_in(batch) for batch in kept] == [{number} for number in range(4 * PIECES)]
    # Parts of batches that are kept for a while keep what is in them.
    draw, kept = random.Random(1), {}
    for number, batch in enumerate(make_loader(Numbered(), range(200), workers=2, pin_memory=False)):
        kept[number] = batch.images[-1, :, 1:]  # a view, of a tensor that goes
        while len(kept) > draw.randrange(8):
            earlier = draw.choice(list(kept))
            assert set(kept.pop(earlier).unique().tolist()) == {earlier}
