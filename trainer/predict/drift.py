"""Whether what a deployed student says of new photos still looks like what it said of the test photos that it was judged by.

No labels are needed: two distributions are compared, how often each class is predicted, and how sure the predictions are. Where a photo
may have several labels, each that is named counts, as if it were drawn by itself, and a photo of which none is named counts as that.
Their distance is the total variation distance, the share of the predictions that would have to fall elsewhere for both to be alike. How
likely chance alone gives such a distance comes from drawing both samples from their common distribution, which holds for rare classes too,
where the chi-square approximation does not.

Shapes: K classes or bins of confidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.evaluation.metrics import confidence_bins
from trainer.graph import EVALUATION
from trainer.io import artifacts, limits, storage
from trainer.io.errors import ArtifactError, DataError
from trainer.io.formatting import isolated, listed, percent
from trainer.predict import batch_prediction
from trainer.report import charts, finished_run, pages, provenance
from trainer.report.charts import Bar
from trainer.report.pages import Figure, PageSection, Paragraph, Table

Ints: TypeAlias = npt.NDArray[np.int64]

FEWEST = 50  # fewest predictions from which anything is said
CHANCE = 0.01  # a distance that chance alone gives less often than this is a drift, if it is large enough
_DRAWS = 9_999
_NONE = "no class is named"
_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Two distributions over the same K classes or bins."""

    names: Sequence[str]
    before: Ints  # of the test photos, [K]
    now: Ints  # of the new photos, [K]
    distance: float  # total variation distance of the two, from 0 to 1
    chance: float  # how often samples of these sizes from one distribution are as far from one another (p-value)


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The changes since the evaluation."""

    labels: Shift
    confidence: Shift
    limit: float  # smallest distance that counts
    unreadable: int  # new photos that could not be read
    left_out: Mapping[str, int]
    """Fingerprint of each other student -> how many of the predictions are of it, and were not compared."""
    unnamed: int  # predictions that were compared although they do not say of which student they are

    @property
    def reasons(self) -> list[str]:
        """Name the distributions that have drifted; empty without any."""
        return [
            f"{what} differ by {percent(shift.distance)}, which chance gives {_chance(shift)}"
            for what, shift in (("predicted classes", self.labels), ("confidences", self.confidence))
            if shift.chance < CHANCE and shift.distance >= self.limit
        ]


def shift(names: Sequence[str], before: Ints, now: Ints) -> Shift:
    """Compare two counts [K] over the same names; each must count something."""
    generator = np.random.default_rng(0)  # so that the same predictions get the same answer
    common = (before + now) / (before.sum() + now.sum())
    drawn = [generator.multinomial(int(counts.sum()), common, size=_DRAWS) for counts in (before, now)]
    distance = float(_distances(before[None], now[None])[0])
    as_far = int((_distances(*drawn) >= distance - 1e-12).sum())
    return Shift(names=names, before=before, now=now, distance=distance, chance=(as_far + 1) / (_DRAWS + 1))


def _distances(first: Ints, second: Ints) -> npt.NDArray[np.float64]:
    """Compute the total variation distance of each pair of rows, [N, K] -> [N]."""
    shares = [counts / counts.sum(axis=1, keepdims=True) for counts in (first, second)]
    distances: npt.NDArray[np.float64] = np.abs(shares[0] - shares[1]).sum(axis=1) / 2
    return distances


def compare(run: str, predictions: str, *, limit: float) -> Drift:
    """Compare predictions of a run's student with its evaluation, without those that name another student.

    Args:
        predictions: a folder with outputs of `predict --output` or of a server (`.parquet`, `.jsonl`), or one such file; here or in a
            store.
        limit: smallest distance that counts as drift.

    Raises:
        ArtifactError: the run has no evaluation of its student, or it is damaged.
        DataError: there are fewer than `FEWEST` predictions of this student, or they have other classes.
    """
    if finished_run.evaluation_of_student(run) is None:
        raise ArtifactError(f"{run}: its student was not judged, so there is nothing to compare with; run evaluate")
    labels, predicted, before = _judged(artifacts.read(finished_run.find(run, EVALUATION), "evaluation").path)
    index = {label: number for number, label in enumerate(labels)}
    several, bins = len(predicted) > len(labels), len(before)
    now, confidences, unreadable = np.zeros_like(predicted), list[float](), 0
    own, left_out, unnamed = finished_run.names_of_student(run), Counter[str](), 0
    for file, rows in _read(predictions, several=several):
        for found, probability, student in rows:
            if student and student not in own:
                left_out[student] += 1
                continue
            unnamed += not student
            if found is None:
                unreadable += 1
                continue
            if unknown := [label for label in found if not isinstance(label, str) or label not in index]:
                raise DataError(
                    f"{file}: predicts {unknown[0]!r}, which is no class of {run}; give predictions of this run's student"
                )
            if not isinstance(probability, float | int) or not 0 <= probability <= 1:
                raise DataError(
                    f"{file}: has the probability {probability!r}, which is not from 0 to 1; write the predictions again"
                )
            now[[index[label] for label in found] or [-1]] += 1
            confidences.append(probability)
    if len(confidences) < FEWEST:
        others = f" of the student of {run} ({_others(left_out)})" if left_out else ""
        raise DataError(
            f"{predictions}: holds {len(confidences)} predictions{others}, too few to compare; give at least {FEWEST}"
        )
    sure = np.bincount(confidence_bins(np.array(confidences), bins), minlength=bins)
    edges = [f"{low:.0%} to {low + 1 / bins:.0%}" for low in np.arange(bins) / bins]
    return Drift(
        labels=shift([*labels, _NONE] if several else labels, predicted, now),
        confidence=shift(edges, before, sure),
        limit=limit,
        unreadable=unreadable,
        left_out=left_out,
        unnamed=unnamed,
    )


def _others(left_out: Mapping[str, int]) -> str:
    named = listed([f"{count:,} of {student[:12]}" for student, count in left_out.items()], 3)
    return f"left out, because they are of another student: {named}"


def _judged(evaluation: Path) -> tuple[Sequence[str], Ints, Ints]:
    """Read the student's predictions of the test photos; an `ArtifactError` if a file is not what `evaluate` writes.

    Returns the labels; how often each was predicted, [K], or [K + 1] with no label last where a photo may have several; and the number of
    predictions in each bin of confidence.
    """
    file = evaluation / "metrics.json"
    try:
        student = storage.read_json(file)["student"]
        before = np.array(student["calibration"]["counts"], dtype=np.int64)
        if before.ndim != 1 or not len(before):
            raise ValueError("its counts are not one for each bin of confidence")
        several = "named" in student
        if several:
            labels = [*student["named"]]
            predicted = np.array([*student["named"].values(), student["none_named"]], dtype=np.int64)
        else:
            file = evaluation / "confusion.json"
            confusion = limits.parse_json(file.read_bytes())  # without a limit: it grows with the test images
            labels, pairs = [*confusion["labels"]], np.array(confusion["pairs"], dtype=np.int64).reshape(-1, 3)
            if not ((pairs >= 0) & (pairs < [len(labels), len(labels), np.inf])).all():
                raise ValueError("a pair has a class that is not among its labels")
            predicted = np.zeros(len(labels), dtype=np.int64)
            np.add.at(predicted, pairs[:, 1], pairs[:, 2])
        if predicted.shape != (len(labels) + several,):
            raise ValueError("its counts are not one for each class")
        if not all(isinstance(label, str) for label in labels):
            raise ValueError("a label is no text")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ArtifactError(f"{file}: is not what evaluate writes ({said}); evaluate the student again") from error
    return labels, predicted, before


def _read(predictions: str, *, several: bool) -> Iterator[tuple[str, list[tuple[list[Any] | None, Any, str]]]]:
    """Yield each file of predictions with its rows: labels, probability of the most probable label, and fingerprint of the student.

    Labels are the `named` ones where an image may have several; None for an unreadable photo. Earlier versions wrote the fingerprint of the
    model's directory; it is empty if unknown.
    """
    if not storage.is_remote(predictions) and not storage.local_path(predictions).exists():
        raise DataError(
            f"{predictions}: no such file or folder; give what `predict --output` or the server's log has written"
        )
    column = "named" if several else "label"
    is_file = not storage.is_remote(predictions) and storage.local_path(predictions).is_file()
    if is_file or predictions.endswith((".parquet", ".jsonl")):
        files = [predictions]
    else:
        files = [storage.join(predictions, name) for name in storage.files(predictions)]
    for file in files:
        try:
            if file.endswith(".parquet"):
                table = pq.read_table(pa.BufferReader(storage.read_bytes(file)), columns=[column, "probability"])
                student = batch_prediction.student_of(file, table.schema)
                found = zip(table[column].to_pylist(), table["probability"].to_pylist(), strict=True)
                rows = [(labels, probability, student) for labels, probability in found]
            elif file.endswith(".jsonl") or is_file:
                parsed = _predicted(file, column)
                rows = [(row[column], row["probability"], str(row.get("student", ""))) for row in parsed]
            else:
                continue
            if several and (wrong := [labels for labels, _, _ in rows if not isinstance(labels, list | None)]):
                raise TypeError(f"{wrong[0]!r} is no list of labels")
            yield (
                file,
                [
                    (labels if several or labels is None else [labels], probability, student)
                    for labels, probability, student in rows
                ],
            )
        except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
            said = limits.cut(next(iter(str(error).splitlines()), type(error).__name__), 300)
            raise DataError(
                f"{file}: holds no predictions ({said}); give what `predict --output` or `serve` wrote"
            ) from error


def _predicted(file: str, column: str) -> list[dict[str, Any]]:
    """Return the predictions of a server's log, without other lines: `kubectl logs` has those of both outputs, a killed server half a line.

    Raises:
        ValueError: No line is one.
    """
    found, wrong = [], ValueError("it is empty")
    for line in storage.read_bytes(file).splitlines():
        try:
            row = limits.parse_json(line)
        except ValueError as error:
            wrong = error
        else:
            if isinstance(row, dict) and row.keys() >= {column, "probability"}:
                found.append(row)
            else:
                wrong = ValueError(f"no line is an object with {column} and probability")
    if not found:
        raise wrong
    return found


def lines(drift: Drift) -> list[str]:
    """Format a comparison as text."""
    found = [
        f"{what}: {percent(one.distance)} of the predictions fall elsewhere, which chance gives {_chance(one)}"
        for what, one in (("classes", drift.labels), ("confidence", drift.confidence))
    ]
    rows = [f"  {name}: {percent(before)} -> {percent(now)}" for name, before, now in _changes(drift.labels)[:5]]
    verdict = "drifted: " + "; ".join(drift.reasons) if drift.reasons else "no drift"
    return [
        f"{drift.confidence.now.sum():,} photos against {drift.confidence.before.sum():,} test photos",
        *_notes(drift),
        *found,
        *rows,
        verdict,
    ]


def _notes(drift: Drift) -> list[str]:
    """List what was left out, and files that do not name their student."""
    notes = [_others(drift.left_out)] if drift.left_out else []
    return notes + ([f"{drift.unnamed:,} do not say of which student they are"] if drift.unnamed else [])


def _chance(one: Shift) -> str:
    return (
        f"less than once in {_DRAWS + 1:,}" if one.chance * (_DRAWS + 1) < 1.5 else f"{percent(one.chance)} of the time"
    )


def _changes(one: Shift) -> list[tuple[str, float, float]]:
    before, now = one.before / one.before.sum(), one.now / one.now.sum()
    order = np.argsort(-np.abs(now - before), kind="stable")
    return [(one.names[index], float(before[index]), float(now[index])) for index in order.tolist()]


def page(drift: Drift, run: str) -> str:
    """Build the page of a comparison, self-contained."""
    reasons = "; ".join(drift.reasons)
    verdict = Paragraph(f"Drifted: {reasons}.", "bad") if reasons else Paragraph("No drift.", "good")
    meaning = Paragraph(
        f"A distribution has drifted where it differs by at least {drift.limit:.0%} and chance alone gives that less than {CHANCE:.0%} of "
        "the time. Drift is no proof of worse answers: label some of the new photos to know.",
        "soft",
    )
    return pages.render(
        "The predictions have drifted" if reasons else "The predictions have not drifted",
        f"{drift.confidence.now.sum():,} new photos against the test photos of {isolated(storage.with_target(run))}; "
        + "; ".join([f"{drift.unreadable:,} could not be read", *_notes(drift)]),
        [
            PageSection("Verdict", [verdict, meaning]),
            _section("Predicted classes", drift.labels),
            _section("Confidence", drift.confidence, in_order=True),
        ],
        facts=provenance.here(),
    )


def _section(title: str, one: Shift, *, in_order: bool = False) -> PageSection:
    before, now = one.before / one.before.sum(), one.now / one.now.sum()
    shown = range(len(one.names)) if in_order else np.argsort(-np.maximum(before, now), kind="stable")[:_SHOWN].tolist()
    bars = []
    for index in shown:
        for name, label, share, photos in (
            ("forward", one.names[index], before[index], "test photos"),
            ("data", "", now[index], "new photos"),
        ):
            bars.append(
                Bar(name=name, label=label, value=100 * float(share), note=f"{percent(float(share))}, {photos}")
            )
    rows = [(isolated(name), percent(first), percent(then)) for name, first, then in _changes(one)[:_SHOWN]]
    return PageSection(
        title,
        [
            Paragraph(f"{percent(one.distance)} of the predictions fall elsewhere, which chance gives {_chance(one)}."),
            Figure(charts.bars(bars, "%", f"{title}: shares of the photos")),
            None if in_order else Table(("largest changes", "test photos", "new photos"), rows),
        ],
    )
