"""Shards: the files of recorded outputs, and what is kept of them while they are being made.

A shard holds the records of one view of a block of samples. Its header says what it is and what it was made from, and holds the
checksum of the records; so a half-written, damaged or foreign shard is recognized. Finished shards stand beside the checkpoints until
the artifact is complete, keyed by what they were made from: an interrupted job finds them again, on any number of processes, on
another machine, and in the next run of the pipeline, whose output has another place. What asks a store raises `StorageError` where that
does not answer or refuses.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.io import storage
from trainer.io.errors import ArtifactError, ObjectNotFoundError

BLOCK = 16_384
"""Most samples in a shard: 0.8 MB without features, and seconds to minutes of a teacher's work, which an interruption may lose."""
SHARD_BYTES = 2**28  # most bytes of a shard, of which a process holds two in memory; a single record may be larger
FOLDER = "records"

_MAGIC = b"VITRECRD"
_VERSION = 1
_HEADER = struct.Struct("<8s I I Q Q Q 32s 32s 24x")
HEADER_BYTES = _HEADER.size

Records = npt.NDArray[np.void]


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One view of a block of samples: what is recorded, kept and found again as a whole."""

    view: int
    first: int  # index of the first sample
    count: int  # number of samples
    block: int

    @property
    def name(self) -> str:
        """Its file, relative to the artifact."""
        return f"{FOLDER}/view-{self.view:05d}-block-{self.block:05d}.bin"


def block_size(samples: int, record_bytes: int = 0) -> int:
    """Samples in each block, at most `BLOCK`, and as `SHARD_BYTES` allows; the last block may have a few less."""
    most = max(1, min(BLOCK, SHARD_BYTES // max(1, record_bytes)))
    return math.ceil(samples / math.ceil(samples / most))


def unit(view: int, block: int, *, samples: int, size: int) -> Unit:
    """A view of a block, where `samples` are cut into blocks of `size`."""
    first = block * size
    return Unit(view=view, first=first, count=min(size, samples - first), block=block)


def units(views: int, *, samples: int, size: int) -> list[Unit]:
    """All of them, view by view."""
    blocks = range(math.ceil(samples / size))
    return [unit(view, block, samples=samples, size=size) for view in range(views) for block in blocks]


def encode(unit: Unit, records: Records, plan: str) -> bytes:
    """The content of a shard with these records [count]; `plan` is the SHA-256 of all that they depend on, as hexadecimal text."""
    payload = records.tobytes()
    digest = hashlib.sha256(payload).digest()
    header = _HEADER.pack(
        _MAGIC, _VERSION, records.itemsize, unit.view, unit.first, unit.count, bytes.fromhex(plan), digest
    )
    return header + payload


def decode(unit: Unit, content: bytes, plan: str, record: np.dtype[np.void]) -> Records:
    """The records of a shard, [count].

    Raises:
        ArtifactError: it is damaged, or another one.
    """
    wanted = HEADER_BYTES + unit.count * record.itemsize
    if len(content) != wanted:
        raise ArtifactError(f"has {len(content)} bytes instead of {wanted}")
    *found, digest = _HEADER.unpack_from(content)
    expected = [_MAGIC, _VERSION, record.itemsize, unit.view, unit.first, unit.count, bytes.fromhex(plan)]
    if found != expected:
        raise ArtifactError("is not the shard that belongs here")
    payload = memoryview(content)[HEADER_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        raise ArtifactError("is damaged (checksum)")
    return np.frombuffer(payload, dtype=record)


class ShardStore:
    """The finished shards of a recording in the making."""

    def __init__(self, root: str | Path, plan: str, record: np.dtype[np.void]) -> None:
        """Below `root`, for a plan (SHA-256 of all that the records depend on)."""
        self.uri = storage.join(root, f"reinforce-{plan[:16]}")
        self._plan, self._record = plan, record

    def names(self) -> set[str]:
        """Names of the files that are there, whole or not."""
        return set(storage.children(storage.join(self.uri, FOLDER)))

    def put(self, unit: Unit, records: Records) -> None:
        """Keep a unit's records, whole or not at all.

        Raises:
            OutputError: the file cannot be written.
        """
        storage.write_bytes(storage.join(self.uri, unit.name), encode(unit, records, self._plan))

    def get(self, unit: Unit) -> tuple[bytes, Records]:
        """The content of a unit's shard, and its records [count].

        Raises:
            ArtifactError: there is none, or it is damaged, or another one.
        """
        uri = storage.join(self.uri, unit.name)
        try:
            content = storage.read_bytes(uri)
        except ObjectNotFoundError as error:
            raise ArtifactError(f"{uri}: is not there") from error
        try:
            return content, decode(unit, content, self._plan, self._record)
        except ArtifactError as error:
            raise ArtifactError(f"{uri}: {error}") from error

    def remove(self) -> None:
        """Drop all of them: the artifact is complete."""
        storage.remove(self.uri)
