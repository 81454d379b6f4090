"""What is installed is locked by its hashes, all of it is audited, and all that the images hold is in a bill of materials."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted(path.name for path in (ROOT / "requirements").glob("*.txt") if not path.stem.endswith("-overrides"))
MAKEFILE = (ROOT / "Makefile").read_text()


def locked(lock):
    """Name -> versions: more than one where they differ between Pythons."""
    versions = {}
    text = (ROOT / "requirements" / lock).read_text()
    for name, version in re.findall(r"^([a-z0-9][\w.-]*)==(\S+)", text, re.MULTILINE):
        versions.setdefault(name, set()).add(version)
    return versions


def recipe(target):
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_has_its_hashes_and_no_address(lock):
    text = (ROOT / "requirements" / lock).read_text()
    named = re.findall(r"^[a-zA-Z0-9].*", text, re.MULTILINE)
    hashed = re.findall(
        r"^[a-z0-9][\w.-]*==\S+ .*\\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", text, re.MULTILINE
    )
    assert len(hashed) == len(named) > 0
    assert "://" not in text
    assert not re.search(r"^ *-(?!-hash=)", text, re.MULTILINE)


def test_installs_are_locked():
    installing = [line for line in MAKEFILE.splitlines() if re.search(r"pip (install|sync)", line)]
    assert len(installing) == 3
    assert [line for line in installing if "--require-hashes" not in line] == []
    # Xla is tested with the torch of the neuron image.
    [image] = re.findall(r"neuronx:(\d+\.\d+)", (ROOT / "manifests" / "images" / "Dockerfile.neuron").read_text())
    xla = locked("xla.txt")
    assert {version.rpartition(".")[0] for version in xla["torch"] | xla["torch-xla"]} == {image}
    assert xla["torchvision"] == locked("neuron.txt")["torchvision"]
    # The images have a bill of materials.
    images = {
        re.search(r"source=requirements/([\w-]+)\.txt", path.read_text())[1]
        for path in (ROOT / "manifests" / "images").glob("Dockerfile*")
    }
    described = re.search(r"^SBOMS := (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert set(described) == images
    # The tools of the audit are no part of the project.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools = {re.match(r"[\w-]+", text)[0] for text in project["dependency-groups"]["audit"]}
    assert tools <= locked("audit.txt").keys()
    assert not tools & (locked("development.txt").keys() | locked("runtime.txt").keys())


@pytest.mark.parametrize("lock", LOCKS)
def test_every_lock_is_made_by_make_and_audited(lock):
    assert f"--output-file requirements/{lock}" in recipe("lock")
    audited = re.search(r"^AUDITED := (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert lock.removesuffix(".txt") in audited
    # A package that the advisories do not know must not pass for one without any.
    assert "--strict" in recipe("audit")


@pytest.mark.parametrize(
    ("lock", "others"),
    [
        ("runtime.txt", set()),
        ("neuron.txt", {"torchvision"}),
        ("xla.txt", {"torch", "torch-xla", "torchvision", "absl-py"}),  # absl-py: only torch-xla needs it
    ],
)
def test_versions_are_those_that_are_tested(lock, others):
    """But for an older torch, and what comes with it: its CUDA, which is another."""
    tested = locked("development.txt")
    differing = {name for name, versions in locked(lock).items() if not versions <= tested.get(name, set())}
    assert {name for name in differing if not re.fullmatch(r"nvidia-[a-z]+(-[a-z]+)?-cu12", name)} == others
