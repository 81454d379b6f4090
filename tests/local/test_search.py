"""A search whose trials train, in processes of this machine."""

import json

import pytest

from tests import groups
from tests.distillations import QUICK
from trainer import config
from trainer.graph import STAGES
from trainer.io import artifacts
from trainer.runner import local_run
from trainer.stages.searching.search_schema import read_search

pytestmark = pytest.mark.timeout(300)


def test_trials_resume_from_their_checkpoints_and_the_best_is_found(digits, teacher, tmp_path, monkeypatch):
    """A learning rate that is far too small loses to the larger one, and the last attempt takes only the steps that are left."""
    monkeypatch.setenv(config.DEVICE_VARIABLE, "cpu")
    distill = QUICK | {"epochs": 2, "base_learning_rate": 1e-6}
    section = {
        "enabled": True,
        "space": {"distill.base_learning_rate": "choice(1e-6, 2e-2)"},
        "trials": 3,
        "sampler": "random",
        "rungs": [0.5, 1],
        "reduction": 2,
        "finalists": 1,
        "seeds": 1,
        "distill": distill,
    }
    directories = {
        "dataset": digits,
        "teacher": teacher,
        "search": str(tmp_path / "search"),
    }
    specs = []

    def start(spec, stop):
        specs.append(spec)
        groups.launch(spec)

    settings = config.validate_section("search", section).model_dump(mode="json")
    local_run.run_stage(STAGES["search"], settings, directories, processes=1, given={}, start=start)
    found = read_search(directories["search"])
    assert found.chosen["base_learning_rate"] == 2e-2
    assert found.best > 0
    resumed = found.trials[found.best].attempts
    assert [attempt.epochs for attempt in resumed] == [1.0, 2.0]
    assert resumed[1].score > found.trials[0].attempts[-1].score
    places = {
        spec.environment[artifacts.CHECKPOINTS_VARIABLE] for spec in specs if spec.part.startswith(f"{found.best:03d}")
    }
    assert len(places) == 1
    assert json.loads((tmp_path / "search" / "manifest.json").read_text())["parents"].keys() == {"dataset", "teacher"}
    assert not list((tmp_path / "checkpoints").iterdir())
