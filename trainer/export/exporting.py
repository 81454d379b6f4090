"""From a finished run to a directory that serves its student by ONNX Runtime: the chosen file, its card, and what was measured."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainer import artifacts, finished_run, models, storage
from trainer.artifacts import Artifact, Manifest
from trainer.config import EvaluateSettings
from trainer.data.dataset import PreparedDataset, open_dataset
from trainer.errors import ModelError, SettingsError
from trainer.evaluation import hierarchy, metrics
from trainer.evaluation.embeddings import spread
from trainer.export import int8, onnx_graph, onnx_student, variants
from trainer.export.onnx_student import OnnxStudent
from trainer.export.variants import FLOAT, LARGEST_LOSS, LARGEST_SHIFT, ServingCandidate
from trainer.graph import DATASET, STUDENT
from trainer.models import ModelCard
from trainer.served_student import preprocessing
from trainer.served_student.class_tags import TAGS

GRAPH, CARD, CANDIDATES = "model.onnx", "card.json", "candidates.json"
PACKAGES = ("onnx", "onnxruntime", "onnxscript")
CALIBRATION_IMAGES = 128
"""Training photos by which the ranges of activations are chosen."""


@dataclass(frozen=True, kw_only=True)
class ExportedStudent:
    """What an export made."""

    directory: Path
    candidates: tuple[ServingCandidate, ...]
    chosen: str


def export(run: str, output: str | Path, *, quantized: bool = True, force: bool = False) -> ExportedStudent:
    """Write the student of a run as ONNX, and choose between its variants by what they measure on this machine.

    Args:
        run: the directory of a run whose student was evaluated.
        quantized: try int8 variants, too.
        force: take fp32 where nothing passes the gate.

    Raises:
        SettingsError: the extra `export` is not installed, or the output is not empty.
        ArtifactError: the run lacks something.
        ModelError: the student was not evaluated, cannot be expressed in ONNX or answers otherwise there, or no variant passes.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(f"export: needs the package {missing[0]}; pip install 'vit-distillation-pipeline[export]'")
    if artifacts.exists(output) or (not storage.is_remote(output) and any(storage.local_path(output).glob("*"))):
        raise SettingsError(
            f"output {output}: holds something already; give a new or empty directory, or remove what is there"
        )
    evaluation = finished_run.evaluation_of_student(run)
    if evaluation is None:
        raise ModelError(f"{run}: its student was not evaluated, so no variant can be judged; complete the run first")
    student = artifacts.read(finished_run.find(run, STUDENT), "model")
    data = open_dataset(finished_run.find(run, DATASET))
    card = models.outline(student.path).card
    if card.square != data.square:
        raise ModelError(
            f"student {student.path}: takes other squares ({card.square}) than the data set has ({data.square})"
        )
    parents = {"dataset": data.fingerprint, "student": student.fingerprint, "evaluation": evaluation.fingerprint}
    with (
        tempfile.TemporaryDirectory(prefix="trainer-") as folder,
        artifacts.create(output, "export", settings={"quantized": quantized}, parents=parents) as draft,
    ):
        measured = _measured(student, data, evaluation, Path(folder), quantized=quantized)
        chosen = variants.fastest(measured)
        if chosen is None and not force:
            reasons = "; ".join(f"{one.name}: {reason}" for one in measured[1:] for reason in one.reasons)
            raise ModelError(f"{run}: no variant of its student passes the gate ({reasons}); export fp32 with --force")
        name = chosen.name if chosen else FLOAT
        shutil.copyfile(Path(folder) / f"{name}.onnx", draft.path / GRAPH)
        shutil.copyfile(preprocessing.__file__, draft.path / Path(preprocessing.__file__).name)
        known = hierarchy.served_tags(data.tags, evaluation.figures)
        if known is not None:
            known.write(draft.path)
        figures = next(asdict(one) for one in measured if one.name == name)
        _write(draft.path / CARD, contract(card, name, parents, figures, tags=known is not None))
        machine = asdict(metrics.machine())
        table = {"chosen": name, "machine": machine, "candidates": [asdict(one) for one in measured]}
        _write(draft.path / CANDIDATES, table)
        draft.figures.update({"chosen": name, **{key: figures[key] for key in ("top1", "size_bytes")}})
    made = artifacts.read(output, "export")
    return ExportedStudent(directory=made.path, candidates=tuple(measured), chosen=name)


def _measured(
    student: Artifact, data: PreparedDataset, evaluation: Manifest, folder: Path, *, quantized: bool
) -> list[ServingCandidate]:
    """Write every variant into a folder, and measure and judge each."""
    settings = EvaluateSettings.model_validate(evaluation.settings)
    model, test = models.load(student), data.split("test")
    own = variants.predict(variants.answering(model), test)
    onnx_graph.write(model, data.image_size, folder / f"{FLOAT}.onnx")
    if quantized:
        _write_int8(folder, data)
    threads = metrics.machine().threads
    students = {file.stem: OnnxStudent(file, threads=threads) for file in sorted(folder.glob("*.onnx"))}
    variants.check_float(own, variants.predict(students[FLOAT].logits, test), test)
    measured = variants.measure(
        own,
        students,
        model,
        (student.path / models.WEIGHTS).stat().st_size,
        test,
        batch_sizes=settings.latency_batch_sizes,
        runs=settings.latency_runs,
    )
    itself = measured[0]
    return [
        replace(itself, reasons=["not in ONNX; stands here for comparison"]),
        *(replace(one, reasons=_reasons(one, itself, settings, evaluation.figures)) for one in measured[1:]),
    ]


def _write_int8(folder: Path, data: PreparedDataset) -> None:
    """Write the variant with all layers of weights in int8, and one whose first and last such layer stay float."""
    train = data.split("train")
    images = variants.squares(train, spread(len(train), CALIBRATION_IMAGES))
    source = folder / f"{FLOAT}.onnx"
    layers = int8.weighted_layers(source)
    int8.quantize(source, folder / "int8.onnx", images)
    if len(layers) > 2:
        int8.quantize(source, folder / "int8-mixed.onnx", images, kept=frozenset({layers[0], layers[-1]}))


def _reasons(
    one: ServingCandidate, itself: ServingCandidate, settings: EvaluateSettings, figures: Mapping[str, Any]
) -> list[str]:
    """List the conditions that a variant does not meet: those of the run's gate, and the losses against the student itself.

    The gate's nearest neighbours are left out, since a graph gives no embeddings.
    """
    reasons = metrics.judge(
        settings.gate,
        teacher_top1=figures["teacher"]["test"]["top1"],
        student_top1=one.top1,
        teacher_parameters=figures["teacher"]["parameters"],
        student_parameters=figures["student"]["parameters"],
        student_p95_ms=one.latencies[0].p95_ms,
    )
    if itself.top1 - one.top1 > LARGEST_LOSS:
        reasons.append(
            f"accuracy: loses {100 * (itself.top1 - one.top1):.2f} points of test top-1; {LARGEST_LOSS:.0%} is allowed"
        )
    if one.shift > LARGEST_SHIFT:
        reasons.append(
            f"probabilities: gives {one.shift:.1%} of the probability to other classes than the student itself; {LARGEST_SHIFT:.0%} is "
            "allowed"
        )
    return reasons


def contract(
    card: ModelCard, variant: str, fingerprints: Mapping[str, str], measured: Mapping[str, Any], *, tags: bool
) -> dict[str, Any]:
    """Build `card.json`: all that whoever feeds the file has to know."""
    if card.square is None:
        raise AssertionError("checked before")
    size, classes = card.square.size, len(card.labels)
    return {
        "file": GRAPH,
        "variant": variant,
        "opset": onnx_graph.OPSET,
        "input": {"name": onnx_student.INPUT, "type": "uint8", "shape": ["batch", size, size, 3], "channels": "RGB"},
        "output": {"name": onnx_student.OUTPUT, "type": "float32", "shape": ["batch", classes]},
        "square": asdict(card.square),  # beside the graph, by preprocessing.py: upright 8-bit RGB, then `to_square`
        "inside": {
            "size": card.image_size,
            "interpolation": card.interpolation,
            "antialias": True,
            "mean": list(card.mean),
            "std": list(card.std),
        },
        "labels": list(card.labels),
        "tags": TAGS if tags else None,
        "architecture": card.architecture,
        "origin": asdict(card.origin) if card.origin else None,
        "fingerprints": dict(fingerprints),
        "measured": dict(measured),
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
