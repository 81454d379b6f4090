"""One object of the store, or one file here: names, content, listing, removal."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # the package ships no types

from trainer.errors import ObjectNotFoundError, StorageError, make_directory, writing_to
from trainer.storage.retries import call, endpoint

CONNECTIONS = 8
"""Requests that are under way at the same time."""
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
"""How long the store may send nothing."""

_S3_SCHEMES = ("s3", "s3a", "minio")
_making = threading.Lock()


def is_remote(uri: str | Path) -> bool:
    """Whether a URI has a scheme other than `file`."""
    return "://" in str(uri) and not str(uri).startswith("file://")


def is_s3(uri: str | Path) -> bool:
    """Whether a URI names something in a store that speaks S3's protocol."""
    return str(uri).partition("://")[0] in _S3_SCHEMES


def local_path(uri: str | Path) -> Path:
    """The path of a local URI, a plain path or `file://...`.

    Raises:
        StorageError: it is remote.
    """
    if is_remote(uri):
        raise StorageError(f"{uri}: a path on this machine is needed here, not a remote one; give a local directory")
    return Path(str(uri).removeprefix("file://"))


def join(uri: str | Path, *names: str) -> str:
    """The URI of what lies below another."""
    return "/".join((str(uri).rstrip("/"), *names))


def parent(uri: str | Path) -> str:
    """The URI of what a URI lies in."""
    return str(uri).rstrip("/").rpartition("/")[0] if is_remote(uri) else str(local_path(uri).parent)


def exists(uri: str | Path) -> bool:
    """Whether there is an object, or a file, of exactly this name.

    Raises:
        StorageError: the store does not answer or refuses.
    """
    if not is_remote(uri):
        return local_path(uri).is_file()
    system, path = locate(uri)
    try:
        return bool(call(str(uri), lambda: system.info(path))["type"] == "file")
    except ObjectNotFoundError:
        return False


def read_bytes(uri: str | Path, start: int | None = None, end: int | None = None) -> bytes:
    """The content of an object or a file, or the bytes from `start` up to `end` of it.

    Raises:
        ObjectNotFoundError: there is none.
        StorageError: the store does not answer or refuses.
    """
    if not is_remote(uri):
        try:
            return local_path(uri).read_bytes()[start:end]
        except FileNotFoundError as error:
            raise ObjectNotFoundError(f"{uri}: there is no such file; check the path") from error
    system, path = locate(uri)
    content: bytes = call(str(uri), lambda: system.cat_file(path, start=start, end=end))
    return content


def write_bytes(uri: str | Path, content: bytes) -> None:
    """Write an object or a file, so that it is there whole or not at all.

    Raises:
        StorageError: the store does not answer or refuses.
        OutputError: the file can not be written.
    """
    if not is_remote(uri):
        _write_file(local_path(uri), content)
        return
    system, path = locate(uri)
    call(str(uri), lambda: system.pipe_file(path, content))


def _write_file(path: Path, content: bytes) -> None:
    make_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with writing_to(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def files(uri: str | Path) -> dict[str, int]:
    """All files below a URI: name relative to it -> size in bytes; none where there is nothing.

    Raises:
        StorageError: the store does not answer or refuses.
    """
    if not is_remote(uri):
        root = local_path(uri)
        found = sorted(path for path in root.rglob("*") if path.is_file())
        return {path.relative_to(root).as_posix(): path.stat().st_size for path in found}
    return {name: int(info["size"]) for name, info in _below(uri, "find").items()}


def _below(uri: str | Path, listing: str) -> dict[str, Mapping[str, Any]]:
    """What `find` or `ls` of fsspec lists below a remote URI, with names relative to it, sorted."""
    system, path = locate(uri)
    prefix = f"{path.rstrip('/')}/"
    try:
        found = call(str(uri), lambda: getattr(system, listing)(prefix, detail=True))
    except ObjectNotFoundError:
        return {}
    infos = found.values() if isinstance(found, dict) else found
    named = {str(info["name"]).rstrip("/"): info for info in infos}
    return {name.removeprefix(prefix): named[name] for name in sorted(named) if name.startswith(prefix)}


def children(uri: str | Path) -> list[str]:
    """Names of what lies directly below a URI, sorted; none where there is nothing.

    Raises:
        StorageError: the store does not answer or refuses.
    """
    if not is_remote(uri):
        root = local_path(uri)
        return sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    return list(_below(uri, "ls"))


def remove(uri: str | Path) -> None:
    """Remove a file or an object, or all that lies below; nothing happens where there is nothing.

    Raises:
        StorageError: the store does not answer or refuses.
    """
    if not is_remote(uri):
        path = local_path(uri)
        if not path.is_dir():
            remove_file(path)
            return
        with writing_to(path):
            shutil.rmtree(path)
        return
    for name in files(uri):
        remove_file(join(uri, name))
    remove_file(uri)


def remove_file(uri: str | Path) -> None:
    """Remove one file or object, if it is there.

    Raises:
        StorageError: the store does not answer or refuses.
    """
    if not is_remote(uri):
        with writing_to(local_path(uri)):
            local_path(uri).unlink(missing_ok=True)
        return
    system, path = locate(uri)
    with suppress(ObjectNotFoundError):  # S3 does not say so, other stores do
        call(str(uri), lambda: system.rm_file(path))


# ---------------------------------------------------------------------------------------------------------------------
# fsspec


def locate(uri: str | Path) -> tuple[Any, str]:
    """The file system of fsspec for a remote URI, and the path in it.

    Raises:
        StorageError: the scheme is not known, or the environment lacks the store's address.
    """
    scheme, _, path = str(uri).partition("://")
    if scheme not in _S3_SCHEMES:
        try:
            system, located = fsspec.core.url_to_fs(str(uri))
        except (ValueError, ImportError) as error:
            raise StorageError(f"{uri}: {error}; give a local path, or a URI of s3:// or minio://") from error
        return system, str(located)
    if not path.partition("/")[0]:
        raise StorageError(f"{uri}: names no bucket; write {scheme}://BUCKET/NAME")
    if scheme == "minio" and not endpoint():
        raise StorageError(f"{uri}: where this store is has to be said; set AWS_ENDPOINT_URL_S3 to its address")
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    with _making:
        return _s3(os.getpid(), settings), path


@functools.lru_cache(maxsize=4)
def _s3(_process: int, _settings: tuple[tuple[str, str], ...]) -> Any:
    """The client of a process (a forked one needs its own), made again when the environment has changed.

    fsspec's own cache of instances would make one for each thread. Repetitions are ours, so they are switched off below.
    """
    address = endpoint()
    system = fsspec.filesystem(
        "s3",
        endpoint_url=address or None,
        use_listings_cache=False,
        skip_instance_cache=True,
        max_concurrency=1,  # within one object: `transfers` cuts large ones into parts
        config_kwargs={
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "max_pool_connections": CONNECTIONS,
            "s3": {"addressing_style": "path" if address else "auto"},
            # Content is checked by SHA-256 when it is read; stores other than Amazon's often lack these checksums.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
    )
    system.retries = 1
    return system
