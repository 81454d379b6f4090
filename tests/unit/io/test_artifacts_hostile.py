"""Manifests that someone has written who wants to be believed: their fingerprints fit."""

import json
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.io import artifacts, limits
from trainer.io.errors import ArtifactError

NUMBER = {"size": 0, "sha256": "0" * 64}


def write(folder, **changes):
    """A manifest with these members, and the fingerprint that fits."""
    content = {"kind": "model", "schema_version": 1, "settings": {}, "parents": {}, "files": {}} | changes
    unchecked = {"created": "2026-11-21T00:00:00+00:00", "seconds": 1.0, "figures": {}}
    manifest = (
        unchecked | content | {"fingerprint": artifacts.digest({key: content[key] for key in artifacts._COVERED})}
    )
    (folder / artifacts.MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        *("../out", "/etc/passwd", "a/../../out", "a//b", "./a", "a/.", "", "..", "/", "a/"),
        *("manifest.json", "weights.bin.partial", "a\0b", "a\nb", "a\x1b[2J", "a\u202eb", "x" * 241, "a/" * 600 + "b"),
    ],
)
def test_a_file_of_this_name_is_refused(tmp_path, name):
    with pytest.raises(
        ArtifactError, match=r"names the file .* outside of it, or in a way that no stage does; do not use it"
    ):
        artifacts.manifest(write(tmp_path, files={name: NUMBER}), "model")


def test_a_file_that_is_a_folder_of_another_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="names the file 'a' outside of it, or"):
        artifacts.manifest(write(tmp_path, files={"a": NUMBER, "a/b": NUMBER}), "model")


@pytest.mark.parametrize(
    "record",
    [
        *(None, 3, [], {}, {"size": 0}, NUMBER | {"more": 1}, NUMBER | {"size": -1}, NUMBER | {"size": 1.0}),
        *(NUMBER | {"size": True}, NUMBER | {"size": limits.FILE_BYTES + 1}, NUMBER | {"sha256": "0" * 63}),
        *(NUMBER | {"sha256": None}, NUMBER | {"sha256": "../" * 22}),
    ],
)
def test_what_is_said_of_a_file_must_be_size_and_checksum(tmp_path, record):
    with pytest.raises(ArtifactError, match=r"its manifest says of the file 'a' .*; do not use it"):
        artifacts.manifest(write(tmp_path, files={"a": record}), "model")


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": []},
        {"parents": {"dataset": 3}},
        {"files": ["a"]},
        {"kind": []},
        {"schema_version": "1"},
        {"parents": None},
    ],
)
def test_members_of_another_kind_are_refused(tmp_path, changes):
    with pytest.raises(ArtifactError, match=r"manifest.json is not the manifest of an artifact"):
        artifacts.manifest(write(tmp_path, **changes), "model")


def test_a_link_out_of_an_artifact_is_refused(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").symlink_to(tmp_path / "secret")
    record = {"size": 1, "sha256": artifacts.storage.file_digest(tmp_path / "secret")}
    with pytest.raises(ArtifactError, match="names the file 'weights' outside of it; do not use it"):
        artifacts.read(write(tmp_path / "a", files={"weights": record}), "model")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(
    derandomize=True, max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    member=st.sampled_from(
        ["kind", "schema_version", "settings", "parents", "files", "created", "seconds", "figures", "place"]
    ),
    value=ANYTHING | st.dictionaries(st.text(max_size=9), st.just(NUMBER), max_size=3),
)
def test_any_member_is_taken_or_refused_with_a_message(tmp_path, member, value):
    content = {"kind": "model", "schema_version": 1, "settings": {}, "parents": {}, "files": {}}
    unchecked = {"created": "2026-11-21T00:00:00+00:00", "seconds": 1.0, "figures": {}}
    changed = content | unchecked | {member: value}
    fingerprint = artifacts.digest({key: changed[key] for key in artifacts._COVERED})
    (tmp_path / artifacts.MANIFEST).write_text(json.dumps(changed | {"fingerprint": fingerprint}))
    with suppress(ArtifactError):
        files = artifacts.manifest(tmp_path, "model").files
        assert all((tmp_path / name).resolve().is_relative_to(tmp_path.resolve()) for name in files)
