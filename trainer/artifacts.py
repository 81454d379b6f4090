"""The directories that stages hand to one another.

An artifact is a directory with a `manifest.json`: its kind and schema version, the settings that made it, the fingerprints
of its parents, and size and SHA-256 of every file. The manifest is written last, so a directory without one does not
exist. Reading checks kind, schema version and checksums, and names what is wrong.

The fingerprint covers kind, schema version, settings, parents and file checksums; it does not cover the time, the duration or
the figures, so the same input and settings give the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from trainer.errors import ArtifactError, make_directory, writing_to

Kind = Literal["dataset", "model", "evidence", "report", "evaluation", "registration", "checkpoint"]

SCHEMA_VERSIONS: Mapping[Kind, int] = {
    "dataset": 1,
    "model": 1,
    "evidence": 1,
    "report": 1,
    "evaluation": 1,
    "registration": 1,
    "checkpoint": 1,
}
"""The version of each kind's content; a reader refuses any other."""

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A complete, checked artifact."""

    path: Path
    kind: Kind
    settings: Mapping[str, Any]
    parents: Mapping[str, str]
    """Name of each parent -> its fingerprint."""
    fingerprint: str
    seconds: float
    """How long the stage took to make it."""
    figures: Mapping[str, Any]
    """The main numbers of the stage, as `summary.json` shows them."""


@dataclass(kw_only=True)
class Draft:
    """An artifact in the making: write files below `path`, put the main numbers into `figures`."""

    path: Path
    figures: dict[str, Any] = field(default_factory=dict)


def canonical_json(value: object) -> str:
    """One text for equal values: sorted keys, no white space, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: object) -> str:
    """SHA-256 of a value's canonical JSON, as hexadecimal text."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal text."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def local_path(uri: str | Path) -> Path:
    """The local directory that a URI names: a plain path or `file://...`.

    Raises:
        ArtifactError: the URI has another scheme.
    """
    text = str(uri)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if "://" in text:
        raise ArtifactError(
            f"artifact {text}: only local paths and file:// are supported; copy it to this machine first"
        )
    return Path(text)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, and on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def create(
    uri: str | Path, kind: Kind, *, settings: Mapping[str, Any], parents: Mapping[str, str] | None = None
) -> Iterator[Draft]:
    """Make an artifact: `with create(path, "model", settings=..., parents={"dataset": fingerprint}) as draft: ...`.

    A manifest already there is removed first, and the new one is written when the block ends without an exception.

    Raises:
        OutputError: the directory can not be written.
    """
    path = local_path(uri)
    make_directory(path)
    with writing_to(path):
        (path / MANIFEST).unlink(missing_ok=True)
        start = time.monotonic()
        draft = Draft(path=path)
        yield draft
        _write_manifest(draft, kind, settings, parents or {}, time.monotonic() - start)


def _write_manifest(
    draft: Draft, kind: Kind, settings: Mapping[str, Any], parents: Mapping[str, str], seconds: float
) -> None:
    files = {
        file.relative_to(draft.path).as_posix(): {"size": file.stat().st_size, "sha256": file_digest(file)}
        for file in sorted(draft.path.rglob("*"))
        if file.is_file() and not file.name.endswith(".partial")
    }
    content: dict[str, Any] = {
        "kind": kind,
        "schema_version": SCHEMA_VERSIONS[kind],
        "settings": settings,
        "parents": parents,
        "files": files,
    }
    manifest = content | {
        "fingerprint": digest(content),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
        "figures": draft.figures,
    }
    write_atomically(
        draft.path / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False).encode()
    )


def exists(uri: str | Path) -> bool:
    """Whether a complete artifact is there (its content is not checked)."""
    return (local_path(uri) / MANIFEST).is_file()


def read(uri: str | Path, kind: Kind) -> Artifact:
    """Open an artifact and check it: kind, schema version, and size and checksum of every file.

    Raises:
        ArtifactError: naming the artifact, what is wrong with it, and the next move.
    """
    path = local_path(uri)
    manifest = _read_manifest(path, kind)
    for name, expected in manifest["files"].items():
        _check_file(path, kind, name, expected)
    return Artifact(
        path=path,
        kind=kind,
        settings=manifest["settings"],
        parents=manifest["parents"],
        fingerprint=manifest["fingerprint"],
        seconds=manifest["seconds"],
        figures=manifest["figures"],
    )


def _read_manifest(path: Path, kind: Kind) -> dict[str, Any]:
    if not path.is_dir():
        raise ArtifactError(f"{kind} {path}: no such directory; run the stage that makes it, or give another path")
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{kind} {path}: no {MANIFEST}, so it was never completed; run the stage that makes it again"
        ) from error
    except ValueError as error:
        raise ArtifactError(f"{kind} {path}: {MANIFEST} is not readable ({error}); make it again") from error
    required = {"kind", "schema_version", "settings", "parents", "files", "fingerprint", "seconds", "figures"}
    if not isinstance(manifest, dict) or not required <= manifest.keys():
        raise ArtifactError(f"{kind} {path}: {MANIFEST} is not the manifest of an artifact; make it again")
    if manifest["kind"] != kind:
        raise ArtifactError(f"{path}: is a {manifest['kind']}, but a {kind} is needed here; give the right directory")
    if manifest["schema_version"] != SCHEMA_VERSIONS[kind]:
        raise ArtifactError(
            f"{kind} {path}: schema version {manifest['schema_version']}, but this version of the project reads "
            f"{SCHEMA_VERSIONS[kind]}; make it again with the stage that made it"
        )
    content = {key: manifest[key] for key in ("kind", "schema_version", "settings", "parents", "files")}
    if digest(content) != manifest["fingerprint"]:
        raise ArtifactError(f"{kind} {path}: {MANIFEST} was altered (its fingerprint does not fit); make it again")
    return manifest


def _check_file(path: Path, kind: Kind, name: str, expected: Mapping[str, Any]) -> None:
    file = path / name
    if not file.resolve().is_relative_to(path.resolve()):
        raise ArtifactError(f"{kind} {path}: its manifest names the file {name!r} outside of it; do not use it")
    if not file.is_file():
        raise ArtifactError(f"{kind} {path}: the file {name} is missing; make it again or copy it whole")
    size = file.stat().st_size
    if size != expected["size"]:
        raise ArtifactError(
            f"{kind} {path}: the file {name} has {size} bytes instead of {expected['size']}; make it again or copy it whole"
        )
    if file_digest(file) != expected["sha256"]:
        raise ArtifactError(f"{kind} {path}: the file {name} is damaged (checksum); make it again or copy it whole")
