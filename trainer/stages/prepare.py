"""prepare: validate, deduplicate, resize, split and describe the images."""

from __future__ import annotations

from pathlib import Path

from trainer import artifacts, tracking
from trainer.artifacts import Artifact
from trainer.config import LOADING, DataSettings
from trainer.data.preparation import prepare


def run(settings: DataSettings, *, dataset: str | Path) -> Artifact:
    """Prepare the images of `settings.source` into the directory `dataset`.

    Raises:
        SettingsError: `settings.source` is no source.
        DataError: the images, labels or splits are not usable.
        OutputError: the directory can not be written.
        TrackingError: MLflow does not answer or refuses.
    """
    kept = settings.model_dump(mode="json", exclude=set(LOADING))
    with (
        tracking.stage_run("prepare", kept) as tracker,
        artifacts.create(dataset, "dataset", settings=kept) as draft,
    ):
        draft.figures |= prepare(settings, draft.path)
        tracker.metrics(0, tracking.numbers(draft.figures))
    return artifacts.read(dataset, "dataset")
