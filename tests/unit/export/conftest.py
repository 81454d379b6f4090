from __future__ import annotations

import shutil

import pytest

from tests.unit.stages.conftest import TAGS, trained_digits  # noqa: F401  # a fixture
from trainer import artifacts
from trainer.config import EvaluateSettings, GateSettings
from trainer.stages import evaluate


@pytest.fixture(scope="session")
def finished(trained_digits, tmp_path_factory):  # noqa: F811
    """Makes the directory of a run whose student was judged by a gate; its classes have a hierarchy."""

    def make(**gate):
        folder = tmp_path_factory.mktemp("finished")
        for name in ("teacher", "student"):
            (folder / name).symlink_to(getattr(trained_digits, name))
        known = artifacts.read(trained_digits.dataset, "dataset")
        with artifacts.create(folder / "dataset", "dataset", settings=known.settings) as draft:
            shutil.copytree(known.path, draft.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
            TAGS.write(draft.path)
        settings = EvaluateSettings(
            latency_runs=10, latency_batch_sizes=(1, 4), answer_risk=0.1, gate=GateSettings(**gate)
        )
        given = {name: folder / name for name in ("dataset", "teacher", "student", "evaluation")}
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("MLFLOW_TRACKING_URI", raising=False)
            evaluate.run(settings, **given)
        return folder

    return make


@pytest.fixture(scope="session")
def run(finished):
    """A run whose student passed."""
    return finished(max_accuracy_drop=1)
