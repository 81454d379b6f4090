"""Predictions for all photos of a folder or a bucket, in Parquet files, that a stopped run continues.

The photos are sorted by name and cut into files of the same number of photos. A file is written whole or not at all, and its name has the
digest of what it depends on: the model, the names, how many labels. So the files that are there are the progress, and nothing else is kept;
several machines take shares of the files, and then those that others have not got to.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.sources.folder_files import SourceFile, list_files
from trainer.data.sources.source import read_file
from trainer.graph import ALONE, Share
from trainer.io import limits, storage
from trainer.io.artifacts import digest
from trainer.io.errors import DataError, ObjectTooLargeError, SettingsError
from trainer.models.served_student.preprocessing import BadImageError

if TYPE_CHECKING:
    from trainer.models.served_student.student import Prediction
    from trainer.predict.photo_classifier import PhotoClassifier

logger = logging.getLogger(__name__)

SUMMARY = "_predictions.json"
"""Written last: what was asked, and how many photos were answered. Readers of a folder of Parquet files pass over such a name."""
PHOTOS_PER_FILE = 2048
_STUDENT = "student"
_BATCH, _READERS = 64, 8
_LOG_SECONDS = 30.0


def predict_folder(
    model: PhotoClassifier,
    source: str,
    output: str,
    *,
    top: int = 5,
    photos_per_file: int = PHOTOS_PER_FILE,
    share: Share = ALONE,
) -> dict[str, Any]:
    """Classify every photo of a folder; each file of predictions that is there already is kept.

    Args:
        model: what `photo_classifier.load_model` gives.
        source: a folder, here or in a store; the log counts the files that are passed over.
        output: the folder to write, here or in a store. `part-00000-DIGEST.parquet` has a row a photo, in the order of their names:
            `photo`, `label` and `probability` of the most probable class, `labels` and `probabilities` of the `top` most probable,
            `answer`, `confidence` and `attributes` where the model has tags, `named` and lists of the attributes of each of these where a
            photo may have several labels, and `error`, which is empty but for a photo that cannot be read, and then nothing else is there.
            Each file's metadata, and `_predictions.json`, have the `student`: its fingerprint.
        top: how many labels each photo gets.
        photos_per_file: how many rows each file has, but for the last.
        share: the files that this machine begins with, where others write into the same output. Each ends when all files are there, so one
            that is lost costs time and nothing else.

    Returns:
        The content of `_predictions.json`.

    Raises:
        DataError: the folder cannot be listed or holds no photo.
        SettingsError: the output has predictions of another model, other photos or another number of labels.
        StorageError: the store does not answer or refuses.
        OutputError: the output cannot be written.
    """
    found = list_files(source, "refuse")
    photos = found.photos
    if not photos:
        raise DataError(f"folder {source}: holds no photo; give a folder with image files, such as .jpg or .png")
    asked: dict[str, Any] = {
        "model": model.fingerprint,
        "tags": digest(asdict(model.tags)) if model.tags else None,
        "temperature": model.temperature,
        **({"threshold": model.threshold} if model.threshold is not None else {}),
        "top": top,
        "photos_per_file": photos_per_file,
    }
    # Not where they are, which has several spellings, but which they are and in which state.
    plan = digest([asked, [[file.name, file.state or _state(file)] for file in photos]])[:12]
    asked |= {"source": source}
    names = [f"part-{number:05d}-{plan}.parquet" for number in range(-(-len(photos) // photos_per_file))]
    there = _there(output, names)
    if kept := len(there & set(names)):
        logger.info("%d of %d files of predictions are there already", kept, len(names))
    done, shown, wrote = 0, time.monotonic(), False
    for number in _order(share, len(names)):
        if names[number] in there or (share.of > 1 and storage.exists(storage.join(output, names[number]))):
            continue
        wanted = photos[number * photos_per_file : (number + 1) * photos_per_file]
        rows: list[dict[str, Any]] = []
        for start in range(0, len(wanted), _BATCH):
            rows += _rows(model, wanted[start : start + _BATCH], top)
            done += len(wanted[start : start + _BATCH])
            if time.monotonic() - shown > _LOG_SECONDS:
                shown = time.monotonic()
                logger.info("%s photos classified", f"{done:,}")
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, schema=_schema(model)), sink, compression="zstd")
        if share.of > 1 and not wrote:
            _there(output, names)
            wrote = True
        storage.write_bytes(storage.join(output, names[number]), sink.getvalue().to_pybytes())
    asked |= {"student": model.student, "labels": list(model.labels), "photos": len(photos)}
    made = _finished(output, asked, names)
    for remark in found.remarks():
        logger.warning("%s", remark)
    return made


def _state(photo: SourceFile) -> str:
    """Return size and time of a file of this machine, by which a changed one is known; empty where it is gone."""
    try:
        found = Path(photo.location).stat()
    except OSError:
        return ""
    return f"{found.st_size} {found.st_mtime_ns}"


def _there(output: str, names: Sequence[str]) -> set[str]:
    """Return the files of the output; a `SettingsError` if some are of other predictions than these."""
    there = set(storage.files(output))
    if others := sorted(name for name in there - set(names) if name.startswith("part-")):
        raise SettingsError(
            f"--output {output}: holds {others[0]} of another model, of other or changed photos or of another --top; give an empty folder"
        )
    return there


def _order(share: Share, files: int) -> Iterator[int]:
    """Yield the numbers of all files: those of the share, then from the end on those that others begin with."""
    yield from range(share.number, files, share.of)
    for other in range(share.of - 1):
        yield from reversed(range((share.number + 1 + other) % share.of, files, share.of))


def _finished(output: str, asked: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return what `_predictions.json` says of these files; it is written if no other machine has done that."""
    _there(output, names)  # where photos came between two machines' listings, their files differ
    place = storage.join(output, SUMMARY)
    if storage.exists(place):
        try:
            made = storage.read_json(place)
        except ValueError as error:  # all that it says is in the files
            logger.warning("%s is written again: %s", place, error)
            made = None
        if isinstance(made, dict) and made == asked | {"unreadable": made.get("unreadable"), "files": list(names)}:
            return made
    written = (pa.BufferReader(storage.read_bytes(storage.join(output, name))) for name in names)
    errors = (pq.read_table(file, columns=["error"])["error"] for file in written)
    unreadable = sum(int(len(one) - one.null_count) for one in errors)
    made = asked | {"unreadable": unreadable, "files": list(names)}
    storage.write_bytes(place, f"{json.dumps(made, indent=2, ensure_ascii=False)}\n".encode())
    return made


def line(made: dict[str, Any], output: str) -> str:
    """Summarize the predictions of `predict_folder` in a line."""
    return f"{made['photos']:,} photos, {made['unreadable']:,} of them unreadable: {output}"


def _rows(model: PhotoClassifier, photos: Sequence[SourceFile], top: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(_READERS) as readers:  # reading waits for disk or store, and decoding leaves Python's lock
        read = list(readers.map(lambda photo: _square(model, photo), photos))
    squares = [one for one in read if not isinstance(one, str)]
    predictions = iter(model.answers(model.of_squares(np.stack(squares)), top=top) if squares else ())
    return [
        {"photo": photo.name, "error": one}
        if isinstance(one, str)
        else {"photo": photo.name, **_columns(next(predictions))}
        for photo, one in zip(photos, read, strict=True)
    ]


def _square(model: PhotoClassifier, photo: SourceFile) -> Any:
    """Make a photo's square, uint8 [S, S, 3], or return why it cannot be made, as a text."""
    try:
        return model.square(read_file(photo.location))
    except (BadImageError, ObjectTooLargeError, OSError) as error:
        return limits.printable_name((error.strerror if isinstance(error, OSError) else "") or str(error))


def _columns(prediction: Prediction) -> dict[str, Any]:
    labels, probabilities = list(prediction.labels), list(prediction.labels.values())
    return {
        "label": labels[0],
        "probability": probabilities[0],
        "labels": labels,
        "probabilities": probabilities,
        "answer": prediction.answer,
        "confidence": prediction.confidence,
        "attributes": dict(prediction.attributes or {}) or None,
        "named": prediction.named,
    }


def _schema(model: PhotoClassifier) -> pa.Schema:
    fields = [
        pa.field("photo", pa.string()),
        pa.field("label", pa.string()),
        pa.field("probability", pa.float64()),
        pa.field("labels", pa.list_(pa.string())),
        pa.field("probabilities", pa.list_(pa.float64())),
    ]
    several = model.threshold is not None
    if several:
        fields.append(pa.field("named", pa.list_(pa.string())))
    elif model.tags is not None:
        fields += [pa.field("answer", pa.string()), pa.field("confidence", pa.float64())]
    if model.tags is not None and model.tags.attributes:
        kinds = {name: pa.float64() if model.tags.is_number(name) else pa.string() for name in model.tags.attributes}
        each = [(name, pa.list_(kind) if several else kind) for name, kind in kinds.items()]
        fields.append(pa.field("attributes", pa.struct(each)))
    return pa.schema([*fields, pa.field("error", pa.string())], metadata={_STUDENT: model.student})


def student_of(file: str, schema: pa.Schema) -> str:
    """Return the fingerprint of the student of a file of predictions (of its model directory in earlier versions); empty if unknown."""
    if _STUDENT.encode() in (schema.metadata or {}):
        return str(schema.metadata[_STUDENT.encode()].decode())
    beside = storage.join(storage.parent(file), SUMMARY)
    if not storage.exists(beside):
        return ""
    summary = storage.read_json(beside)
    return str(summary.get("student") or summary.get("model", "")) if isinstance(summary, dict) else ""
