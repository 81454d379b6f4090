import errno
import json
import os
from pathlib import Path

import pytest

from trainer import artifacts, storage
from trainer.errors import ArtifactError, OutputError, StorageError, TrainerError, writing_to

SETTINGS = {"temperature": 2.0, "name": "ä"}


def make(path, *, settings=SETTINGS, parents=None, content=b"weights", figures=None):
    with artifacts.create(path, "model", settings=settings, parents=parents) as draft:
        (draft.path / "sub").mkdir(exist_ok=True)
        (draft.path / "sub" / "weights.bin").write_bytes(content)
        draft.figures.update(figures or {})
    return path


def test_what_was_written_is_read_back(tmp_path):
    artifact = artifacts.read(make(tmp_path / "a", parents={"dataset": "f00"}, figures={"parameters": 3}), "model")
    assert (artifact.settings, artifact.parents, artifact.figures) == (SETTINGS, {"dataset": "f00"}, {"parameters": 3})
    assert artifact.seconds >= 0
    assert artifacts.read(f"file://{tmp_path / 'a'}", "model") == artifact


def test_the_fingerprint_covers_content_settings_and_parents_but_not_figures(tmp_path):
    def fingerprint(name, **changes):
        return artifacts.read(make(tmp_path / name, **changes), "model").fingerprint

    base = fingerprint("base")
    assert fingerprint("same", figures={"seconds": 9}) == base
    others = {
        fingerprint("content", content=b"weightz"),
        fingerprint("settings", settings={}),
        fingerprint("parents", parents={"a": "b"}),
    }
    assert len(others | {base}) == 4


def test_what_was_not_completed_does_not_exist(tmp_path):
    def break_off():
        with artifacts.create(tmp_path / "a", "model", settings={}) as draft:
            (draft.path / "weights").write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert not artifacts.exists(tmp_path / "a")
    with pytest.raises(ArtifactError, match="never completed"):
        artifacts.read(tmp_path / "a", "model")


def test_beginning_again_unmakes_the_old_one(tmp_path):
    make(tmp_path / "a")
    with pytest.raises(ZeroDivisionError), artifacts.create(tmp_path / "a", "model", settings={}):
        raise ZeroDivisionError
    assert not artifacts.exists(tmp_path / "a")


def alter_manifest(path, **changes):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


DAMAGES = {
    "missing": (lambda path: (path / "sub" / "weights.bin").unlink(), r"sub/weights.bin is missing"),
    "truncated": (lambda path: (path / "sub" / "weights.bin").write_bytes(b"weigh"), r"5 bytes instead of 7"),
    "flipped": (lambda path: (path / "sub" / "weights.bin").write_bytes(b"weightz"), r"damaged \(checksum\)"),
    "no JSON": (lambda path: (path / "manifest.json").write_text("{"), r"not readable"),
    "other JSON": (lambda path: (path / "manifest.json").write_text("[]"), r"not the manifest"),
    "settings altered": (lambda path: alter_manifest(path, settings={"temperature": 3}), r"was altered"),
    "other schema": (lambda path: alter_manifest(path, schema_version=99), r"schema version 99.*reads 1"),
    "other kind": (lambda path: alter_manifest(path, kind="dataset"), r"is a dataset, but a model is needed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(tmp_path, damage):
    act, message = DAMAGES[damage]
    act(make(tmp_path / "a"))
    with pytest.raises(ArtifactError, match=message) as caught:
        artifacts.read(tmp_path / "a", "model")
    assert str(tmp_path / "a") in str(caught.value)


def test_a_manifest_that_names_a_file_outside_is_refused(tmp_path):
    make(tmp_path / "a")
    (tmp_path / "secret").write_bytes(b"x")
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    manifest["files"]["../secret"] = {"size": 1, "sha256": storage.file_digest(tmp_path / "secret")}
    content = {key: manifest[key] for key in ("kind", "schema_version", "settings", "parents", "files")}
    alter_manifest(tmp_path / "a", files=manifest["files"], fingerprint=artifacts.digest(content))
    with pytest.raises(ArtifactError, match=r"'../secret' outside"):
        artifacts.read(tmp_path / "a", "model")


def test_a_missing_directory_and_a_foreign_scheme_are_named(tmp_path):
    with pytest.raises(ArtifactError, match="no such directory"):
        artifacts.read(tmp_path / "nowhere", "model")
    with pytest.raises(StorageError, match=r"gopher://a/manifest.json: Protocol not known"):
        artifacts.read("gopher://a", "model")


def test_a_write_is_whole_or_not_at_all(tmp_path, monkeypatch):
    storage.write_bytes(tmp_path / "file", b"old")

    def refuse(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OutputError, match="the disk is full"):
        storage.write_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "no permission")],
)
def test_the_systems_refusal_to_write_becomes_a_message(number, advice):
    with pytest.raises(OutputError, match=advice), writing_to("out"):
        raise OSError(number, os.strerror(number), "out/file")


def test_a_really_full_disk_is_reported():
    with (
        pytest.raises(OutputError, match=r"/dev/full: the disk is full"),
        writing_to("/dev/full"),
        Path("/dev/full").open("wb") as file,
    ):
        file.write(b"x" * 100_000)


def test_other_failures_of_the_system_pass_unchanged():
    with pytest.raises(OSError, match="Input/output") as caught, writing_to("out"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert not isinstance(caught.value, TrainerError)
