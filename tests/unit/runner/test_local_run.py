"""Where a run is kept, and what it takes over from an earlier one in the same output."""

from dataclasses import replace
from datetime import datetime

import pytest

from trainer import config, devices, stages
from trainer.io import artifacts
from trainer.runner import local_run


def test_an_output_is_one_run_also_when_it_is_moved_and_no_other_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def identity(place):
        return local_run.environment(config.resolve("digits"), local_run.new_directory("digits", str(place)))[
            "TRAINER_RUN_ID"
        ]

    first = identity(tmp_path / "a" / "shelf")
    assert identity(tmp_path / "b" / "shelf") != first
    (tmp_path / "a" / "shelf").rename(tmp_path / "moved")
    assert identity(tmp_path / "moved") == first
    assert identity(tmp_path / "a" / "shelf") != first


def test_runs_that_start_in_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    class Stopped(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, 27, 3, 31, 16, tzinfo=tz)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_run, "datetime", Stopped)
    made = [local_run.new_directory("recipes/digits.toml", None) for _ in range(3)]
    first = "20261127-033116-digits"
    assert [one.name for one in made] == [first, f"{first}-2", f"{first}-3"]
    assert (local_run.RUNS / local_run.LATEST).resolve() == made[-1].resolve()


@pytest.mark.parametrize("output", ["shelf", "runs/shelf", "elsewhere/shelf"])
def test_the_latest_run_is_the_newest_one_also_in_an_output_of_its_own(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    local_run.new_directory("digits", None)
    newest = local_run.new_directory("digits", output)
    assert (local_run.RUNS / local_run.LATEST).resolve() == newest.resolve() == tmp_path / output


def test_a_run_goes_on_where_latest_cannot_point_to_it(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (local_run.RUNS / local_run.LATEST).mkdir(parents=True)
    assert local_run.new_directory("digits", "shelf").is_dir()
    assert "runs/latest does not point to this run (Is a directory); name shelf instead" in caplog.text
    assert [path.name for path in local_run.RUNS.iterdir()] == [local_run.LATEST]


@pytest.fixture
def recorded(tmp_path):
    """Teacher outputs that were recorded on a CPU, with what they were made of."""
    directories = {name: str(tmp_path / name) for name in ("dataset", "teacher", "teacher_outputs")}
    parents = {}
    for name, kind in stages.STAGES["reinforce"].inputs.items():
        with artifacts.create(directories[name], kind, settings={}):
            pass
        parents[name] = artifacts.manifest(directories[name], kind).fingerprint
    with artifacts.create(
        directories["teacher_outputs"], "teacher_outputs", settings={"views": 2}, parents=parents
    ) as draft:
        draft.device = "cpu"
    return directories


def is_complete(directories, **settings):
    return local_run._is_complete(stages.STAGES["reinforce"], settings, directories)


def test_what_the_same_settings_made_on_the_same_device_is_kept(recorded, monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    assert is_complete(recorded, views=2)
    assert not is_complete(recorded, views=3)


def test_what_another_device_made_is_done_again(recorded, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(devices, "choose_device", lambda: replace(devices.HOST, kind="cuda"))
    assert not is_complete(recorded, views=2)
    assert "reinforce  is done again: it was done on cpu" in caplog.text


def test_weights_that_have_changed_where_they_lie_are_taken_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_DEVICE", "cpu")
    weights = str(tmp_path / "given")
    directories = {name: str(tmp_path / name) for name in ("dataset", "teacher", "evidence")}

    def give(content):
        with artifacts.create(weights, "model", settings={}) as draft:
            (draft.path / "weights").write_text(content)

    give("one")
    with artifacts.create(directories["dataset"], "dataset", settings={}):
        pass
    parents = {
        name: artifacts.manifest(uri, kind).fingerprint
        for name, uri, kind in (("dataset", directories["dataset"], "dataset"), ("weights", weights, "model"))
    }
    for name, kind in stages.STAGES["pretrain"].outputs.items():
        with artifacts.create(directories[name], kind, settings={"weights": weights}, parents=parents) as draft:
            draft.device = "cpu"
    assert local_run._is_complete(stages.STAGES["pretrain"], {"weights": weights}, directories)
    give("another")
    assert not local_run._is_complete(stages.STAGES["pretrain"], {"weights": weights}, directories)
