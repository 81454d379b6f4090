import functools
import shutil
import sys
from pathlib import Path

import pytest

from pipelines import deploy_student

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"


@functools.cache
def rendered(folder):
    """The objects of a kustomization, as `kubectl apply -k` would send them; reads no network."""
    if shutil.which("kubectl", path=Path(sys.executable).parent) is None and shutil.which("kubectl") is None:
        pytest.skip("not rendered: kubectl is missing; `make setup` installs it")
    return deploy_student.rendered(folder)


@pytest.fixture(scope="session")
def render():
    """Folder below `manifests` -> its objects."""
    return rendered


@pytest.fixture(scope="session")
def versions():
    lines = (MANIFESTS / "versions.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
