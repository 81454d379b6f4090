"""How units become batches and batches become records."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from tests.unit.objectives.distillation.test_recording import DESCRIPTION
from trainer.config import ViewSettings
from trainer.data.loader import make_loader
from trainer.objectives.distillation import reinforcement, shards
from trainer.objectives.distillation.losses import TeacherOutputs
from trainer.objectives.distillation.recording import unpack
from trainer.objectives.distillation.reinforcement import (
    VIEWS_BETWEEN_SYNCS,
    Reinforcement,
    UnitBatch,
    UnitBatches,
    batch_dividing_block,
    batches_of_units,
    recording_digest,
)
from trainer.objectives.distillation.shards import Unit


class Counted:
    """Samples of which only the number counts."""

    labeled = None

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count


class Numbered:
    """Views whose pixels are the sample's index and the view's number, and of which the loader asks all that it needs."""

    def __init__(self, count, settings):
        self.samples, self.seed, self.settings = Counted(count), 5, settings

    def batch(self, taken):
        return taken


@pytest.mark.parametrize(
    ("block", "batch_size", "batch"),
    [(1257, 256, 252), (2640, 256, 240), (100, 256, 100), (16_384, 256, 256), (7, 1, 1)],
)
def test_batches_are_so_even_that_hardly_any_view_is_computed_twice(block, batch_size, batch):
    assert batch_dividing_block(block, batch_size) == batch
    batches = -(-block // batch)
    assert batches * batch - block < batches


def test_batches_of_a_plan():
    units = [Unit(view=2, first=10, count=7, block=1), Unit(view=3, first=0, count=10, block=0)]
    parts = list(batches_of_units(units, 4))
    assert [(part.unit.view, part.start) for part in parts] == [(2, 0), (2, 4), (3, 0), (3, 4), (3, 8)]
    batches = UnitBatches(Numbered(17, ViewSettings()), 4)
    taken = [batches[part] for part in parts]
    assert [one.indices.tolist() for one in taken[:2]] == [[10, 11, 12, 13], [14, 15, 16, 16]]
    assert taken[4].indices.tolist() == [8, 9, 9, 9]
    assert taken[0].numbers.tolist() == [2, 2, 2, 2]
    assert taken[0].partners is None
    # Partners are those of the view whatever was loaded before.
    settings = ViewSettings(cutmix=1)
    unit, other = Unit(view=1, first=0, count=17, block=0), Unit(view=2, first=0, count=17, block=0)
    batches = UnitBatches(Numbered(17, settings), 17)
    first, between, again = (batches[UnitBatch(one, 0)].partners for one in (unit, other, unit))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, between)
    assert np.array_equal(first[first], np.arange(17))


def test_batches_come_in_order_from_loader_processes():
    units = [Unit(view=view, first=0, count=5, block=0) for view in range(3)]
    parts = list(batches_of_units(units, 2))
    for workers in (0, 2):
        loader = make_loader(UnitBatches(Numbered(5, ViewSettings()), 2), parts, workers=workers, pin_memory=False)
        loaded = [(int(one.numbers[0]), int(one.indices[0])) for one in loader]
        assert loaded == [(part.unit.view, part.start) for part in parts]


def test_batches_are_read_back_one_behind():
    description, order = replace(DESCRIPTION, classes=3, top_k=3), []

    def teacher(images):
        order.append(f"asked {int(images[0, 0])}")
        return TeacherOutputs(images.float())

    batches = [torch.tensor([[number, 2, 1]]) for number in (10, 20, 30)]
    for records in reinforcement.record_batches(iter(batches), teacher, description):
        order.append(f"got {int(unpack(records).logits[0, 0])}")
    assert order == ["asked 10", "asked 20", "got 10", "asked 30", "got 20", "got 30"]


OTHER = {
    "augmentation": {"flip": False},
    "dataset": {"source": "digits"},
    "feature_format": "int8",
    "tokens": (4, 4, 8),
    "token_format": "fp16",
    **{name: f"another {name}" for name in ("decoder", "teacher", "precision")},
}


@pytest.mark.parametrize("name", asdict(DESCRIPTION))
def test_whatever_changes_the_records_changes_the_plan(name):
    parents = {"dataset": "d", "teacher": "t"}
    plan, whole = recording_digest(DESCRIPTION, parents), replace(DESCRIPTION, tokens=(4, 4, 4))
    value = OTHER[name] if name in OTHER else getattr(DESCRIPTION, name) + 1
    assert recording_digest(replace(whole, **{name: value}), parents) not in {plan, recording_digest(whole, parents)}
    assert recording_digest(DESCRIPTION, parents | {"teacher": "another"}) != plan
    assert recording_digest(replace(DESCRIPTION), dict(reversed(parents.items()))) == plan


class CountedProcesses:
    """One of two processes, which notes how many batches it has recorded at each meeting."""

    world_size = 2

    def __init__(self, rank):
        self.rank, self.is_first, self.recorded, self.notes = rank, rank == 0, 0, []

    def barrier(self, what):
        self.notes.append(self.recorded)


class Kept(dict):
    """Keeps shards in memory."""

    def put(self, unit, records):
        self[unit.name] = records


def test_processes_meet_equally_often_and_long_before_shard_is_full(monkeypatch):
    description = replace(DESCRIPTION, samples=5000, block=2500, views=3)
    missing = shards.units(3, samples=5000, size=2500)[:5]  # of which the second process has one less
    notes = []
    for rank in (0, 1):
        processes, kept = CountedProcesses(rank), Kept()

        def stream(job, units, batch, _progress, processes=processes):
            for part in batches_of_units(units, batch):
                processes.recorded += 1
                yield np.full(batch, part.start, dtype=job.description.record)

        monkeypatch.setattr(Reinforcement, "_stream", stream)
        monkeypatch.setattr(Reinforcement, "_check", lambda *_: None)
        job = Reinforcement(
            views=None,
            teacher=None,
            description=description,
            shards=kept,
            processes=processes,
            batch_size=256,
            workers=0,
        )
        job._record(missing)
        assert sorted(kept) == [unit.name for unit in missing[rank::2]]
        assert [len(records) for records in kept.values()] == [2500] * len(kept)
        assert max(np.diff([0, *processes.notes])) * 250 <= VIEWS_BETWEEN_SYNCS
        notes.append(processes.notes)
    assert len(notes[0]) == len(notes[1])
    assert (notes[0][-1], notes[1][-1]) == (30, 20)
