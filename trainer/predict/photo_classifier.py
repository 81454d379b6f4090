"""Trained models that are asked about photos: those of a run, of a directory, or of MLflow's registry.

Importing this module imports neither torch nor timm.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trainer.graph import DATASET, STUDENT
from trainer.io import artifacts, limits, storage
from trainer.io.artifacts import Artifact, Manifest
from trainer.io.errors import ArtifactError, ModelError, SettingsError
from trainer.io.formatting import aligned, listed
from trainer.io.formatting import exact as _shown
from trainer.io.host import usable_cores
from trainer.io.local_files import with_home
from trainer.models.served_student.class_tags import TAGS, ClassTags
from trainer.models.served_student.onnx_network import runtime_of
from trainer.models.served_student.student import EXPORT_CARD, Photo, Pixels, Prediction, Predictor
from trainer.report import tracking

if TYPE_CHECKING:
    import pandas as pd

_LISTED = 5  # classes that a line names, at most


class PhotoClassifier(Predictor):
    """A trained model on the CPU, with the preprocessing that it was trained and measured with."""

    def __init__(self, files: Artifact, name: str, *, threads: int = 0) -> None:
        """Load a model directory or an export; `name` is for messages. `load_model` makes these."""
        super().__init__(files.path, threads=threads)
        self._name, self._created = name, files.created
        self.fingerprint = files.fingerprint  # of the model directory
        self.version = files.fingerprint[:12]  # changes with every file of it
        self.student = files.parents.get("student", files.fingerprint)
        """Fingerprint of the student: of this model, or of the one that was exported or registered as it."""

    def __str__(self) -> str:
        """Describe in a line which model answers."""
        classes = f"{len(self.labels):,} classes: {listed(self.labels, _LISTED)}"
        return f"{self._name} answers: made {self._created.astimezone():%Y-%m-%d %H:%M}, {classes}"

    def of_squares(self, squares: Pixels) -> npt.NDArray[np.float64]:
        """Compute the probability of each class from squares, uint8 [B, S, S, 3] -> [B, K]; a `ModelError` if one is not finite."""
        found = super().of_squares(squares)
        if not np.isfinite(found).all():
            raise ModelError(f"model {self._name}: its logits are not finite; choose another model")
        return found

    def predict(self, photo: str | Photo) -> dict[str, float]:
        """Classify one photo: class -> probability, the most probable first. A `BadImageError` if the photo cannot be used.

        `photo` is a file's path, its bytes, or an array [H, W] or [H, W, C] of any size.
        """
        return dict(self.predictions([photo], top=len(self.labels))[0].labels)

    def predictions(self, photos: Sequence[str | Photo], *, top: int) -> list[Prediction]:
        """Give each photo's `top` most probable classes, and its answer with attributes if the model has tags.

        A `BadImageError` names an unusable photo; nothing is classified then.
        """
        return self.answers(self.of_photos(_with_paths(photos)), top=top)

    def probabilities(self, photos: Sequence[str | Photo]) -> pd.DataFrame:
        """Classify photos of any sizes and kinds: a row each, a column for each class. A `BadImageError` names an unusable photo."""
        import pandas as pd  # which a server lacks

        return pd.DataFrame(self.of_photos(_with_paths(photos)), columns=list(self.labels))


def _with_paths(photos: Sequence[str | Photo]) -> list[Photo]:
    """Take text for a path; a `Predictor` takes it for an image file in base64, since its text may come over the network."""
    return [Path(photo) if isinstance(photo, str) else photo for photo in photos]


def load_model(place: str | Path, *, judged: bool = False, exported: bool = False, threads: int = 0) -> PhotoClassifier:
    """Load the student of a run, a registered one, or any model that a stage wrote.

    Args:
        place: a run's directory, such as `runs/latest`, a model directory, or an export, on this machine or in a store; or a model of
            MLflow's registry, such as `models:/vit-student-digits@champion`.
        judged: refuse a student that did not pass its gate; one that was not judged is not refused.
        exported: take nothing but an ONNX file: of a run its export.
        threads: of an ONNX file's runtime; 0: one for each core that this process may use.

    Raises:
        ArtifactError: there is no model, or it is damaged.
        ModelError: its files make no classifier of photos, or it is refused.
        SettingsError: the runtime of its ONNX file is not installed.
    """
    with _found(with_home(place), exported=exported) as found:
        if judged:
            _refuse(place, found.refusals)
        is_export = storage.exists(storage.join(found.directory, EXPORT_CARD))
        if exported and not is_export and str(place).startswith(tracking.REGISTERED):
            raise ModelError(
                f"model {place}: is a network in torch, not an ONNX file (the page export.html in its MLflow run says why); export it "
                "from the directory of its run"
            )
        if exported or is_export:
            return _exported(found, judged=judged, threads=threads or usable_cores())
        return _in_torch(found)


def _in_torch(found: _Found) -> PhotoClassifier:
    model = artifacts.read(found.directory, "model")

    from trainer.models import networks

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
    loaded = PhotoClassifier(model, found.name)
    loaded.tags = loaded.tags or found.tags
    loaded.temperature = card.temperature or found.temperature
    loaded.threshold = found.threshold if found.threshold is not None else card.threshold
    return loaded


def _exported(found: _Found, *, judged: bool, threads: int) -> PhotoClassifier:
    directory = found.directory
    export = artifacts.read(directory, "export")
    if EXPORT_CARD not in export.files:
        reasons = "; ".join(export.figures.get("reasons", ()))
        raise ModelError(f"export {directory}: has no ONNX file ({reasons}); serve that of another student")
    try:
        card = storage.read_json(export.path / EXPORT_CARD)
        runtime, reasons = runtime_of(card), card.get("measured", {}).get("reasons", ())
    except (AttributeError, ValueError) as error:
        raise ArtifactError(
            f"export {directory}: its card is not readable ({error}); export the student again"
        ) from error
    if judged:
        _refuse(directory, reasons)
    if find_spec(runtime) is None:
        raise SettingsError(
            f"model {directory}: is an ONNX file, which needs the package {runtime}; pip install {runtime}"
        )
    try:
        if TAGS in export.files:  # which the predictor reads without a limit, as it travels without this package
            storage.read_json(export.path / TAGS)
        loaded = PhotoClassifier(export, found.name, threads=threads)
        # An answer beforehand, so that the first request is no slower.
        loaded.of_squares(np.zeros((1, loaded.size, loaded.size, 3), np.uint8))
    except Exception as error:  # the runtimes have classes of their own
        why = limits.cut(" ".join(str(error).split()), 300)
        raise ArtifactError(f"export {directory}: cannot be loaded ({why}); export the student again") from error
    return loaded


def _refuse(place: str | Path, reasons: Sequence[object]) -> None:
    if reasons:
        raise ModelError(
            f"model {place}: did not pass its gate ({'; '.join(map(str, reasons))}); choose another one, or use it all the same (--force)"
        )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The place of a model, and its known facts."""

    name: str  # as messages name it
    directory: str
    refusals: Sequence[object] = ()  # conditions of the gate that it did not meet
    tags: ClassTags | None = None  # what is known of its classes, where the directory does not say it
    temperature: float = 1.0  # by which its logits are divided, where the directory does not say it
    threshold: float | None = None  # probability above which a class is named, where the evaluation says it


@contextmanager
def _found(place: str, *, exported: bool) -> Iterator[_Found]:
    """Find a model, whose files may be removed at the end of the block."""
    reads_runs = find_spec("torch") is not None  # the server's image has only the packages that serve
    if place.startswith(tracking.REGISTERED):
        if not os.environ.get(tracking.URI) and reads_runs:
            from trainer.runner import local_run

            local_run.track_here()
        with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
            version, files, passed = tracking.registered_model(place, Path(folder))
            directory = next((path for path in sorted(files.glob("data/*")) if artifacts.exists(path)), None)
            if directory is None:
                raise ModelError(f"model {place}: holds no student; name one that the stage register has registered")
            name = place if place == version else f"{place} ({version})"
            yield _Found(name=name, directory=str(directory), refusals=() if passed else ("its MLflow run says why",))
    elif artifacts.exists(place) or (exported and not reads_runs):
        # A server without torch reads no runs, so what is missing there is named as a missing export.
        yield _Found(name=storage.with_target(place), directory=place)
    else:
        from trainer.report import finished_run

        name = storage.with_target(place)
        where = finished_run.export_of_student(place) if exported else finished_run.find(place, STUDENT)
        evaluation = finished_run.evaluation_of_student(place)
        refusals = evaluation.figures["verdict"]["reasons"] if evaluation is not None else ()
        if exported or evaluation is None:  # an export has tags, temperature and threshold in its card
            yield _Found(name=name, directory=where, refusals=refusals)
            return
        student = evaluation.figures["student"]
        yield _Found(
            name=name,
            directory=where,
            refusals=refusals,
            tags=_tags(place, evaluation),
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


def _tags(run: str, evaluation: Manifest) -> ClassTags | None:
    """Return a run's student's tags of its classes, as they would be registered with it; None if the data set is gone or has none."""
    place = storage.join(run, DATASET.folder)
    if not artifacts.exists(place) or TAGS not in artifacts.manifest(place, "dataset").files:
        return None
    file, of_student = storage.join(place, TAGS), evaluation.parents.get("dataset")
    if of_student and of_student != (there := artifacts.manifest(place, "dataset").fingerprint):
        raise ArtifactError(
            f"{place}: is another data set (fingerprint {there[:12]}) than the student was judged on ({of_student[:12]}), so "
            "what it says of classes may be of others; end the run that began since, or use the registered model"
        )
    try:
        known = ClassTags.of(storage.read_json(file))
    except ValueError as error:
        raise ArtifactError(
            f"{file}: does not describe classes ({limits.cut(str(error), 500)}); prepare the data set again"
        ) from error
    return known.judged(evaluation.figures)
