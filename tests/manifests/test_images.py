"""The Dockerfiles, as far as they can be checked without a Docker engine; hadolint, in `make check`, knows the instructions."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.manifests.test_requirements import LOCKS

ROOT = Path(__file__).parents[2]
IMAGES = ("Dockerfile", "Dockerfile.neuron", "Dockerfile.serving", "Dockerfile.reaper")


def instructions(name):
    """(instruction, rest) of each, continued lines joined, comments left out."""
    text = (ROOT / "manifests" / "images" / name).read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def sources(name):
    """What the build takes from its context: by COPY, and by mounts of RUN."""
    found = []
    for instruction, rest in instructions(name):
        if instruction == "COPY":
            found += rest.split()[:-1]
        found += re.findall(r"--mount=type=bind,source=([^,\s]+)", rest)
    return found


@pytest.mark.parametrize("name", IMAGES)
def test_the_base_is_pinned(name):
    (argument,) = [rest for instruction, rest in instructions(name) if instruction == "ARG"]
    assert re.fullmatch(r"BASE=\S+:[\w.-]*\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?", argument)
    assert [rest for instruction, rest in instructions(name) if instruction == "FROM"] == ["${BASE}"]


@pytest.mark.parametrize("name", IMAGES)
def test_it_does_not_run_as_root(name):
    """The last user is a number, for Kubernetes cannot know who a name is; it is the user of the jobs' pods."""
    from components.launch import job_manifest

    users = [rest for instruction, rest in instructions(name) if instruction == "USER"]
    assert users[-1] == f"{job_manifest.USER}:{job_manifest.USER}"


@pytest.mark.parametrize("name", IMAGES)
def test_its_user_has_a_name(name):
    """`getpass.getuser` looks it up, and fails without."""
    (entry,) = [
        re.search(r"echo '([^']+)' >>/etc/passwd", rest)[1] for _, rest in instructions(name) if "passwd" in rest
    ]
    fields = entry.split(":")
    assert (len(fields), fields[2], fields[3], fields[5]) == (7, "1000", "1000", "/tmp")


@pytest.mark.parametrize("name", IMAGES)
def test_packages_are_hashed_wheels_and_leave_nothing(name):
    (installing,) = [rest for instruction, rest in instructions(name) if "pip install" in rest]
    for flag in ("--require-hashes", "--only-binary :all:", "--no-cache-dir"):
        assert flag in installing
    (requirements,) = [source for source in sources(name) if source.endswith(".txt")]
    assert Path(requirements).name in LOCKS


def test_the_neuron_image_keeps_its_torch():
    text = (ROOT / "requirements/neuron.txt").read_text()
    packages = dict(re.findall(r"^([a-z0-9][\w.-]*)==\S+ (.*)\\$", text, re.MULTILINE))
    assert packages["torch"] == "; sys_platform == 'never' "
    assert not [name for name in packages if name.startswith(("nvidia-cu", "nvidia-nccl", "triton"))]
    assert {"timm", "torchvision", "mlflow", "kubernetes"} <= set(packages)


def test_the_image_has_what_triton_compiles_with():
    """Without a C compiler and libc's headers its first kernel on a GPU fails."""
    (installing,) = [rest for instruction, rest in instructions("Dockerfile") if "apt-get install" in rest]
    assert {"gcc", "libc6-dev", "--no-install-recommends"} <= set(installing.split())
    assert installing.endswith("rm -rf /var/lib/apt/lists/*")


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
@pytest.mark.parametrize("compiler", ["there", "missing"])
def test_the_build_notices_where_triton_could_not_compile(tmp_path, compiler):
    script = ROOT / "manifests/images/compile_driver.py"
    assert f"$MANIFESTS/images/{script.name}" in (ROOT / "manifests/images/build.sh").read_text()
    path = os.environ["PATH"] if compiler == "there" else str(tmp_path)
    environment = {"PATH": path, "HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode == 0) is (compiler == "there"), ended.stderr
    assert compiler == "there" or "C compiler" in ended.stderr


def test_driver_that_documentation_names_is_that_of_torchs_cuda():
    """NVIDIA's table of drivers goes by the major version."""
    assert torch.version.cuda.startswith("13.")
    assert f"built with CUDA {torch.version.cuda}" in (ROOT / "docs/cluster.md").read_text()


def context():
    """Files that Docker would be sent, by our .dockerignore: `*` and exceptions, and names to leave out everywhere."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    kept = [line[1:] for line in lines if line.startswith("!")]
    dropped = {line.removeprefix("**/") for line in lines[1:] if line.startswith("**/")}
    assert len(lines) == 1 + len(kept) + len(dropped)
    return kept, dropped


@pytest.mark.parametrize("name", IMAGES)
def test_the_build_finds_what_it_takes(name):
    kept, _ = context()
    taken = [source.rstrip("/") for source in sources(name)]
    assert len(taken) == (2 if name == "Dockerfile.serving" else 3)
    for source in taken:
        assert (ROOT / source).exists()
        assert source in kept


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that PYTHONPATH names in the image, filled as the build would."""
    folder, (_, dropped) = tmp_path_factory.mktemp("image"), context()
    for instruction, rest in instructions("Dockerfile"):
        if instruction == "COPY":
            source, target = rest.split()
            destination = folder / Path(target).relative_to("/opt/vit-distillation")
            shutil.copytree(ROOT / source, destination, ignore=shutil.ignore_patterns(*dropped))
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "trainer", "--version"],
        ["-m", "trainer", "config", "digits"],
        ["-m", "components.launch", "pools"],
        ["-c", "import components.task, components.kfp_components, components.launching"],
    ],
    ids=" ".join,
)
def test_what_is_copied_suffices(installed, tmp_path, command):
    """Recipes, pools and packages are all there; nothing else of the working tree is in reach."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(installed),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(tmp_path),
    }
    # -S and an explicit path leave out the .pth file that makes the working tree importable.
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    environment["PYTHONPATH"] += os.pathsep + packages
    result = subprocess.run(
        [sys.executable, "-S", *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


SERVER = """
import fsspec, mlflow.artifacts, onnxruntime, openvino
from trainer import cli; from trainer.predict import photo_classifier; from trainer.report import tracking
from trainer.predict.serving import server
fsspec.filesystem("s3")
tracking.client()
for name in ("torch", "timm", "pandas"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} is within reach")
"""


def test_the_servers_packages_suffice(tmp_path):
    """With nothing but what requirements/serving.txt locks, the server, the store and the registry can be imported."""
    text = (ROOT / "requirements/serving.txt").read_text()
    packages = tmp_path / "packages"
    packages.mkdir()
    here = {}
    for one in importlib.metadata.distributions():
        here[re.sub(r"[-_.]+", "-", one.name).lower()] = one
    for name in re.findall(r"^([a-z0-9][\w.-]*)==", text, re.MULTILINE):
        if name in here:  # or it is for another Python
            for top in {file.parts[0] for file in here[name].files if file.parts[0] not in ("..", "__pycache__")}:
                link = packages / top
                if not link.exists():
                    link.symlink_to(here[name].locate_file(top))
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{packages}"}
    result = subprocess.run(
        [sys.executable, "-S", "-c", SERVER],
        cwd=tmp_path,
        env={**environment, "PYTHONDONTWRITEBYTECODE": "1", "MLFLOW_TRACKING_URI": "http://localhost:5000"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr + result.stdout
