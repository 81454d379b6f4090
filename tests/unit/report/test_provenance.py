from __future__ import annotations

import re
import subprocess

import pytest

from trainer import __version__, config
from trainer.report import provenance


def test_what_differs_from_the_recipe_is_named() -> None:
    settings = config.resolve("digits", ["distill.epochs=3", "evaluate.gate.min_accuracy=0.5", "run.seed=7"])
    found = provenance.differences("digits", settings.model_dump(mode="json"))
    assert found == {"distill.epochs": 3, "evaluate.gate.min_accuracy": 0.5, "run.seed": 7}
    assert provenance.differences("digits", config.resolve("digits").model_dump(mode="json")) == {}
    # A recipe of another machine is compared with the defaults.
    assert "data.image_size" in provenance.differences("/elsewhere/mine.toml", settings.model_dump(mode="json"))


def test_code_and_machine_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRAINER_RUN", "one")
    known = provenance.here()
    assert (known["run"], known["version"]) == ("one", __version__)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", known["date"])
    assert known["machine"].endswith(" cores")
    # The commit of the tree that the package lies in, or none.
    provenance.commit.cache_clear()
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    assert provenance.commit() == "not known"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    provenance.commit.cache_clear()
    assert re.fullmatch("[0-9a-f]{7,}", provenance.commit())
    provenance.commit.cache_clear()
