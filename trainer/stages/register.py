"""register: log the student to MLflow, register it, and promote it if it passed."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml

from trainer.config import RegisterSettings
from trainer.data.dataset import open_dataset
from trainer.data.dataset_schema import CARD
from trainer.evaluation.embeddings import evenly_spaced
from trainer.graph import STAGES, flag
from trainer.io import artifacts, limits, storage
from trainer.io.artifacts import Artifact, Manifest
from trainer.io.base_models import flatten
from trainer.io.errors import ModelError, TrackingError
from trainer.io.formatting import listed
from trainer.models import networks, served_student
from trainer.models.networks import ModelCard
from trainer.models.served_student.class_tags import ANSWER, CONFIDENCE, NAMED, ClassTags
from trainer.models.served_student.onnx_network import runtime_of
from trainer.models.served_student.student import EXPORT_CARD, TOP_K
from trainer.objectives.distillation import recording
from trainer.profiling.evidence_files import read_evidence
from trainer.report import provenance, scores, tracking
from trainer.report.billing import Bill, StageBill, bill_here, make_bill, stage_bill
from trainer.report.finished_run import SUMMARY, Registered, build_summary
from trainer.report.tracking.stage_runs import stage_run
from trainer.stages import evaluate, profile
from trainer.stages.onnx_export import exporting
from trainer.stages.searching.search_schema import PAGE as SEARCH_PAGE
from trainer.stages.searching.search_schema import read_search
from trainer.stages.tuning.tuning_schema import read_tuning

if TYPE_CHECKING:
    from mlflow.models.model import ModelInfo
    from mlflow.tracking import MlflowClient
    from mlflow.types import Schema

logger = logging.getLogger(__name__)

_READ = ("student", "pretrain_evidence", "distill_evidence", "report", "evaluation", "exported", "search")
"""Inputs whose files are read; of the data set the card, the tags and an example are."""
_RECORDING = "reinforce.html"
"""Name of the copy of the recording's page; of the recording, which is large, nothing else is fetched."""

_ALWAYS = ("mlflow", "numpy", "pandas", "pillow")
_TORCH = (*_ALWAYS, "safetensors", "timm", "torch", "torchvision")
"""What a registered model needs: beside `_ALWAYS` what computes it."""
_DIGEST = 36  # characters of a data set's digest, at most, in MLflow
_RESULT = "\n\n---\n\n"  # between a note that was there and the description of the result
_POINTS = 200  # of a curve, at most
_LISTED = 10  # classes that the description of a version names, at most
_EXAMPLE_EDGE = 64  # the example is kept as JSON, and the student takes photos of any size
_PICTURES = "**/*.png"


def run(
    settings: RegisterSettings,
    *,
    registration: str | Path,
    recipe: str,
    resolved: Mapping[str, Any],
    **inputs: str | Path | None,
) -> Artifact:
    """Register the student where MLflow is set up, and write `summary.json` in any case.

    The version gets the alias `settings.alias` only if the student passed the gate and, unless `settings.same_classes` is false, knows the
    classes of the alias's present version. A run has one version, even if an earlier attempt was killed after registering it. A
    `TrackingError` says where the student is and how to register it later.
    """
    start = time.monotonic()
    stage = STAGES["register"]
    given: dict[str, str | Path] = {name: uri for name in stage.all_inputs if (uri := inputs.get(name))}
    # The manifest of the others is enough: the teacher and the data set may be large, and the records many gigabytes.
    made: dict[str, Manifest] = {
        name: artifacts.manifest(given[name], kind) for name, kind in stage.all_inputs.items() if name in given
    }
    read = {name: artifacts.read(given[name], made[name].kind) for name in _READ if name in given}
    read["dataset"] = artifacts.read(given["dataset"], "dataset", only=[CARD])
    if tracking.uri() and networks.load(given["student"]).card.square is None:
        raise ModelError(
            f"student {given['student']}: {networks.CONFIG} does not say how a photo becomes its input, because an older version wrote it; "
            "remove the directory and distill it again"
        )
    tuned = read_tuning(given["tuning"]) if "tuning" in given else None
    searched = read_search(given["search"]) if "search" in given else None
    distilled = {"distill": searched.chosen} if searched else {"distill": tuned.settings} if tuned else {}
    forecast = tuned.forecast if tuned else None
    stages = list(_stage_bills(made, given))
    values = settings.model_dump(mode="json")
    parents = {name: manifest.fingerprint for name, manifest in made.items()}
    with artifacts.create(registration, "registration", settings=values, parents=parents) as draft:
        shown = _reports(read)
        reports = {name: read[place].path / file for name, (place, file) in shown.items()}
        given["registration"] = registration
        if "teacher_outputs" in given:
            shown["reinforce"], reports["reinforce"] = ("registration", _RECORDING), draft.path / _RECORDING
            reports["reinforce"].write_bytes(
                storage.read_bytes(storage.join(given["teacher_outputs"], recording.REPORT))
            )
        with _explain_outage(settings, given, recipe):
            registered = _register(settings, read, given, reports, recipe, resolved, make_bill(stages, forecast))
        content = build_summary(
            recipe=recipe,
            settings={**resolved, **distilled},
            bill=make_bill([*stages, bill_here("register", time.monotonic() - start)], forecast),
            dataset=read["dataset"].figures,
            recording=made["teacher_outputs"].figures if "teacher_outputs" in made else None,
            profile=read["report"].figures,
            evaluation=read["evaluation"].figures,
            exported=read["exported"].figures if "exported" in read else None,
            search=read["search"].figures if "search" in read else None,
            registered=registered,
            provenance={
                **provenance.here(),
                "data": made["dataset"].fingerprint,
                "seed": resolved["run"]["seed"],
                "changed": provenance.differences(recipe, resolved),
            },
            examples=[
                {**one, "picture": _place(given["evaluation"], one["picture"])}
                for one in read["evaluation"].figures.get("examples", ())
            ],
            curves=_curves(given),
            reports={name: _place(given[place], file) for name, (place, file) in shown.items()},
        )
        (draft.path / SUMMARY).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        draft.figures.update(content["mlflow"])
    return artifacts.read(registration, "registration")


@contextmanager
def _explain_outage(settings: RegisterSettings, places: Mapping[str, str | Path], recipe: str) -> Iterator[None]:
    """Add to MLflow's failure that nothing is lost, and the command that goes on from here with the same inputs and output."""
    try:
        yield
    except TrackingError as error:
        words = [
            f"{tracking.URI}={tracking.shown(tracking.uri() or '')}",
            *("python", "-m", "trainer", "stage", "register"),
            *(("--recipe", recipe) if recipe else ()),
            *("--set", f"register.model_name={settings.model_name}", f"register.alias={settings.alias}"),
            *(word for name, place in places.items() for word in (f"--{flag(name)}", str(place))),
        ]
        raise type(error)(  # whether another try may help
            f"{error}. The student is safe in {places['student']}; register it later with `{shlex.join(words)}`"
        ) from error


def _stage_bills(made: Mapping[str, Manifest], given: Mapping[str, str | Path]) -> Iterator[StageBill]:
    """Yield the bill of every stage whose first output is given, with the evidence of those that train."""
    for stage in STAGES.values():
        first, *others = (spec.name for spec in stage.makes.values())
        recorded = next((name for name in others if made[name].kind == "evidence"), None)
        if first in made:
            yield stage_bill(stage.name, made[first], read_evidence(given[recorded]) if recorded else None)


def _curves(given: Mapping[str, str | Path]) -> dict[str, dict[str, Any]]:
    """Return the score on the validation split and the loss of each training, by step."""
    evidence = [read_evidence(given[name]) for name in ("pretrain_evidence", "distill_evidence")]
    found = {}
    for training in (training for one in evidence for training in one.trainings):
        score = next((name for name in scores.VAL_TITLES if name in training.metrics), "")
        curves = {"score": training.metrics.get(score), "loss": training.metrics.get("loss")}
        points = {
            kind: [
                (int(curve.steps[index]) + 1, round(float(curve.values[index]), 6))
                for index in evenly_spaced(len(curve.steps), _POINTS)
            ]
            for kind, curve in curves.items()
            if curve is not None
        }
        if points:
            last = max(step for of_kind in points.values() for step, _ in of_kind)
            found[training.name] = {"steps": last, **points}
    return found


def _reports(inputs: Mapping[str, Artifact]) -> dict[str, tuple[str, str]]:
    """Return name of each page and picture -> the input that it is in, and its name there."""
    pages = {
        "data": ("dataset", CARD),
        "profile": ("report", profile.REPORT),
        "evaluation": ("evaluation", evaluate.REPORT),
        **({"export": ("exported", exporting.PAGE)} if "exported" in inputs else {}),
        **({"search": ("search", SEARCH_PAGE)} if "search" in inputs else {}),
    }
    evidence = inputs["pretrain_evidence"].path
    pictures = [picture.relative_to(evidence) for picture in sorted(evidence.glob(_PICTURES))]
    return pages | {picture.stem: ("pretrain_evidence", picture.as_posix()) for picture in pictures}


def _place(uri: str | Path, file: str) -> str:
    """Where a file of an artifact is, for whoever reads the summary: an absolute path, or a URI."""
    return storage.join(uri, file) if storage.is_remote(uri) else str((storage.local_path(uri) / file).resolve())


def _register(
    settings: RegisterSettings,
    inputs: Mapping[str, Artifact],
    given: Mapping[str, str | Path],
    reports: Mapping[str, Path],
    recipe: str,
    resolved: Mapping[str, Any],
    bill: Bill,
) -> Registered:
    tracking_uri = tracking.uri()
    if tracking_uri is None:
        return Registered()
    figures, stays = inputs["evaluation"].figures, ""
    if "exported" in inputs:
        figures = {**figures, "export": inputs["exported"].figures}
    with stage_run("register", settings.model_dump(mode="json")) as tracker, tracking.uploading():
        with tracking.explained():
            run_id = tracking.start_parent(resolved, {"recipe": recipe}) or str(tracker.run_id)
            client = tracking.client()
            _log_results(client, run_id, figures, reports, bill)
            _log_origin(client, run_id, inputs, figures, recipe, resolved)
            version = _version(client, settings, inputs, given, run_id)
            if figures["verdict"]["passed"]:
                if settings.same_classes:
                    card = networks.outline(inputs["student"].path).card
                    stays = tracking.other_classes(settings.model_name, settings.alias, lambda: card.labels)
                if stays:
                    logger.warning("register.alias=%s stays: %s; %s", settings.alias, stays, tracking.ALIAS_ADVICE)
                else:
                    client.set_registered_model_alias(settings.model_name, settings.alias, version)
        tracking.finish_parent()
    return Registered(
        tracking_uri=tracking.shown(tracking_uri),
        run_id=run_id,
        model_name=settings.model_name,
        model_version=version,
        alias_stays=stays or None,
    )


def _log_results(
    client: MlflowClient, run_id: str, evaluation: Mapping[str, Any], reports: Mapping[str, Path], bill: Bill
) -> None:
    """Log the run's reports, pictures, figures and bill."""
    from mlflow.entities import Metric

    for name, page in reports.items():
        client.log_artifact(run_id, str(page), f"reports/{name}")
    client.log_dict(run_id, dict(evaluation), "evaluation.json")
    now_ms = int(time.time() * 1000)
    client.log_dict(run_id, bill.model_dump(mode="json"), tracking.BILL)
    stages = {one.stage: {"seconds": one.seconds, "dollars": one.dollars} for one in bill.stages}
    costs = {"bill": {**stages, "seconds": bill.seconds, "dollars": bill.dollars}}
    figures = tracking.numbers(evaluation) | tracking.numbers(costs)
    client.log_batch(run_id, metrics=[Metric(name, value, now_ms, 0) for name, value in figures.items()])


def _log_origin(
    client: MlflowClient,
    run_id: str,
    inputs: Mapping[str, Artifact],
    figures: Mapping[str, Any],
    recipe: str,
    resolved: Mapping[str, Any],
) -> None:
    """Log what the run was made of: its data sets, code, all settings as TOML, and a description that begins with what was changed."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = inputs["dataset"]
    source = str(resolved["data"]["source"])
    contexts = {"train": "training", "val": "validation", "test": "testing"}
    known = [
        DatasetInput(
            Dataset(
                name=f"{limits.cut(source, 400)} {split}",
                digest=dataset.fingerprint[:_DIGEST],
                source_type=source.partition(":")[0] or "local",
                source=json.dumps({"uri": source}),
                profile=json.dumps({"num_rows": dataset.figures[split], "classes": dataset.figures["classes"]}),
            ),
            [InputTag("mlflow.data.context", context)],
        )
        for split, context in contexts.items()
    ]
    client.log_inputs(run_id, known)
    client.log_text(run_id, _toml(resolved), "settings.toml")
    here = provenance.here()
    tags = {
        **{f"trainer.{name}": here[name] for name in ("commit", "code", "version")},
        "trainer.data": dataset.fingerprint,
        "trainer.recipe": recipe,
        "mlflow.source.git.commit": here["commit"].removesuffix("-dirty"),
    }
    changed = provenance.differences(recipe, resolved)
    lines = [f"- `{name} = {limits.toml_value(value)}`" for name, value in changed.items()]
    card = networks.outline(inputs["student"].path).card
    text = "\n\n".join(
        [
            _description(card, figures, inputs.get("exported")),
            f"Recipe {limits.printable(recipe)}" + ("; changed:" if lines else ", as it is."),
            *(["\n".join(lines)] if lines else []),
        ]
    )
    note, _, _ = (
        client.get_run(run_id).data.tags.get(tracking.NOTE_TAG, "").partition(_RESULT)
    )  # it may lead to Kubeflow
    tags[tracking.NOTE_TAG] = f"{note}{_RESULT if note else ''}{text}" if not note.startswith("**") else text
    for name, value in tags.items():
        client.set_tag(run_id, name, value)


def _toml(resolved: Mapping[str, Any]) -> str:
    """Write all settings as a recipe, without those that are not set."""
    sections = dict[str, list[str]]()
    for name, value in flatten(resolved, keep=lambda group: not group or not all(map(str.isidentifier, group))).items():
        section, _, key = name.rpartition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{key} = {limits.toml_value(value)}")
    return "\n\n".join("\n".join([f"[{section}]", *lines]) for section, lines in sections.items()) + "\n"


@contextmanager
def _served_copy(student: Artifact, figures: Mapping[str, Any], tags: ClassTags | None) -> Iterator[Path]:
    """Give a copy of the student's directory with what its evaluation has found: temperature and threshold in its card, and the tags."""
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        copy = Path(folder) / student.path.name
        parents = {**student.parents, "student": student.fingerprint}
        with artifacts.create(copy, "model", settings=student.settings, parents=parents) as draft:
            for name in student.files:
                shutil.copyfile(student.path / name, draft.path / name)
            file = draft.path / networks.CONFIG
            card = json.loads(file.read_text(encoding="utf-8"))
            card |= {name: figures[name] for name in ("temperature", "threshold") if name in figures}
            file.write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            if tags is not None:
                tags.write(draft.path)
        yield copy


def _output_schema(card: ModelCard, tags: ClassTags | None) -> Schema:
    from mlflow.types import ColSpec, DataType, Schema, TensorSpec
    from mlflow.types.schema import Array

    number, text = DataType.double, DataType.string
    columns: list[ColSpec | TensorSpec] = [ColSpec(number, label) for label in card.labels]
    kinds: dict[str, Any] = {name: number if tags.is_number(name) else text for name in tags.attributes} if tags else {}
    if card.threshold is not None:  # lists of what is named, and of what is known of each of that
        columns.append(ColSpec(Array(text), NAMED))
        kinds = {name: Array(kind) for name, kind in kinds.items()}
    elif tags is not None:
        columns += [ColSpec(text, ANSWER, required=False), ColSpec(number, CONFIDENCE)]
    # An answer may be missing, and so may an attribute; MLflow counts that as optional.
    return Schema([*columns, *(ColSpec(kind, name, required=False) for name, kind in kinds.items())])


def _log_model(
    client: MlflowClient,
    run_id: str,
    directory: Path,
    requirements: Sequence[str],
    card: ModelCard,
    dataset: str | Path,
    tags: ClassTags | None,
) -> ModelInfo:
    """Log the student as an MLflow model: its directory, the file that loads it, signature, example, pinned requirements."""
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ParamSchema, ParamSpec, Schema, TensorSpec

    folder = Path(served_student.__file__).parent
    # The one specification that lets arrays of any shape and type through. MLflow refuses a list in any case where inputs are described,
    # and without a description MLServer, with which KServe serves models of MLflow, does not load the model.
    any_images = TensorSpec(np.dtype(object), (-1,), name=None)
    experiment = client.get_run(run_id).info.experiment_id
    logged = client.create_logged_model(experiment, name="student", source_run_id=run_id, model_type="pyfunc")
    # A local version (2.15.0+cu132) is not to be had elsewhere.
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in requirements}
    pinned = [f"{name}=={version}" for name, version in versions.items()]
    dependencies = [f"python={_python()}", "pip", {"pip": pinned}]
    info: ModelInfo = Model.log(
        artifact_path=None,
        flavor=SimpleNamespace(save_model=_save_model),
        run_id=run_id,
        model_id=logged.model_id,
        loader_module=f"{folder.name}.pyfunc",
        code_paths=[str(folder)],
        data_path=str(directory),
        signature=ModelSignature(
            Schema([any_images]), _output_schema(card, tags), ParamSchema([ParamSpec(TOP_K, "long", 0)])
        ),
        input_example=example(dataset),
        conda_env={"name": "student", "channels": ["conda-forge"], "dependencies": dependencies},
        metadata={"labels": list(card.labels), "architecture": card.architecture},
    )
    return info


def _save_model(path: str, **described: Any) -> None:
    """Save a model with `mlflow.pyfunc.save_model`, but so that its environment can be made on a machine that is not like this one."""
    with warnings.catch_warnings():  # MLflow warns of its own type hints when it is imported
        warnings.filterwarnings("ignore", message=".*Any type hint is inferred", category=UserWarning)
        import mlflow.pyfunc

    # A project of uv's in the folder that a run was started in would else travel along, and MLflow would install all of it to serve.
    mlflow.pyfunc.save_model(path, uv_project_path=path, **described)
    # MLflow writes this machine's Python to the last digit, which another machine would first have to download or compile, and packages
    # to build others with, though all are to be had as wheels.
    environment = {"python": _python(), "dependencies": ["-r requirements.txt"]}
    (Path(path) / "python_env.yaml").write_text(yaml.safe_dump(environment, sort_keys=False), encoding="utf-8")


def _python() -> str:
    """Return this Python's version without its patch level."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def example(dataset: str | Path) -> npt.NDArray[np.uint8]:
    """Read a raw test image, uint8 [1, H, W, 3], thinned so that it stays small as text."""
    image = open_dataset(dataset).example().numpy()
    step = -(-image.shape[-1] // _EXAMPLE_EDGE)
    thinned: npt.NDArray[np.uint8] = np.ascontiguousarray(image[:, :, ::step, ::step].transpose(0, 2, 3, 1))
    return thinned


def _version(
    client: MlflowClient,
    settings: RegisterSettings,
    inputs: Mapping[str, Artifact],
    given: Mapping[str, str | Path],
    run_id: str,
) -> str:
    """Return the run's version of the registered model: that of an interrupted attempt, or a new one."""
    figures, parents = inputs["evaluation"].figures, inputs["student"].parents
    exported = inputs.get("exported")
    variant = exported.figures["chosen"] if exported else None
    fingerprints = {name: inputs[name].fingerprint for name in ("dataset", "student")}
    fingerprints["teacher"] = artifacts.manifest(given["teacher"], "model").fingerprint
    fingerprints |= {name: parents[name] for name in ("teacher_outputs",) if name in parents}
    tags = {
        **{f"{name}_fingerprint": value for name, value in fingerprints.items()},
        "variant": variant or "torch",
        "verdict": "passed" if figures["verdict"]["passed"] else "not passed",
        "latency_p50_ms": f"{figures['student']['latency_ms']['p50']:.3f}",
        "size_bytes": str(figures["student"]["size_bytes"]),
        "teacher": figures["teacher"]["title"],
        f"test_{scores.name(figures['student']['test'])}": f"{scores.score(figures['student']['test']):.4f}",
    }
    known = open_dataset(given["dataset"]).tags
    classes = known and known.judged(figures)
    if classes is not None and classes.threshold is not None:
        tags["answer_threshold"] = f"{classes.threshold:.6f}"
    for found in client.search_model_versions(f"run_id = '{run_id}'"):
        if found.name == settings.model_name and found.status == "READY" and tags.items() <= found.tags.items():
            return str(found.version)
    from mlflow.exceptions import MlflowException

    student = inputs["student"]
    described = networks.outline(student.path).card, given["dataset"], classes
    if exported and variant:
        runtime = runtime_of(storage.read_json(exported.path / EXPORT_CARD))
        needed = sorted((*_ALWAYS, runtime))
        model = _log_model(client, run_id, exported.path, needed, *described)
        client.log_artifacts(run_id, str(student.path), "student")  # which the model's file cannot be trained from
    else:
        with _served_copy(student, figures["student"], classes) as folder:
            model = _log_model(client, run_id, folder, _TORCH, *described)
    try:
        client.create_registered_model(settings.model_name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = client.create_model_version(
        settings.model_name,
        source=model.model_uri,
        run_id=run_id,
        tags=tags,
        description=_description(described[0], figures, exported),
        model_id=model.model_id,
    )
    return str(version.version)


def _description(card: ModelCard, figures: Mapping[str, Any], exported: Artifact | None) -> str:
    student, teacher, verdict = figures["student"], figures["teacher"], figures["verdict"]
    title, theirs, ours = scores.title(student["test"]), teacher["test"], student["test"]
    latency = f"p50 {student['latency_ms']['p50']:.2f} ms for a photo on a CPU, in torch"
    if exported and (chosen := exported.figures["chosen"]):
        served = exported.figures["candidates"][chosen]
        tested = served.get("test", served)  # exports of older versions have no more than the test images' figures
        latency = f"served as {chosen}: {scores.score(tested):.1%} test {title}, p50 {served['p50_ms']:.2f} ms for a photo on a CPU"
    ours_is, theirs_is = (
        f"{limits.printable(one['title'])}, {one['parameters']:,} parameters" for one in (student, teacher)
    )
    parts = [
        f"**{ours_is}**, distilled from {theirs_is}.",
        f"{scores.score(ours):.1%} test {title}, the teacher {scores.score(theirs):.1%}; {latency}.",
        "Passed its gate." if verdict["passed"] else f"Did not pass its gate: {'; '.join(verdict['reasons'])}.",
        f"{len(card.labels):,} classes: {limits.printable(listed(card.labels, _LISTED))}.",
    ]
    if card.origin is not None:
        terms = f", license {card.origin.license}" if card.origin.license else ""
        parts.append(f"Its training began with the weights {limits.printable(card.origin.name)}{terms}.")
    return "\n\n".join(parts)
