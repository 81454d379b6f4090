"""The plan of a run on a node pool, and that configure asks it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from components import planning, sections
from components.launching import Placement
from trainer.data.sources import SourceState
from trainer.io.errors import SettingsError
from trainer.runner import training_work

README = Path(__file__).parents[2] / "README.md"


def test_configure_refuses_what_cannot_work(monkeypatch):
    monkeypatch.setattr(sections.class_tables, "source_state", lambda _: SourceState("v", 40_000_000, 40_000_000 * 500))
    monkeypatch.setattr(sections.preflight, "checked", lambda settings, **_: settings)
    with pytest.raises(
        SettingsError,
        match=r"prepare needs 159\.79 GB of disk and has 85\.90 GB.*pretrain needs .* GB of disk and has 1\.72",
    ):
        sections.configure(sections.resolve("digits"), Placement(pool="cpu"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits", "--images", "0", "--pool", "cpu"], r"--images: must be from 1 to 1e12, got 0"),
        (
            ["digits", "--images", "1e3", "--pool", "cpu", "--task-disk", "1x"],
            r"--task-disk must be a quantity above 0, .* got '1x'",
        ),
        (["digits", "--images", "1e3", "--pool", ""], r"--pool is empty; name a node pool"),
        (["digits", "--images", "1e3", "--pool", "cpus"], r"unknown pool 'cpus'; did you mean cpu\?"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    try:
        code = planning.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert re.search(message, capsys.readouterr().err)


def test_what_readme_shows_can_work(monkeypatch, capsys):
    command = re.search(r"python -m components\.planning (.+)", README.read_text(encoding="utf-8"))[1].split("  #")[0]
    # Counting the operations of a ViT-L takes seconds, and hours are not what binds.
    monkeypatch.setattr(training_work, "_operations", lambda _: 0.0)
    monkeypatch.setattr(training_work, "_masked_operations", lambda _: 0.0)
    assert planning.main(command.split()) == 0
    assert "Every stage is within its limits." in capsys.readouterr().out
    without = command.partition("--prepare-pool")[0].split()
    assert planning.main(without) == 2
    expected = "prepare needs 195.51 GB of disk and has 85.90 GB: name a pool with a larger cache for it (PREPARE_POOL)"
    assert expected in capsys.readouterr().err
    assert planning.main([*without, "--task-disk", "1000Gi"]) == 0


def prepared(capsys, *arguments):
    """The row of prepare in a plan of eleven million photos."""
    planning.main(["model-case", "--images", "11e6", "--bytes", "200e3", "--pool", "gpu-a100", *arguments])
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("prepare"))


def test_nodes_share_a_preparation(monkeypatch, capsys):
    monkeypatch.setattr(training_work, "_operations", lambda _: 0.0)
    monkeypatch.setattr(training_work, "_masked_operations", lambda _: 0.0)
    task, one, four = (
        prepared(capsys, *place)
        for place in ((), ("--prepare-pool", "gpu-a10g-4"), ("--prepare-pool", "gpu-a10g-4", "--prepare-nodes", "4"))
    )
    assert ("40.07 h" in task, "3.81 h" in one, "83.7 min" in four) == (True, True, True)
    assert "$" not in task
    assert "$21.61" in one


def test_where_images_are_prepared_is_checked(capsys):
    arguments = ["digits", "--images", "1e3", "--pool", "cpu"]
    assert planning.main([*arguments, "--prepare-pool", "cpus"]) == 2
    assert "unknown pool 'cpus'; did you mean cpu?" in capsys.readouterr().err
    assert planning.main([*arguments, "--prepare-nodes", "4"]) == 2
    assert "prepare_nodes = 4, but the pod of prepare's own task is one; name a pool" in capsys.readouterr().err
