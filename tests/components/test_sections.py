"""`configure`: the pipeline's parameters become one section a stage."""

from __future__ import annotations

import json

import pytest

from components import sections
from components.configure import configure
from trainer import config
from trainer.errors import DataError, SettingsError


@pytest.fixture(autouse=True)
def _untracked(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")


def test_each_stage_gets_its_own_section_only():
    made = sections.configure(sections.resolve("digits"))._asdict()
    for stage, name in config.SECTION_OF_STAGE.items():
        own = json.loads(made[stage])
        whole = config.resolve("digits").model_dump(mode="json")[name]
        assert own.items() <= whole.items()
        assert not set(own) & (set(config.Settings.model_fields) - {"profile", "evaluate"})


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ("distill.temperature=3.5", {"distill"}),
        ("data.workers=1", {"pretrain", "distill"}),
        ("data.image_size=64", {"prepare"}),
        ("evaluate.gate.max_accuracy_drop=0.5", {"evaluate"}),
        ("tracking.experiment=other", set()),
    ],
)
def test_a_changed_setting_changes_the_sections_that_read_it_and_no_other(overrides, changed):
    before = sections.configure(sections.resolve("digits"))._asdict()
    after = sections.configure(sections.resolve("digits", overrides))._asdict()
    assert {name for name in before if before[name] != after[name]} == changed | {"resolved"}


def test_named_parameters_go_before_the_overrides():
    settings = sections.resolve(
        "digits", "data.source=digits", dataset="imagefolder:/some photos/it's", teacher="/models/1", experiment="2"
    )
    assert settings.data.source == "imagefolder:/some photos/it's"
    assert settings.pretrain.weights == "/models/1"
    assert settings.tracking.experiment == "2"


def test_empty_named_parameters_change_nothing():
    assert sections.resolve("digits", "", "", "", "") == config.resolve("digits")


def test_an_unknown_setting_is_named():
    with pytest.raises(SettingsError, match=r"distill\.temprature.*did you mean distill\.temperature"):
        sections.resolve("digits", "distill.temprature=3")


def test_missing_images_are_found_before_anything_starts(tmp_path):
    with pytest.raises(DataError, match="missing"):
        sections.configure(sections.resolve("digits", dataset=f"imagefolder:{tmp_path / 'missing'}"))


def test_changed_images_change_the_version(tmp_path):
    photo = tmp_path / "a" / "1.png"
    photo.parent.mkdir()
    photo.write_bytes(b"one")
    first = sections.configure(sections.resolve("digits", dataset=f"imagefolder:{tmp_path}"))
    photo.write_bytes(b"another")
    second = sections.configure(sections.resolve("digits", dataset=f"imagefolder:{tmp_path}"))
    assert first.source_version != second.source_version
    assert first.prepare == second.prepare


def test_the_component_gives_what_the_function_gives():
    assert list(configure.component_spec.outputs) == list(sections.Sections._fields)
    assert configure.python_func("digits", "", "", "", "") == sections.configure(sections.resolve("digits"))
