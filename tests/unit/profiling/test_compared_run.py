from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trainer import artifacts
from trainer.config import ProfileSettings
from trainer.errors import ArtifactError
from trainer.profiling.compared_run import read_compared_run
from trainer.stages import profile


@pytest.fixture(scope="module")
def run(evidence: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run, as far as a comparison reads it."""
    path = tmp_path_factory.mktemp("run")
    shutil.copytree(evidence, path / "distill-evidence")
    with artifacts.create(path / "pretrain-evidence", "evidence", settings={}):
        pass
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


def test_a_run_its_report_and_its_evidence_tell_the_same_numbers(run: Path) -> None:
    whole, report, recorded = (read_compared_run(str(run / place)) for place in ("", "report", "distill-evidence"))
    assert whole.trainings == report.trainings == recorded.trainings
    assert list(whole.trainings) == ["mae", "distill"]
    assert whole.answers == report.answers == recorded.answers
    assert whole.dataset == report.dataset == recorded.dataset == "the digits"
    assert whole.run is not None
    assert set(whole.evidence) == set(recorded.evidence) == {"mae", "distill"}
    assert report.run is None
    assert not report.evidence


def test_the_report_of_a_run_may_lie_where_the_run_says(run: Path, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_bytes((run / "summary.json").read_bytes())
    assert read_compared_run(str(tmp_path)).trainings == read_compared_run(str(run)).trainings


def test_the_evidence_of_a_pipelines_run_is_found_beside_its_report(run: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "pipeline" / "distillation"
    for source, target in (("report", "profile/report"), ("distill-evidence", "distill/evidence")):
        shutil.copytree(run / source, tasks / target)
    shutil.copy(run / "summary.json", tmp_path)
    change(tmp_path / "summary.json", reports={"profile": str(tasks / "profile" / "report" / "report.html")})
    assert set(read_compared_run(str(tmp_path)).evidence) == {"mae", "distill"}


def test_evidence_of_another_training_is_not_taken_for_the_reports(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    with artifacts.create(tmp_path / "distill-evidence", "evidence", settings={"another": True}):
        pass
    assert read_compared_run(str(tmp_path)).evidence == {}


def test_a_registration_is_read_as_its_run(run: Path, tmp_path: Path) -> None:
    with artifacts.create(tmp_path, "registration", settings={}) as draft:
        (draft.path / "summary.json").write_bytes((run / "summary.json").read_bytes())
    assert read_compared_run(str(tmp_path)).trainings == read_compared_run(str(run)).trainings


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def changed_report(report: Path, path: Path, file: str, content: str) -> str:
    """A report that is whole, but says something else in one of its files."""
    old = artifacts.read(report, "report")
    with artifacts.create(path, "report", settings=old.settings) as draft:
        for name in old.files:
            (draft.path / name).write_bytes((report / name).read_bytes())
        (draft.path / file).write_text(content)
    return str(path)


def test_what_is_nothing_to_compare_is_refused_in_one_message(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
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
    change(copy / "summary.json", reports={})
    cases = {
        str(tmp_path / "nowhere"): "nowhere: no such directory; give the directory of a run",
        str(empty): "holds neither summary.json, as a completed run does, nor manifest.json",
        str(foreign): "is not the summary of a run",
        str(broken): "is not JSON",
        str(listed): "is not a JSON object",
        str(model): "is a model; give the directory of a run",
        str(copy): "its report is not at .*/copy/report; give the directory of the report",
        changed_report(
            run / "report", tmp_path / "a", "summary.json", '{"distill": {}}'
        ): "distill.name: Field required",
        changed_report(
            run / "report", tmp_path / "b", "findings.json", "[1]"
        ): "b: findings.json: does not hold the answers",
    }
    for uri, message in cases.items():
        with pytest.raises(ArtifactError, match=message):
            read_compared_run(uri)
