"""Local files from elsewhere, read up to a limit and without waiting for a pipe or a device."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.io import limits
from trainer.io.errors import ObjectNotFoundError, ObjectTooLargeError, StorageError

_LONGEST_PATH, _LONGEST_PART = 4095, 255  # limits of Linux, in bytes


def checked_path(path: str | Path) -> Path:
    """Return a path after a check that the system can have it."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded or len(encoded) > _LONGEST_PATH or max(map(len, encoded.split(b"/"))) > _LONGEST_PART:
        raise StorageError(
            f"{limits.cut(str(path), 200)!r} cannot be a path: it has a NUL character, or more bytes than the system takes; give another"
        )
    return Path(path)


def with_home(place: str | Path) -> str:
    """Put the home directory in the place of a leading `~`, where it is known; a URI stays as it is."""
    return os.path.expanduser(place)  # noqa: PTH111  # a Path would take a slash out of a URI


def located(path: str | Path) -> str:
    """Name a path that does not exist: a relative one with the folder in which it was looked for."""
    return str(path) if Path(path).is_absolute() or "://" in str(path) else f"{path} (in {Path.cwd()})"


def read_limited(path: str | Path, limit: int) -> bytes:
    """Read a whole file, or raise a `StorageError`; at most `limit` bytes of it are read."""
    with reading(path):
        return read_file(checked_path(path), limit=limit)


@contextmanager
def reading(name: str | Path) -> Iterator[None]:
    """Turn the operating system's refusal to read a file into a `StorageError`."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectNotFoundError(f"{located(name)}: there is no such file; check the path") from error
    except OSError as error:
        raise StorageError(
            f"{name}: cannot be read ({error.strerror or error}); check the path and the right to read it"
        ) from error


def read_file(path: Path, start: int | None = None, end: int | None = None, *, limit: int | None = None) -> bytes:
    """Read the bytes from `start` up to `end` of a file; a pipe or a device is refused, since reading it might block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        # The text may become the reason in a data set's quarantine.json, which its fingerprint covers: it stays as it is.
        raise PermissionError(errno.EPERM, "it is no regular file", str(path))
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None:
            check_size(size, limit, path)
            end = limit
        file.seek(start or 0)
        # Python allocates all that is asked for, even past the end of the file.
        return file.read(-1 if end is None else max(0, min(end, size + 1) - (start or 0)))


def check_size(size: int, limit: int, name: str | Path) -> None:
    """Refuse a file, or an object of a store, that exceeds the limit for its kind."""
    if size > limit:
        raise ObjectTooLargeError(
            f"{name}: has more than {limit:,} bytes, the most that are read of such a file; check that it is what its name says"
        )
