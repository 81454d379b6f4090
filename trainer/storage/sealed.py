"""A text with its checksum, for notes that an interrupted stage leaves to its next try: what is damaged is not believed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from trainer.errors import ObjectDamagedError
from trainer.storage.objects import read_bytes, write_bytes


def write(uri: str | Path, text: str) -> None:
    """Write two lines: SHA-256 of a JSON text, and the text; whole or not at all.

    Raises:
        StorageError: the store does not answer or refuses.
        OutputError: the file cannot be written.
    """
    write_bytes(uri, f"{json.dumps(_digest(text.encode()))}\n{text}\n".encode())


def read(uri: str | Path) -> str:
    """The text.

    Raises:
        ObjectNotFoundError: there is none.
        ObjectDamagedError: it is not what was written.
        StorageError: the store does not answer or refuses.
    """
    seal, _, text = read_bytes(uri).partition(b"\n")
    text = text.removesuffix(b"\n")
    if seal.decode(errors="replace") != json.dumps(_digest(text)):
        raise ObjectDamagedError(f"{uri}: is damaged (checksum)")
    return text.decode()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
