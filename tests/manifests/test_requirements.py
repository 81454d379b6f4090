"""What is installed is locked by its hashes, all of it is audited, and all that the images hold is in a bill of materials."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCKS = sorted(path.name for path in (ROOT / "requirements").glob("*.txt") if path.name != "neuron-overrides.txt")
MAKEFILE = (ROOT / "Makefile").read_text()


def recipe(target):
    """The commands of a target."""
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


def test_nothing_is_installed_without_its_hash():
    installing = [line for line in MAKEFILE.splitlines() if re.search(r"pip (install|sync)", line)]
    assert len(installing) == 3
    assert [line for line in installing if "--require-hashes" not in line] == []


@pytest.mark.parametrize("lock", LOCKS)
def test_every_lock_is_made_by_make_and_audited(lock):
    assert f"--output-file requirements/{lock}" in recipe("lock")
    audited = re.search(r"^AUDITED := (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert lock.removesuffix(".txt") in audited
    # A package that the advisories do not know must not pass for one without any.
    assert "--strict" in recipe("audit")


def test_the_images_have_a_bill_of_materials():
    images = {
        re.search(r"source=requirements/([\w-]+)\.txt", path.read_text())[1]
        for path in (ROOT / "manifests" / "images").glob("Dockerfile*")
    }
    described = re.search(r"^SBOMS := (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert set(described) == images


def test_the_tools_of_the_audit_are_no_part_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tools = {re.match(r"[\w-]+", text)[0] for text in project["dependency-groups"]["audit"]}
    locked = {
        name: set(re.findall(r"^([a-z0-9][\w.-]*)==", (ROOT / "requirements" / name).read_text(), re.M))
        for name in LOCKS
    }
    assert tools <= locked["audit.txt"]
    assert not tools & (locked["development.txt"] | locked["runtime.txt"])
