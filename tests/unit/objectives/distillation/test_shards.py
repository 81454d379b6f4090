import numpy as np
import pytest

from trainer.io import artifacts
from trainer.io.errors import ArtifactError
from trainer.objectives.distillation import shards
from trainer.objectives.distillation.shards import ShardStore, Unit, decode, encode

RECORD = np.dtype([("indices", "<u2", (2,)), ("logits", "<f2", (2,)), ("rest", "<f4", (2,))])
PLAN, OTHER_PLAN = artifacts.digest("plan"), artifacts.digest("another plan")
UNIT = Unit(view=3, first=10, count=5, block=1)


def some_records(count=5):
    return np.frombuffer(np.random.default_rng(0).bytes(count * RECORD.itemsize), dtype=RECORD)


@pytest.mark.parametrize("samples", [1, 7, 16_384, 16_385, 50_000])
def test_units_cover_every_view_once(samples):
    seen = np.zeros((2, samples), dtype=int)
    units = shards.units(2, samples=samples, size=shards.block_size(samples))
    for unit in units:
        seen[unit.view, unit.first : unit.first + unit.count] += 1
    assert (seen == 1).all()
    assert len({unit.name for unit in units}) == len(units)
    counts = [unit.count for unit in units]
    assert max(counts) <= shards.BLOCK
    assert max(counts) - min(counts) < len(units)


def test_shard_is_written_and_read():
    records = some_records()
    content = encode(UNIT, records, PLAN)
    assert len(content) == shards.HEADER_BYTES + records.nbytes == 128 + 5 * 16
    assert decode(UNIT, content, PLAN, RECORD).tobytes() == records.tobytes()
    # The header stays as it is.
    header = encode(UNIT, some_records(), PLAN)[: shards.HEADER_BYTES]
    assert header[:40].hex() == (
        b"VITRECRD".hex() + "01000000" + "10000000" + "0300000000000000" + "0a00000000000000" + "0500000000000000"
    )
    assert header[40:72].hex() == PLAN


@pytest.mark.parametrize("place", [0, 9, 20, 45, 80, 127], ids=lambda place: f"byte {place}")
def test_changed_byte_of_header_or_records_is_noticed(place):
    content = bytearray(encode(UNIT, some_records(), PLAN))
    content[place] ^= 1
    if place in range(104, shards.HEADER_BYTES):  # what fills the header up means nothing
        assert decode(UNIT, bytes(content), PLAN, RECORD).tobytes() == some_records().tobytes()
        content[shards.HEADER_BYTES + 1] ^= 1
    with pytest.raises(ArtifactError, match=r"is not the shard that belongs here|is damaged"):
        decode(UNIT, bytes(content), PLAN, RECORD)


@pytest.mark.parametrize("kept", [0, 64, 128, 150])
def test_a_half_written_shard_is_noticed(kept):
    with pytest.raises(ArtifactError, match=f"has {kept} bytes instead of 208"):
        decode(UNIT, encode(UNIT, some_records(), PLAN)[:kept], PLAN, RECORD)


@pytest.mark.parametrize(
    ("unit", "plan"),
    [(Unit(view=4, first=10, count=5, block=1), PLAN), (Unit(view=3, first=5, count=5, block=0), PLAN), (UNIT, OTHER_PLAN)],
    ids=["another view", "another block", "another plan"],
)  # fmt: skip
def test_a_foreign_shard_is_noticed(unit, plan):
    with pytest.raises(ArtifactError, match="is not the shard that belongs here"):
        decode(UNIT, encode(unit, some_records(), plan), PLAN, RECORD)


def test_a_shelf_keeps_units_until_they_are_removed(tmp_path):
    shards, other = ShardStore(tmp_path, PLAN, RECORD), ShardStore(tmp_path, OTHER_PLAN, RECORD)
    assert shards.names() == set()
    shards.put(UNIT, some_records())
    assert shards.names() == {"view-00003-block-00001.bin"}
    assert other.names() == set()
    content, records = shards.get(UNIT)
    assert records.tobytes() == some_records().tobytes()
    assert content == encode(UNIT, some_records(), PLAN)
    with pytest.raises(ArtifactError, match=r"view-00000-block-00000.bin: is not there"):
        shards.get(Unit(view=0, first=0, count=5, block=0))
    shards.remove()
    assert shards.names() == set()
