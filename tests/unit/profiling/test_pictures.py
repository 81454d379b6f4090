from __future__ import annotations

from dataclasses import replace

import pytest

from docs.pictures import parts
from trainer.io.errors import ArtifactError
from trainer.profiling.compare import ComparedRun
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.findings import Answer
from trainer.profiling.training_summary import summarize
from trainer.report import pages


def test_each_side_is_drawn_with_its_findings_and_two_together(
    plain: list[TrainingEvidence], large: TrainingEvidence, answers: list[Answer]
) -> None:
    sides = [
        ComparedRun(name="run", trainings={"distill": summarize(one)}, answers=given, evidence={"distill": one})
        for one, given in ((plain[1], answers), (large, []))
    ]
    drawn = {name: pages.render("", "", blocks) for name, blocks in parts(*sides).items()}
    assert set(drawn) == {
        "comparison",
        *(f"{when}-{part}" for when in ("before", "after") for part in ("findings", "step", "course")),
    }
    assert "Exploding gradients" in drawn["before-findings"]
    assert "Findings: 0" in drawn["after-findings"]
    assert "CPU cores" in drawn["after-course"]
    with pytest.raises(ArtifactError, match="the evidence of two distillations is needed"):
        parts(sides[0], replace(sides[1], evidence={}))
