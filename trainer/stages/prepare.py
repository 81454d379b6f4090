"""prepare: validate, deduplicate, resize, split and describe the images."""

from __future__ import annotations

from pathlib import Path

from trainer import artifacts
from trainer.artifacts import Artifact
from trainer.config import DataSettings
from trainer.data.preparation import prepare


def run(settings: DataSettings, *, dataset: str | Path) -> Artifact:
    """Prepare the images of `settings.source` into the directory `dataset`.

    Raises:
        SettingsError: `settings.source` is no source.
        DataError: the images, labels or splits are not usable.
        OutputError: the directory can not be written.
    """
    kept = settings.model_dump(
        mode="json", exclude={"workers"}
    )  # loader processes of trainings: no matter of the data set
    with artifacts.create(dataset, "dataset", settings=kept) as draft:
        draft.figures |= prepare(settings, draft.path)
    return artifacts.read(dataset, "dataset")
