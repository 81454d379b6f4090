"""Files here and in an object store, by URI; what speaks of one of them, and the requests to the store, which are repeated.

    a path, file://...      this machine
    s3://BUCKET/KEY         Amazon S3 or whatever speaks its protocol
    minio://BUCKET/KEY      how Kubeflow Pipelines writes the same

Endpoint and credentials come from the environment, as every S3 tool reads them: AWS_ENDPOINT_URL_S3 (or AWS_ENDPOINT_URL),
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_DEFAULT_REGION. Other schemes that fsspec knows can be read and written
too, with its own settings.

Whatever goes wrong in the store ends in a `StorageError`, and whatever cannot be changed on this machine in an `OutputError`. `transfers`
moves many files at once; `cache` keeps what was fetched, once per node.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import fsspec  # type: ignore[import-untyped]  # the package ships no types

from trainer.io import limits
from trainer.io.errors import (
    ObjectDamagedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAwayError,
    StorageError,
    make_directory,
    writing_to,
)
from trainer.io.local_files import check_size, checked_path, read_file, reading
from trainer.io.retry import Outage, Retry
from trainer.io.storage import s3_listing

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECTIONS = 8  # concurrent requests
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60  # longest silence of the store within an answer

ATTEMPTS_VARIABLE = "AWS_MAX_ATTEMPTS"
ATTEMPTS = 9
"""Attempts of a request unless `AWS_MAX_ATTEMPTS` says otherwise; with the waits below, a store may be away for about 40 s."""
RETRY = Retry(first_s=0.25, longest_s=15.0, jitter=0.5)

_S3_SCHEMES = ("s3", "s3a", "minio")
_OTHER_SCHEMES = frozenset(
    {"abfs", "abfss", "adl", "az", "gcs", "gs", "hdfs", "http", "https", "memory", "oss", "webhdfs"}
)
"""Further schemes that fsspec may read and write: stores, but neither archives, nor caches, nor other files of this machine."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_making = threading.Lock()
_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_CONFLICT = "ConditionalRequestConflict"
"""Two requests would create the same object at the same time; the second has to ask again."""


def is_remote(uri: str | Path) -> bool:
    """Return whether a URI has a scheme other than `file`."""
    return "://" in str(uri) and not str(uri).startswith("file://")


def is_s3(uri: str | Path) -> bool:
    """Return whether a URI is in a store that speaks S3's protocol."""
    return str(uri).partition("://")[0] in _S3_SCHEMES


def local_path(uri: str | Path) -> Path:
    """Return the path of a local URI, a plain path or `file://...`; a `StorageError` if it is remote, or not a path."""
    if is_remote(uri):
        raise StorageError(f"{uri}: a path on this machine is needed here, not a remote one; give a local directory")
    path = str(uri).removeprefix("file://")
    if path != str(uri) and not path.startswith("/"):
        raise StorageError(
            f"{uri}: names a host, {path.partition('/')[0]!r}; write file:///PATH for a path on this machine"
        )
    return checked_path(path)


def with_target(uri: str | Path) -> str:
    """Return a URI for a message, with the target of a local link such as `runs/latest`."""
    if is_remote(uri):
        return str(uri)
    path, here = local_path(uri), Path.cwd()
    target = path.resolve()
    if target == Path(os.path.normpath(path.absolute())):
        return str(uri)
    return f"{uri} ({target.relative_to(here) if target.is_relative_to(here) else target})"


def join(uri: str | Path, *names: str) -> str:
    """Append names to a URI."""
    return "/".join((str(uri).rstrip("/"), *names))


def parent(uri: str | Path) -> str:
    """Return the URI of the folder that a URI lies in."""
    if is_remote(uri):
        return str(uri).rstrip("/").rpartition("/")[0]
    path = local_path(uri)
    return str(path.parent if path.name not in {"", ".."} else path.absolute().parent)  # that of `.` is not itself


def exists(uri: str | Path) -> bool:
    """Return whether there is an object, or a file, of exactly this name."""
    if not is_remote(uri):
        return local_path(uri).is_file()
    system, path = locate(uri)
    try:
        return bool(call(str(uri), lambda: system.info(path))["type"] == "file")
    except ObjectNotFoundError:
        return False


def read_bytes(uri: str | Path, start: int | None = None, end: int | None = None) -> bytes:
    """Read an object or a file, or the bytes from `start` up to `end` of it; raises an `ObjectNotFoundError`, or a `StorageError`."""
    if not is_remote(uri):
        with reading(uri):
            return read_file(local_path(uri), start, end)
    system, path = locate(uri)
    content: bytes = call(str(uri), lambda: system.cat_file(path, start=start, end=end))
    return content


def read_limited(uri: str | Path, limit: int) -> bytes:
    """Read a whole object or file that others have made as `read_bytes` does, or raise an `ObjectTooLargeError`."""
    if not is_remote(uri):
        with reading(uri):
            return read_file(local_path(uri), limit=limit)
    try:
        content = read_bytes(uri, 0, limit + 1)
    except ObjectDamagedError:  # how the store answers a range of an empty object
        return b""
    check_size(len(content), limit, uri)
    return content


def read_json(uri: str | Path) -> Any:
    """Read and parse a JSON file or object of at most `limits.JSON_BYTES`; a `ValueError` if `limits.parse_json` refuses it."""
    return limits.parse_json(read_limited(uri, limits.JSON_BYTES))


def write_bytes(uri: str | Path, content: bytes) -> None:
    """Write an object or a file atomically."""
    if is_remote(uri):
        system, location = locate(uri)
        call(str(uri), lambda: system.pipe_file(location, content))
        return
    path = local_path(uri)
    make_directory(path.parent)
    temporary = unfinished_file(path)
    with writing_to(path):
        try:
            _write_through(temporary, "wb", content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def unfinished_file(path: Path) -> Path:
    """Name the file that is written in place of another until it is whole; each machine, process and thread has its own."""
    # Machines, since several may share the folder, and in a container each process is number 1.
    return path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}-{threading.get_ident()}.partial")


def _write_through(path: Path, mode: str, content: bytes) -> None:
    with path.open(mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk, so that they survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_bytes(uri: str | Path, content: bytes) -> bool:
    """Write a new object or file; returns whether it has this content now. One with another content is left as it is."""
    if not is_remote(uri):
        file = local_path(uri)
        make_directory(file.parent)
        with writing_to(file):
            try:
                _write_through(file, "xb", content)
            except FileExistsError:
                return False
        return True
    system, path = locate(uri)
    try:
        call(str(uri), lambda: system.pipe_file(path, content, mode="create"))
    except ObjectExistsError:
        # Or a repeated request has met what the first one had written, of which only the answer was lost.
        return read_bytes(uri) == content
    return True


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, as hexadecimal text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksummed(uri: str | Path, text: str) -> None:
    """Write two lines, the SHA-256 of a JSON text and the text, whole or not at all."""
    write_bytes(uri, f"{_checksum(text.encode())}\n{text}\n".encode())


def read_checksummed(uri: str | Path) -> str:
    """Read a text from `write_checksummed`; an `ObjectDamagedError` if it has changed."""
    seal, _, text = read_bytes(uri).partition(b"\n")
    text = text.removesuffix(b"\n")
    if seal.decode(errors="replace") != _checksum(text):
        raise ObjectDamagedError(f"{uri}: is damaged (checksum)")
    return text.decode()


def _checksum(text: bytes) -> str:
    return json.dumps(hashlib.sha256(text).hexdigest())


def files(uri: str | Path) -> dict[str, int]:
    """Map the relative name of each file below a URI to its size in bytes; empty for a missing folder."""
    if not is_remote(uri):
        root = local_path(uri)
        found = sorted(path for path in root.rglob("*") if path.is_file())
        return {path.relative_to(root).as_posix(): path.stat().st_size for path in found}
    return {one.name: one.size for one in sorted(listing(uri))}


class Listed(NamedTuple):
    """An object as the store lists it."""

    name: str  # relative to the URI that was listed
    size: int  # in bytes
    tag: str  # changes with the content; empty where the store lists nothing of the kind


def listing(uri: str | Path) -> Iterator[Listed]:
    """Yield all objects below a remote URI, in the store's order, which for S3 is that of the names.

    S3 lists a thousand objects per request (`s3_listing`). Pages are requested as they are needed, and one that fails is repeated alone.
    """
    if not is_s3(uri):
        for name, info in _below(uri, "find").items():
            # How the stores of fsspec call what changes with the content.
            tag = next((str(info[key]) for key in ("ETag", "etag", "mtime") if info.get(key)), "")
            yield Listed(name, int(info["size"]), tag)
        return
    system, path = locate(uri)
    bucket, _, key = path.partition("/")
    prefix = f"{key.rstrip('/')}/" if key else ""

    def request(**where: Any) -> Mapping[str, Any]:
        asked = functools.partial(system.call_s3, "list_objects_v2", Bucket=bucket, **where)
        page: Mapping[str, Any] = call(str(uri), asked)
        return page

    for found in s3_listing.objects(request, prefix):
        if not found["Key"].endswith("/"):  # a placeholder for a folder
            yield Listed(found["Key"].removeprefix(prefix), int(found["Size"]), found["ETag"])


def _below(uri: str | Path, listing: str) -> dict[str, Mapping[str, Any]]:
    """List a remote URI by fsspec's `find` or `ls`: relative name -> details, sorted."""
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
    """List the names directly below a URI, sorted; empty for a missing folder."""
    if not is_remote(uri):
        root = local_path(uri)
        return sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    return list(_below(uri, "ls"))


def remove(uri: str | Path) -> None:
    """Remove a file, an object, or everything below it, if it exists."""
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
    """Remove one file or object, if it exists."""
    if not is_remote(uri):
        with writing_to(local_path(uri)):
            local_path(uri).unlink(missing_ok=True)
        return
    system, path = locate(uri)
    with suppress(ObjectNotFoundError):  # S3 answers a removal of nothing with success, other stores do not
        call(str(uri), lambda: system.rm_file(path))


def locate(uri: str | Path) -> tuple[Any, str]:
    """Return fsspec's file system for a remote URI and the path in it; a `StorageError` if URI and environment do not name them."""
    scheme, _, path = str(uri).partition("://")
    if scheme not in _S3_SCHEMES:
        try:
            # `a::b` would read b through a, which may be an archive or a cache on this disk.
            if scheme not in _OTHER_SCHEMES or "::" in str(uri):
                raise ValueError(f"Protocol not known: {scheme}")
            system, located = fsspec.core.url_to_fs(str(uri))
        except Exception as error:  # each kind of store raises its own errors
            raise StorageError(f"{uri}: {error}; give a local path, or a URI of s3:// or minio://") from error
        return system, str(located)
    bucket, _, key = path.partition("/")
    if not bucket:
        raise StorageError(f"{uri}: names no bucket; write {scheme}://BUCKET/NAME")
    if not _BUCKET.fullmatch(bucket):
        secretless = bucket.rpartition("@")[2]
        raise StorageError(
            f"{scheme}://{secretless}/...: {secretless!r} cannot be a bucket; write {scheme}://BUCKET/NAME (the "
            "store's address and credentials belong into AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        )
    if not {".", ".."}.isdisjoint(key.split("/")):
        raise StorageError(
            f"{uri}: has . or .. for a folder, by which it could lead to another bucket; write the name out"
        )
    if scheme == "minio" and not endpoint():
        raise StorageError(f"{uri}: where this store is has to be said; set AWS_ENDPOINT_URL_S3 to its address")
    settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    with _making:
        return _s3(os.getpid(), settings), path


@functools.lru_cache(maxsize=4)
def _s3(_process: int, _settings: tuple[tuple[str, str], ...]) -> Any:
    """Make the client of a process (a forked one needs its own), anew when the environment has changed."""
    # Not fsspec's own cache of instances, which has one for each thread. `call` repeats requests, so the client's own retries are off.
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


# ---- Requests to the store


def endpoint() -> str:
    """Return the address of the object store that the environment names; empty for Amazon's own."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _store() -> str:
    return f"the store at {endpoint()}" if endpoint() else "Amazon S3"


outage = Outage(_store, logger)


def is_away() -> bool:
    """Return whether the store has not answered this process since a request of it failed."""
    return outage.is_away


def call(uri: str, request: Callable[[], T]) -> T:
    """Repeat a request, which must be repeatable and touch no local file, while the store fails (5xx, no answer, cut off), with back-off.

    Raises:
        ObjectNotFoundError: the object is missing.
        ObjectExistsError: the object was to be created.
        ObjectDamagedError: the object lacks the requested bytes.
        StorageAwayError: the store kept failing.
        StorageError: the store refuses.
    """
    text = os.environ.get(ATTEMPTS_VARIABLE) or str(ATTEMPTS)
    if not text.isdecimal() or int(text) < 1:
        raise StorageError(f"{ATTEMPTS_VARIABLE}={text}: must be a number >= 1; correct it or unset it")
    attempts = int(text)
    start, this, answered = time.monotonic(), object(), False

    def failed(error: Exception, attempt: int) -> None:
        nonlocal answered
        if not _passes(error):
            answered = bool(_status(error)) or isinstance(error, FileNotFoundError)
            raise _refusal(uri, error) from error
        text = f"{uri}: {_describe(error)}; {_store()} is away or busy, so requests are tried again, each up to {attempts} times"
        outage.failed(text if attempts > 1 else "", this)  # of a single attempt the error says it all
        if attempt == attempts:
            raise StorageAwayError(
                f"{uri}: gave up after {attempts} attempts in {time.monotonic() - start:.0f} s; the last time: {_describe(error)}. See to "
                f"{_store()} and the way there, then start again: what arrived whole is kept (more attempts: {ATTEMPTS_VARIABLE})"
            ) from error

    try:
        result = RETRY(request, failed=failed)
        answered = True
        return result
    finally:
        outage.ended(this, answered=answered)


def _passes(error: Exception) -> bool:
    from aiohttp import ClientError
    from botocore import exceptions  # type: ignore[import-untyped]  # the package ships no types

    if _status(error):
        return _status(error) in _PASSING_STATUS or _code(error) == _CONFLICT
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return False
    client_errors = (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError)
    return isinstance(error, (*client_errors, ClientError, OSError))


def _response(error: BaseException) -> dict[str, Any]:
    """Return the store's answer behind an error; s3fs keeps it in the cause of a builtin exception."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return response
    return {}


def _status(error: Exception) -> int:
    return int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: Exception) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _describe(error: Exception) -> str:
    response = _response(error)
    if not response:
        return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
    texts = (str(_status(error)), _code(error), str(response.get("Error", {}).get("Message", "")))
    return "the store answered " + " ".join(dict.fromkeys(filter(None, texts)))


def _refusal(uri: str, error: Exception) -> StorageError:
    from botocore import exceptions

    if isinstance(error, (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)):
        return StorageError(
            f"{uri}: no credentials for {_store()} ({error}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod a role"
        )
    if isinstance(error, PermissionError) or _status(error) in (401, 403):
        return StorageError(
            f"{uri}: {_store()} refuses ({_describe(error)}); check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and that they give the "
            "right to read, write and list there"
        )
    if _code(error) == "NoSuchBucket":
        return StorageError(f"{uri}: {_store()} has no such bucket; make it, or correct the URI or AWS_ENDPOINT_URL_S3")
    if _status(error) == 416:
        return ObjectDamagedError(f"the file {uri} is shorter than it was; make it again or copy it whole")
    if isinstance(error, FileExistsError) or _status(error) == 412:
        return ObjectExistsError(f"{uri}: there is such an object already; remove it or give another URI")
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(f"{uri}: there is no such object at {_store()}; check the URI")
    return StorageError(f"{uri}: {_store()} cannot do that ({_describe(error)}); check the URI and AWS_ENDPOINT_URL_S3")
