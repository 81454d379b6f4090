"""What `pip install .` brings: the wheel has all files and says what it needs, and the trainer runs without the extra `kubeflow`."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
PACKAGES = ("trainer", "components", "pipelines")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

WITHOUT_THE_EXTRA = """
import sys
from importlib.machinery import PathFinder

class WithoutTheExtra(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.partition(".")[0] in {"kfp", "kfp_server_api", "kubernetes"}
        return None if absent else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTheExtra
"""
"""As `sitecustomize`: the packages of the extra cannot be found."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, as `pip install .` builds it."""
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    with zipfile.ZipFile(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel's files, and the environment of a process that finds them first and nothing of the extra."""
    folder = tmp_path_factory.mktemp("site-packages")
    wheel.extractall(folder)
    (folder / "sitecustomize.py").write_text(WITHOUT_THE_EXTRA)
    return folder, os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


def run(installed, *arguments):
    _, environment = installed
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_wheel(wheel):
    there = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {
        "trainer/py.typed",
        "trainer/config/recipes/digits.toml",
        "trainer/report/pages/templates/page.html.jinja",
    } < there
    assert "components/launch/pools.toml" in there
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == there
    # Each package says that it is typed.
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").is_file()] == []
    # The wheel says what it is.
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    text = wheel.read(name).decode()
    extra = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra == 'kubeflow'" in line]
    assert {re.match(r"Requires-Dist: ([\w-]+)", line)[1] for line in extra} == {"kfp", "kfp-kubernetes", "kubernetes"}
    assert "License-File: LICENSE" in text
    assert name.replace("METADATA", "licenses/LICENSE") in wheel.namelist()


def test_the_script_runs_without_the_extra(installed):
    code = (
        "import sys, importlib.metadata as m; sys.argv[0] = 'vit-distill'; "
        "[script] = m.entry_points(group='console_scripts', name='vit-distill'); script.load()()"
    )
    shown = run(installed, "-c", code, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "usage: vit-distill " in shown.stdout
    assert "  vit-distill run digits " in shown.stdout
    listed = run(installed, "-c", code, "recipes")
    assert listed.returncode == 0
    assert f"{installed[0]}/trainer/config/recipes" in listed.stdout
    assert run(installed, "-c", code, "recipes").stdout == run(installed, "-m", "trainer", "recipes").stdout


@pytest.mark.slow
def test_trainer_has_all_it_imports_without_extra(installed):
    """Every module, those of stages too."""
    code = """
import importlib, pkgutil, sys, trainer
names = [module.name for module in pkgutil.walk_packages(trainer.__path__, "trainer.")]
for name in names:
    if not name.endswith((".xla", ".xla_counters", ".__main__")):
        importlib.import_module(name)
print(len(names), sorted({"kfp", "kfp_server_api", "kubernetes"} & sys.modules.keys()), trainer.__file__)
"""
    ended = run(installed, "-c", code)
    assert ended.stderr == ""
    count, rest = ended.stdout.split(" ", 1)
    assert int(count) > 100
    assert rest == f"[] {installed[0]}/trainer/__init__.py\n"


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (("-m", "pipelines.deploy", "--run"), "kfp and kubernetes"),
        (("-m", "components.launch", "reap", "--all"), "kubernetes"),  # the reaper's image has no kfp
    ],
)
def test_what_needs_the_extra_names_it(installed, arguments, needed):
    ended = run(installed, *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(
        rf"error: .* needs {needed}, not installed here; "
        r"install the extra: pip install 'vit-distillation-pipeline\[kubeflow\]'\n",
        ended.stderr,
    )


def test_importing_the_pipelines_without_the_extra_names_it(installed):
    ended = run(installed, "-c", "import pipelines.distillation")
    assert ended.returncode == 1
    assert ended.stderr.endswith("install the extra: pip install 'vit-distillation-pipeline[kubeflow]'\n")


def test_the_message_has_the_names_of_the_project():
    from components.launch import INSTALL_EXTRA

    assert f"pip install '{PROJECT['name']}[{next(iter(PROJECT['optional-dependencies']))}]'" == INSTALL_EXTRA


COME_WITH = {
    "aiohttp": "s3fs",
    "botocore": "s3fs",
    "kfp-server-api": "kfp",
    "pydantic-core": "pydantic",
    "requests": "mlflow",
    "sqlalchemy": "mlflow",
    "starlette": "fastapi",
    "urllib3": "kubernetes",
}
"""Imported for their exceptions, or as a part -> what brings them."""


def imports(package):
    """Every module that a package imports, but for Python's, ours, and torch_xla, which the Neuron image has."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names}:
                if top not in {*sys.stdlib_module_names, *PACKAGES, "torch_xla"}:
                    yield top


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_is_declared(package):
    extras = ("export", "openvino", "search", "serve", "transformers") if package == "trainer" else ("kubeflow",)
    given = [text for extra in extras for text in PROJECT["optional-dependencies"][extra]]
    declared = {re.match(r"[\w-]+", text)[0].lower() for text in PROJECT["dependencies"] + given}
    providers = importlib.metadata.packages_distributions()
    normal = {top: {name.lower().replace("_", "-") for name in providers.get(top, [top])} for top in imports(package)}
    assert len(normal) > 3
    missing = {
        top: names for top, names in normal.items() if not (names | {COME_WITH.get(name) for name in names}) & declared
    }
    assert missing == {}
