"""A finished run: its `summary.json`, the table and the front page of that, where its artifacts are, and runs side by side.

The keys of `summary.json` are a contract: tests, reports and people read the same file; keys are added and never renamed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.graph import EVALUATION, EXPORTED, STUDENT, ArtifactSpec
from trainer.io import artifacts, limits, storage
from trainer.io.artifacts import Manifest
from trainer.io.base_models import what_is_wrong
from trainer.io.costs import Machines, dollars_text
from trainer.io.errors import ArtifactError, ObjectNotFoundError, writing_to
from trainer.io.formatting import aligned, duration, isolated, percent, ratio, short
from trainer.io.local_files import located
from trainer.report import billing, charts, pages, scores, tracking
from trainer.report.billing import Bill
from trainer.report.forecast import Forecast
from trainer.report.pages import (
    BulletList,
    Commands,
    Figure,
    Legend,
    Links,
    PageLink,
    PageSection,
    Paragraph,
    Photo,
    PhotoGrid,
    SideBySide,
    Table,
    Tiles,
)

SUMMARY = "summary.json"
INDEX = "index.html"
TITLES = {
    "evaluation": "Evaluation",
    "export": "Export",
    "profile": "Profile of the trainings",
    "data": "Data card",
    "reinforce": "Recorded outputs",
    "search": "Search for settings",
}  # what the page of a run calls the others, the most asked for first
CAPTIONS = {"reconstructions": "Masked autoencoder: images, what it saw of them, what it made of that"}
PRICED = ("warm_up", "reinforce", "distill")  # stages that count as the distillation where runs stand side by side


@dataclass(frozen=True, kw_only=True)
class Registered:
    """Where MLflow keeps a run and its student; None where nothing is tracked."""

    tracking_uri: str | None = None
    run_id: str | None = None
    model_name: str | None = None
    model_version: str | None = None
    alias_stays: str | None = None  # why the alias did not move to a version that passed


def build_summary(
    *,
    recipe: str,
    settings: Mapping[str, Any],
    bill: Bill,
    dataset: Mapping[str, Any],
    recording: Mapping[str, Any] | None,
    profile: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    exported: Mapping[str, Any] | None,
    search: Mapping[str, Any] | None = None,
    registered: Registered,
    provenance: Mapping[str, Any] | None = None,
    examples: Sequence[Mapping[str, Any]] = (),
    curves: Mapping[str, Any] | None = None,
    reports: Mapping[str, str],
) -> dict[str, Any]:
    """Build `summary.json` from the artifacts' figures; `recording` is None with an online teacher, `exported` without an export."""
    teacher, student = evaluation["teacher"], evaluation["student"]
    of_dataset = ("train", "val", "test", "unlabeled", "classes", "quarantined")
    of_teacher = ("architecture", "title", "parameters", "latency_ms", *(("head",) if "head" in teacher else ()))
    of_student = ("architecture", "title", "parameters", "test", "latency_ms", "size_bytes")
    return {
        "recipe": recipe,
        "settings": dict(settings),
        "stages": {one.stage: {"seconds": round(one.seconds, 3)} for one in bill.stages},
        "bill": bill.model_dump(mode="json"),
        "dataset": {key: dataset[key] for key in of_dataset},
        **({"teacher_outputs": dict(recording)} if recording is not None else {}),
        "teacher": {
            **{key: teacher[key] for key in of_teacher},
            "test": {scores.name(teacher["test"]): scores.score(teacher["test"])},
        },
        "student": {key: student[key] for key in of_student},
        "profile": {key: profile.get(key, "") for key in ("verdict", "outcome")},
        "verdict": dict(evaluation["verdict"]),
        **({"provenance": dict(provenance)} if provenance else {}),
        **({"examples": list(examples)} if examples else {}),
        **({"curves": dict(curves)} if curves else {}),
        **({"export": dict(exported)} if exported is not None else {}),
        **({"search": dict(search)} if search is not None else {}),
        "mlflow": {key: value for key, value in asdict(registered).items() if key != "alias_stays" or value},
        "reports": dict(reports),
    }


def table(summary: Mapping[str, Any], page: Path) -> str:
    """Format a summary as text: the stages, what they cost, teacher against student, the verdict, and where to look: its page."""
    verdict = ["The student passed every condition of the gate."]
    if not summary["verdict"]["passed"]:
        reasons = summary["verdict"]["reasons"]
        verdict = ["The student did not pass the gate:", *(f"  - {reason}" for reason in reasons)]
    places, mlflow = [("all of it", str(page))], summary["mlflow"]
    if stays := mlflow.get("alias_stays"):
        verdict.append(f"It was not promoted: {stays}; {tracking.ALIAS_ADVICE}.")
    if mlflow["tracking_uri"]:
        pages = "" if tracking.is_server(mlflow["tracking_uri"]) else f"; `{_ui(mlflow['tracking_uri'])}` shows it"
        places.append(("mlflow", f"{mlflow['tracking_uri']} (run {mlflow['run_id']}){pages}"))
    parts = [
        _stages(summary),
        bill_table(Bill.model_validate(summary["bill"])),
        aligned(_comparison(summary), right={1, 2}),
        verdict,
        ["Where to look:", *(f"  {line}" for line in aligned(places))],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def bill_table(bill: Bill) -> list[str]:
    """Format a bill as lines: time and cost of each stage, forecast against actual, and what the total leaves out."""
    return [*aligned(billing.rows(bill), right={2, 3}), *(f"  - {text}" for text in _notes(bill))]


def _notes(bill: Bill) -> list[str]:
    return [text for text in (billing.forecast_text(bill), *bill.notes) if text]


def _stages(summary: Mapping[str, Any]) -> list[str]:
    data, teacher, student, verdict = (summary[key] for key in ("dataset", "teacher", "student", "verdict"))
    version = summary["mlflow"]["model_version"]
    promoted = "promoted" if verdict["passed"] else "not promoted"
    promoted = "not promoted (other classes)" if summary["mlflow"].get("alias_stays") else promoted
    named = f"{summary['mlflow']['model_name']} version {version}, {promoted}"
    forecast, outputs = summary["bill"]["forecast"], summary.get("teacher_outputs")
    exported = summary.get("export", {})
    title, agreement = scores.title(student["test"]), student["test"]["agreement"]
    probe = f" ({teacher['head']}: it has no head)" if "head" in teacher else ""
    figures = {
        "prepare": f"{data['train']:,} train, {data['val']:,} val, {data['test']:,} test images of {data['classes']:,} classes",
        "pretrain": f"teacher {scores.score(teacher['test']):.1%} test {title}{probe}",
        "distill": f"student {scores.score(student['test']):.1%} test {title}, agrees with the teacher on {agreement:.1%}",
        "tune": f"forecast {Forecast.model_validate(forecast)}" if forecast else "",
        "profile": summary["profile"]["verdict"] or summary["reports"].get("profile", ""),
        "evaluate": "gate passed" if verdict["passed"] else "gate not passed",
        "register": named if version else "nothing is tracked",
    }
    if chosen := exported.get("chosen"):
        own, served = (exported["candidates"][name] for name in ("torch", chosen))
        tested = served.get("test", served)  # exports of older versions have no more than the test images' figures
        figures["export"] = (
            f"{chosen}: {scores.score(tested):.1%} test {title}, p50 {served['p50_ms']:.2f} ms (torch {own['p50_ms']:.2f} ms)"
        )
    elif exported:
        figures["export"] = "no ONNX file: the registered model runs on torch"
    if search := summary.get("search"):
        found = (
            f"trial {search['best']}, {100 * search['gain']:+.1f} points on val"
            if search["best"]
            else "the recipe stays"
        )
        figures["search"] = f"{search['trials']} trials: {found}"
    if outputs is not None:
        if "mass" in outputs:
            mass = outputs["mass"]["t1"]["mean"]
            held = f"{outputs['top_k']} logits a view hold {mass:.2%} of the probability"
        else:
            embedding = f"an embedding of {outputs['features']:,} numbers"
            kept = [embedding] if outputs["features"] or "tokens" not in outputs else []
            if "tokens" in outputs:
                height, width, numbers = outputs["tokens"]
                kept.append(f"{height} x {width} patch tokens of {numbers:,} numbers")
            held = f"{' and '.join(kept)} a view"
        figures["reinforce"] = (
            f"{outputs['views']:,} views of {outputs['samples']:,} images in {outputs['mib']:,.1f} MiB, {held}"
        )
    rows = [(name, f"{stage['seconds']:.1f}", figures.get(name, "")) for name, stage in summary["stages"].items()]
    return aligned([("stage", "seconds", "main figure"), *rows], right={1})


def _comparison(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a heading and a row for each figure of the teacher and the student: name, teacher's, student's, the difference."""
    teacher, student = summary["teacher"], summary["student"]
    theirs, ours = (scores.score(model["test"]) for model in (teacher, student))
    p50 = [model["latency_ms"]["p50"] for model in (teacher, student)]
    size = [model["parameters"] for model in (teacher, student)]
    return [
        ("", "teacher", "student", ""),
        ("model", teacher["title"], student["title"], ""),
        (
            f"test {scores.title(student['test'])}",
            f"{theirs:.2%}",
            f"{ours:.2%}",
            f"{100 * (ours - theirs):+.2f} points",
        ),
        ("parameters", f"{size[0]:,}", f"{size[1]:,}", ratio(size[0], size[1], "smaller", "larger")),
        ("latency p50 (CPU)", f"{p50[0]:.2f} ms", f"{p50[1]:.2f} ms", ratio(p50[0], p50[1], "faster", "slower")),
    ]


def write_front_page(directory: Path, content: Mapping[str, Any]) -> Path:
    """Write the front page of a run from its `summary.json`, copy the pages that it leads to beside it, and return the file."""
    links, photos = list[tuple[str, str]](), list[Photo]()
    facts = _facts(directory, content)
    with writing_to(directory):
        for name, place in sorted(content["reports"].items(), key=lambda item: [*TITLES, item[0]].index(item[0])):
            if place.endswith(".html"):
                text = pages.with_facts(Path(place).read_text(encoding="utf-8"), facts)
                (directory / f"{name}.html").write_text(text, encoding="utf-8")
                links.append((f"{name}.html", TITLES.get(name, name)))
            else:
                photos.append(Photo(Path(place).read_bytes(), CAPTIONS.get(name, name)))
        cards = [_example(one) for one in content.get("examples", ())]
        file = directory / INDEX
        page = _page(directory, content, links, cards, photos)
        file.write_text(pages.with_facts(page, facts), encoding="utf-8")
    return file


def _facts(directory: Path, content: Mapping[str, Any]) -> dict[str, str | PageLink]:
    """Say where the pages of a run come from."""
    known, mlflow = content.get("provenance", {}), content["mlflow"]
    changed = known.get("changed", {})
    facts: dict[str, str | PageLink] = {
        "run": isolated(directory.resolve().name),
        "recipe": isolated(content["recipe"]),
        **{
            name: str(known[name])
            for name in ("date", "version", "commit", "code", "data", "seed", "machine")
            if name in known
        },
        "settings that differ from the recipe": ", ".join(
            f"{name}={limits.toml_value(value)}" for name, value in changed.items()
        )
        or "none",
    }
    if mlflow["tracking_uri"]:
        link = tracking.is_server(mlflow["tracking_uri"]) and not mlflow["tracking_uri"].startswith("databricks")
        address = f"{mlflow['tracking_uri'].rstrip('/')}/#/runs/{mlflow['run_id']}"
        facts["MLflow run"] = PageLink(mlflow["run_id"], address) if link else mlflow["run_id"]
    return facts


def _example(one: Mapping[str, Any]) -> Photo:
    lines = [
        (
            name,
            f"{isolated(one[name]['answer'])}  {one[name]['confidence']:.0%}",
            "good" if one[name]["answer"] == one["label"] else "bad",
        )
        for name in ("teacher", "student")
    ]
    return Photo(
        Path(one["picture"]).read_bytes(),
        limits.cut(one["source"], 60),
        answers=[("label", isolated(one["label"]), ""), *lines],
    )


def _page(
    directory: Path, content: Mapping[str, Any], links: list[tuple[str, str]], cards: list[Photo], photos: list[Photo]
) -> str:
    passed, bill = content["verdict"]["passed"], Bill.model_validate(content["bill"])
    heading, *bill_rows = billing.rows(bill)
    compared, *rows = _comparison(content)
    notes, mlflow = _notes(bill), content["mlflow"]
    tracked = f"Run {mlflow['run_id']}, {mlflow['model_name']} version {mlflow['model_version']}"
    if tracking.is_server(mlflow["tracking_uri"] or ""):
        tracked += f" at {mlflow['tracking_uri']}"
    if stays := mlflow.get("alias_stays"):
        tracked += f"; not promoted: {isolated(stays)}; {tracking.ALIAS_ADVICE}"
    verdict = (
        Paragraph("Passed: every condition of the gate holds.", "good") if passed else Paragraph("Not passed:", "bad")
    )
    return pages.render(
        f"Run {isolated(directory.resolve().name)}: the student {'passed' if passed else 'did not pass'}",
        f"Recipe {isolated(content['recipe'])}; {content['dataset']['train']:,} training images, {content['dataset']['classes']:,} classes",
        [
            _tiles(content, bill),
            Links(links),
            PageSection("Answers to test images", [PhotoGrid(cards, small=True)]) if cards else None,
            PageSection("Verdict", [verdict, *pages.gate_table(content["verdict"])]),
            PageSection("Teacher and student", [Table(compared, rows)]),
            _curves(content.get("curves", {})),
            PageSection("What next", [_commands(directory, content)]),
            PageSection("Profile", [Paragraph(content["profile"]["verdict"] or "Nothing was trained in this run.")]),
            PageSection("Bill", [Table(heading, bill_rows), BulletList(notes) if notes else None]),
            PageSection("Pictures", photos) if photos else None,
            PageSection("MLflow", [Paragraph(tracked)]) if mlflow["tracking_uri"] else None,
        ],
    )


def _tiles(content: Mapping[str, Any], bill: Bill) -> Tiles:
    teacher, student = content["teacher"], content["student"]
    theirs, ours = (scores.score(model["test"]) for model in (teacher, student))
    p50 = [model["latency_ms"]["p50"] for model in (teacher, student)]
    cost = dollars_text(bill.dollars)
    return Tiles(
        [
            ("passed" if content["verdict"]["passed"] else "not passed", "verdict of the gate"),
            (f"{ours:.1%}", f"test {scores.title(student['test'])} of the student; teacher {theirs:.1%}"),
            (
                ratio(teacher["parameters"], student["parameters"], "smaller", "larger"),
                f"{student['parameters']:,} parameters",
            ),
            (ratio(p50[0], p50[1], "faster", "slower"), f"{p50[1]:.2f} ms for a photo on the CPU"),
            (duration(bill.seconds), "for all stages" + (f", {cost}" if cost else "")),
        ]
    )


def _curves(known: Mapping[str, Any]) -> PageSection | None:
    """Draw score and loss of the teacher's and the student's training."""
    drawn = []
    for kind, unit, title in (("score", percent, "score on the validation images"), ("loss", short, "loss")):
        lines = {
            name: [(step / known[training]["steps"], value) for step, value in known[training][kind]]
            for name, training in (("teacher", "finetune"), ("student", "distill"))
            if known.get(training, {}).get(kind)
        }
        if lines:
            drawn.append((lines, Figure(charts.curves(lines, unit, title))))
    if not drawn:
        return None
    named = dict.fromkeys(name for lines, _ in drawn for name in lines)
    legend = [(f"g{series}", name) for series, name in enumerate(named)]
    return PageSection("Learning curves", [Legend(legend), SideBySide([figure for _, figure in drawn])])


def _commands(directory: Path, content: Mapping[str, Any]) -> Commands:
    """Return what can be done with the student."""
    place = directory.resolve()
    run = shlex.quote(str(place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place))
    program, force = "python -m trainer", "" if content["verdict"]["passed"] else " --force"
    commands = [("Ask the student about photos", f"{program} predict PHOTO.jpg --model {run}{force}")]
    if content.get("export", {}).get("chosen"):
        commands.append(("Serve it over HTTP, with a page to try it", f"{program} serve {run}{force}"))
    mlflow = content["mlflow"]
    if mlflow["tracking_uri"] and not tracking.is_server(mlflow["tracking_uri"]):
        commands.append(("Look at the run in MLflow", _ui(mlflow["tracking_uri"])))
    # Pods of the alias are replaced, so for a version that did not get it no command is proposed.
    if mlflow["model_version"] and content["verdict"]["passed"] and not mlflow.get("alias_stays"):
        model = shlex.quote(f"models:/{mlflow['model_name']}/{mlflow['model_version']}")
        alias = shlex.quote(content["settings"]["register"]["alias"])
        commands.append(
            ("Deploy it on a cluster whose MLflow has it", f"make deploy-student MODEL={model} ALIAS={alias}")
        )
    return Commands([*commands, ("Compare with another run", f"{program} compare RUN {run}")])


def _ui(store: str) -> str:
    """Return the command that shows a store of MLflow's."""
    is_default = store == tracking.local_uri(Path("runs"))
    return "python -m trainer ui" + ("" if is_default else f" --store {shlex.quote(store)}")


# ---- Where its artifacts are


def find(run: str, artifact: ArtifactSpec) -> str:
    """Return where a run, whose directory is here or in a store, has an artifact; an `ArtifactError` if it has none."""
    place = storage.join(run, artifact.folder)
    if not artifacts.exists(place):
        raise ArtifactError(
            f"{located(run)}: no {artifact.name} at {place}; give the directory of a completed run, or that of a model"
        )
    return place


def evaluation_of_student(run: str) -> Manifest | None:
    """Return the manifest of a run's evaluation; None where its student was not judged, an `ArtifactError` if it has none."""
    student = artifacts.manifest(find(run, STUDENT), "model").fingerprint
    place = storage.join(run, EVALUATION.folder)
    evaluation = artifacts.manifest(place, "evaluation") if artifacts.exists(place) else None
    # It may be that of an earlier student.
    return evaluation if evaluation is not None and evaluation.parents.get("student") == student else None


def names_of_student(run: str) -> set[str]:
    """Return the fingerprints by which predictions may name a run's student: its own, and that of the run's export of it."""
    student = artifacts.manifest(find(run, STUDENT), "model").fingerprint
    place = storage.join(run, EXPORTED.folder)
    export = artifacts.manifest(place, "export") if artifacts.exists(place) else None
    return {student, export.fingerprint} if export and export.parents.get("student") == student else {student}


def export_of_student(run: str) -> str:
    """Return where a run has the export of its student; an `ArtifactError` if it has none."""
    found, student = find(run, EXPORTED), storage.join(run, STUDENT.folder)
    if not artifacts.exists(student):
        raise ArtifactError(
            f"{run}: has no student, so nothing tells whether the export at {found} is of this run's; give that directory "
            "to take it all the same"
        )
    if artifacts.manifest(found, "export").parents.get("student") != artifacts.manifest(student, "model").fingerprint:
        raise ArtifactError(
            f"{run}: its student was not exported, and the export at {found} is of another one; export the student "
            f"(`python -m trainer export {run} --output DIR`) and give that directory"
        )
    return found


# ---- Accuracy and speed of runs against their cost, side by side
#
# Time and dollars are those of the distillation from the start of its processes, start-up and compilation included, and of the recording of
# the teacher's outputs and the compilation beforehand where there were any. Rates are of the training alone.


@dataclass(frozen=True, kw_only=True)
class PricedRun:
    """A run in the table; unknown values are None."""

    name: str
    place: Machines | None
    seconds: float  # billed wall time
    iterations_per_second: float | None = None
    images_per_second: float | None = None
    accuracy: float | None = None  # as a fraction
    epochs: float | None = None
    dollars: float | None = None  # of all stages that count, each at the price of the machines that it ran on
    doubts: tuple[str, ...] = ()  # what speaks against these prices

    @property
    def epoch_s(self) -> float | None:
        return self.seconds / self.epochs if self.epochs else None


def read_run(run: str | Path) -> tuple[PricedRun, Bill]:
    """Read a run by its directory, by its registration, or by its `summary.json`."""
    path = str(run) if str(run).endswith(".json") else storage.join(run, SUMMARY)
    try:
        content = storage.read_json(path)
        if isinstance(content, dict) and "bill" not in content:
            raise ArtifactError(
                f"{path}: has no bill, as those of an earlier version; register the run again, or leave it out"
            )
        bill = Bill.model_validate(content["bill"])
        accuracy, epochs = scores.score(content["student"]["test"]), float(content["settings"]["distill"]["epochs"])
    except ObjectNotFoundError as error:
        raise ArtifactError(
            f"{located(run)}: has no {SUMMARY}; give the directory of a finished run (`python -m trainer run` prints it)"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: is not the summary of a run ({error}); give the directory of a run") from error
    # The name of the run's directory, also where its registration or a link to it was given.
    folder = path.rpartition("/")[0] if storage.is_remote(path) else str(storage.local_path(path).resolve().parent)
    name = folder.removesuffix("/registration").rpartition("/")[2]
    return priced_run(name, bill, accuracy=accuracy, epochs=epochs), bill


def read_experiment(name: str) -> list[PricedRun]:
    """Read the finished runs of an MLflow experiment."""
    runs = tracking.billed_runs(name)
    if not runs:
        raise ArtifactError(
            f"experiment {name}: no run of it has a bill yet; a run has one when its stage register is done"
        )
    priced = []
    for run, params, metrics, content in runs:
        try:
            bill = Bill.model_validate_json(content)
        except ValidationError as error:
            raise ArtifactError(
                f"experiment {name}: {run}: {tracking.BILL} is not one of this version ({what_is_wrong(error)}); "
                "delete that run in MLflow, or name the directories of the runs"
            ) from error
        accuracy = metrics.get("student/test/top1", metrics.get("student/test/map"))
        epochs = float(params["distill.epochs"]) if "distill.epochs" in params else None
        priced.append(priced_run(run, bill, accuracy=accuracy, epochs=epochs))
    return priced


def priced_run(name: str, bill: Bill, *, accuracy: float | None, epochs: float | None) -> PricedRun:
    """Make a row of the table from the bill of a run."""
    distill = bill.stage("distill")
    if distill is None:
        raise ArtifactError(f"{name}: its bill has no distillation; leave it out")
    counted = [one for one in bill.stages if one.stage in PRICED]
    costs = [one.dollars for one in counted if one.dollars is not None]
    return PricedRun(
        name=name,
        place=distill.place,
        seconds=sum(one.seconds for one in counted),
        dollars=sum(costs) if len(costs) == len(counted) else None,
        doubts=tuple(one.place.price.doubt() for one in counted if one.place and one.place.price),
        iterations_per_second=distill.iterations_per_second,
        images_per_second=distill.images_per_second,
        accuracy=accuracy,
        epochs=epochs,
    )


def price_rows(entries: Sequence[PricedRun]) -> list[tuple[str, ...]]:
    """Return a heading and a row for each run, without empty columns: speeds relative to the first run, and last the winners' titles."""
    first = entries[0]
    known = {
        "cheapest": [(one.dollars, one) for one in entries if one.dollars is not None],
        "fastest": [(one.seconds, one) for one in entries],
        "most accurate": [(-one.accuracy, one) for one in entries if one.accuracy is not None],
    }
    winners = {
        title: min(pairs, key=lambda pair: pair[0])[1]
        for title, pairs in known.items()
        if len({value for value, _ in pairs}) > 1  # where runs differ
    }
    columns: Mapping[str, Callable[[PricedRun], str]] = {
        "run": lambda one: one.name,
        "where": lambda one: str(one.place or ""),
        "it/s": lambda one: _number(one.iterations_per_second, ",.2f"),
        "images/s": lambda one: _number(one.images_per_second, ",.0f"),
        "accuracy": lambda one: _number(one.accuracy, ".2%"),
        "epochs": lambda one: _number(one.epochs, ",g"),
        "an epoch": lambda one: "" if one.epoch_s is None else duration(one.epoch_s),
        "epoch speed": lambda one: _number(
            first.epoch_s / one.epoch_s if first.epoch_s and one.epoch_s else None, ".2f", "x"
        ),
        "time": lambda one: duration(one.seconds),
        "dollars": lambda one: dollars_text(one.dollars),
        "$/point": lambda one: _number(
            one.dollars / (100 * one.accuracy) if one.dollars is not None and one.accuracy else None, ",.4f"
        ),
        "price of": lambda one: one.place.price.date if one.place and one.place.price else "",
        "": lambda one: ", ".join(title for title, best in winners.items() if one is best),
    }
    shown = {title: [cell(one) for one in entries] for title, cell in columns.items()}
    kept = {title: cells for title, cells in shown.items() if any(cells)}
    return [tuple(kept), *(tuple(cells[index] for cells in kept.values()) for index in range(len(entries)))]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def price_table(entries: Sequence[PricedRun]) -> list[str]:
    """Format the table as text, with notes on its coverage and on doubtful prices."""
    doubts = dict.fromkeys(doubt for one in entries for doubt in one.doubts)
    table = price_rows(entries)
    text = ("run", "where", "price of", "")
    return [
        *aligned(table, right={index for index, title in enumerate(table[0]) if title not in text}),
        "",
        f"Time and dollars: {', '.join(PRICED)}, with start-up and compilation. Rates: while it trained.",
        *(f"  - {doubt}" for doubt in doubts if doubt),
    ]
