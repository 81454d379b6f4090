"""The memory of a batch is used again when nobody reads it any more, and not before."""

import gc
import random

import pytest
import torch
from torch.utils.data import Dataset

from trainer.data import batch_memory
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


class Changed(Numbered):
    """The images that were allocated go unsent: others take their place, which lie elsewhere."""

    def __getitem__(self, number):
        batch = super().__getitem__(number)
        return batch._replace(
            images=batch.images + 1, label_weights=torch.full((40_000,), number, dtype=torch.bfloat16)
        )


def numbers_in(batch):
    return set(batch.images.unique().tolist())


@pytest.mark.parametrize(("source", "tensors"), [(Numbered(), 1), (Changed(), 3)])
def test_dropped_memory_is_used_again(source, tensors):
    batches = make_loader(source, range(60), workers=2, pin_memory=False)
    places = [batch.images.data_ptr() for batch in batches]
    # Of each process: what it prefetches, makes and sends, and what the training has.
    assert len(set(places)) <= 2 * tensors * (PREFETCHED + 3)


def test_large_tensors_come_in_shared_pieces_and_small_ones_by_value():
    # A tensor in torch's shared memory takes messages between the two processes, for which a loader process that computes is late.
    batches = make_loader(Changed(), [3], workers=1, pin_memory=False)
    batch = next(batches)
    pieces = range(*batches.gi_frame.f_locals["memory"].addresses)
    assert all(tensor.data_ptr() in pieces for tensor in (batch.images, batch.label_weights))
    assert not any(tensor.is_shared() for tensor in batch if isinstance(tensor, torch.Tensor))
    assert numbers_in(batch) == {4}
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.label_weights.dtype is torch.bfloat16
    assert set(batch.label_weights.tolist()) == {3}
    batch.labels.add_(1)  # as a training may
    assert batch.labels.tolist() == [1]
    batches.close()
    # Without loader processes batches are not shared.
    (batch,) = make_loader(Numbered(), [5], workers=0, pin_memory=False)
    assert numbers_in(batch) == {5}


class Small(Dataset):
    """Batches that travel by their numbers."""

    def __getitem__(self, number):
        images = empty_images(2, 8)
        images.copy_(torch.arange(images.numel(), dtype=torch.uint8).view(images.shape))
        nothing = torch.zeros(2, dtype=torch.int64)
        return Batch(images=images.permute(0, 3, 1, 2), labels=nothing, keys=nothing, numbers=nothing)


def test_a_small_batch_keeps_its_layout():
    """Convolutions of another one round otherwise, so a training would depend on the number of its loader processes."""
    (batch,) = make_loader(Small(), [0], workers=1, pin_memory=False)
    here = Small()[0].images
    assert torch.equal(batch.images, here)
    assert batch.images.stride() == here.stride()


def test_pieces_are_lent_until_nobody_has_them():
    memory = BatchMemory(2)
    memory.serve(1)
    lent = [memory.allocate(100) for _ in range(PIECES)]
    assert len({piece.data_ptr() for piece in lent}) == PIECES
    assert memory.allocate(100) is None
    address = lent[3].data_ptr()
    lent[3] = None  # unsent
    assert memory.allocate(2**31) is None, "more than a piece"
    again = memory.allocate(200)
    assert again.data_ptr() == address

    rebuild, arguments = memory._reduce(again.fill_(7).expand(1, 200).to(torch.uint8))
    assert rebuild is batch_memory._by_value, "small enough to travel by value"
    large = memory._bytes.part(0, 2**17).fill_(9)  # of no piece that was lent
    assert memory._reduce(large) is None, "no piece is left to copy it to"
    lent[4] = None
    rebuild, arguments = memory._reduce(large)
    received = rebuild(*arguments)
    assert set(received.tolist()) == {9}
    assert memory.allocate(1) is None, "the training process has it"
    part = received[5:7]
    del received
    gc.collect()
    assert memory.allocate(1) is None, "or a part of it"
    del part
    assert memory.allocate(1) is not None


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


class Runtime:
    """CUDA's calls for page-locked memory; refuses what the driver refuses."""

    def __init__(self, code=0):
        self.code, self.locked, self.calls = code, {}, 0

    def cudaHostRegister(self, address, size, flags):  # noqa: N802  # CUDA's name
        assert flags == 0
        assert address % 4096 == size % 4096 == 0
        assert all(address + size <= other or other + held <= address for other, held in self.locked.items())
        self.calls += 1
        if not self.code:
            self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802  # CUDA's name
        del self.locked[address]
        return 0


def test_pages_are_locked_where_a_batch_first_arrives(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    batches = make_loader(Numbered(), range(90), workers=2, pin_memory=True)
    for number, batch in enumerate(batches):
        address = batch.images.data_ptr()
        assert runtime.locked[address] >= batch.images.nbytes
        assert numbers_in(batch) == {number}
        del batch
    assert runtime.locked == {}
    assert runtime.calls <= 2 * (PREFETCHED + 3) * 3, "three sizes of batches, each once a piece at most"


def test_a_system_that_locks_no_pages_is_named_once(monkeypatch, caplog):
    runtime = Runtime(code=304)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    loaded = [numbers_in(batch) for batch in make_loader(Numbered(), range(9), workers=1, pin_memory=True)]
    assert loaded == [{number} for number in range(9)]
    assert runtime.calls == 1
    (message,) = [record.getMessage() for record in caplog.records]
    assert "304" in message
