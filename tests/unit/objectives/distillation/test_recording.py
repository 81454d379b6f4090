import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.io import artifacts
from trainer.io.errors import ArtifactError
from trainer.objectives.distillation import recording, shards
from trainer.objectives.distillation.losses import TeacherOutputs, recorded_kl
from trainer.objectives.distillation.recording import (
    Recording,
    RecordingDescription,
    open_recording,
    placeholder_recording,
)
from trainer.objectives.distillation.reinforcement import pack, summarize, unusable

DESCRIPTION = RecordingDescription(
    samples=25,
    views=3,
    block=9,
    classes=12,
    top_k=4,
    features=0,
    seed=0,
    view_size=16,
    augmentation={"flip": True},
    decoder="pillow",
    teacher="vit",
    precision="fp32",
    dataset={},
)


def records_of(logits, description, features=None):
    return pack(summarize(TeacherOutputs(logits, features), description), description)


def random_records(description, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(count, description.classes, generator=generator)
    features = torch.randn(count, description.features, generator=generator) if description.features else None
    return records_of(logits, description, features)


# ---------------------------------------------------------------------------------------------------------------------
# Layout


def test_record_bytes(written):
    description = replace(DESCRIPTION, classes=3, top_k=2, features=1)
    records = records_of(torch.tensor([[1.0, -2.0, 3.0]]), description, torch.tensor([[0.5]]))
    indices, logits, rest, features = "02000000", "0042003c", "000000c0000080bf", "0038"
    assert records.tobytes().hex() == indices + logits + rest + features
    assert records["rest"].tolist() == [[-2.0, -1.0]]  # one class is left: its logit, and half of it
    # A description is read back whole.
    path, description, _ = written
    assert recording.describe(path) == description


@pytest.mark.parametrize(("classes", "index", "size"), [(1000, 2, 48), (65_536, 2, 48), (65_537, 4, 68)])
def test_ten_logits_take_48_bytes_unless_there_are_very_many_classes(classes, index, size):
    record = replace(DESCRIPTION, classes=classes, top_k=10).record
    assert record["indices"].base.itemsize == index
    assert record.itemsize == size
    assert record.isbuiltin == 0
    assert not record.isalignedstruct


EMBEDDING = replace(DESCRIPTION, classes=0, top_k=0, features=5)
"""Of a teacher without a head."""


def embeddings(count, seed=0):
    return 7 * torch.randn(count, EMBEDDING.features, generator=torch.Generator().manual_seed(seed))


def test_a_headless_teacher_records_its_embedding():
    given = embeddings(40)
    records = records_of(torch.empty(40, 0), EMBEDDING, given)
    assert records.dtype.names == ("features",)
    assert EMBEDDING.record.itemsize == 2 * EMBEDDING.features
    assert not unusable(records).any()
    kept = recording.unpack(records)
    assert ((kept.features - given).abs() <= 2**-11 * given.abs() + 2**-25).all()
    assert not torch.equal(kept.features, given)
    assert kept.indices.shape == kept.logits.shape == (40, 0)
    assert kept.rest.isneginf().all()


def test_int8_is_off_by_half_step_at_most():
    """The bound that the report states, number by number, with a step for each record."""
    given = torch.cat([embeddings(40), 1e-3 * embeddings(5, seed=1), torch.zeros(1, EMBEDDING.features)])
    description = replace(EMBEDDING, feature_format="int8")
    assert description.record.itemsize == EMBEDDING.features + 4
    records = records_of(torch.empty(len(given), 0), description, given)
    assert not unusable(records).any()
    kept = recording.unpack(records).features
    for row, numbers in zip(kept.double().tolist(), given.double().tolist(), strict=True):
        half_a_step = max(map(abs, numbers)) / 254
        assert all(abs(a - b) <= half_a_step * (1 + 1e-5) for a, b in zip(row, numbers, strict=True))
    assert (kept - given).abs().max() > 1e-3


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_unusable_in_int8_too(value):
    given = embeddings(3)
    given[2, 1] = value
    records = records_of(torch.empty(3, 0), replace(EMBEDDING, feature_format="int8"), given)
    assert unusable(records).tolist() == [False, False, True]


def test_format_is_named_where_it_is_not_usual_one():
    """So what describes a recording, and what is found again of one in the making, is as it was before there were two."""
    assert "feature_format" not in EMBEDDING.content()
    assert replace(EMBEDDING, feature_format="int8").content()["feature_format"] == "int8"
    assert "window" not in EMBEDDING.content()
    assert replace(EMBEDDING, window=7).content()["window"] == 7


def test_logits_are_kept_to_half_precision_and_rest_to_single():
    logits = (6 * torch.randn(200, 12, generator=torch.Generator().manual_seed(1))).double()
    kept = recording.unpack(records_of(logits.float(), DESCRIPTION))
    values, indices = logits.topk(4, dim=1)
    assert torch.equal(kept.indices, indices)
    assert ((kept.logits - values).abs() <= 2**-11 * values.abs() + 2**-25).all()
    others = logits.scatter(1, indices, -torch.inf)
    for column, temperature in enumerate((1, 2)):
        exact = torch.log(torch.exp(others / temperature).sum(1))
        assert torch.allclose(kept.rest[:, column].double(), exact, rtol=1e-6, atol=1e-6)
    assert kept.features is None


@pytest.mark.parametrize("value", [np.nan, np.inf, 65_520.0, -np.inf])
def test_numbers_that_a_record_cannot_hold_are_found(value):
    logits = torch.randn(4, 12)
    logits[2, 5] = value
    everything = replace(DESCRIPTION, top_k=12)
    assert unusable(records_of(logits, everything)).tolist() == [False, False, True, False]
    features = torch.zeros(4, 2)
    features[1, 0] = value
    with_features = replace(DESCRIPTION, features=2)
    assert unusable(records_of(torch.randn(4, 12), with_features, features)).tolist() == [False, True, False, False]


def test_numbers_of_half_precision():
    logits = torch.zeros(1, 12)
    logits[0, 0] = 65_504
    records = records_of(logits, DESCRIPTION)
    assert not unusable(records).any()
    assert records["logits"][0, 0] == 65_504
    # An embedding that half precision cannot hold is unusable.
    given = embeddings(3)
    given[1, 2] = 7e4
    assert unusable(records_of(torch.empty(3, 0), EMBEDDING, given)).tolist() == [False, True, False]


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@pytest.fixture
def written(tmp_path):
    """A recording, and what is in it, [views, samples]."""
    description = replace(DESCRIPTION, features=2)
    records = random_records(description, 75).reshape(3, 25)
    with artifacts.create(tmp_path / "outputs", "teacher_outputs", settings={}) as draft:
        (draft.path / shards.FOLDER).mkdir()
        for unit in shards.units(3, samples=25, size=9):
            part = records[unit.view, unit.first : unit.first + unit.count]
            (draft.path / unit.name).write_bytes(shards.encode(unit, part, artifacts.digest("plan")))
        recording.write_description(draft.path, description, np.arange(25, dtype=np.uint64))
    return tmp_path / "outputs", description, records


@pytest.mark.parametrize("maps", [1, 2, 256])
def test_samples_and_views_are_read_in_any_order(written, monkeypatch, maps):
    monkeypatch.setattr(recording, "MOST_MAPS", maps)
    path, _, records = written
    opened = open_recording(path)
    generator = np.random.default_rng(0)
    for _ in range(3):
        indices, numbers = generator.integers(0, 25, 40), generator.integers(0, 3, 40)
        read = opened.read(indices, numbers)
        wanted = records[numbers, indices]
        assert np.array_equal(read.indices.numpy(), wanted["indices"])
        assert np.array_equal(read.logits.numpy(), wanted["logits"])
        assert np.array_equal(read.rest.numpy(), wanted["rest"])
        assert np.array_equal(read.features.numpy(), wanted["features"])
    assert [part.dtype for part in read[:4]] == [torch.int64, torch.float32, torch.float32, torch.float32]


def test_shards_travel_and_are_let_go(written, monkeypatch):
    opened = open_recording(written[0])
    first = opened.read(np.array([1]), np.array([0]))
    sent = pickle.dumps(opened)
    assert len(sent) < 2000
    again = pickle.loads(sent)
    assert isinstance(again, Recording)
    assert torch.equal(again.read(np.array([1]), np.array([0])).logits, first.logits)
    # Shards that were not read for long are let go.
    monkeypatch.setattr(recording, "MOST_MAPS", 2)
    opened, descriptors = open_recording(written[0]), Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for view in range(3):
        opened.read(np.arange(25), np.full(25, view))
    assert len(list(descriptors.iterdir())) - before <= 2


def test_a_damaged_shard_is_refused(written):
    path, _, _ = written
    shard = path / "records" / "view-00001-block-00002.bin"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"the file records/view-00001-block-00002.bin is damaged \(checksum\)"):
        open_recording(path)


# ---------------------------------------------------------------------------------------------------------------------
# Before there are any

LARGE = replace(DESCRIPTION, samples=50_000, views=30, block=12_500, classes=1000, top_k=10, features=4, view_size=224)


def test_any_recorded_sample_gives_a_loss(tmp_path):
    read = placeholder_recording(tmp_path, LARGE).read(
        np.array([0, 12_499, 12_500, 49_999]), np.zeros(4, dtype=np.int64)
    )
    assert read.logits.shape == read.indices.shape == (4, 10)
    assert read.features.shape == (4, 4)
    assert torch.isfinite(recorded_kl(torch.randn(4, 1000), read, 2.0))


def test_the_shards_take_the_room_of_one(tmp_path):
    placeholder_recording(tmp_path, LARGE)
    files = list((tmp_path / "records").iterdir())
    assert len(files) == 4
    assert len({file.stat().st_ino for file in files}) == 1
