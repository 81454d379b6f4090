"""`summary.json`: what a run made, and the table of it that ends a run.

Its keys are a contract: tests, reports and people read the same file; keys are added and never renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer import billing
from trainer.billing import Bill
from trainer.forecast import Forecast

SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Registered:
    """Where MLflow keeps a run and its student; None where nothing is tracked."""

    tracking_uri: str | None = None
    run_id: str | None = None
    model_name: str | None = None
    model_version: str | None = None


def build(
    *,
    recipe: str,
    settings: Mapping[str, Any],
    bill: Bill,
    dataset: Mapping[str, Any],
    recording: Mapping[str, Any] | None,
    profile: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    registered: Registered,
    reports: Mapping[str, str],
) -> dict[str, Any]:
    """Build the content of `summary.json` from the figures of the artifacts; `recording` is None where the teacher ran in every step."""
    teacher, student = evaluation["teacher"], evaluation["student"]
    of_dataset = ("train", "val", "test", "unlabeled", "classes", "quarantined")
    of_teacher = ("architecture", "parameters", "latency_ms")
    of_student = ("architecture", "parameters", "test", "latency_ms", "size_bytes")
    return {
        "recipe": recipe,
        "settings": dict(settings),
        "stages": {one.stage: {"seconds": round(one.seconds, 3)} for one in bill.stages},
        "bill": bill.model_dump(mode="json"),
        "dataset": {key: dataset[key] for key in of_dataset},
        **({"teacher_outputs": dict(recording)} if recording is not None else {}),
        "teacher": {**{key: teacher[key] for key in of_teacher}, "test": {"top1": teacher["test"]["top1"]}},
        "student": {key: student[key] for key in of_student},
        "profile": {key: profile.get(key, "") for key in ("verdict", "outcome")},
        "verdict": dict(evaluation["verdict"]),
        "mlflow": asdict(registered),
        "reports": dict(reports),
    }


def table(summary: Mapping[str, Any]) -> str:
    """Format a summary as text: the stages, what they cost, teacher against student, the verdict, and where to look."""
    verdict = ["The student passed every condition of the gate."]
    if not summary["verdict"]["passed"]:
        reasons = summary["verdict"]["reasons"]
        verdict = ["The student did not pass the gate:", *(f"  - {reason}" for reason in reasons)]
    places, mlflow = [*summary["reports"].items()], summary["mlflow"]
    if mlflow["tracking_uri"]:
        places.append(("mlflow", f"{mlflow['tracking_uri']} (run {mlflow['run_id']})"))
    parts = [
        _stages(summary),
        bill_table(Bill.model_validate(summary["bill"])),
        _comparison(summary),
        verdict,
        ["Where to look:", *(f"  {line}" for line in aligned(places))],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def bill_table(bill: Bill) -> list[str]:
    """Format a bill as lines: what each stage took and cost, forecast against actual, and what the total leaves out."""
    said = [billing.forecast_text(bill), *bill.notes]
    return [*aligned(billing.rows(bill), right={2, 3}), *(f"  - {text}" for text in said if text)]


def _stages(summary: Mapping[str, Any]) -> list[str]:
    data, teacher, student, verdict = (summary[key] for key in ("dataset", "teacher", "student", "verdict"))
    version = summary["mlflow"]["model_version"]
    promoted = "promoted" if verdict["passed"] else "not promoted"
    named = f"{summary['mlflow']['model_name']} version {version}, {promoted}"
    forecast, outputs = summary["bill"]["forecast"], summary.get("teacher_outputs")
    figures = {
        "prepare": f"{data['train']:,} train, {data['val']:,} val, {data['test']:,} test images of {data['classes']:,} classes",
        "pretrain": f"teacher {teacher['test']['top1']:.1%} test top-1",
        "distill": f"student {student['test']['top1']:.1%} test top-1, agrees with the teacher on {student['test']['agreement']:.1%}",
        "tune": f"forecast {Forecast.model_validate(forecast)}" if forecast else "",
        "profile": summary["profile"]["verdict"] or summary["reports"].get("profile", ""),
        "evaluate": "gate passed" if verdict["passed"] else "gate not passed",
        "register": named if version else "nothing is tracked",
    }
    if outputs is not None:
        figures["reinforce"] = (
            f"{outputs['views']:,} views of {outputs['samples']:,} images in {outputs['mib']:,.1f} MiB, {outputs['top_k']} logits a view "
            f"hold {outputs['mass']['t1']['mean']:.2%} of the probability"
        )
    rows = [(name, f"{stage['seconds']:.1f}", figures.get(name, "")) for name, stage in summary["stages"].items()]
    return aligned([("stage", "seconds", "main figure"), *rows], right={1})


def _comparison(summary: Mapping[str, Any]) -> list[str]:
    teacher, student = summary["teacher"], summary["student"]
    points = 100 * (student["test"]["top1"] - teacher["test"]["top1"])
    p50 = [model["latency_ms"]["p50"] for model in (teacher, student)]
    return aligned(
        [
            ("", "teacher", "student", ""),
            ("architecture", teacher["architecture"], student["architecture"], ""),
            ("test top-1", f"{teacher['test']['top1']:.2%}", f"{student['test']['top1']:.2%}", f"{points:+.2f} points"),
            (
                "parameters",
                f"{teacher['parameters']:,}",
                f"{student['parameters']:,}",
                ratio(teacher["parameters"], student["parameters"], "smaller", "larger"),
            ),
            ("latency p50 (CPU)", f"{p50[0]:.2f} ms", f"{p50[1]:.2f} ms", ratio(p50[0], p50[1], "faster", "slower")),
        ],
        right={1, 2},
    )


def ratio(teacher: float, student: float, less: str, more: str) -> str:
    """Compare the student's figure with the teacher's: `10.0x smaller`, with a word for less and one for more."""
    return f"{teacher / student:.1f}x {less}" if teacher >= student else f"{student / teacher:.1f}x {more}"


def aligned(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Format lines with columns as wide as their widest cell, two spaces apart; those in `right` are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    forms = [f"{'>' if column in right else '<'}{width}" for column, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]
