"""Manifests whose fingerprints fit and which name files outside of the artifact."""

import json

import pytest

from trainer.io import artifacts
from trainer.io.errors import ArtifactError


def write(folder, files):
    """A manifest of these files, with the fingerprint that fits."""
    content = {"kind": "model", "schema_version": 1, "settings": {}, "parents": {}, "files": files}
    unchecked = {"created": "2026-11-21T00:00:00+00:00", "seconds": 1.0, "figures": {}}
    manifest = content | unchecked | {"fingerprint": artifacts.digest(content)}
    (folder / artifacts.MANIFEST).write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../out", ".."])
def test_a_name_that_leads_out_is_refused(tmp_path, name):
    files = {name: {"size": 0, "sha256": "0" * 64}}
    with pytest.raises(ArtifactError, match=r"names the file .* outside of it"):
        artifacts.manifest(write(tmp_path, files), "model")


def test_a_link_out_of_an_artifact_is_refused(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").symlink_to(tmp_path / "secret")
    record = {"size": 1, "sha256": artifacts.storage.file_digest(tmp_path / "secret")}
    with pytest.raises(ArtifactError, match="names the file 'weights' outside of it"):
        artifacts.read(write(tmp_path / "a", {"weights": record}), "model")
