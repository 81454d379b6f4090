"""Candidates, and what is refused where a tuning is read."""

from __future__ import annotations

import pytest

from trainer import artifacts
from trainer.config import DistillSettings
from trainer.errors import ArtifactError
from trainer.tuning.tuning_schema import FILE, Candidate, read_tuning


def test_a_candidate_changes_what_it_is_about_and_nothing_else():
    settings = DistillSettings(epochs=7, temperature=3.0)
    candidate = Candidate.of(settings)
    assert candidate.workers == "auto"
    assert candidate.applied(settings) == settings.model_copy(update={"workers": "auto"})
    larger = candidate.model_copy(update={"batch_size": 2048, "accumulation": 2})
    assert larger.changes(candidate) == {"batch_size": (1024, 2048), "accumulation": (1, 2)}
    assert larger.applied(settings).temperature == 3.0
    assert larger.held == 1024


def test_a_file_of_another_version_is_refused(tmp_path):
    with artifacts.create(tmp_path / "tuning", "tuning", settings={}) as draft:
        (draft.path / FILE).write_text('{"place": "somewhere"}')
    with pytest.raises(ArtifactError, match=r"tuning.json is not one of this version .*; run the stage tune again"):
        read_tuning(tmp_path / "tuning")
