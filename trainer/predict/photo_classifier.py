"""Trained models that are asked about photos: those of a run, of a directory, or of MLflow's registry.

Importing this module imports neither torch nor timm.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.graph import STUDENT
from trainer.io import artifacts, limits, storage
from trainer.io.artifacts import Manifest
from trainer.io.errors import ArtifactError, ModelError, SettingsError
from trainer.io.formatting import aligned, listed
from trainer.io.formatting import exact as _shown
from trainer.io.local_files import with_home
from trainer.models.prediction import Prediction, predictions
from trainer.models.served_student.class_tags import TAGS, ClassTags
from trainer.models.served_student.onnx_network import runtime_of
from trainer.models.served_student.student import EXPORT_CARD
from trainer.report import tracking

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pandas as pd

    from trainer.models.served_student.student import Photo, ServedStudent

_LISTED = 5  # classes that a line names, at most


class PhotoClassifier:
    """A trained model on the CPU, with the preprocessing that it was trained and measured with."""

    def __init__(self, served: ServedStudent, manifest: Manifest, name: str) -> None:
        """Wrap a model as MLflow would load it, with the manifest of its directory and how messages name it; `load_model` makes these."""
        self._served, self._name, self._created = served, name, manifest.created
        self.fingerprint = manifest.fingerprint
        """Of the model directory."""
        self.student = student_of(manifest)
        """Fingerprint of the student that it is, or that was exported or registered as it."""
        self.labels: Sequence[str] = tuple(served.labels)
        """Name of each class, in the order of the model's outputs."""

    def __str__(self) -> str:
        """Say in a line which model answers."""
        return answering(self._name, self._created, self.labels)

    @property
    def tags(self) -> ClassTags | None:
        """Attributes and hierarchy of its classes, if it knows any."""
        return self._served.tags

    @property
    def temperature(self) -> float:
        """By which its logits are divided."""
        return self._served.temperature

    @property
    def threshold(self) -> float | None:
        """Probability above which a class is named, where photos may have several labels; None where they have one."""
        return self._served.threshold

    def square(self, content: bytes) -> npt.NDArray[np.uint8]:
        """Make of an image file what the other methods take in its place, and what they would make of it: uint8 [S, S, 3].

        Raises:
            BadImageError: it is no image, or cannot be used.
        """
        return self._served.square(content)

    def predict(self, photo: str | Photo) -> dict[str, float]:
        """Classify one photo.

        Args:
            photo: a file's path, its bytes, or an array [H, W] or [H, W, C] of any size.

        Returns:
            Class -> probability, the most probable first.

        Raises:
            BadImageError: it is no image, or cannot be used.
        """
        return dict(self.predictions([photo], top=len(self.labels))[0].labels)

    def predictions(self, photos: Sequence[str | Photo], *, top: int) -> list[Prediction]:
        """Say of each photo the `top` most probable classes, and where the model has tags its answer and what is known of that.

        Raises:
            BadImageError: one of them is no image, or cannot be used; names it, and nothing is classified.
        """
        probabilities = self.probabilities(photos).to_numpy()
        return predictions(probabilities, self.labels, self.tags, top=top, threshold=self.threshold)

    def probabilities(self, photos: Sequence[str | Photo]) -> pd.DataFrame:
        """Classify photos of any sizes and kinds: a row each, a column for each class.

        Raises:
            BadImageError: one of them is no image, or cannot be used; names it, and nothing is classified.
        """
        # Text is a path here, which it is not for a served student.
        return self._served.probabilities([Path(photo) if isinstance(photo, str) else photo for photo in photos])


def load_model(place: str | Path, *, judged: bool = False) -> PhotoClassifier:
    """Load the student of a run, a registered one, or any model that a stage wrote.

    Args:
        place: a run's directory, such as `runs/latest`, a model directory, or what `export` has made, on this machine or in a store; or
            a model of MLflow's registry, such as `models:/vit-student-digits@champion`.
        judged: refuse a student that did not pass its gate; one that was not judged is not refused.

    Raises:
        ArtifactError: there is no model, or it is damaged.
        ModelError: its files do not make a model, it has no head, an older version wrote it without its preprocessing, or it is refused.
        SettingsError: it is an ONNX file, and ONNX Runtime is not installed.
        StorageError: the store does not answer or refuses.
        TrackingError: MLflow does not answer, or has no such model.
    """
    with _found(with_home(place)) as found:
        if judged:
            _refuse(place, found.refusals)
        return _exported(found, judged=judged) if _is_export(found.directory) else _in_torch(found)


def _in_torch(found: _Found) -> PhotoClassifier:
    """Load a model directory."""
    model = artifacts.read(found.directory, "model")

    from trainer.models import networks
    from trainer.models.served_student.student import ServedStudent

    card = networks.outline(model.path).card  # which also checks the description before anything is built by it
    if not card.labels:
        raise ModelError(
            f"model {found.directory}: has no head, so it names no class; load the student that it teaches (distill.head=probe fits a "
            "head)"
        )
    if card.square is None:
        raise ModelError(
            f"model {found.directory}: {networks.CONFIG} does not say how a photo becomes its input, because an older version wrote it; "
            "train it again"
        )
    served = ServedStudent(model.path)
    served.tags = served.tags or found.tags
    served.temperature = card.temperature or found.temperature
    served.threshold = found.threshold if found.threshold is not None else card.threshold
    return PhotoClassifier(served, model, found.name)


def _exported(found: _Found, *, judged: bool) -> PhotoClassifier:
    """Load what `export` has made."""
    directory = found.directory
    export = artifacts.read(directory, "export")
    if judged:
        _refuse(directory, export.figures.get("reasons", ()))
    try:
        runtime = runtime_of(storage.read_json(export.path / EXPORT_CARD))
    except (AttributeError, ValueError) as error:
        raise ArtifactError(
            f"export {directory}: its card is not readable ({error}); export the student again"
        ) from error
    if find_spec(runtime) is None:
        raise SettingsError(
            f"model {directory}: is an ONNX file, which needs the package {runtime}; pip install {runtime}"
        )
    from trainer.models.served_student.student import ServedStudent

    try:
        if TAGS in export.files:  # which the student reads without a limit, as it travels without this package
            storage.read_json(export.path / TAGS)
        return PhotoClassifier(ServedStudent(export.path), export, found.name)
    except Exception as error:  # the runtimes have classes of their own
        said = limits.cut(" ".join(str(error).split()), 300)
        raise ArtifactError(f"export {directory}: cannot be loaded ({said}); export the student again") from error


@contextmanager
def export_at(place: str, *, judged: bool = False) -> Iterator[str]:
    """Give where an export is: itself, that of a run, or that of a model in MLflow's registry, whose files may go when this ends.

    Raises:
        ArtifactError: there is none.
        ModelError: the registered model is a network in torch; or did not pass its gate, where it is to be `judged`.
        TrackingError: MLflow does not answer, or has no such model.
    """
    if place.startswith(tracking.REGISTERED):
        with _found(place) as found:
            if judged:
                _refuse(place, found.refusals)
            if not _is_export(found.directory):
                raise ModelError(
                    f"model {place}: is a network in torch, not an ONNX file (the page export.html in its MLflow run says why); export it "
                    "from the directory of its run"
                )
            yield found.directory
    else:
        yield place if artifacts.exists(place) else _export_of_a_run(place, judged=judged)


def _export_of_a_run(place: str, *, judged: bool) -> str:
    if not _reads_runs():
        return place  # which is then named as a missing export
    from trainer.report import finished_run

    directory = finished_run.export_of_student(place)
    if judged and (evaluation := finished_run.evaluation_of_student(place)):
        _refuse(place, evaluation.figures["verdict"]["reasons"])
    return directory


def student_of(manifest: Manifest) -> str:
    """Return the fingerprint of the student that a model directory or an export is, or was made from."""
    return manifest.parents.get("student", manifest.fingerprint)


def answering(name: str, created: datetime, labels: Sequence[str]) -> str:
    """Say in a line which model answers."""
    return f"{name} answers: made {created.astimezone():%Y-%m-%d %H:%M}, {len(labels):,} classes: {listed(labels, _LISTED)}"


def _reads_runs() -> bool:
    """Return whether what reads the directories of runs is installed: the server's image has only what serves."""
    return find_spec("torch") is not None


def _is_export(directory: str) -> bool:
    return storage.exists(storage.join(directory, EXPORT_CARD))


def _refuse(place: str | Path, reasons: Sequence[object]) -> None:
    if reasons:
        raise ModelError(
            f"model {place}: did not pass its gate ({'; '.join(map(str, reasons))}); choose another one, or use it all the same (--force)"
        )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Where a model is, and what is known of it."""

    name: str
    """As messages name it."""
    directory: str
    refusals: Sequence[object] = ()
    """Conditions of the gate that it did not meet."""
    tags: ClassTags | None = None
    """What is known of its classes, where the directory does not say it."""
    temperature: float = 1.0
    """By which its logits are divided, where the directory does not say it."""
    threshold: float | None = None
    """Probability above which a class is named, where the evaluation says it."""


@contextmanager
def _found(place: str) -> Iterator[_Found]:
    if place.startswith(tracking.REGISTERED):
        if not os.environ.get(tracking.URI) and _reads_runs():
            from trainer.runner import local_run

            local_run.track_here()
        with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
            version, files, passed = tracking.registered_model(place, Path(folder))
            directory = next((path for path in sorted(files.glob("data/*")) if artifacts.exists(path)), None)
            if directory is None:
                raise ModelError(f"model {place}: holds no student; name one that the stage register has registered")
            name = place if place == version else f"{place} ({version})"
            yield _Found(name=name, directory=str(directory), refusals=() if passed else ("its MLflow run says why",))
    elif artifacts.exists(place):
        yield _Found(name=storage.with_target(place), directory=place)
    else:
        from trainer.report import finished_run

        evaluation = finished_run.evaluation_of_student(place)
        found = _Found(name=storage.with_target(place), directory=finished_run.find(place, STUDENT))
        if evaluation is None:
            yield found
            return
        student = evaluation.figures["student"]
        yield replace(
            found,
            refusals=evaluation.figures["verdict"]["reasons"],
            tags=finished_run.tags(place, evaluation),
            temperature=student.get("temperature", 1.0),
            threshold=student.get("threshold"),
        )


def lines(prediction: Prediction) -> list[str]:
    """Format a prediction as text."""
    rows = [(f"{probability:.1%}", label) for label, probability in prediction.labels.items()]
    known = (prediction.attributes or {}).items()
    if prediction.named is not None:
        for place, label in enumerate(prediction.named):
            of_label = [(name, values[place]) for name, values in known if isinstance(values, list)]
            shown = [f"{name} {_shown(value)}" for name, value in of_label if value is not None]
            rows.append(("named", ", ".join([label, *shown])))
        rows += [] if prediction.named else [("named", "no class")]
    else:
        if prediction.confidence is not None:
            answer = prediction.answer if prediction.answer is not None else "not sure of any class or group"
            rows.append(("answer", f"{answer} ({prediction.confidence:.1%})"))
        rows += [(name, _shown(value)) for name, value in known if value is not None]
    return aligned(rows)
