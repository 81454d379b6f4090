"""Every recipe: its comment has what a user needs to know. Its commands, the README's and the tutorials' pass the checks before a run.

Teacher and student are built at their real shapes on the meta device, where a tensor has no memory, and make one step of the distillation.
"""

import csv
import dataclasses
import re
import shlex
from contextlib import nullcontext
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from components import sections
from components.launching import Placement
from pipelines import compile as compilation
from trainer import config
from trainer.config import BUNDLED, RECIPES
from trainer.data.batch import Batch, Mixing, Recorded
from trainer.data.loader import micro_batch_size
from trainer.devices import Device
from trainer.graph import PACKAGE, STAGES
from trainer.io.errors import ModelError, SettingsError
from trainer.models import networks, pretrained
from trainer.runner import preflight
from trainer.stages import distill

STATED = ("command", "machine", "hours", "result", "models")


def comment(recipe):
    """The lines at the top of a recipe's file."""
    text = (RECIPES / f"{recipe}.toml").read_text()
    return "\n".join(line.removeprefix("#") for line in text.partition("\n\n")[0].splitlines())


def commands(text):
    """Each run that a text names: its variables, by their names."""
    runs = r"^ +(?:command +)?(make (?:run|search|deploy-pipeline|neuron-warm-up)\b.*)"
    lines = re.findall(runs, text.replace("\\\n", " "), flags=re.MULTILINE)
    return [dict(word.partition("=")[::2] for word in shlex.split(line, comments=True)) for line in lines]


ROOT = Path(__file__).parents[2]
PAGES = {page.stem: page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("start-*.md")))}
COMMANDS = [
    pytest.param(command, id=f"{name}-{number}")
    for name, text in [*((recipe, comment(recipe)) for recipe in sorted(config.recipes())), *PAGES.items()]
    for number, command in enumerate(commands(text))
]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    """What is looked at beforehand needs neither the hub nor its cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("recipe", sorted(config.recipes()))
def test_the_comment_says_how_to_run_it(recipe):
    stated = dict(re.findall(r"^ +(\w+) {2,}(\S.*)", comment(recipe), flags=re.MULTILINE))
    assert tuple(stated) == STATED
    assert stated["command"].startswith("make ")
    assert commands(comment(recipe))[0]["RECIPE"] == recipe


@pytest.fixture
def photos(tmp_path):
    """Make a source of photos that are listed and never read, some without a label."""

    def make(classes):
        folder = tmp_path / "photos"
        names = [f"{split}/{name}" for split in ("train", "val") for name in classes]
        for name in (*names, "unlabeled"):
            (folder / name).mkdir(parents=True)
            (folder / name / "1.jpg").touch()
        return f"data.source=imagefolder:{folder}"

    return make


def classes_of(settings):
    """The classes that the recipe is for, where it says so by its tables or by a teacher that is taken as it is; else any."""
    if settings.data.attributes.startswith(BUNDLED):
        with (RECIPES / settings.data.attributes.removeprefix(BUNDLED)).open() as file:
            return [row["class"] for row in csv.DictReader(file)]
    if settings.pretrain.head == "classes" and not settings.pretrain.finetune.epochs:
        return pretrained.check(settings.pretrain, settings.pretrain.teacher).card.labels
    return ["a", "b", "c"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_recipes_and_tutorials_pass_all_checks(command, photos):
    """On a pool of a cluster; or here, where the images are listed."""
    place = Placement(pool=command.get("POOL", ""), nodes=int(command.get("NODES", 1)))
    place.check()
    overrides = ["run.device=cpu", *shlex.split(command.get("SET", ""))]
    recipe = command.get("RECIPE", "digits")
    settings = sections.resolve(recipe, shlex.join(overrides))
    if not place.pool and settings.data.source != "digits":
        settings = sections.resolve(recipe, shlex.join([*overrides, photos(classes_of(settings))]))
    processes = place.processes("auto") if place.pool else 1  # there are too few images for several
    preflight.checked(settings, trains_here=not place.pool, processes=processes)
    tasks = compilation.task_names(compilation.committed_text())
    for name, stage in STAGES.items():
        if stage.is_needed(settings):
            assert name.replace("_", "-") in tasks
            config.validate_section(stage.section, settings.for_stage(name))


# ---------------------------------------------------------------------------------------------------------------------
# A step


class OnMeta(Device):
    """Where tensors have shapes alone; autocast does not know it."""

    def uses_bf16(self, precision):
        return False

    def autocast(self, precision):
        return nullcontext()


META = OnMeta(kind="cuda", torch_device=torch.device("meta"), backend="gloo", has_bf16=False, compiles=False)


def millions(model, stated):
    """The parameters of a model without its head, with as many decimals as stated."""
    count = networks.parameter_count(networks.with_labels(model, ()))
    return f"{count / 1e6:.{len(stated.partition('.')[2])}f}"


def a_batch(settings, teacher, student, classes):
    """What each process gets of a step, mixed, with what the settings record of the teacher."""
    count, features = micro_batch_size(settings.distill, 1), None
    if settings.distill.reads_recording and settings.reinforce.features:
        features = torch.empty(count, networks.feature_size(teacher))
    kept = settings.reinforce.logits(len(classes)) if teacher.card.labels else 0
    recorded = Recorded(torch.empty(count, kept).long(), torch.empty(count, kept), torch.empty(count, 2), features)
    edge, numbers = distill.view_size(student, [teacher], None), torch.empty(count).long()
    mixing = Mixing(numbers, numbers, torch.empty(count), torch.empty(count), torch.empty(count, 4))
    return Batch(
        images=torch.empty(count, 3, edge, edge, dtype=torch.uint8),
        labels=numbers,
        keys=numbers,
        numbers=numbers,
        mixing=mixing if settings.distill.views.mixup or settings.distill.views.cutmix else None,
        recorded=recorded if settings.distill.reads_recording else None,
        label_weights=torch.empty(count),
    )


@pytest.mark.parametrize("recipe", sorted(config.recipes()))
def test_models_have_their_size_and_make_a_step(recipe):
    settings = sections.resolve(recipe, commands(comment(recipe))[0].get("SET", ""))
    classes = classes_of(settings)
    teacher, _ = preflight.build_teacher(settings.pretrain, classes, trains_here=False)
    student = preflight.build_student(settings.distill, classes, trains_here=False)
    stated = re.search(r"teacher ([\d.]+) M parameters, student ([\d.]+) M, without heads", comment(recipe))
    with torch.device("meta"):
        assert stated.groups() == (millions(teacher, stated[1]), millions(student, stated[2]))
        if settings.distill.head == "probe":
            student = networks.with_labels(student, ())
        batch = a_batch(settings, teacher, student, classes)
        objective = distill.make_objective(settings.distill, student, [teacher], None, META)
        if settings.distill.reads_recording:
            objective._teacher = None
        losses = objective(objective.model.train(), batch)
        losses["loss"].backward()
    assert losses["loss"].shape == ()
    assert [name for name, weight in objective.model.named_parameters() if weight.grad is None] == []


# ---------------------------------------------------------------------------------------------------------------------
# What is missing


OF_PACKAGES = [name for name in sorted(config.recipes()) if config.resolve(name).pretrain.weights.startswith(PACKAGE)]


@pytest.mark.parametrize("recipe", OF_PACKAGES)
def test_a_missing_extra_is_named(recipe, photos, monkeypatch):
    for name, package in pretrained.WEIGHTS_PACKAGES.items():
        absent = dataclasses.replace(package, distribution=f"absent-{name}")
        monkeypatch.setitem(pretrained.WEIGHTS_PACKAGES, name, absent)
    settings = sections.resolve(recipe, shlex.join(["run.device=cpu", photos("ab")]))
    with pytest.raises(ModelError, match=r"^pretrain\.teacher: the package absent-.* is not installed"):
        preflight.checked(settings, trains_here=True)


WITHOUT_SOURCE = [name for name in sorted(config.recipes()) if not config.resolve(name).data.source]


@pytest.mark.parametrize("recipe", WITHOUT_SOURCE)
def test_missing_photos_are_named_before_sending(recipe):
    with pytest.raises(
        SettingsError, match=rf"data\.source is empty: the recipe {recipe} .*, such as data\.source=image"
    ):
        sections.resolve(recipe)
