from __future__ import annotations

import datetime

import pytest

from trainer.config import EvidenceSettings
from trainer.io import artifacts
from trainer.io.costs import PLACE_VARIABLE, Machines, Price
from trainer.profiling.evidence import (
    AttemptRecord,
    CompilationRecord,
    Evidence,
    OutsideRecord,
    ProcessRecord,
    RankEvidence,
    RankRecord,
    Spans,
    StepRecord,
    TensorSamples,
    TrainingEvidence,
)
from trainer.report import billing
from trainer.report.billing import Bill, bill_here, make_bill, stage_bill
from trainer.report.forecast import Forecast

BEGAN = 1_790_000_000.0
PRICE = Price(dollars_an_hour=36.0, date="2026-11", region="us-east-1", source="list")
GPUS = Machines(pool="gpu", instance="g5.xlarge", nodes=2, price=PRICE)


def record(**changes):
    values = {
        "schema_version": 2,
        "name": "distill",
        "rank": 0,
        "world_size": 1,
        "device": "cpu",
        "host": "node",
        "cores": 2,
        "memory_bytes": 1,
        "process": ProcessRecord(pid=1, started_unix=BEGAN, imported_unix=BEGAN + 4),
        "place": GPUS,
        "began_unix": BEGAN + 10,
        "first_step_s": 2.0,
        "ended_s": 100.0,
        "settings": EvidenceSettings(),
        "steps": StepRecord(count=170, kept_of=1, lost=0, seconds=88.0, images=5440, ranges={}),
        "outside": {
            "evaluate": OutsideRecord(count=2, seconds=6.0),
            "checkpoint": OutsideRecord(count=1, seconds=2.0),
            "between": OutsideRecord(count=170, seconds=4.0),
        },
        "compilations": (CompilationRecord(step=0, graphs=1, seconds=5.0), CompilationRecord(step=9, graphs=1, seconds=1.0)),
        "overhead": {"tensors": 0.75, "rules": 0.25},
        "system_interval_s": 0.5,
        "operators": None,
        "missing": {},
    }  # fmt: skip
    return RankRecord(**{**values, **changes})


def evidence(tmp_path, *records):
    nothing = TensorSamples(steps=[], seconds=[], tensors=[], values={})
    spans = Spans(names=[], start_s=[], seconds=[])
    ranks = [RankEvidence(record=one, steps={}, spans=spans, tensors=nothing, system={}) for one in records]
    trainings = [TrainingEvidence(name=rank.record.name, ranks=[rank], metrics={}) for rank in ranks]
    return Evidence(path=tmp_path, fingerprint="", trainings=trainings)


def manifest(**changes):
    values = {
        "kind": "model",
        "settings": {},
        "parents": {},
        "files": {},
        "fingerprint": "",
        "created": datetime.datetime.fromtimestamp(BEGAN + 113, datetime.UTC),
        "seconds": 104.0,
        "startup_seconds": 9.0,
        "device": "cuda",
        "code": None,
        "source_version": None,
        "place": None,
        "figures": {},
    }
    return artifacts.Manifest(**{**values, **changes})


@pytest.mark.parametrize(("beside_s", "compiled"), [(4.0, 10.0), (9.0, 12.0)])
def test_what_a_validation_compiles_is_no_evaluation(tmp_path, beside_s, compiled):
    """On XLA; no more than the validations took."""
    parts = stage_bill("distill", manifest(), evidence(tmp_path, record(compile_beside_s=beside_s))).parts
    assert parts["compilation"] == pytest.approx(compiled)
    assert parts["compilation"] + parts.get("evaluation", 0.0) == pytest.approx(12)
    assert parts["training"] == pytest.approx(85)


def test_a_training_is_billed_from_start_to_end(tmp_path):
    bill = stage_bill("distill", manifest(), evidence(tmp_path, record()))
    assert bill.parts == pytest.approx(
        {
            "startup": 10.0,
            "compilation": 6.0,
            "training": 85.0,
            "evaluation": 6.0,
            "checkpoints": 2.0,
            "recorder": 1.0,
            "ending": 3.0,
        }
    )
    assert bill.seconds == pytest.approx(113)
    assert bill.dollars == pytest.approx(113 * 2 * 36 / 3600)
    assert bill.iterations_per_second == pytest.approx(2.0)
    assert bill.images_per_second == pytest.approx(64.0)


def test_a_failure_loses_what_no_checkpoint_kept(tmp_path):
    first = AttemptRecord(began_unix=BEGAN - 5000, seen_unix=BEGAN - 4900, first_step=0, steps_seen=50)
    second = AttemptRecord(began_unix=BEGAN - 1000, seen_unix=BEGAN - 990, first_step=40, steps_seen=0)
    third = AttemptRecord(began_unix=BEGAN, seen_unix=BEGAN + 110, first_step=40, steps_seen=170)
    bill = stage_bill("distill", manifest(), evidence(tmp_path, record(attempts=(first, second, third))))
    assert bill.parts["lost"] == pytest.approx(0.2 * 100 + 10)
    assert bill.parts["training"] == pytest.approx(85 + 0.8 * 100)
    assert bill.seconds == pytest.approx(113 + 110)  # the time between the attempts is not billed
    assert bill.iterations_per_second == pytest.approx(2.0)


def test_launched_stage_without_evidence(tmp_path, monkeypatch):
    reported = stage_bill("reinforce", manifest(place=GPUS))
    assert reported.parts == {"startup": 9.0, "work": 104.0}
    assert reported.seconds == pytest.approx(113)
    given_weights = stage_bill("pretrain", manifest(), evidence(tmp_path))
    assert given_weights.parts == {"startup": 9.0, "work": 104.0}
    task = stage_bill("prepare", manifest(startup_seconds=None))
    assert (task.parts, task.seconds, task.place, task.dollars) == ({}, 104.0, None, None)
    # A stage in this process costs what its user says.
    monkeypatch.delenv(PLACE_VARIABLE, raising=False)
    assert bill_here("register", 100.0).dollars is None
    monkeypatch.setenv(PLACE_VARIABLE, GPUS.model_dump_json())
    assert bill_here("register", 100.0).dollars == pytest.approx(2.0)


def test_total_notes_what_it_leaves_out(tmp_path):
    stages = [
        stage_bill("prepare", manifest(startup_seconds=None)),
        stage_bill("distill", manifest(), evidence(tmp_path, record())),
    ]
    bill = make_bill(stages)
    assert bill.seconds == pytest.approx(217)
    assert bill.dollars == pytest.approx(2.26)
    assert bill.notes == ("the dollars are without prepare (104 s): the price of where they ran is not known",)
    assert make_bill(stages[:1]).dollars is None
    assert make_bill(stages[:1]).notes == ()
    assert Bill.model_validate_json(bill.model_dump_json()) == bill
    # An old price is noted.
    old = GPUS.model_copy(update={"price": PRICE.model_copy(update={"date": "2020-01"})})
    (note,) = make_bill([stage_bill("reinforce", manifest(place=old)), stage_bill("tune", manifest(place=old))]).notes
    assert note.startswith("the price of 36.00 $/h (us-east-1; list) is of 2020-01, ")


def test_rows_split_the_time_and_add_up(tmp_path):
    heading, row, total = billing.rows(make_bill([stage_bill("distill", manifest(), evidence(tmp_path, record()))]))
    assert heading == ("stage", "where", "time", "dollars", "for")
    assert row == (
        "distill",
        "2 nodes of gpu (g5.xlarge)",
        "113 s",
        "$2.26",
        "training 75%, start-up 9%, compilation 5%, evaluation 5%, ending 3%, checkpoints 2%, recorder 1%",
    )
    assert total == ("total", "", "113 s", "$2.26", "")


def test_forecast_against_actual_covers_stages_that_it_was_of(tmp_path):
    stages = [
        stage_bill("reinforce", manifest(place=GPUS)),
        stage_bill("distill", manifest(), evidence(tmp_path, record())),
    ]
    expected = Forecast(
        place=GPUS, hours=0.025, dollars=1.8, assumptions=("twice as many nodes are 1.8 times as fast",)
    )
    assert billing.forecast_text(make_bill(stages, expected)) == (
        "distill: 90 s, $1.80 was forecast, and it took 113 s, $2.26: 25.6% more; "
        "it assumed that twice as many nodes are 1.8 times as fast"
    )
    both = expected.model_copy(update={"stages": ("reinforce", "distill"), "hours": 0.125, "assumptions": ()})
    text = billing.forecast_text(make_bill(stages, both))
    assert text.startswith("reinforce and distill: ")
    assert text.endswith("and it took 3.8 min, $4.52: 49.8% less")
    assert billing.forecast_text(make_bill(stages)) == ""
