"""Artifacts: the directories that stages hand to one another.

An artifact is a directory, here or in an object store, with a `manifest.json`: its kind and schema version, the settings that made it,
the fingerprints of its parents, and size and SHA-256 of every file. The manifest is written last, so a directory without one does not
exist. Reading checks kind, schema version and checksums, and names what is wrong. One in a store is written into a local folder and sent
when it is complete; reading fetches it, once for all processes of this machine.

Reading raises an `ArtifactError` that names the artifact, what is wrong with it, and the next move; a store that does not answer or refuses
is a `StorageError`, a directory that cannot be written an `OutputError`.

The fingerprint covers kind, schema version, settings, parents and file checksums; it does not cover the time, the duration, the
place, the device, the code or the figures, so the same input and settings give the same fingerprint.

A reader that needs a few files of a large artifact names them: no others are fetched, and no others are checked.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.graph import MODULE, PACKAGE, SCHEMA_VERSIONS, TIMM, TRANSFORMERS, Kind
from trainer.io import storage
from trainer.io.costs import Machines, place_here
from trainer.io.errors import (
    ArtifactError,
    ObjectDamagedError,
    ObjectNotFoundError,
    OutputError,
    make_directory,
    writing_to,
)
from trainer.io.formatting import listed
from trainer.io.local_files import located
from trainer.io.storage import cache
from trainer.io.storage.transfers import FileRecord, download_directory, upload_directory
from trainer.io.storage.writers import LOCK

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
DRAFT = ".draft"
"""File of a local folder that an artifact without a manifest yet is written to, by which the folder is known as ours."""
CHECKPOINTS_VARIABLE = "TRAINER_CHECKPOINTS"
"""Environment variable with the URI where interrupted stages keep their state; without it that lies beside the output."""
_WITHOUT_CACHE = "on a cluster, where KFP's cache takes that stage for done, start a run without the cache: make deploy-pipeline FRESH=1"

_COMPARED_ELSEWHERE = ("teacher", "pretrain_evidence", "teacher_outputs")
"""Inputs whose own origin `check_related` passes over: a teacher may have been trained on other images, and `recording.check_fits` says
what exactly differs of recorded outputs."""
_COVERED = ("kind", "schema_version", "settings", "parents", "files")
_MEMBERS = {
    str: ("kind", "fingerprint"),
    int: ("schema_version",),
    int | float: ("seconds",),
    dict: ("settings", "parents", "files", "figures"),
}  # type -> the members of it that a manifest must have


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """An artifact's manifest."""

    kind: Kind
    settings: Mapping[str, Any]
    parents: Mapping[str, str]  # name of each parent -> its fingerprint
    files: Mapping[str, FileRecord]  # name of each file, relative to the artifact, with / -> its size and checksum
    fingerprint: str
    created: datetime  # when it was completed
    seconds: float  # how long the stage took to make it
    startup_seconds: float | None
    """From the launch of its stage until it was begun; None for a stage that is not launched."""
    place: Machines | None  # on which machines; None where that is not known
    device: str | None
    """Kind of the devices that it was trained on, `cpu`, `cuda` or `xla`; none of what no training made."""
    code: str | None  # `code_version` of the process that made it; None in manifests of earlier versions
    source_version: str | None  # version of the images that a data set was prepared from; None where it is not known
    figures: Mapping[str, Any]  # the main numbers of the stage, as `summary.json` shows them


@dataclass(frozen=True, kw_only=True)
class Artifact(Manifest):
    """A complete, checked artifact."""

    path: Path
    """Its directory on this machine, with the manifest unless only some files were asked for; that of a remote one is the cache's and
    must not be written to."""


@dataclass(kw_only=True)
class Draft:
    """An artifact in the making: write files below `path`, put the main numbers into `figures`."""

    path: Path
    figures: dict[str, Any] = field(default_factory=dict)
    startup_seconds: float | None = None  # from the launch of its stage until it was begun
    device: str | None = None  # kind of the devices that it is trained on
    place: Machines | None = None  # where it is made; by default where this process is
    source_version: str | None = None  # version of the images that a data set is prepared from
    remote_files: dict[str, FileRecord] = field(default_factory=dict)
    """Files that `contribute` has sent from other machines."""


def canonical_json(value: object) -> str:
    """Serialize a value so that equal values give equal texts: sorted keys, no white space, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def list_json(values: Iterable[object]) -> Iterator[str]:
    """Yield the canonical JSON of a list in pieces, so that its values need not be there together."""
    yield "["
    for number, value in enumerate(values):
        yield f"{',' * bool(number)}{canonical_json(value)}"
    yield "]"


def digest(value: object) -> str:
    """Return the SHA-256 of a value's canonical JSON, as hexadecimal text."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


@functools.cache
def code_version() -> str:
    """Return a digest of this package's code, templates and recipes."""
    package = Path(__file__).parents[1]
    files = sorted(path for path in package.rglob("*") if path.suffix in {".jinja", ".py", ".toml"})
    return digest({path.relative_to(package).as_posix(): storage.file_digest(path) for path in files})[:12]


# ---- Writing


@contextmanager
def create(
    uri: str | Path, kind: Kind, *, settings: Mapping[str, Any], parents: Mapping[str, str] | None = None
) -> Iterator[Draft]:
    """Make an artifact: `with create(path, "model", settings=..., parents={"dataset": fingerprint}) as draft: ...`.

    An existing manifest is removed first, and the new one written when the block ends without an exception. Files that another artifact
    shares as hard links (`copy`) are removed too, so that nothing is written over them. An `ArtifactError` where an artifact of another
    kind is.
    """
    place = place_here()  # refused before the work
    with folder_for(uri) as path:
        if not storage.is_remote(uri):
            _check_kind(uri, kind)
            _begin(uri)
            with suppress(ArtifactError):  # there is none yet
                for file in (path / name for name in manifest(uri, kind).files):
                    if file.exists() and file.stat().st_nlink > 1:
                        file.unlink()
        storage.remove_file(storage.join(uri, MANIFEST))
        start = time.monotonic()
        draft = Draft(path=path)
        try:
            yield draft
        except BaseException:  # an interruption too; raised again
            # the mark stays only where something was written
            if {file.name for file in path.iterdir()} <= {DRAFT, LOCK}:
                (path / DRAFT).unlink(missing_ok=True)
            raise
        seconds, place = time.monotonic() - start, draft.place or place
        files = contribute(uri, path) | draft.remote_files
        if not storage.is_remote(uri):
            _keep_written(path, files)
        content: dict[str, Any] = {
            "kind": kind,
            "schema_version": SCHEMA_VERSIONS[kind],
            "settings": settings,
            "parents": parents or {},
            "files": dict(sorted(files.items())),
        }
        sealed = content | {
            "fingerprint": digest(content),
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(seconds, 3),
            "startup_seconds": draft.startup_seconds,
            "place": place.model_dump() if place else None,
            "device": draft.device,
            "code": code_version(),
            "source_version": draft.source_version,
            "figures": draft.figures,
        }
        text = json.dumps(sealed, indent=2, ensure_ascii=False, allow_nan=False).encode()
        storage.write_bytes(storage.join(uri, MANIFEST), text)
        if not storage.is_remote(uri):
            (path / DRAFT).unlink(missing_ok=True)
            storage.flush(path)
        elif kind != "checkpoint" and not draft.remote_files:
            (path / MANIFEST).write_bytes(text)
            cache.adopt(path, sealed["fingerprint"])  # so that the next stage on this machine need not fetch it


def _begin(uri: str | Path) -> None:
    """Mark a local folder as one of ours before its manifest goes."""
    if not storage.is_remote(uri):
        folder = storage.local_path(uri)
        make_directory(folder)
        with writing_to(folder):
            (folder / DRAFT).touch()


def _check_kind(uri: str | Path, kind: Kind) -> None:
    try:
        there = _load_manifest(uri, kind)["kind"]
    except ArtifactError:  # none, or a damaged one, which may be made again
        return
    if there != kind:
        raise ArtifactError(
            f"{uri}: holds an artifact of kind {there}, which one of kind {kind} would replace; name another folder"
        )


def check_outputs(outputs: Mapping[str, str | Path], inputs: Mapping[str, str | Path]) -> None:
    """Raise an `OutputError` where a stage would write over an input, or into a local folder that holds something else than an artifact."""
    paths = {name: storage.local_path(uri).resolve() for name, uri in inputs.items() if not storage.is_remote(uri)}
    for name, uri in outputs.items():
        if storage.is_remote(uri):
            continue
        path = storage.local_path(uri)
        if same := next((one for one, place in paths.items() if place == path.resolve()), None):
            raise OutputError(f"{name} {uri}: is also the {same} that is read; name another folder")
        if not path.is_dir() or any((path / file).exists() for file in (MANIFEST, DRAFT)):
            continue
        if others := sorted(file.name for file in path.iterdir() if not file.name.startswith(".")):
            raise OutputError(
                f"{name} {uri}: holds files of something else ({listed(others, 3)}), which would be replaced; name a new or an empty folder"
            )


@contextmanager
def folder_for(uri: str | Path) -> Iterator[Path]:
    """Open the local folder into which the files of an artifact are written: its own directory, or a draft of a remote one."""
    if storage.is_remote(uri):
        with cache.draft() as path:
            yield path
    else:
        path = storage.local_path(uri)
        make_directory(path)
        with writing_to(path):
            yield path


def contribute(uri: str | Path, folder: Path) -> dict[str, FileRecord]:
    """Add the files of a folder from `folder_for(uri)` to the artifact, which `create` completes; returns their records."""
    apart = {folder / name for name in (MANIFEST, LOCK, DRAFT)}
    records: dict[str, FileRecord] = {
        file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": storage.file_digest(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.endswith(".partial") and file not in apart
    }
    if storage.is_remote(uri):
        upload_directory(folder, str(uri), records)
    return records


def unfinished(output: str | Path) -> str:
    """Return the URI of an interrupted stage's state, kept until its output is complete: `TRAINER_CHECKPOINTS`, or beside the output."""
    return os.environ.get(CHECKPOINTS_VARIABLE) or storage.join(storage.parent(output), "checkpoints")


def remove(uri: str | Path) -> None:
    """Remove an artifact, its manifest first, so that it does not exist from then on."""
    _begin(uri)
    storage.remove_file(storage.join(uri, MANIFEST))
    storage.remove(uri)


def copy(source: str | Path, target: str | Path, kind: Kind, *, link: bool = False) -> Manifest:
    """Copy a whole artifact between this machine and a store, its manifest last; nothing is sent where the same one is already.

    With `link`, files of this machine become hard links where the file system has them, which takes neither time nor space.
    """
    content = manifest(source, kind)
    with suppress(ArtifactError):  # there is none yet
        if manifest(target, kind).fingerprint == content.fingerprint:
            return content
    path = read(source, kind).path
    _begin(target)
    storage.remove_file(storage.join(target, MANIFEST))
    if storage.is_remote(target):
        upload_directory(path, str(target), content.files)
    else:
        folder = storage.local_path(target)
        with writing_to(folder):
            for name in content.files:
                make_directory((folder / name).parent)
                (folder / name).unlink(missing_ok=True)  # another artifact may share it
                if link:
                    with suppress(OSError):  # another file system, or one without hard links
                        (folder / name).hardlink_to(path / name)
                        continue
                shutil.copyfile(path / name, folder / name)
            _keep_written(folder, content.files)
    storage.write_bytes(storage.join(target, MANIFEST), storage.read_bytes(storage.join(source, MANIFEST)))
    if not storage.is_remote(target):
        (storage.local_path(target) / DRAFT).unlink(missing_ok=True)
    return content


def _keep_written(folder: Path, names: Collection[str]) -> None:
    """Flush the files of a folder to the disk, and remove unfinished ones that killed writers have left."""
    for left in [*folder.rglob(".*.partial")]:
        left.unlink(missing_ok=True)
    paths = [folder / name for name in names]
    for path in [*paths, *{path.parent for path in paths}]:
        storage.flush(path)


# ---- Reading


def exists(uri: str | Path) -> bool:
    """Return whether there is a complete artifact, without checking its content."""
    return storage.exists(storage.join(uri, MANIFEST))


def read(uri: str | Path, kind: Kind, *, only: Collection[str] | None = None) -> Artifact:
    """Open an artifact and check it: kind, schema version, and size and checksum of every file, or of `only` these that it has.

    A remote one is fetched, unless its content is in this machine's cache, where it was checked when it came.
    """
    content = manifest(uri, kind)
    return Artifact(path=checked_files(uri, content, only), **vars(content))


def checked_files(
    uri: str | Path, content: Manifest, only: Collection[str] | None = None, *, is_one_of_many: bool = False
) -> Path:
    """Return the local directory with the checked files of an artifact whose manifest was read, as `read` does.

    A fetch that is one of many is not worth a line of the log.
    """
    files = {name: record for name, record in content.files.items() if only is None or name in only}
    if storage.is_remote(uri):
        return _fetch(str(uri), content, files, logging.DEBUG if is_one_of_many else logging.INFO)
    kind, path = content.kind, storage.local_path(uri)
    for name, expected in files.items():
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
        if storage.file_digest(file) != expected["sha256"]:
            raise ArtifactError(f"{kind} {path}: the file {name} is damaged (checksum); make it again or copy it whole")
    return path


def _fetch(uri: str, content: Manifest, files: Mapping[str, FileRecord], level: int) -> Path:
    what, is_all = f"{content.kind} {uri}", len(files) == len(content.files)

    def download(directory: Path) -> None:
        size = sum(record["size"] for record in files.values())
        part = "" if is_all else f", {len(files)} of {len(content.files)} files"
        logger.log(level, "fetching %s (%.1f MiB%s)", what, size / 2**20, part)
        download_directory(uri, directory, files)
        if is_all:  # so that the fetched directory is an artifact too
            (directory / MANIFEST).write_bytes(storage.read_bytes(storage.join(uri, MANIFEST)))

    def is_whole(directory: Path) -> bool:
        sizes = storage.files(directory)
        return (MANIFEST in sizes or not is_all) and all(sizes.get(name) == one["size"] for name, one in files.items())

    try:
        if not is_all and (whole := cache.held(content.fingerprint, what, is_whole=is_whole)):
            return whole
        key = content.fingerprint if is_all else f"{content.fingerprint}-{digest(sorted(files))[:16]}"
        return cache.keep(key, what, download, is_whole=is_whole)
    except ObjectNotFoundError as error:
        raise ArtifactError(f"{what}: {error}; {_WITHOUT_CACHE}") from error
    except ObjectDamagedError as error:
        raise ArtifactError(f"{what}: {error}") from error


def manifest(uri: str | Path, kind: Kind) -> Manifest:
    """Read an artifact's manifest; its files are neither fetched nor checked."""
    content = _load_manifest(uri, kind)
    if content["kind"] != kind:
        there, needed = (
            f"{'an' if name.startswith(tuple('aeiou')) else 'a'} {name}" for name in (str(content["kind"]), kind)
        )
        raise ArtifactError(f"{uri}: is {there}, but {needed} is needed here; give the right directory")
    if content["schema_version"] != SCHEMA_VERSIONS[kind]:
        raise ArtifactError(
            f"{kind} {uri}: schema version {content['schema_version']}, but this version of the project reads "
            f"{SCHEMA_VERSIONS[kind]}; make it again with the stage that made it"
        )
    if digest({key: content[key] for key in _COVERED}) != content["fingerprint"]:
        raise ArtifactError(f"{kind} {uri}: {MANIFEST} was altered (its fingerprint does not fit); make it again")
    for name in content["files"]:
        if name.startswith("/") or ".." in name.split("/"):
            raise ArtifactError(f"{kind} {uri}: its manifest names the file {name!r} outside of it; do not use it")
    members: dict[str, Any] = {one.name: content.get(one.name) for one in fields(Manifest)}
    try:
        place = None if members["place"] is None else Machines.model_validate(members["place"])
        return Manifest(**members | {"created": datetime.fromisoformat(members["created"]), "place": place})
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{kind} {uri}: {MANIFEST} is not readable ({error}); make it again") from error


def check_related(places: Mapping[str, str | Path], kinds: Mapping[str, Kind]) -> None:
    """Raise an `ArtifactError` unless the inputs of a stage belong together: each one's recorded parents are the other inputs.

    `places` maps each input's name, as its children call it, to its URI, and `kinds` the names that the stage knows to their kinds.
    """
    given = {name: manifest(places[name], kind) for name, kind in kinds.items() if name in places}
    for name, child in given.items():
        for parent in child.parents.keys() & given.keys() if name not in _COMPARED_ELSEWHERE else ():
            made_from, there = child.parents[parent], given[parent].fingerprint
            if made_from != there:
                raise ArtifactError(
                    f"{name} {places[name]}: was made from another {parent} (fingerprint {made_from[:12]}) than {places[parent]} "
                    f"({there[:12]}); give the {parent} that it was made from, or make the {name} again from this one"
                )


def weights_version(weights: str, file: str = "") -> str:
    """Return the version of the weights that a setting names: the fingerprint of a model directory, or the SHA-256 of a file.

    Empty where the name itself fixes the weights, or where they cannot be read from here.
    """
    if file and not storage.exists(file):
        return ""
    if file:
        is_remote = storage.is_remote(file)
        return hashlib.sha256(storage.read_bytes(file)).hexdigest() if is_remote else storage.file_digest(Path(file))
    if weights.startswith(TRANSFORMERS):  # a folder that the library wrote, or a name that says all
        files = [
            path
            for pattern in ("*.json", "*.safetensors")
            for path in Path(weights.removeprefix(TRANSFORMERS)).glob(pattern)
        ]
        return digest({path.name: storage.file_digest(path) for path in files}) if files else ""
    is_named = weights.startswith((TIMM, PACKAGE, MODULE))
    return manifest(weights, "model").fingerprint if weights and not is_named and exists(weights) else ""


def _load_manifest(uri: str | Path, kind: Kind) -> dict[str, Any]:
    if not storage.is_remote(uri) and not storage.local_path(uri).is_dir():
        raise ArtifactError(
            f"{kind} {located(uri)}: no such directory; run the stage that makes it, or give another path"
        )
    try:
        content = storage.read_json(storage.join(uri, MANIFEST))
    except ObjectNotFoundError as error:
        lack = f"no {MANIFEST}, so it was never completed, or its removal has begun"
        if storage.is_remote(uri) and not storage.children(uri):
            lack = "nothing is there: it was removed, by a lifecycle rule or with its store, or never made"
        cached = f"; {_WITHOUT_CACHE}" if storage.is_remote(uri) else ""
        raise ArtifactError(f"{kind} {uri}: {lack}; run the stage that makes it again{cached}") from error
    except ValueError as error:
        raise ArtifactError(f"{kind} {uri}: {MANIFEST} is not readable ({error}); make it again") from error
    if not (
        isinstance(content, dict)
        and all(isinstance(content.get(name), form) for form, names in _MEMBERS.items() for name in names)
        and all(isinstance(parent, str) for parent in content["parents"].values())
    ):
        raise ArtifactError(f"{kind} {uri}: {MANIFEST} is not the manifest of an artifact; make it again")
    return content
