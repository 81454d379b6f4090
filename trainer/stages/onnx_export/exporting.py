"""From a finished run to a directory that serves its student by ONNX Runtime: the chosen file, its card, and what was measured.

Variants are compared and chosen on validation images. The test images are answered after that, by the student and by what was chosen, for
the score that is published and for the gate.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config import EvaluateSettings, ExportSettings
from trainer.data.dataset import PreparedDataset, open_dataset
from trainer.data.dataset_schema import SplitName
from trainer.evaluation import metrics
from trainer.evaluation.embeddings import evenly_spaced
from trainer.graph import DATASET, EVALUATION, STAGES, STUDENT
from trainer.io import artifacts, storage
from trainer.io.artifacts import Artifact, Manifest
from trainer.io.errors import ArtifactError, ModelError, SettingsError
from trainer.io.storage.writers import one_writer
from trainer.models import networks
from trainer.models.networks import Classifier, ModelCard
from trainer.models.onnx_student import Logits, OnnxStudent, Pixels
from trainer.models.served_student import preprocessing
from trainer.models.served_student.class_tags import TAGS
from trainer.models.served_student.onnx_network import INPUT, ONNX_RUNTIME, OPENVINO, OUTPUT
from trainer.models.served_student.preprocessing import Square
from trainer.models.served_student.student import EXPORT_CARD
from trainer.report import finished_run, scores
from trainer.stages.onnx_export import int8, missing_package, onnx_graph, variants
from trainer.stages.onnx_export.variants import FLOAT, FinalFigures, Scoring, ServingCandidate

logger = logging.getLogger(__name__)

_LITTLE = 0.005  # score on the validation images that an int8 variant may lose without being fine-tuned
_IN_OPENVINO = f"-{OPENVINO}"  # suffix of variants that OpenVINO computes
GRAPH, CARD, CANDIDATES, PAGE = "model.onnx", EXPORT_CARD, "candidates.json", "export.html"


@dataclass(frozen=True, kw_only=True)
class ExportedStudent:
    """What an export made."""

    directory: Path
    candidates: Sequence[ServingCandidate]
    """The student itself and its variants, as measured; none where there is no ONNX file of it."""
    chosen: str | None  # name of the variant in `GRAPH`; None without one


class _Images:
    """Images of a split on which answers are compared."""

    def __init__(
        self, data: PreparedDataset, split: SplitName, settings: ExportSettings, student: Mapping[str, Any]
    ) -> None:
        """Take at most `settings.test_images` of the split; `student` is what the evaluation says of it."""
        self.split = data.split(split)
        self.indices = evenly_spaced(len(self.split), settings.test_images)
        self.yardstick = Scoring(
            labels=self.split.labels[self.indices],
            temperature=student.get("temperature", 1.0),
            targets=data.targets,
            threshold=student.get("threshold", 0.5),
        )

    def answers(self, answer: Callable[[Pixels], Logits]) -> Logits:
        """Let something answer all of them."""
        return variants.predict(answer, self.split, self.indices)


@dataclass(frozen=True, kw_only=True)
class _Variants:
    """A student and the files of its variants."""

    model: Classifier
    size_bytes: int  # size of the weights
    students: Mapping[str, OnnxStudent]  # by the variant's name
    logits: Mapping[str, Logits]  # of the student (`torch`) and each variant for the validation images


def export(
    run: str, output: str | Path, *, quantized: bool = True, openvino: bool = False, force: bool = False
) -> ExportedStudent:
    """Write the student of an evaluated run as ONNX, and choose between its variants by measurements on this machine.

    Args:
        quantized: try int8 variants, too.
        openvino: try each variant in OpenVINO, too.
        force: take fp32 where nothing passes the gate.

    Raises:
        SettingsError: the extra `export` is not installed, or the output is not empty.
        ModelError: the student was not evaluated, cannot be expressed in ONNX or gives other logits there, or no variant passes.
    """
    if missing := missing_package():
        raise SettingsError(f"export: needs the package {missing}; pip install 'vit-distillation-pipeline[export]'")
    if openvino and missing_package(OPENVINO):
        raise SettingsError(f"export: --openvino needs the package {OPENVINO}; pip install {OPENVINO}")
    if artifacts.exists(output) or (not storage.is_remote(output) and any(storage.local_path(output).glob("*"))):
        raise SettingsError(
            f"output {output}: holds something already; give a new or empty directory, or remove what is there"
        )
    if finished_run.evaluation_of_student(run) is None:
        raise ModelError(f"{run}: its student was not evaluated, so no variant can be judged; complete the run first")
    given = {spec.name: finished_run.find(run, spec) for spec in (DATASET, STUDENT, EVALUATION)}
    artifacts.check_related(given, STAGES["export"].inputs)
    with one_writer([output]):
        return make(ExportSettings(int8=quantized, openvino=openvino), output, **given, strict=True, force=force)


def make(
    settings: ExportSettings,
    output: str | Path,
    *,
    dataset: str | Path,
    student: str | Path,
    evaluation: str | Path,
    strict: bool = False,
    force: bool = False,
) -> ExportedStudent:
    """Measure the variants of a student, and write the fastest that passes the gate, with its card and all measurements.

    With `strict` a variant that cannot be made, or none that passes, is an error in place of a note; `force` takes fp32 then.
    """
    made, data = artifacts.read(student, "model"), open_dataset(dataset)
    judged = artifacts.manifest(evaluation, "evaluation")
    try:
        scores.name(judged.figures["teacher"]["test"])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"evaluation {evaluation}: {artifacts.MANIFEST} has no score of the teacher ({error}); evaluate the student again"
        ) from error
    card = networks.outline(made.path).card
    if card.square != data.square:
        raise ModelError(
            f"student {made.path}: takes other squares ({card.square}) than the data set has ({data.square}); give the data set "
            "that it was trained on, or train it again"
        )
    parents = {"dataset": data.fingerprint, "student": made.fingerprint, "evaluation": judged.fingerprint}
    val, test = (_Images(data, split, settings, judged.figures["student"]) for split in ("val", "test"))
    notes, measured, chosen = list[str](), list[ServingCandidate](), None
    with (
        tempfile.TemporaryDirectory(prefix="trainer-") as folder,
        artifacts.create(output, "export", settings=settings.model_dump(mode="json"), parents=parents) as draft,
    ):
        for file in (GRAPH, CARD, Path(preprocessing.__file__).name, TAGS, CANDIDATES, PAGE):
            (draft.path / file).unlink(missing_ok=True)  # of an earlier try, where this one makes none
        try:
            tried = _make_variants(settings, made, data, val, Path(folder), notes, strict=strict)
            measured = _measured(settings, tried, val, judged)
            measured, chosen = _choose(measured, tried, test, judged, force=force)
            if chosen is None:
                floating = next(one for one in measured if one.name == FLOAT)
                raise ModelError(
                    f"student {made.path}: no variant of it passes the gate ({FLOAT}: {'; '.join(floating.reasons)}); "
                    f"`python -m trainer export RUN --force` takes {FLOAT} all the same"
                )
        except ModelError as error:
            _note(error, notes, strict=strict)
        if chosen is not None:
            shutil.copyfile(Path(folder) / f"{chosen.name.removesuffix(_IN_OPENVINO)}.onnx", draft.path / GRAPH)
            shutil.copyfile(preprocessing.__file__, draft.path / Path(preprocessing.__file__).name)
            known = data.tags and data.tags.judged(judged.figures)
            if known is not None:
                known.write(draft.path)
            found = contract(card, data.square, chosen, parents, judged.figures["student"], tags=known is not None)
            _write(draft.path / CARD, found)
        machine, name = metrics.machine(), chosen.name if chosen is not None else None
        images = {"val": len(val.indices), "test": len(test.indices)}
        table = {"chosen": name, "notes": notes, "images": images, "candidates": [*map(variants.record, measured)]}
        _write(draft.path / CANDIDATES, {"machine": asdict(machine), **table})
        (draft.path / PAGE).write_text(
            variants.page(card.title, measured, name, notes, machine, images=images), encoding="utf-8"
        )
        figures = {one.name: variants.figures(one) for one in measured}
        why_not = notes if chosen is None else list(chosen.reasons)
        draft.figures.update({"chosen": name, "reasons": why_not, "candidates": figures})
    if chosen is not None and chosen.test is not None:
        logger.info(
            "export  %s is chosen: test %s %.2f%%, p50 %.2f ms",
            chosen.name,
            scores.TITLES[chosen.measure],
            100 * chosen.test.score,
            chosen.latencies[0].p50_ms,
        )
    return ExportedStudent(directory=artifacts.read(output, "export").path, candidates=measured, chosen=name)


def _note(error: ModelError, notes: list[str], *, strict: bool) -> None:
    """Note and log why there is no such file, unless that is to end the export."""
    if strict:
        raise error
    logger.warning("export  %s", error)
    notes.append(str(error))


def _make_variants(
    settings: ExportSettings,
    student: Artifact,
    data: PreparedDataset,
    val: _Images,
    folder: Path,
    notes: list[str],
    *,
    strict: bool,
) -> _Variants:
    """Write every variant into a folder, and let each answer the validation images: the student itself first, then fp32."""
    model = networks.load(student)
    names, threads = [val.split.names[index] for index in val.indices], metrics.machine().threads
    logits = {"torch": val.answers(variants.answering(model))}
    students: dict[str, OnnxStudent] = {}

    def ask(file: Path) -> None:
        """Let each runtime answer by a file."""
        for runtime in (ONNX_RUNTIME, *([OPENVINO] if settings.openvino else [])):
            name = file.stem + (_IN_OPENVINO if runtime == OPENVINO else "")
            try:
                student_there = OnnxStudent(file, threads=threads, runtime=runtime)
                answers = val.answers(student_there.logits)
                if file.stem == FLOAT:
                    variants.check_float(logits["torch"], answers, names)
                students[name], logits[name] = student_there, answers
            except ModelError as error:
                if name == FLOAT:
                    raise
                _note(error, notes, strict=strict)

    def keeps_answers(name: str) -> bool:
        """Whether a variant loses little enough to be left as it is."""
        found, own, yardstick = logits[name], logits["torch"], val.yardstick
        lost = yardstick.score(own) - yardstick.score(found)
        return lost <= _LITTLE and yardstick.shift(own, found) <= settings.max_shift

    onnx_graph.write(model, data.image_size, folder / f"{FLOAT}.onnx")
    ask(folder / f"{FLOAT}.onnx")
    if settings.int8:
        train = data.sample("train")
        images = variants.squares(train, evenly_spaced(len(train), settings.calibration_images))
        try:
            for file in _write_int8(folder, images):
                ask(file)
            tried = [name for name in logits if name.startswith("int8")]
            if settings.finetune_steps and tried and not any(map(keeps_answers, tried)):
                tuned = int8.finetune(model, train, steps=settings.finetune_steps, by_class=data.targets is not None)
                # write the int8 variant of a student that was fine-tuned for it
                with tempfile.TemporaryDirectory(dir=folder) as inner:
                    source, file = Path(inner) / f"{FLOAT}.onnx", folder / "int8-tuned.onnx"
                    onnx_graph.write(tuned, data.image_size, source)
                    int8.quantize(source, file, images)
                ask(file)
        except ModelError as error:
            _note(error, notes, strict=strict)
    size_bytes = (student.path / networks.WEIGHTS).stat().st_size
    return _Variants(model=model, size_bytes=size_bytes, students=students, logits=logits)


def _measured(settings: ExportSettings, tried: _Variants, val: _Images, evaluation: Manifest) -> list[ServingCandidate]:
    """Time the student itself and its variants, and judge each by its answers to the validation images."""
    evaluated = EvaluateSettings.model_validate(evaluation.settings)
    itself, *others = variants.measure(
        tried.logits,
        tried.students,
        tried.model,
        tried.size_bytes,
        val.split,
        val.indices,
        yardstick=val.yardstick,
        batch_sizes=evaluated.latency_batch_sizes,
        runs=evaluated.latency_runs,
    )
    return [
        replace(itself, reasons=["not in ONNX; stands here for comparison"]),
        *(replace(one, reasons=_reasons(one, itself, settings, evaluated, evaluation.figures)) for one in others),
    ]


def _choose(
    measured: Sequence[ServingCandidate], tried: _Variants, test: _Images, evaluation: Manifest, *, force: bool
) -> tuple[list[ServingCandidate], ServingCandidate | None]:
    """Choose by the measurements and test the choice: the candidates with figures of the tested ones, and the chosen name or None.

    A chosen variant that fails the gate gives way to fp32, which equals the student, so its test score decides nothing. `force` takes
    fp32 even where it fails.
    """
    by_name = {one.name: one for one in measured}
    best, own = variants.fastest(measured), test.answers(variants.answering(tried.model))
    by_name["torch"] = replace(by_name["torch"], test=_final(own, own, test))
    chosen: ServingCandidate | None = None
    for name in dict.fromkeys([*([best.name] if best else []), FLOAT]):
        one, final = by_name[name], _final(test.answers(tried.students[name].logits), own, test)
        by_name[name] = chosen = replace(one, test=final, reasons=[*one.reasons, *_refused(final, evaluation)])
        if not chosen.reasons:
            break
    return [*by_name.values()], chosen if chosen and (force or not chosen.reasons) else None


def _final(answers: Logits, own: Logits, test: _Images) -> FinalFigures:
    """Compare answers to the test images with the labels and with the student's own."""
    yardstick = test.yardstick
    return FinalFigures(
        score=yardstick.score(answers), same=yardstick.same(answers, own), shift=yardstick.shift(own, answers)
    )


def _refused(final: FinalFigures, evaluation: Manifest) -> list[str]:
    """List the conditions of the run's gate that the test images fail, without nearest neighbors: a graph gives no embeddings."""
    teacher = evaluation.figures["teacher"]["test"]
    conditions = metrics.judge_scores(
        EvaluateSettings.model_validate(evaluation.settings).gate,
        teacher_score=scores.score(teacher),
        student_score=final.score,
        title=scores.title(teacher),
    )
    return [one.reason for one in conditions if one.reason]


def _write_int8(folder: Path, images: Pixels) -> list[Path]:
    """Write the variant with all layers of weights in int8, and one whose first and last such layer stay float."""
    source, files = folder / f"{FLOAT}.onnx", [folder / "int8.onnx"]
    layers = int8.weighted_layers(source)
    int8.quantize(source, files[0], images)
    if len(layers) > 2:
        files.append(folder / "int8-mixed.onnx")
        int8.quantize(source, files[1], images, kept=frozenset({layers[0], layers[-1]}))
    return files


def _reasons(
    one: ServingCandidate,
    itself: ServingCandidate,
    settings: ExportSettings,
    evaluated: EvaluateSettings,
    figures: Mapping[str, Any],
) -> list[str]:
    """List the conditions that a variant does not meet: the gate's on size and latency, and the losses against the student itself."""
    conditions = metrics.judge_cost(
        evaluated.gate,
        teacher_parameters=figures["teacher"]["parameters"],
        student_parameters=figures["student"]["parameters"],
        student_p95_ms=one.latencies[0].p95_ms,
    )
    reasons = [condition.reason for condition in conditions if condition.reason]
    title = scores.TITLES[one.measure]
    if itself.score - one.score > settings.max_accuracy_loss:
        reasons.append(
            f"accuracy: loses {100 * (itself.score - one.score):.2f} points of validation {title}; export.max_accuracy_loss allows "
            f"{100 * settings.max_accuracy_loss:.2f}"
        )
    if one.shift > settings.max_shift:
        reasons.append(
            f"probabilities: gives {one.shift:.1%} of the probability to other classes than the student itself; export.max_shift allows "
            f"{settings.max_shift:.1%}"
        )
    return reasons


def contract(
    card: ModelCard,
    square: Square,
    chosen: ServingCandidate,
    fingerprints: Mapping[str, str],
    measured: Mapping[str, Any],
    *,
    tags: bool,
) -> dict[str, Any]:
    """Build `card.json`: all that whoever feeds the file has to know. `measured` is what the evaluation says of the student."""
    size, classes = square.size, len(card.labels)
    return {
        "file": GRAPH,
        "runtime": chosen.runtime,
        "variant": chosen.name,
        "opset": onnx_graph.OPSET,
        "input": {"name": INPUT, "type": "uint8", "shape": ["batch", size, size, 3], "channels": "RGB"},
        "output": {"name": OUTPUT, "type": "float32", "shape": ["batch", classes]},
        "square": asdict(square),  # beside the graph, by preprocessing.py: upright 8-bit RGB, then `to_square`
        "inside": {
            "size": card.image_size,
            "interpolation": card.interpolation,
            "antialias": True,
            "mean": list(card.mean),
            "std": list(card.std),
        },
        "labels": list(card.labels),
        # Probabilities are the softmax of logits / temperature; where there is a threshold, their sigmoid, and classes above it are named.
        "temperature": measured.get("temperature", 1.0),
        **({"threshold": measured["threshold"]} if "threshold" in measured else {}),
        "tags": TAGS if tags else None,
        "architecture": card.architecture,
        "origin": asdict(card.origin) if card.origin else None,
        "fingerprints": dict(fingerprints),
        "measured": variants.record(chosen),
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
