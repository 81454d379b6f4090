from __future__ import annotations

import pytest

from trainer.config import EvaluateSettings, GateSettings
from trainer.stages import evaluate


@pytest.fixture(scope="session")
def finished(trained_digits, tagged_dataset, tmp_path_factory):
    """Makes the directory of a run whose student was judged by a gate; its classes have a hierarchy."""

    def make(**gate):
        folder = tmp_path_factory.mktemp("finished")
        for name in ("teacher", "student"):
            (folder / name).symlink_to(getattr(trained_digits, name))
        (folder / "dataset").symlink_to(tagged_dataset)
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
