from __future__ import annotations

import copy

import pytest

from trainer import summary
from trainer.billing import StageBill, make_bill
from trainer.costs import Machines, Price
from trainer.forecast import Forecast
from trainer.summary import Registered

PRICE = Price(dollars_an_hour=36.0, date="2026-11", region="us-east-1", source="list")
EXPECTED = Forecast(
    place=Machines(pool="gpu", price=PRICE),
    hours=0.01,
    hours_low=0.009,
    hours_high=0.011,
    dollars=0.36,
    dollars_low=0.324,
    dollars_high=0.396,
)

TEACHER = {
    "architecture": "vit_base_patch16_224",
    "parameters": 469_000,
    "macs": 9_000_000,
    "size_bytes": 1_900_000,
    "latency_ms": {"p50": 2.5, "p95": 3.0},
    "throughput": 800.0,
    "test": {"top1": 0.985, "top5": 1.0, "ece": 0.01},
}
STUDENT = {
    "architecture": "vit_tiny_patch16_224",
    "parameters": 33_000,
    "macs": 600_000,
    "size_bytes": 140_000,
    "latency_ms": {"p50": 1.0, "p95": 1.4},
    "throughput": 4000.0,
    "test": {"top1": 0.95, "top5": 0.999, "agreement": 0.96, "ece": 0.02},
}


def bill(forecast=None, place=None, **seconds):
    stages = [
        StageBill(stage=name, seconds=taken, place=place, dollars=place.dollars(taken) if place else None)
        for name, taken in seconds.items()
    ]
    return make_bill(stages, forecast)


def built(**changes):
    arguments = {
        "recipe": "digits",
        "settings": {"distill": {"epochs": 4}},
        "bill": bill(prepare=1.23456, distill=40.0, profile=0.5, evaluate=3.0, register=2.0),
        "dataset": {
            "train": 1437, "val": 180, "test": 180, "unlabeled": 0, "classes": 10, "quarantined": 2, "leakage": 0,
        },
        "recording": None,
        "profile": {"verdict": "nothing slows it", "outcome": "healthy", "distill": {"step_ms": 12.0}},
        "evaluation": {"teacher": TEACHER, "student": STUDENT, "verdict": {"passed": True, "reasons": []}},
        "registered": Registered(tracking_uri="sqlite:///x.db", run_id="abc", model_name="vit-student", model_version="3"),
        "reports": {"data": "/runs/x/dataset/card.html", "evaluation": "/runs/x/evaluation/report.html"},
    }  # fmt: skip
    return summary.build(**{**arguments, **changes})


def leaves(value, prefix=""):
    if not isinstance(value, dict):
        return {prefix}
    return set().union(*(leaves(child, f"{prefix}.{name}" if prefix else name) for name, child in value.items()))


def test_every_key_of_the_contract_is_there():
    assert leaves(built()) == {
        "recipe",
        "settings.distill.epochs",
        *(f"stages.{name}.seconds" for name in ("prepare", "distill", "profile", "evaluate", "register")),
        *(f"bill.{name}" for name in ("stages", "seconds", "dollars", "forecast", "notes")),
        "profile.verdict",
        "profile.outcome",
        *(f"dataset.{name}" for name in ("train", "val", "test", "unlabeled", "classes", "quarantined")),
        *(
            f"teacher.{name}"
            for name in ("architecture", "parameters", "test.top1", "latency_ms.p50", "latency_ms.p95")
        ),
        *(f"student.test.{name}" for name in ("top1", "top5", "agreement", "ece")),
        *(
            f"student.{name}"
            for name in ("architecture", "parameters", "latency_ms.p50", "latency_ms.p95", "size_bytes")
        ),
        "verdict.passed",
        "verdict.reasons",
        *(f"mlflow.{name}" for name in ("tracking_uri", "run_id", "model_name", "model_version")),
        "reports.data",
        "reports.evaluation",
    }


def test_values_come_from_where_they_were_measured():
    content = built()
    assert content["stages"]["prepare"]["seconds"] == 1.235
    assert content["student"]["test"]["agreement"] == 0.96
    assert content["teacher"]["test"] == {"top1": 0.985}
    assert content["mlflow"]["model_version"] == "3"


def test_a_missing_figure_is_no_silent_gap():
    evaluation = {"teacher": TEACHER, "student": {}, "verdict": {"passed": True, "reasons": []}}
    with pytest.raises(KeyError, match="architecture"):
        built(evaluation=evaluation)


def test_table_shows_what_a_reader_looks_for():
    text = summary.table(built())
    for expected in (
        "1,437 train, 180 val, 180 test images of 10 classes",
        "student 95.0% test top-1, agrees with the teacher on 96.0%",
        "vit-student version 3, promoted",
        "98.50%",
        "-3.50 points",
        "14.2x smaller",
        "2.5x faster",
        "passed every condition",
        "/runs/x/evaluation/report.html",
        "sqlite:///x.db (run abc)",
    ):
        assert expected in text, expected


def test_recorded_outputs_have_their_keys_and_their_line_and_no_others_do():
    recorded = {
        "samples": 1437, "views": 30, "top_k": 10, "mib": 1.97, "bytes_per_view": 48,
        "mass": {"t1": {"mean": 0.99876, "p5": 0.99, "p1": 0.98}},
    }  # fmt: skip
    seconds = {"prepare": 1.0, "reinforce": 12.5, "distill": 40.0}
    content = built(recording=recorded, bill=bill(**seconds))
    assert content["teacher_outputs"] == recorded
    assert list(content["stages"]) == list(seconds)
    line = next(line for line in summary.table(content).splitlines() if line.startswith("reinforce"))
    assert "12.5" in line
    assert "30 views of 1,437 images in 2.0 MiB, 10 logits a view hold 99.88% of the probability" in line
    assert "reinforce" not in summary.table(built())
    assert "teacher_outputs" not in built()


def test_table_is_aligned():
    lines = summary.table(built()).splitlines()
    figures = [line for line in lines[:6] if line.startswith(("stage ", "prepare", "distill", "register"))]
    assert len({line.index(text) for line, text in zip(figures, ("main", "1,437", "student", "vit"), strict=True)}) == 1
    models = [line for line in lines if line.startswith(("test top-1", "parameters", "latency"))]
    ends = [line.index(text) + len(text) for line, text in zip(models, ("95.00%", "33,000", "1.00 ms"), strict=True)]
    assert len(set(ends)) == 1
    assert all(line == line.rstrip() for line in lines)


def test_table_of_a_failed_gate_and_an_untracked_run():
    evaluation = {
        "teacher": TEACHER,
        "student": STUDENT,
        "verdict": {"passed": False, "reasons": ["latency: too long"]},
    }
    text = summary.table(built(evaluation=evaluation, registered=Registered()))
    assert "gate not passed" in text
    assert "  - latency: too long" in text
    assert "nothing is tracked" in text
    assert "None" not in text


def test_a_student_that_is_larger_and_slower_is_called_so():
    student = copy.deepcopy(STUDENT) | {"parameters": 938_000, "latency_ms": {"p50": 5.0, "p95": 6.0}}
    text = summary.table(
        built(evaluation={"teacher": TEACHER, "student": student, "verdict": {"passed": True, "reasons": []}})
    )
    assert "2.0x larger" in text
    assert "2.0x slower" in text


def test_the_table_tells_the_verdict_on_the_trainings_and_what_was_forecast():
    lines = summary.table(built(bill=bill(EXPECTED, tune=5.0, distill=40.0, profile=1.0))).splitlines()
    shown = {line.split()[0]: line for line in lines[:4]}
    assert "forecast 36.0 s (32.4 s to 39.6 s), $0.36 ($0.32 to $0.40)" in shown["tune"]
    assert "nothing slows it" in shown["profile"]


def test_the_bill_is_in_the_table_with_dollars_where_there_is_a_price():
    priced = bill(EXPECTED, Machines(pool="gpu", instance="g5.xlarge", nodes=2, price=PRICE), distill=40.0)
    plain = bill(prepare=10.0)
    content = built(bill=make_bill([*plain.stages, *priced.stages], EXPECTED))
    text = summary.table(content)
    assert content["bill"]["dollars"] == pytest.approx(0.8)
    assert "2 nodes of gpu (g5.xlarge)  40.0 s    $0.80" in text
    assert (
        "36.0 s (32.4 s to 39.6 s), $0.36 ($0.32 to $0.40) was forecast, and it took 40.0 s, $0.80: 11.1% more" in text
    )
    assert "the dollars are without prepare (10.0 s): the price of where they ran is not known" in text
