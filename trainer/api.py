"""The public API: load a model and ask it about photos, run a stage, record a training loop of one's own.

The names are there as `trainer.load_model`, `trainer.run_stage` and `trainer.record`. Importing this module imports neither torch nor timm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import artifacts, config, limits, runner, storage
from trainer.artifacts import Manifest
from trainer.errors import ArtifactError, ModelError, SettingsError
from trainer.graph import STAGES, Stage
from trainer.host import environment_variables

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from trainer.own_loop import LoopRecording
    from trainer.served_student.pyfunc import Photo, ServedStudent

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


class PhotoClassifier:
    """A trained model on the CPU, with the preprocessing that it was trained and measured with."""

    def __init__(self, served: ServedStudent) -> None:
        """Wrap a model as MLflow would load it; `load_model` makes these."""
        self._served = served
        self.labels: Sequence[str] = tuple(served.labels)
        """Name of each class, in the order of the model's outputs."""

    def predict(self, photo: str | Photo) -> dict[str, float]:
        """Classify one photo.

        Args:
            photo: a file's path, its bytes, or an array [H, W] or [H, W, C] of any size.

        Returns:
            Class -> probability, the most probable first.

        Raises:
            BadImageError: it is no image, or cannot be used.
        """
        probabilities = self.probabilities([photo]).iloc[0].sort_values(ascending=False, kind="stable")
        return {str(label): float(value) for label, value in probabilities.items()}

    def probabilities(self, photos: Sequence[str | Photo]) -> pd.DataFrame:
        """Classify photos of any sizes and kinds: a row each, a column for each class.

        Raises:
            BadImageError: one of them is no image, or cannot be used; names it, and nothing is classified.
        """
        return self._served.probabilities([Path(photo) if isinstance(photo, str) else photo for photo in photos])


def load_model(place: str | Path) -> PhotoClassifier:
    """Load the student of a run, or any model that a stage wrote.

    Args:
        place: a run's directory, such as `runs/latest`, or a model directory, on this machine or in a store.

    Raises:
        ArtifactError: there is no model, or it is damaged.
        ModelError: its files do not make a model, it has no head, or an older version wrote it without its preprocessing.
        StorageError: the store does not answer or refuses.
    """
    uri = str(place) if artifacts.exists(place) else _student_of(str(place))
    path = artifacts.read(uri, "model").path

    from trainer import models
    from trainer.served_student.pyfunc import ServedStudent

    card = models.outline(path).card  # which also checks the description before anything is built by it
    if not card.labels:
        raise ModelError(
            f"model {uri}: has no head, so it names no class; load the student that it teaches (distill.head=probe fits a head)"
        )
    if card.square is None:
        raise ModelError(
            f"model {uri}: {models.CONFIG} does not say how a photo becomes its input, because an older version wrote it; train it again"
        )
    return PhotoClassifier(ServedStudent(path))


def _student_of(run: str) -> str:
    """Find where a run of `python -m trainer run` or of `make run` has its student."""
    from trainer.summary import SUMMARY

    places = [storage.join(run, "student")]
    if not storage.is_remote(run):
        # kfp.local names a folder for each run of the pipeline, and has one in it for each task.
        places += sorted(map(str, Path(run).glob("pipeline/*/distill/student")))
    file = storage.join(run, SUMMARY)
    if storage.exists(file):
        # A pipeline's run that took its distillation from the cache has it beside the task that made the report.
        try:
            page = limits.parse_json(storage.read_limited(file, limits.JSON_BYTES))["reports"]["profile"]
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{file}: is not the summary of a run ({error}); give the directory of a model"
            ) from error
        task = storage.parent(storage.parent(str(page)))
        places.append(storage.join(storage.parent(task), "distill/student"))
    for place in places:
        if artifacts.exists(place):
            return place
    raise ArtifactError(
        f"{run}: no student at {' nor at '.join(places)}; give the directory of a completed run, or that of a model"
    )


def run_stage(
    name: str,
    *,
    recipe: str = "",
    overrides: str | Iterable[str] = (),
    processes: int = 0,
    **directories: str | Path,
) -> dict[str, Manifest]:
    """Run one stage on given inputs, as `python -m trainer stage NAME` does.

    Args:
        name: of the stage, such as `evaluate`.
        recipe: takes the stage's settings from this recipe; the defaults without one.
        overrides: `key=value` settings, such as `distill.temperature=2`.
        processes: how many processes train, in a stage that trains; 0: one for each GPU, or else one.
        directories: of each input and output, by the stage's keywords, such as `dataset` and `evaluation`.

    Returns:
        Keyword of each output -> its manifest, whose `figures` are the stage's main numbers.

    Raises:
        SettingsError: there is no such stage, a setting is wrong, or a directory is missing or not the stage's.
        TrainerError: as the stage.
    """
    stage = _stage(name, directories)
    settings = config.resolve(recipe, overrides)
    uris = {keyword: str(place) for keyword, place in directories.items()}
    given = {"recipe": recipe, "resolved": settings.model_dump(mode="json")}
    with environment_variables({config.DEVICE_VARIABLE: os.environ.get(config.DEVICE_VARIABLE, settings.run.device)}):
        runner.run_stage(stage, settings.for_stage(name), uris, processes=processes, given=given)
    return {keyword: artifacts.manifest(uris[keyword], kind) for keyword, kind in stage.outputs.items()}


def _stage(name: str, directories: Mapping[str, object]) -> Stage:
    """Return the stage, if it takes exactly these directories."""
    stage = STAGES.get(name)
    if stage is None:
        raise SettingsError(f"stage {name!r}: there is none of this name; choose from {', '.join(STAGES)}")
    needed = [*stage.inputs, *stage.outputs]
    known = [*needed, *stage.optional_inputs]
    missing = [keyword for keyword in needed if keyword not in directories]
    if missing:
        raise SettingsError(f"stage {name}: needs the directory {missing[0]}; give {', '.join(needed)}")
    foreign = sorted(directories.keys() - {*known})
    if foreign:
        raise SettingsError(f"stage {name}: has no directory {foreign[0]}; it takes {', '.join(known)}")
    return stage


def record(name: str, output: str | Path, *, model: nn.Module | None = None) -> LoopRecording:
    """Record a training loop of your own, and report what slows or spoils it.

        with trainer.record("segmentation", "profile", model=model) as recording:
            for images, targets in recording.steps(loader):
                with recording.span("forward"):
                    loss = criterion(model(images), targets)
                with recording.span("backward"):
                    loss.backward()
                with recording.span("optimizer"):
                    optimizer.step()
                recording.log(loss=loss.item())

    Args:
        name: of the training, for the report.
        output: directory for `report/report.html` and, in `evidence`, what it was made of.
        model: what is trained, on its device, not compiled and not wrapped. The span `optimizer` looks at its weights now and then;
            without it only time and machine are judged.

    Raises:
        SettingsError: the name cannot be a file's.
    """
    if not _NAME.fullmatch(name):
        raise SettingsError(f"record: the name {name!r} must be of letters, digits, dots and dashes, 64 at most")
    from trainer.own_loop import LoopRecording

    return LoopRecording(name, Path(output), model)
