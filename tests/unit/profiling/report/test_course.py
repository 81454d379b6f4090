from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainer.profiling.evidence import read_evidence
from trainer.profiling.report.course import phase_shares


def test_shares_over_time_add_up_to_the_seconds_recorded(evidence: Path) -> None:
    rank = read_evidence(evidence).trainings[1].ranks[0]
    edges = np.linspace(0, rank.record.ended_s, 201)
    shares = phase_shares(rank, edges)
    width = edges[1] - edges[0]
    np.testing.assert_allclose(np.sum(list(shares.values()), axis=0), 1, atol=1e-6)
    assert shares["backward"].sum() * width == pytest.approx(rank.record.steps.ranges["backward"], rel=0.02)
    evaluating = rank.record.outside["evaluate"].seconds
    assert shares["evaluate"].sum() * width == pytest.approx(evaluating, rel=0.02)
