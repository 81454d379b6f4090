"""Notes that an interrupted stage leaves: what is damaged is not believed."""

import pytest

from trainer.io import storage
from trainer.io.errors import ObjectDamagedError, ObjectNotFoundError

TEXT = '{"name": "Käse\\nbrot", "seconds": 0.1}'


def test_what_is_written_is_read(tmp_path, object_store):
    for place in (tmp_path / "notes.jsonl", object_store.uri("notes.jsonl")):
        storage.write_checksummed(place, TEXT)
        assert storage.read_checksummed(place) == TEXT


def test_every_truncation_and_every_changed_bit_is_found(tmp_path):
    file = tmp_path / "notes.jsonl"
    storage.write_checksummed(file, TEXT)
    content = file.read_bytes()
    whole = content.removesuffix(b"\n")
    changed = [content[:length] for length in range(len(whole))]
    changed += [
        whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :] for at in range(len(whole)) for bit in (0, 5, 7)
    ]
    for damaged in changed:
        file.write_bytes(damaged)
        with pytest.raises(ObjectDamagedError, match=r"notes\.jsonl: is damaged \(checksum\)"):
            storage.read_checksummed(file)


def test_there_is_none(tmp_path):
    with pytest.raises(ObjectNotFoundError):
        storage.read_checksummed(tmp_path / "notes.jsonl")
