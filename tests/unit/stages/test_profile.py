from __future__ import annotations

import gzip
import json
import logging
import re
import shutil
from html import escape, unescape
from pathlib import Path

import pytest
import torch

from trainer.config import EvidenceSettings, ProfileSettings
from trainer.io import artifacts, formatting
from trainer.io.errors import ArtifactError
from trainer.profiling.recorder import Recorder
from trainer.report.tracking.stage_runs import Tracker
from trainer.stages import profile


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Evidence of a pretraining with given weights, which is empty, and of a small distillation."""
    torch.set_num_threads(1)
    paths = {name: tmp_path_factory.mktemp(name) for name in ("pretrain_evidence", "distill_evidence")}
    settings = EvidenceSettings(system_interval_s=0.05, operators_at=(3,), operators_steps=2)
    recorder = Recorder(settings, name="distill", device=torch.device("cpu"), rank=0, world_size=1)
    layer = torch.nn.Linear(32, 32)
    with recorder:
        for step in range(10):
            with recorder.timeline.step(step, images=16):
                with recorder.timeline.span("forward"):
                    loss = layer(torch.rand(16, 32)).square().mean()
                with recorder.timeline.span("backward"):
                    loss.backward()
    with artifacts.create(paths["pretrain_evidence"], "evidence", settings={}):
        pass
    with artifacts.create(paths["distill_evidence"], "evidence", settings={}) as draft:
        recorder.write(draft.path)
    return paths


def test_the_report_holds_the_page_and_its_numbers(
    inputs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    logged: list[str] = []
    monkeypatch.setattr(Tracker, "file", lambda _tracker, path: logged.append(path.name))
    report = profile.run(ProfileSettings(top_operators=2), **inputs, report=tmp_path / "report")
    page = (report.path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "Distillation" in page
    numbers = json.loads((report.path / "summary.json").read_text())
    assert list(numbers) == ["distill"]
    assert numbers["distill"]["steps"] == 10
    table = page.partition("Own time a step</th>")[2].partition("</table>")[0]
    assert logged == ["trace-distill.json.gz"]
    trace = json.loads(gzip.decompress((report.path / "trace-distill.json.gz").read_bytes()))
    assert "aten::addmm" in {event["name"] for event in trace["traceEvents"]}
    assert '<a href="trace-distill.json.gz" download>' in page
    longest = [one["name"] for one in numbers["distill"]["operators"]["operators"][:2]]
    assert re.findall(r"<tr><td[^>]*>([^<]*)", table) == [escape(formatting.clipped(name)) for name in longest]
    assert json.loads((report.path / "bill.json").read_text())["stages"][1]["stage"] == "distill"
    rows = json.loads((report.path / "findings.json").read_text())
    assert {row["training"] for row in rows} == {"distill"}
    assert report.figures["outcome"] == "too_short"
    assert report.figures["verdict"].startswith("Too short to judge: ")
    assert report.figures["verdict"] in unescape(page)
    assert f"profile  {report.figures['verdict']}" in caplog.messages
    assert "the training was too short for the rule" in page
    # Which operators take longest is chance; of all, some have known operations.
    all_rows = profile.run(ProfileSettings(top_operators=100), **inputs, report=tmp_path / "all")
    assert "Limited by</th>" in (all_rows.path / "report.html").read_text()
    figures = report.figures["distill"]
    assert figures["step_ms"] == numbers["distill"]["step_ms"]["p50"] > 0
    assert figures["images_per_second"] == numbers["distill"]["images_per_second"] > 0
    assert sum(figures["phases"].values()) == pytest.approx(1, abs=1e-4)
    for name, path in inputs.items():
        assert report.parents[name] == artifacts.read(path, "evidence").fingerprint


def test_damaged_evidence_is_refused_before_anything_is_written(inputs: dict[str, Path], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(inputs["distill_evidence"], damaged)
    (damaged / "distill" / "rank0.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"rank0\.json"):
        profile.run(
            ProfileSettings(),
            pretrain_evidence=inputs["pretrain_evidence"],
            distill_evidence=damaged,
            report=tmp_path / "report",
        )
    assert not (tmp_path / "report").exists()


def test_evidence_of_another_stage_is_refused_before_anything_is_written(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    distilled, finetuned = inputs["distill_evidence"], tmp_path / "finetuned"
    with artifacts.create(finetuned, "evidence", settings={}) as draft:
        shutil.copytree(distilled / "distill", draft.path / "finetune")
    for pretrain, distill, training, stage in (
        (distilled, distilled, "distill", "pretrain"),
        (distilled, finetuned, "distill", "pretrain"),
        (finetuned, finetuned, "finetune", "distill"),
    ):
        with pytest.raises(ArtifactError, match=f"holds the training '{training}'.*{stage}"):
            profile.run(
                ProfileSettings(), pretrain_evidence=pretrain, distill_evidence=distill, report=tmp_path / "report"
            )
        assert not (tmp_path / "report").exists()
    profile.run(ProfileSettings(), pretrain_evidence=finetuned, distill_evidence=distilled, report=tmp_path / "report")
