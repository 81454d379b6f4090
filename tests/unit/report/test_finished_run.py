from __future__ import annotations

import copy
import html
import json
import re
import shlex
from pathlib import Path

import pytest
from mlflow import MlflowClient
from PIL import Image

from trainer import cli
from trainer.io.costs import Machines, Price
from trainer.io.errors import EXIT_CODE, ArtifactError
from trainer.report import finished_run, tracking
from trainer.report.billing import StageBill, make_bill
from trainer.report.finished_run import (
    PricedRun,
    Registered,
    price_rows,
    price_table,
    priced_run,
    read_experiment,
    read_run,
)
from trainer.report.forecast import Forecast

PRICE = Price(dollars_an_hour=36.0, date="2026-11", region="us-east-1", source="list")
EXPECTED = Forecast(place=Machines(pool="gpu", price=PRICE), hours=0.01, dollars=0.36)

TEACHER = {
    "architecture": "vit_base_patch16_224",
    "title": "vit_base_patch16_224, 224 px",
    "parameters": 469_000,
    "macs": 9_000_000,
    "size_bytes": 1_900_000,
    "latency_ms": {"p50": 2.5, "p95": 3.0},
    "throughput": 800.0,
    "test": {"top1": 0.985, "top5": 1.0, "ece": 0.01},
}
STUDENT = {
    "architecture": "vit_tiny_patch16_224",
    "title": "vit_tiny_patch16_224, depth 2, width 32, 224 px",
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


def table(content):
    return finished_run.table(content, Path("runs/one/index.html"))


def built(**changes):
    arguments = {
        "recipe": "digits",
        "settings": {"distill": {"epochs": 4}, "register": {"alias": "champion"}},
        "bill": bill(prepare=1.23456, distill=40.0, profile=0.5, evaluate=3.0, register=2.0),
        "dataset": {
            "train": 1437, "val": 180, "test": 180, "unlabeled": 0, "classes": 10, "quarantined": 2, "leakage": 0,
        },
        "recording": None,
        "profile": {"verdict": "nothing slows it", "outcome": "healthy", "distill": {"step_ms": 12.0}},
        "evaluation": {"teacher": TEACHER, "student": STUDENT, "verdict": {"passed": True, "reasons": []}},
        "exported": None,
        "registered": Registered(tracking_uri="sqlite:///x.db", run_id="abc", model_name="vit-student", model_version="3"),
        "reports": {"data": "/runs/x/dataset/card.html", "evaluation": "/runs/x/evaluation/report.html"},
    }  # fmt: skip
    return finished_run.build_summary(**{**arguments, **changes})


def leaves(value, prefix=""):
    if not isinstance(value, dict):
        return {prefix}
    return set().union(*(leaves(child, f"{prefix}.{name}" if prefix else name) for name, child in value.items()))


def test_every_key_of_the_contract_is_there():
    assert leaves(built()) == {
        "recipe",
        "settings.distill.epochs",
        "settings.register.alias",
        *(f"stages.{name}.seconds" for name in ("prepare", "distill", "profile", "evaluate", "register")),
        *(f"bill.{name}" for name in ("stages", "seconds", "dollars", "forecast", "notes")),
        "profile.verdict",
        "profile.outcome",
        *(f"dataset.{name}" for name in ("train", "val", "test", "unlabeled", "classes", "quarantined")),
        *(
            f"teacher.{name}"
            for name in ("architecture", "title", "parameters", "test.top1", "latency_ms.p50", "latency_ms.p95")
        ),
        *(f"student.test.{name}" for name in ("top1", "top5", "agreement", "ece")),
        *(
            f"student.{name}"
            for name in ("architecture", "title", "parameters", "latency_ms.p50", "latency_ms.p95", "size_bytes")
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


def test_table():
    text = table(built())
    for expected in (
        "1,437 train, 180 val, 180 test images of 10 classes",
        "student 95.0% test top-1, agrees with the teacher on 96.0%",
        "vit-student version 3, promoted",
        "98.50%",
        "-3.50 points",
        "14.2x smaller",
        "2.5x faster",
        "passed every condition",
        "vit_tiny_patch16_224, depth 2, width 32, 224 px",
        "runs/one/index.html",
        "sqlite:///x.db (run abc)",
    ):
        assert expected in text, expected
    # Table is aligned.
    lines = table(built()).splitlines()
    figures = [line for line in lines[:6] if line.startswith(("stage ", "prepare", "distill", "register"))]
    assert len({line.index(text) for line, text in zip(figures, ("main", "1,437", "student", "vit"), strict=True)}) == 1
    models = [line for line in lines if line.startswith(("test top-1", "parameters", "latency"))]
    ends = [line.index(text) + len(text) for line, text in zip(models, ("95.00%", "33,000", "1.00 ms"), strict=True)]
    assert len(set(ends)) == 1
    assert all(line == line.rstrip() for line in lines)
    # The table says how to see mlflows pages where no server has them.
    assert "sqlite:///x.db (run abc); `python -m trainer ui --store sqlite:///x.db` shows it" in table(built())
    for uri in ("http://mlflow:5000", "databricks"):
        server = Registered(tracking_uri=uri, run_id="abc", model_name="vit-student", model_version="3")
        assert table(built(registered=server)).endswith(f"{uri} (run abc)")


def test_recorded_outputs_have_their_keys():
    recorded = {
        "samples": 1437, "views": 30, "top_k": 10, "mib": 1.97, "bytes_per_view": 48,
        "mass": {"t1": {"mean": 0.99876, "p5": 0.99, "p1": 0.98}},
    }  # fmt: skip
    seconds = {"prepare": 1.0, "reinforce": 12.5, "distill": 40.0}
    content = built(recording=recorded, bill=bill(**seconds))
    assert content["teacher_outputs"] == recorded
    assert list(content["stages"]) == list(seconds)
    line = next(line for line in table(content).splitlines() if line.startswith("reinforce"))
    assert "12.5" in line
    assert "30 views of 1,437 images in 2.0 MiB, 10 logits a view hold 99.88% of the probability" in line
    assert "reinforce" not in table(built())
    for without_head, held in (
        ({"features": 32}, "an embedding of 32 numbers a view"),
        ({"features": 0, "tokens": [2, 3, 8]}, "2 x 3 patch tokens of 8 numbers a view"),
        (
            {"features": 32, "tokens": [2, 3, 8]},
            "an embedding of 32 numbers and 2 x 3 patch tokens of 8 numbers a view",
        ),
    ):
        content["teacher_outputs"] = {name: value for name, value in recorded.items() if name != "mass"} | without_head
        assert f" MiB, {held}" in table(content)
    assert "teacher_outputs" not in built()


def test_table_of_other_runs():
    evaluation = {
        "teacher": TEACHER,
        "student": STUDENT,
        "verdict": {"passed": False, "reasons": ["latency: too long"]},
    }
    text = table(built(evaluation=evaluation, registered=Registered()))
    assert "gate not passed" in text
    assert "  - latency: too long" in text
    assert "nothing is tracked" in text
    assert "None" not in text
    # A student that is larger and slower is called so.
    student = copy.deepcopy(STUDENT) | {"parameters": 938_000, "latency_ms": {"p50": 5.0, "p95": 6.0}}
    text = table(built(evaluation={"teacher": TEACHER, "student": student, "verdict": {"passed": True, "reasons": []}}))
    assert "2.0x larger" in text
    assert "2.0x slower" in text
    # The table tells the verdict on the trainings and what was forecast.
    lines = table(built(bill=bill(EXPECTED, tune=5.0, distill=40.0, profile=1.0))).splitlines()
    shown = {line.split()[0]: line for line in lines[:4]}
    assert "forecast 36 s, $0.36" in shown["tune"]
    assert "nothing slows it" in shown["profile"]


def test_the_bill_is_in_the_table():
    priced = bill(EXPECTED, Machines(pool="gpu", instance="g5.xlarge", nodes=2, price=PRICE), distill=40.0)
    plain = bill(prepare=10.0)
    content = built(bill=make_bill([*plain.stages, *priced.stages], EXPECTED))
    text = table(content)
    assert content["bill"]["dollars"] == pytest.approx(0.8)
    assert "2 nodes of gpu (g5.xlarge)  40 s    $0.80" in text
    assert "36 s, $0.36 was forecast, and it took 40 s, $0.80: 11.1% more" in text
    assert "the dollars are without prepare (10 s): the price of where they ran is not known" in text


# ---------------------------------------------------------------------------------------------------------------------
# The front page


def reports(folder):
    """Where the stages have left their pages and a picture."""
    (folder / "stages").mkdir()
    made = {name: folder / "stages" / f"of_{name}.html" for name in ("data", "profile", "evaluation")}
    for name, file in made.items():
        file.write_text(f"the page {name}")
    Image.new("RGB", (3, 3)).save(folder / "stages" / "seen.png")
    return {name: str(file) for name, file in made.items()} | {"reconstructions": str(folder / "stages" / "seen.png")}


def test_the_index_leads_to_copies_of_the_pages(tmp_path):
    run = tmp_path / "one <run>"
    run.mkdir()
    places = reports(tmp_path)
    example = {"picture": places["reconstructions"], "source": "cat/<1>.png", "label": "cat"}
    answers = {"teacher": {"answer": "cat", "confidence": 0.91}, "student": {"answer": "dog", "confidence": 0.55}}
    curves = {
        "finetune": {"steps": 100, "score": [[50, 0.5], [100, 0.9]], "loss": [[10, 2.0], [100, 1.0]]},
        "distill": {"steps": 10, "score": [[10, 0.8]], "loss": [[5, 2.5], [10, 1.5]]},
    }
    exported = {"chosen": "fp32", "candidates": {}}
    provenance = {"date": "2026-11-29", "commit": "abc-dirty", "data": "f00", "changed": {"distill.epochs": 3}}
    content = built(
        reports=places, provenance=provenance, examples=[example | answers], curves=curves, exported=exported
    )
    assert finished_run.write_front_page(run, content) == run / "index.html"
    page = (run / "index.html").read_text()
    assert re.findall('href="([^"#]*)"', page) == ["evaluation.html", "profile.html", "data.html"]
    for name in ("evaluation", "profile", "data"):
        assert (run / f"{name}.html").read_text() == f"the page {name}"
    for said in (
        "one &lt;run&gt;",
        "the student passed",
        TEACHER["title"],
        STUDENT["title"],
        "-3.50 points",
        "14.2x smaller",
        "nothing slows it",
        "data:image/png;base64,",
        "Run abc, vit-student version 3",
        "cat/&lt;1&gt;.png",
        '<dt>teacher</dt><dd class="good">cat  91%</dd><dt>student</dt><dd class="bad">dog  55%</dd>',
        '<div class="tile"><b>14.2x smaller</b>',
        "teacher: 50 % at first, 90 % at last",
        "student: 2.5 at first, 1.5 at last",
        "python -m trainer ui --store sqlite:///x.db",
        "make deploy-student MODEL=models:/vit-student/3 ALIAS=champion",
        "<dt>commit</dt><dd>abc-dirty</dd><dt>data</dt><dd>f00</dd>",
        "<dt>settings that differ from the recipe</dt><dd>distill.epochs=3</dd>",
        "<dt>MLflow run</dt><dd>abc</dd>",
    ):
        assert said in page, said
    commands = re.findall("<code.*?>(.*?)</code>", page)
    assert commands[:2] == [
        f"python -m trainer predict PHOTO.jpg --model {html.escape(shlex.quote(str(run)))}".replace("&#x27;", "&#39;"),
        f"python -m trainer serve {html.escape(shlex.quote(str(run)))}".replace("&#x27;", "&#39;"),
    ]
    # MLflow's file lies on a machine that whoever reads the page may not have: the command alone names it.
    assert page.count("sqlite") == 1


def test_run_that_did_not_pass_and_is_not_tracked(tmp_path):
    verdict = {"passed": False, "reasons": ["accuracy: below <0.9>", "latency: too long"]}
    evaluation = {"teacher": TEACHER, "student": STUDENT, "verdict": verdict}
    finished_run.write_front_page(tmp_path, built(evaluation=evaluation, registered=Registered(), reports={}))
    page = (tmp_path / "index.html").read_text()
    assert "the student did not pass" in page
    assert "<li>accuracy: below &lt;0.9&gt;</li><li>latency: too long</li>" in page
    assert "MLflow" not in page
    assert "Pictures" not in page
    assert "Learning curves" not in page
    assert "--force</code>" in page
    assert "trainer serve" not in page
    assert "None" not in page


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation": {"teacher": TEACHER, "student": STUDENT, "verdict": {"passed": False, "reasons": ["too slow"]}}},
        {
            "registered": Registered(
                tracking_uri="http://x",
                run_id="abc",
                model_name="vit-student",
                model_version="3",
                alias_stays="other classes",
            )
        },
    ],
)
def test_no_deployment_of_what_the_alias_does_not_name_is_proposed(tmp_path, changes):
    """It would replace the pods of the version that passed."""
    finished_run.write_front_page(tmp_path, built(**changes, reports={}))
    page = (tmp_path / "index.html").read_text()
    assert "vit-student version 3" in page
    assert "deploy-student" not in page
    assert ("trainer ui" in page) == ("registered" not in changes), "a server has pages of its own"


# ---------------------------------------------------------------------------------------------------------------------
# Runs side by side


def place(pool, dollars, **changes):
    price = Price(dollars_an_hour=dollars, date="2026-11", region="us-east-1", source="list")
    return Machines(pool=pool, price=price, **changes)


def column(entries, title):
    heading, *table = price_rows(entries)
    return [row[heading.index(title)] for row in table]


# ---------------------------------------------------------------------------------------------------------------------
# Two published comparisons, from their own inputs


def published(name, at, seconds, iterations_per_second):
    distill = StageBill(
        stage="distill",
        seconds=seconds,
        place=at,
        dollars=at.dollars(seconds),
        iterations_per_second=iterations_per_second,
    )
    return priced_run(name, make_bill([distill]), accuracy=0.984, epochs=None)


TRAINIUM = published("trn1.32xlarge", place("trn1", 24.725), 6033, 6.64)
A100 = published("p4d.24xlarge", place("p4d", 37.69), 6553, 5.44)


def test_published_comparisons_are_reproduced():
    assert A100.dollars == pytest.approx(68.60, abs=0.01)
    assert TRAINIUM.dollars == pytest.approx(41.47, rel=1e-3)
    assert column([TRAINIUM, A100], "dollars") == ["$41.43", "$68.61"]
    assert column([TRAINIUM, A100], "it/s") == ["6.64", "5.44"]
    assert column([TRAINIUM, A100], "accuracy") == ["98.40%", "98.40%"]
    assert column([TRAINIUM, A100], "time") == ["100.5 min", "109.2 min"]
    assert column([TRAINIUM, A100], "") == ["cheapest, fastest", ""]
    # The model case is reproduced.
    before = PricedRun(name="before", place=Machines(pool="2 x A100-80GB"), seconds=300 * 3.20 * 3600, epochs=300)
    after = PricedRun(
        name="after", place=Machines(pool="8 x A100-40GB", nodes=4, processes_per_node=8), seconds=210 * 0.11 * 3600, epochs=210
    )  # fmt: skip
    assert column([before, after], "time") == ["40 days", "23.1 h"]
    assert column([before, after], "an epoch") == ["3.2 h", "6.6 min"]
    assert column([before, after], "epoch speed") == ["1.00x", "29.09x"]
    assert "dollars" not in price_rows([before, after])[0]


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def write_run(
    directory, *, seconds=3600.0, at=None, top1=0.9, epochs=10, recorded=0.0, recorded_at=None, warmed=0.0, **changes
):
    distill = StageBill(
        stage="distill", seconds=seconds, parts={"startup": 60.0, "training": seconds - 60}, place=at,
        dollars=at.dollars(seconds) if at else None, iterations_per_second=2.5, images_per_second=2560.0,
    )  # fmt: skip

    def earlier(stage, seconds, there):
        cost = there.dollars(seconds) if there else None
        return [StageBill(stage=stage, seconds=seconds, place=there, dollars=cost)] if seconds else []

    reinforce, warm_up = earlier("reinforce", recorded, recorded_at or at), earlier("warm_up", warmed, at)
    summary = {
        "bill": make_bill([StageBill(stage="prepare", seconds=5.0), *warm_up, *reinforce, distill]).model_dump(
            mode="json"
        ),
        "student": {"test": {"top1": top1}},
        "settings": {"distill": {"epochs": epochs}},
    }
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text(json.dumps(summary | changes))
    return directory


def test_runs_stand_side_by_side_whatever_they_ran_on(tmp_path, capsys):
    gpus = write_run(tmp_path / "gpus", at=place("gpu-a100", 21.96, instance="p4d.24xlarge", nodes=2), top1=0.91)
    neuron = write_run(tmp_path / "neuron", at=place("neuron-trn1-16", 21.5), seconds=5400.0)
    laptop = write_run(tmp_path / "laptop", at=Machines(pool="this machine"), seconds=86400.0)
    assert cli.main(["bill", *map(str, (gpus, neuron, laptop))]) == 0
    heading, first, second, third, *_ = capsys.readouterr().out.splitlines()
    titles = "run where it/s images/s accuracy epochs an epoch epoch speed time dollars $/point price of"
    assert heading.split() == titles.split()
    assert first.split()[:6] == ["gpus", "2", "nodes", "of", "gpu-a100", "(p4d.24xlarge)"]
    assert first.endswith("$43.92   0.4826  2026-11   fastest, most accurate")
    assert second.split()[:2] == ["neuron", "neuron-trn1-16"]
    assert second.endswith("0.67x  90 min   $32.25   0.3583  2026-11   cheapest")
    assert third.split()[:3] == ["laptop", "this", "machine"]
    assert third.endswith("24 h")


def test_the_teachers_recording_is_part_of_the_price(tmp_path):
    entry, _ = read_run(write_run(tmp_path / "run", at=place("gpu", 36.0), recorded=1800.0))
    assert entry.dollars == pytest.approx(54)
    assert entry.epoch_s == pytest.approx(540)
    # It may be of an earlier run, on other machines with another price.
    entry, _ = read_run(
        write_run(tmp_path / "b", at=place("gpu", 36.0), recorded=1800.0, recorded_at=place("small", 1.0))
    )
    assert entry.dollars == pytest.approx(36.5)


def test_what_was_compiled_beforehand_is_part_of_price(tmp_path):
    """Else a run would look cheaper for having paid earlier."""
    entry, _ = read_run(write_run(tmp_path / "run", at=place("neuron-trn1-16", 21.5), seconds=3600.0, warmed=900.0))
    assert entry.seconds == 4500
    assert entry.dollars == pytest.approx(1.25 * 21.5)


def test_comparison_names_time_and_registrations(tmp_path):
    entry, _ = read_run(write_run(tmp_path / "my-run" / "registration"))
    assert entry.name == "my-run"
    assert read_run(tmp_path / "my-run" / "registration" / "summary.json")[0] == entry
    (tmp_path / "latest").symlink_to("my-run")
    assert read_run(tmp_path / "latest" / "registration")[0] == entry
    # The table says what time it is of and doubts old prices.
    old = Machines(pool="gpu", price=Price(dollars_an_hour=1.0, date="2020-01", region="r", source="s"))
    recorded, _ = read_run(write_run(tmp_path / "b", at=place("gpu", 36.0), recorded=1800.0, recorded_at=old))
    text = "\n".join(price_table([recorded]))
    assert "warm_up, reinforce, distill, with start-up and compilation" in text
    assert "  - the price of 1.00 $/h (r; s) is of 2020-01, " in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not the summary of a run"),
        ("[]", "is not the summary of a run"),
        ('{"bill": {}}', "is not the summary of a run"),
        ('{"stages": {}}', "has no bill, as those of an earlier version; register the run again, or leave it out"),
    ],
)
def test_a_wrong_summary_is_one_message(tmp_path, content, message):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ArtifactError, match=message):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student": {"test": {}}}, "there is no score among its figures, top1 or map"),
        ({"settings": {"distill": {"epochs": "many"}}}, "could not convert string to float: 'many'"),
    ],
)
def test_summary_without_accuracy_or_epochs_is_one_message(tmp_path, changes, message):
    with pytest.raises(ArtifactError, match=rf"summary\.json: is not the summary of a run \({message}\)"):
        read_run(write_run(tmp_path / "run", **changes))


def test_run_without_distillation_is_left_out_by_hand(tmp_path):
    bill = make_bill([StageBill(stage="prepare", seconds=5.0)]).model_dump(mode="json")
    with pytest.raises(ArtifactError, match="run: its bill has no distillation"):
        read_run(write_run(tmp_path / "run", bill=bill))


def test_bill_of_another_version_in_mlflow_is_one_message(mlflow_uri, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    store = MlflowClient(mlflow_uri)
    run = store.create_run(
        store.create_experiment("mine", artifact_location=(tmp_path / "artifacts").as_uri()), run_name="old"
    ).info.run_id
    store.log_metric(run, "bill/seconds", 1.0)
    (tmp_path / tracking.BILL).write_text('{"stages": 3}')
    store.log_artifact(run, str(tmp_path / tracking.BILL))
    with pytest.raises(ArtifactError, match=r"experiment mine: old: bill.json is not one of this version \(stages"):
        read_experiment("mine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: bill: name the directories of runs, such as runs/latest, or an MLflow experiment with --experiment"),
        (["nowhere"], "error: nowhere (in "),
        (["--experiment", "mine"], "error: MLFLOW_TRACKING_URI is not set, so nothing is tracked"),
    ],
)  # fmt: skip
def test_wrong_input_of_the_command_is_one_message(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert cli.main(["bill", *arguments]) == EXIT_CODE
    assert capsys.readouterr().err.startswith(message)
