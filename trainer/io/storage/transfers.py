"""Uploads and downloads of many files at once, in parts that travel concurrently.

After an interruption a download fetches only the missing parts, and an upload leaves out files that the store has with the same SHA-256; a
store that is away is waited for and logged once for all threads. s3transfer and fsspec's `get` and `put` do none of this: they begin an
interrupted file anew, send each file again, and retry every part for itself.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from trainer.io.errors import ObjectDamagedError, ObjectNotFoundError, StorageError, make_directory, writing_to
from trainer.io.storage import (
    CONNECTIONS,
    call,
    file_digest,
    files,
    flush,
    is_s3,
    join,
    locate,
    read_bytes,
    write_bytes,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

PART_BYTES = 8 * 2**20  # larger files travel in parts of this size; S3 requires at least 5 MiB
LOG_INTERVAL_S = 15.0  # seconds between two lines about a transfer's progress
_MOST_PARTS = 10_000  # S3's limit for one object
_DIGEST = "sha256"  # key of the checksum in an object's metadata


class FileRecord(TypedDict):
    """A file in a manifest."""

    size: int  # in bytes
    sha256: str  # as hexadecimal text


def _in_parallel(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Map items to results in parallel, in their order; after a failure, Ctrl-C or SIGTERM nothing more is begun."""
    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="transfer") as pool:
        return list(pool.map(work, items))


class _Progress:
    """Logs now and then how far a transfer is: people and launchers take a long silence for a hang."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._said = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if time.monotonic() - self._said >= LOG_INTERVAL_S:
                self._said = time.monotonic()
                logger.info("%s: %.1f of %.1f MiB", self._what, self._done / 2**20, self._total / 2**20)


def _part_bytes(size: int) -> int:
    return max(PART_BYTES, math.ceil(size / _MOST_PARTS))


# ---- From the store


def download_directory(uri: str, directory: Path, records: Mapping[str, FileRecord]) -> None:
    """Fetch these files from below a URI into a directory, and check them.

    Parts that an earlier attempt has fetched are not fetched again: an unfinished file has a journal beside it, NAME.partial, with a byte
    for each part. An `ObjectDamagedError` if a file does not match its record, twice.
    """
    for last in (False, True):
        parts = [part for name, record in records.items() for part in _missing_parts(uri, directory, name, record)]
        progress = _Progress(f"fetching {uri}", sum(part.end - part.start for part in parts))
        _in_parallel(partial(_fetch, progress), parts)
        whole = _in_parallel(lambda item: _settle(directory / item[0], item[1]), records.items())
        damaged = [name for name, is_whole in zip(records, whole, strict=True) if not is_whole]
        if damaged and last:
            raise ObjectDamagedError(f"the file {damaged[0]} is damaged (checksum); make it again or copy it whole")
        if damaged:
            logger.warning("%s: %s did not arrive as sent; fetching again", uri, ", ".join(damaged))


@dataclass(frozen=True, kw_only=True)
class _Part:
    uri: str
    file: Path
    number: int
    start: int
    end: int


def _fetch(progress: _Progress, part: _Part) -> None:
    try:
        content = read_bytes(part.uri, part.start, part.end)
    except ObjectNotFoundError as error:
        raise ObjectNotFoundError(f"the file {part.uri} is missing; make it again or copy it whole") from error
    if len(content) != part.end - part.start:
        raise ObjectDamagedError(f"the file {part.uri} is shorter than it was; make it again or copy it whole")
    with writing_to(part.file):
        for file, offset, written in ((part.file, part.start, content), (_journal(part.file), part.number, b"\1")):
            with file.open("r+b") as opened:
                opened.seek(offset)
                opened.write(written)
    progress.add(len(content))


def _journal(file: Path) -> Path:
    return file.with_name(f"{file.name}.partial")


def _missing_parts(uri: str, directory: Path, name: str, record: FileRecord) -> Iterator[_Part]:
    """Yield the parts of a file that have not arrived yet; creates the file and its journal."""
    file, size = directory / name, record["size"]
    journal, step = _journal(file), _part_bytes(size)
    count = math.ceil(size / step)
    make_directory(file.parent)
    with writing_to(file):
        if not file.exists():
            journal.write_bytes(bytes(count))
            file.touch()
            os.truncate(file, size)
        if not journal.exists():
            return  # an earlier attempt has fetched and checked it
        fetched = journal.read_bytes().ljust(count, b"\0")
    for number in range(count):
        if not fetched[number]:
            start = number * step
            yield _Part(uri=join(uri, name), file=file, number=number, start=start, end=min(start + step, size))


def _settle(file: Path, record: FileRecord) -> bool:
    """Check a file that has all its parts and remove its journal, or both if it is damaged; returns whether it is whole."""
    if not _journal(file).exists():
        return True
    if file_digest(file) != record["sha256"]:
        file.unlink()
        _journal(file).unlink()
        return False
    with writing_to(file):
        flush(file)
    _journal(file).unlink()
    return True


# ---- To the store


def upload_directory(directory: Path, uri: str, records: Mapping[str, FileRecord]) -> None:
    """Send these files of a directory to the store, below a URI, unless they are there with the same checksum."""
    present = files(uri)
    progress = _Progress(f"sending {uri}", sum(record["size"] for record in records.values()))

    def is_missing(name: str) -> bool:
        return present.get(name) != records[name]["size"] or not _is_there(join(uri, name), records[name])

    def send(name: str) -> None:
        content = (directory / name).read_bytes()
        if is_s3(uri):
            _s3_call("put_object", join(uri, name), Body=content, Metadata={_DIGEST: records[name]["sha256"]})
        else:
            write_bytes(join(uri, name), content)
        progress.add(len(content))

    missing = [name for name, lacks in zip(records, _in_parallel(is_missing, records), strict=True) if lacks]
    large = {name for name in missing if is_s3(uri) and records[name]["size"] > _part_bytes(records[name]["size"])}
    _in_parallel(send, [name for name in missing if name not in large])
    for name in missing:  # one after the other, since the parts of each already travel concurrently
        if name in large:
            _upload_in_parts(directory / name, join(uri, name), records[name], progress)


def _is_there(uri: str, record: FileRecord) -> bool:
    return is_s3(uri) and bool(_s3_call("head_object", uri)["Metadata"].get(_DIGEST) == record["sha256"])


def _s3_call(method: str, uri: str, **arguments: Any) -> Mapping[str, Any]:
    system, path = locate(uri)
    bucket, _, key = path.partition("/")
    answer: Mapping[str, Any] = call(uri, lambda: system.call_s3(method, Bucket=bucket, Key=key, **arguments))
    return answer


def _upload_in_parts(file: Path, uri: str, record: FileRecord, progress: _Progress) -> None:
    step = _part_bytes(record["size"])
    identity = _s3_call("create_multipart_upload", uri, Metadata={_DIGEST: record["sha256"]})["UploadId"]

    def send(number: int) -> dict[str, Any]:
        with file.open("rb") as opened:
            opened.seek((number - 1) * step)
            content = opened.read(step)
        answer = _s3_call("upload_part", uri, UploadId=identity, PartNumber=number, Body=content)
        progress.add(len(content))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        parts = _in_parallel(send, range(1, math.ceil(record["size"] / step) + 1))
        try:
            _s3_call("complete_multipart_upload", uri, UploadId=identity, MultipartUpload={"Parts": parts})
        except ObjectNotFoundError:
            # The upload is also gone where an earlier attempt completed it and only the answer was lost.
            if not _is_there(uri, record):
                raise
    except BaseException:  # Ctrl-C and SIGTERM too: the store charges for parts of uploads that are never completed
        try:
            _s3_call("abort_multipart_upload", uri, UploadId=identity)
        except StorageError as error:
            logger.warning("the parts sent so far stay in the store until its own rules remove them: %s", error)
        raise
