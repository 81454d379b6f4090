"""export: write the student as ONNX, measure its variants on this machine's CPU, and choose the fastest that passes the gate."""

from __future__ import annotations

from pathlib import Path

from trainer.config import ExportSettings
from trainer.io import artifacts
from trainer.io.artifacts import Artifact
from trainer.report import tracking
from trainer.report.tracking.stage_runs import stage_run
from trainer.stages.onnx_export import exporting


def run(
    settings: ExportSettings, *, dataset: str | Path, student: str | Path, evaluation: str | Path, exported: str | Path
) -> Artifact:
    """Write what `vit-distill export` writes, and the page of it.

    A student that ONNX cannot express, or of which no variant passes, ends no run: the page, the log and `candidates.json` say why, and
    there is no file.
    """
    with stage_run("export", settings.model_dump(mode="json")) as tracker:
        exporting.make(settings, exported, dataset=dataset, student=student, evaluation=evaluation)
        made = artifacts.read(exported, "export")
        tracker.metrics(0, tracking.numbers(made.figures))
        for name in (exporting.CANDIDATES, exporting.PAGE):
            tracker.file(made.path / name)
    return made
