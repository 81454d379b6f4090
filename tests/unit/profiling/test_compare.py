from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.profiling.large import PLACE, made_up_answers
from tests.unit.profiling.rules.learning import measured
from trainer import cli
from trainer.config import ProfileSettings
from trainer.io import artifacts
from trainer.io.errors import EXIT_CODE, ArtifactError
from trainer.profiling.compare import ComparedRun, Comparison, change, compare, read_compared_run, text
from trainer.profiling.compare import page as compare_page
from trainer.profiling.evidence import Spread, TrainingEvidence
from trainer.profiling.rules.outcomes import Healthy, NotJudged
from trainer.profiling.training_summary import PhaseSummary, TrainingSummary, summarize
from trainer.stages import profile


@pytest.fixture
def training(plain: list[TrainingEvidence]) -> TrainingEvidence:
    return plain[1]


def spread(ms: float) -> Spread:
    return Spread(p5=ms, p50=ms, p95=ms, mean=ms, max=ms)


def with_steps(summary: TrainingSummary, *, images: float, **phases: float) -> TrainingSummary:
    """The same training with steps that take so many milliseconds in each phase."""
    total = sum(phases.values())
    return replace(
        summary,
        step_ms=spread(total),
        images_a_step=images,
        images_per_second=1000 * images / total,
        phases={name: PhaseSummary(share=ms / total, ms=spread(ms), ranges={}) for name, ms in phases.items()},
    )


def side(name: str, summary: TrainingSummary, **further: Any) -> ComparedRun:
    return ComparedRun(name=name, trainings={summary.name: summary}, **{"answers": [], **further})


def table(comparison: Comparison, title: str) -> dict[str, tuple[str, ...]]:
    tables = [*comparison.general, *(one for some in comparison.tables.values() for one in some)]
    (found,) = [one for one in tables if one.title == title]
    return {row[0]: row[1:] for row in [found.headers, *found.rows]}


def test_steps_are_compared_by_size(training: TrainingEvidence) -> None:
    summary = summarize(training)
    before = with_steps(summary, images=64, data=60, forward=30, backward=10)
    after = with_steps(summary, images=64, data=10, forward=30, backward=10)
    comparison = compare(side("a", before), side("b", after))
    assert comparison.verdict == (
        "Distillation: 2.0x as fast, 100 before and 50 ms a step after; most of it in “waiting for data” (60 before, 10 after)."
    )
    phases = table(comparison, "phases")
    assert phases["waiting for data"] == ("60", "10", "-83 %")
    assert phases["forward pass"] == ("30", "30", "as before")
    assert phases["together"] == ("100", "50", "-50 %")

    before = with_steps(summary, images=32, forward=32)
    after = with_steps(summary, images=128, forward=64)
    comparison = compare(side("a", before), side("b", after))
    assert "2.0x as fast, 1,000 before and 500 µs an image after" in comparison.verdict
    assert table(comparison, "phases")["forward pass"] == ("1,000", "500", "-50 %")
    assert table(comparison, "in short")["images a step"] == ("32", "128", "")

    before, after = (with_steps(summary, images=8, data=ms, forward=10) for ms in (1, 9))
    comparison = compare(side("a", before), side("b", after))
    assert "1.7x slower" in comparison.verdict
    assert "“waiting for data” (1 before, 9 after)" in comparison.verdict
    alike = replace(before, steps=before.steps + 1)
    assert "as fast as before" in compare(side("a", before), side("b", alike)).verdict
    same = compare(side("a", before), side("b", before))
    assert text(same) == "\n\n".join(["Distillation: both sides are the same recording."] * 2)
    assert "Both sides are the same recording." in compare_page(same)


def test_findings_gone_new_or_kept(training: TrainingEvidence) -> None:
    summary = summarize(training)
    first, second, third = [one for one in made_up_answers() if one.rule not in ("start_up", "host_syncs")]
    cured, sound = (replace(one, outcome=Healthy(text="fine")) for one in (first, third))
    before, after = [first, second, sound], [cured, second, third]
    comparison = compare(side("a", summary, answers=before), side("b", summary, answers=after))
    (findings,) = [one for one in comparison.general if one.title == "Findings"]
    assert [(row[0], row[-1]) for row in findings.rows] == [
        (first.title, "gone"),
        (second.title, "still there"),
        (third.title, "new"),
    ]
    assert findings.rows[1][2] == "66.7 min $195.20"

    first, second = made_up_answers()[:2]
    short = [replace(one, outcome=NotJudged(reason="only 6 steps", too_short=True)) for one in (first, second)]
    sides = side("a", summary, answers=[first, short[1]]), side("b", summary, answers=[short[0], second])
    (findings,) = [one for one in compare(*sides).general if one.title == "Findings"]
    assert [(row[0], row[-1]) for row in findings.rows] == [
        (first.title, "not judged after"),
        (second.title, "not judged before"),
    ]


def test_other_data_or_machines_are_said_first(training: TrainingEvidence) -> None:
    summary = summarize(training)
    faster = with_steps(summary, images=8, data=4)
    before = side("a", with_steps(summary, images=8, data=8), run=run(0.95, 100.0, None), dataset="abc")
    after = side("b", faster, run=run(0.65, 50.0, None), dataset="def")
    comparison = compare(before, after)
    first = text(comparison).splitlines()[0]
    assert first == "Other data: the two sides are of different data sets, so their accuracy is not compared."
    assert first in compare_page(comparison).partition("<table")[0]
    assert comparison.verdict.startswith("Distillation: 2.0x as fast")
    assert "top-1" not in comparison.verdict
    assert table(comparison, "The runs")["student, test top-1"] == ("95.00%", "65.00%", "other data")
    alike = compare(before, replace(after, dataset="abc"))
    assert alike.differences == []
    assert "the student's test top-1: 95.0% before and 65.0% after" in alike.verdict

    slower = with_steps(summary, images=8, data=9)

    def counted(one: TrainingSummary, train: int | None) -> ComparedRun:
        counts = {} if train is None else {"dataset": {"train": train, "val": 10}}
        return side("", one, run=run(0.9, 10.0, None) | counts)

    assert compare(counted(summary, 100), counted(slower, 200)).differences[0].startswith("Other data")
    for one, other in ((100, 100), (100, None)):
        sentence = compare(counted(summary, one), counted(slower, other)).differences[0]
        assert sentence == "Whether both sides are of the same data was not recorded."
    # Other hardware and processes are said before the times.
    summary = replace(summarize(training), processor="a CPU", host="node-1", device="cuda:0 (a GPU)", place=PLACE)

    def differences(**changes: Any) -> list[str]:
        changed = replace(with_steps(summary, images=8, data=9), **changes)
        return list(compare(side("a", summary, dataset="x"), side("b", changed, dataset="x")).differences)

    assert differences(host="node-2", device="cuda:3 (a GPU)") == [], "another machine of the same kind"
    assert differences(world_size=8) == ["Other processes: 2 before, 8 after."]
    assert differences(processor="another CPU")[0].endswith("another CPU, p4d.24xlarge after.")
    assert differences(processor="", place=None) == [], "what was not recorded is not other"
    (sentence,) = differences(cores=64, device="cpu")
    assert sentence.startswith(
        f"Other hardware: cuda (a GPU), {summary.cores} cores, a CPU, p4d.24xlarge before, cpu, 64 cores, "
    )


def test_unrecorded_is_not_zero(training: TrainingEvidence) -> None:
    summary = summarize(training)
    signals = {name: signal for name, signal in summary.system.items() if name != "memory_used_bytes"}
    fewer = replace(summary, system=signals, images_per_second=None, workers=4)
    before, after = run(0.9, 10.0, None), run(0.9, 10.0, None)
    after["student"] = {"test": {"top1": 0.9}}
    after["stages"] = after["stages"] | {"tune": {"seconds": 5.0}}
    comparison = compare(side("a", summary, run=before), side("b", fewer, run=after))
    assert table(comparison, "use of the machine")["memory of the machine"][1:] == ("not recorded", "")
    assert table(comparison, "in short")["images a second"][1:] == ("not recorded", "")
    assert table(comparison, "in short")["loader processes"] == ("not recorded", "4", "")
    assert table(comparison, "The runs")["agrees with the teacher"] == ("90.00%", "not recorded", "")
    assert table(comparison, "The runs")["  tune"] == ("did not run", "5 s", "")

    page = compare_page(compare(side("a", replace(summary, operators=None)), side("b", summary)))
    chart = page.partition("Operators by kind of work")[2].partition("</svg>")[0]
    assert "not recorded" in chart
    assert ">0 ms" not in chart
    assert summary.operators is not None
    other_clock = replace(summary, operators=replace(summary.operators, clock="device"))
    drawn = compare_page(compare(side("a", summary), side("b", other_clock))).partition("In short")[0]
    assert "Operators by kind of work" not in drawn, "times of a device and of a host on one scale"


def test_settings_that_differ_are_named(training: TrainingEvidence) -> None:
    summary = summarize(training)
    before = replace(summary, settings={"batch_size": 32, "views": {"flip": True}, "workers": None})
    after = replace(summary, settings={"batch_size": 64, "views": {"flip": True}, "zero": False})
    rows = table(compare(side("a", before), side("b", after)), "Settings that differ")
    assert rows["distill.batch_size"] == ("32", "64")
    assert rows["distill.zero"] == ("not there", "False")
    assert "distill.views.flip" not in rows
    # Those of the last version by their names now.
    before = replace(summary, settings={"logit_loss": "kl", "temperature": 2.0, "dkd_beta": 8.0})
    after = replace(summary, settings={"logit": {"loss": "kl", "temperature": 3.0}})
    rows = table(compare(side("a", before), side("b", after)), "Settings that differ")
    assert rows == {"setting": ("before", "after"), "distill.logit.temperature": ("2.0", "3.0")}


def test_similar_weights_across_runs(training: TrainingEvidence) -> None:
    """A change without an effect leaves all tensors alike; another seed none; a tensor that only one side has is left out."""
    first = training.ranks[0]

    def with_tensors(values: dict[str, Any]) -> TrainingEvidence:
        return replace(training, ranks=[replace(first, tensors=measured(4, **values)), *training.ranks[1:]])

    def rows(other: TrainingEvidence) -> dict[str, tuple[str, ...]]:
        fast = with_steps(summarize(training), images=64, data=10)
        slow = with_steps(summarize(training), images=64, data=20)
        one, two = (
            side(name, summary, evidence={summary.name: evidence})
            for name, summary, evidence in (("a", fast, with_tensors({})), ("b", slow, other))
        )
        return table(compare(one, two), "similar weights and gradients")

    assert rows(with_tensors({}))["weights before step 31"] == ("3 of 3",)
    moved = np.array([[1.28, 1.28, 8.0]] * 2 + [[1.28, 1.3, 8.0]] * 2)
    found = rows(with_tensors({"weight_norm": moved}))
    assert found["weights before step 1"] == ("3 of 3",)
    assert found["weights before step 31"] == ("2 of 3; they differ from step 21 on",)
    assert found["gradients before step 31"] == ("3 of 3",)
    summary = with_steps(summarize(training), images=64, data=10)
    comparison = compare(side("a", summary), side("b", with_steps(summary, images=64, data=20)))
    assert "similar weights and gradients" not in {one.title for one in comparison.tables[summary.name]}


def run(top1: float, seconds: float, dollars: float | None) -> dict[str, Any]:
    return {
        "recipe": "digits",
        "settings": {"distill": {"epochs": int(seconds)}},
        "stages": {"distill": {"seconds": seconds}},
        "student": {"test": {"top1": top1, "agreement": 0.9}},
        "teacher": {"test": {"top1": 0.99}},
        "bill": {"dollars": dollars},
    }


def test_runs_are_compared_by_accuracy_time_and_dollars(training: TrainingEvidence) -> None:
    summary = summarize(training)
    before, after = side("a", summary, run=run(0.95, 100.0, 2.0)), side("b", summary, run=run(0.9625, 50.0, 1.0))
    comparison = compare(before, after)
    assert comparison.verdict == "Distillation: both sides are the same recording."
    rows = table(comparison, "The runs")
    assert rows["student, test top-1"] == ("95.00%", "96.25%", "+1.25 points")
    assert rows["  distill"] == ("100 s", "50 s", "-50 %")
    assert rows["dollars"] == ("$2.00", "$1.00", "-50 %")
    assert table(comparison, "Settings that differ") == {
        "setting": ("before", "after"),
        "distill.epochs": ("100", "50"),
    }
    faster = replace(before, trainings={"distill": with_steps(summary, images=8, data=8)})
    slower = replace(after, trainings={"distill": with_steps(summary, images=8, data=4)})
    assert compare(faster, slower).verdict.endswith("; the student's test top-1: 95.0% before and 96.2% after.")
    priced = compare(side("a", replace(summary, place=PLACE)), side("b", summary))
    assert table(priced, "in short")["dollars"][1:] == ("not recorded", "")


def test_the_text_and_the_page_hold_every_table(large: TrainingEvidence, training: TrainingEvidence) -> None:
    hostile = "<script>alert(1)</script>"
    sides = [
        ComparedRun(
            name=name, trainings={one.name: summarize(one)}, answers=made_up_answers(), evidence={one.name: one}
        )
        for name, one in ((hostile, training), ("after", large))
    ]
    comparison = compare(*sides)
    shown, page = text(comparison), compare_page(comparison)
    for wanted in ("in short", "phases", "operators by kind of work", "use of the machine"):
        assert f"Distillation: {wanted}" in shown
        assert wanted[1:] in page
    assert "still there" in shown
    assert shown.splitlines()[2].startswith("Other hardware: cpu, "), "a sentence on the data stands before it"
    assert "on the cpu before and on the device after" in shown
    assert "operators that moved most" not in shown, "of other clocks"
    assert "<script" not in page
    assert "The training and the machine over time" in page
    assert len(page.encode()) < 2_000_000
    assert max(len(line) for line in shown.splitlines()) < 200


def test_nothing_in_common_is_refused(training: TrainingEvidence) -> None:
    summary = summarize(training)
    other = replace(summary, name="mae")
    with pytest.raises(ArtifactError, match="a holds distill and b holds mae, so there is nothing to compare"):
        compare(side("a", summary), side("b", other))
    empty = ComparedRun(name="empty", trainings={}, answers=[])
    with pytest.raises(ArtifactError, match="empty holds no training"):
        compare(empty, side("b", other))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (1.0, None, ""),
        (None, 1.0, ""),
        (0.0, 0.0, "as before"),
        (0.0, 1.0, "new"),
        (100.0, 100.4, "as before"),
        (100.0, 0.0, "-100 %"),
        (2.0, 3.0, "+50 %"),
        (1.0, 1234.0, "1,234 x"),
    ],
)
def test_a_change_in_words(before: float | None, after: float | None, expected: str) -> None:
    assert change(before, after) == expected


def test_command_prints_comparison_and_writes_its_page(
    evidence: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "comparison.html"
    assert cli.main(["compare", str(evidence), str(evidence), "--output", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "Distillation: both sides are the same recording." in shown
    assert f"As a page: {page}" in shown
    assert page.read_text().startswith("<!doctype html>")


def test_wrong_input_of_command_ends_in_one_message(
    evidence: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        ([str(tmp_path), str(evidence)], f"error: {tmp_path}: holds neither summary.json"),
        (
            [str(evidence), "nowhere"],
            f"error: nowhere (in {Path.cwd()}): no such directory; give the directory of a run",
        ),
        ([str(evidence), str(evidence), "--output", str(tmp_path)], f"error: --output {tmp_path} is a directory"),
        ([str(evidence), str(evidence), "--output", "/proc/here/page.html"], "error: cannot write to /proc/here"),
    ):
        assert cli.main(["compare", *arguments]) == EXIT_CODE
        said = capsys.readouterr().err
        assert said.startswith(message)
        assert "Traceback" not in said


@pytest.fixture(scope="module")
def run_directory(evidence: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run, as far as a comparison reads it."""
    path = tmp_path_factory.mktemp("run")
    for stage, training in (("pretrain", "mae"), ("distill", "distill")):
        with artifacts.create(
            path / f"{stage}-evidence", "evidence", settings={}, parents={"dataset": "the digits"}
        ) as draft:
            shutil.copytree(evidence / training, draft.path / training)
    inputs = {f"{name}_evidence": path / f"{name}-evidence" for name in ("pretrain", "distill")}
    profile.run(ProfileSettings(), **inputs, report=path / "report")
    summary = {
        "recipe": "digits",
        "settings": {"distill": {"batch_size": 32}},
        "stages": {"distill": {"seconds": 60.0}},
        "teacher": {"test": {"top1": 0.98}},
        "student": {"test": {"top1": 0.95, "agreement": 0.97}},
        "reports": {"profile": str(path / "report" / "report.html")},
    }
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_run_its_report_and_its_evidence_tell_same_numbers(run_directory: Path) -> None:
    whole, report, pretrained, distilled = (
        read_compared_run(str(run_directory / place))
        for place in ("", "report", "pretrain-evidence", "distill-evidence")
    )
    assert list(whole.trainings) == ["mae", "distill"]
    assert whole.trainings == report.trainings == {**pretrained.trainings, **distilled.trainings}
    assert whole.answers == report.answers == [*pretrained.answers, *distilled.answers]
    assert whole.dataset == report.dataset == pretrained.dataset == distilled.dataset == "the digits"
    assert whole.run is not None
    assert set(whole.evidence) == {"mae", "distill"}
    assert (set(pretrained.evidence), set(distilled.evidence)) == ({"mae"}, {"distill"})
    assert report.run is None
    assert not report.evidence


def test_evidence_is_found_beside_its_report(run_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_bytes((run_directory / "summary.json").read_bytes())
    assert read_compared_run(str(tmp_path)).trainings == read_compared_run(str(run_directory)).trainings
    # The evidence of a pipelines run is found beside its report.
    tasks = tmp_path / "pipeline" / "distillation"
    for source, target in (
        ("report", "profile/report"),
        ("pretrain-evidence", "pretrain/evidence"),
        ("distill-evidence", "distill/evidence"),
    ):
        shutil.copytree(run_directory / source, tasks / target)
    shutil.copy(run_directory / "summary.json", tmp_path)
    rewrite(tmp_path / "summary.json", reports={"profile": str(tasks / "profile" / "report" / "report.html")})
    assert set(read_compared_run(str(tmp_path)).evidence) == {"mae", "distill"}
    # Evidence of another training is not taken for the reports.
    shutil.copytree(run_directory, tmp_path, dirs_exist_ok=True)
    with artifacts.create(tmp_path / "distill-evidence", "evidence", settings={"another": True}):
        pass
    assert set(read_compared_run(str(tmp_path)).evidence) == {"mae"}
    # A registration is read as its run.
    with artifacts.create(tmp_path, "registration", settings={}) as draft:
        (draft.path / "summary.json").write_bytes((run_directory / "summary.json").read_bytes())
    assert read_compared_run(str(tmp_path)).trainings == read_compared_run(str(run_directory)).trainings


def rewrite(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


def changed_report(report: Path, path: Path, file: str, content: str) -> str:
    """A report that is whole, but says something else in one of its files."""
    old = artifacts.read(report, "report")
    with artifacts.create(path, "report", settings=old.settings) as draft:
        for name in old.files:
            (draft.path / name).write_bytes((report / name).read_bytes())
        (draft.path / file).write_text(content)
    return str(path)


def test_what_is_nothing_to_compare_is_refused_in_one_message(run_directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_directory, copy)
    empty, foreign, model, broken = (tmp_path / name for name in ("empty", "foreign", "model", "broken"))
    empty.mkdir()
    foreign.mkdir()
    (foreign / "summary.json").write_text('{"distill": {}}')
    broken.mkdir()
    (broken / "summary.json").write_text("[")
    (listed := tmp_path / "listed").mkdir()
    (listed / "summary.json").write_text("[]")
    with artifacts.create(model, "model", settings={}):
        pass
    shutil.rmtree(copy / "report")
    rewrite(copy / "summary.json", reports={})
    cases = {
        str(tmp_path / "nowhere"): "nowhere: no such directory; give the directory of a run",
        str(empty): "holds neither summary.json, as a completed run does, nor manifest.json",
        str(foreign): "is not the summary of a run",
        str(broken): "is not JSON",
        str(listed): "is not a JSON object",
        str(model): "is a model; give the directory of a run",
        str(copy): "its report is not at .*/copy/report; give the directory of the report",
        changed_report(
            run_directory / "report", tmp_path / "a", "summary.json", '{"distill": {}}'
        ): "distill.name is missing",
        changed_report(
            run_directory / "report", tmp_path / "b", "findings.json", "[1]"
        ): "b: findings.json: does not hold the answers",
    }
    for uri, message in cases.items():
        with pytest.raises(ArtifactError, match=message):
            read_compared_run(uri)
