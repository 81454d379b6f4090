from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.profiling.evidence import STEP_COLUMNS, RankEvidence, Spans, TrainingEvidence
from trainer.profiling.report.over_time import phase_shares

EDGES = np.linspace(0, 10, 11)


@pytest.fixture
def rank(plain: list[TrainingEvidence]) -> RankEvidence:
    """Four steps of 1.5 s at 0, 2, 4 and 8 s, a third of each in the data phase; an evaluation from 5.5 to 7.5 s."""
    columns = {name: np.zeros(4) for name in STEP_COLUMNS}
    steps = {
        **columns,
        "start_s": np.array([0.0, 2, 4, 8]),
        "seconds": np.full(4, 1.5),
        "data": np.full(4, 0.5),
        "forward": np.full(4, 0.75),
        "forward/attention": np.full(4, 0.25),
    }
    spans = Spans(names=["evaluate"], start_s=np.array([5.5]), seconds=np.array([2.0]))
    return replace(plain[1].ranks[0], steps=steps, spans=spans)


def test_shares_over_time_add_up_to_the_seconds_recorded(rank: RankEvidence) -> None:
    shares = phase_shares(rank, EDGES)
    np.testing.assert_allclose(np.sum(list(shares.values()), axis=0), 1)
    assert {name: values.sum() for name, values in shares.items()} == pytest.approx(
        {"data": 2.0, "forward": 4.0, "evaluate": 2.0, "between": 2.0}
    )
    assert shares["evaluate"].tolist() == pytest.approx([0, 0, 0, 0, 0, 0.5, 1, 0.5, 0, 0])


def test_where_steps_are_not_kept_only_the_known_time_is_shared(rank: RankEvidence) -> None:
    thinned = rank.record.model_copy(update={"steps": rank.record.steps.model_copy(update={"kept_of": 2})})
    shares = phase_shares(replace(rank, record=thinned), EDGES)
    assert "between" not in shares
    assert shares["data"][:4].tolist() == pytest.approx([1 / 3] * 4)


def test_a_device_that_ends_a_step_late_does_not_count_time_twice(rank: RankEvidence) -> None:
    late = replace(rank, steps={**rank.steps, "start_s": np.array([0.0, 1, 2, 3])})
    shares = phase_shares(late, EDGES)
    assert np.sum(list(shares.values()), axis=0).max() == pytest.approx(1)
