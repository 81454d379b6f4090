"""The node's cache of what was fetched from the store: each content once, for all processes.

Below `TRAINER_CACHE` every content has a folder, named by its key. It is filled beside its final path and moved there when it is whole
and checked, so what is at that path needs no check. The locks are flocks, which the system drops with the process that held them:

    KEY.lock    held by the process that fills the folder; the others wait for it and then find the folder filled
    KEY/        held, shared, by every process that made or uses the folder, until it releases the folder or ends

A folder that no process holds may be evicted; `rm -r` of the whole cache is safe while no training runs.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.io.errors import OutputError, StorageError, make_directory, writing_to

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "TRAINER_CACHE"
LIMIT_VARIABLE = "TRAINER_CACHE_GIB"
LIMIT_GIB = 100.0
"""When the cache holds more, the least recently used folders are evicted, unless a process is using them."""

LOG_INTERVAL_S = 30.0  # seconds between two lines about a wait
_POLL_S = 0.1
_DRAFT = "draft-"
_WORTH_A_LINE = 2**28  # bytes of a removed folder; of a large data set thousands of smaller ones may be

_used: dict[Path, int] = {}  # folder that this process uses -> descriptor that holds its lock
_sizes: dict[Path, int] = {}  # folder -> its bytes
_using = threading.Lock()  # of that dictionary


def root() -> Path:
    """Return the folder of the cache: `TRAINER_CACHE`, or one in the user's cache folder; a `StorageError` if neither is known."""
    named, base = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(named or Path(base or Path.home() / ".cache") / "vit-distillation")
    except RuntimeError as error:  # a container may run as a user that the system does not know
        raise StorageError(f"no folder is known for what is fetched ({error}); set {CACHE_VARIABLE} to one") from error


def keep(key: str, what: str, fetch: Callable[[Path], None], *, is_whole: Callable[[Path], bool]) -> Path:
    """Return the cached folder of a content, whose `key` is equal for equal content; of several processes one fetches, the others wait.

    `what` names it in messages; `fetch` fills a folder, which may hold parts of an earlier attempt, and raises unless it is whole and
    checked; `is_whole` checks quickly whether files have gone since.
    """
    limit_bytes()  # raises for a wrong value before the work, not after it
    place = root() / key
    fetched = False
    with _exclusively(key, what):
        if place.is_dir() and not is_whole(place):
            logger.warning("%s: is not whole any more; fetching it again", place)
            shutil.rmtree(place)
        if not place.is_dir():
            partial = place.with_name(f"{key}.partial")
            with _naming_folder():
                make_directory(partial)
                fetch(partial)
            partial.rename(place)
            fetched = True
        _use(place)
    if fetched:
        evict()
    return place


def held(key: str, what: str, *, is_whole: Callable[[Path], bool]) -> Path | None:
    """Return the folder of a content if it is cached and whole, else None; the arguments are as in `keep`."""
    place = root() / key
    with _exclusively(key, what):
        if not place.is_dir() or not is_whole(place):
            return None
        _use(place)
    return place


@contextmanager
def draft() -> Iterator[Path]:
    """Make a new folder to write into, removed when the block ends unless `adopt` has taken it."""
    limit_bytes()  # likewise
    name = f"{_DRAFT}{uuid.uuid4().hex}"
    place = root() / name
    with _exclusively(name, name):
        make_directory(place)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)  # after a failure others may still write; `evict` takes the rest
            place.with_name(f"{name}.lock").unlink(missing_ok=True)


def adopt(folder: Path, key: str) -> None:
    """Make a draft, which is whole and checked, the folder of a content; it is in use from then on."""
    place = root() / key
    with _exclusively(key, folder.name):
        if not place.is_dir():
            folder.rename(place)
        _use(place)
    evict()


def release(folder: Path) -> None:
    """Let a folder that this process has used be evicted."""
    with _using:
        if (descriptor := _used.pop(folder, None)) is not None:
            os.close(descriptor)


def evict() -> None:
    """Remove the least recently used folders until the cache is within its limit; folders in use stay."""
    limit = limit_bytes()
    folders: list[tuple[int, int, Path]] = []  # time of last use, bytes, path
    with os.scandir(root()) as entries:
        for entry in entries:
            try:
                if entry.is_dir():
                    folders.append((entry.stat().st_mtime_ns, _size(Path(entry.path)), Path(entry.path)))
            except FileNotFoundError:  # another process has just moved, filled or removed it
                continue
    total = sum(size for _, size, _ in folders)
    for _, size, folder in sorted(folders):
        if total <= limit:
            return
        if _remove_unused(folder):
            level = logging.INFO if size >= _WORTH_A_LINE else logging.DEBUG
            logger.log(level, "cache: removed %s (%.1f GiB)", folder, size / 2**30)
            total -= size


def _size(folder: Path) -> int:
    """Return the bytes of a folder. A whole one never changes, and is walked through once: of a large data set there are thousands."""
    if (size := _sizes.get(folder)) is None:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        # A folder that is gone now may have been measured while it was being removed.
        if folder.suffix != ".partial" and not folder.name.startswith(_DRAFT) and folder.is_dir():
            _sizes[folder] = size
    return size


def _remove_unused(folder: Path) -> bool:
    """Remove a folder unless a process fills or uses it; returns whether it is gone."""
    lock, user = _open(folder.with_name(f"{folder.name.removesuffix('.partial')}.lock")), None
    try:
        if not _locks(lock):
            return False
        if folder.is_dir():
            user = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            if not _locks(user):
                return False
            # First under another name: one that is half removed is not whole, and comes back whole when it is fetched again.
            shutil.rmtree(folder.rename(folder.with_name(f"{_DRAFT}{uuid.uuid4().hex}")))
        return True
    finally:
        if user is not None:
            os.close(user)
        os.close(lock)


@contextmanager
def _exclusively(key: str, what: str) -> Iterator[None]:
    """Hold the lock of a key; waits for the process that holds it, whose own waits are bounded."""
    with _naming_folder():
        make_directory(root())
        with writing_to(root()):
            descriptor = _open(root() / f"{key}.lock")
    try:
        start = said = time.monotonic()
        while not _locks(descriptor):
            if time.monotonic() - said >= LOG_INTERVAL_S:
                said = time.monotonic()
                logger.info("waiting for another process of this machine, which fetches %s: %.0f s", what, said - start)
            time.sleep(_POLL_S)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where a forked process has a copy
        os.close(descriptor)


@contextmanager
def _naming_folder() -> Iterator[None]:
    try:
        yield
    except OutputError as error:
        raise OutputError(f"{error} ({CACHE_VARIABLE} names the folder for what is fetched)") from error


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(lock: Path) -> int:
    return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _use(folder: Path) -> None:
    """Hold a folder until it is released or this process ends, and update its time of use."""
    with _using:
        held = _used.get(folder)
        if held is None or os.fstat(held).st_ino != folder.stat().st_ino:
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            _used[folder] = descriptor
            if held is not None:
                os.close(held)
    os.utime(folder)


def limit_bytes() -> float:
    """Return the bytes that the cache may hold (`TRAINER_CACHE_GIB`); a `StorageError` where that is no number."""
    text = os.environ.get(LIMIT_VARIABLE) or str(LIMIT_GIB)
    try:
        if (limit := float(text)) >= 0:
            return limit * 2**30
        raise ValueError("is negative, or no number")
    except ValueError as error:
        raise StorageError(f"{LIMIT_VARIABLE}={text}: must be a number of GiB; correct it or unset it") from error
