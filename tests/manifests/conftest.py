import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"


def kubectl():
    """The one of this environment, which is pinned, or else any."""
    return shutil.which("kubectl", path=Path(sys.executable).parent) or shutil.which("kubectl")


@functools.cache
def rendered(folder):
    """The objects of a kustomization, as `kubectl apply -k` would send them; reads no network."""
    tool = kubectl()
    if tool is None:
        pytest.skip("not rendered: kubectl is missing; `make setup` installs it")
    result = subprocess.run(
        [tool, "kustomize", MANIFESTS / folder], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


@pytest.fixture(scope="session")
def render():
    """Folder below `manifests` -> its objects."""
    return rendered


@pytest.fixture(scope="session")
def versions():
    """Name -> version, of versions.env."""
    lines = (MANIFESTS / "versions.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
