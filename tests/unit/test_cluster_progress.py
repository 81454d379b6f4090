"""What the soak on a cluster makes of a training's log."""

import logging

import pytest

from tests.cluster.progress import Seen, goodput, recovery, steps
from trainer.training.metric_logger import ProgressBar


def lines(*moments):
    return [Seen(at, step, 1000) for at, step in moments]


def test_steps_are_read_as_a_training_writes_them(caplog):
    """And nothing else: not the steps of a finding or of a validation."""
    with caplog.at_level(logging.INFO):
        progress = ProgressBar("distill", first_step=0, total_steps=100, images_per_step=64, active=True)
        progress.show(9, {"loss": 1.2})
    written = [f"04:31:58  {record.getMessage()}" for record in caplog.records]
    assert written
    others = ["04:31:58  distill  step 18  warning: Own overhead. 2/100", "04:31:59  distill  step 20/100 validated"]
    log = "".join(f"2026-11-23T04:31:58.123456789Z {line}\n" for line in [*written, *others])
    assert [(seen.step, seen.total) for seen in steps(log)] == [(10, 100)]
    assert steps(log)[0].at == pytest.approx(1795408318.123456, abs=1e-3)


def test_a_training_that_begins_again_at_a_checkpoint():
    seen = lines((0, 0), (5, 50), (10, 100), (42, 80), (47, 130))
    found = recovery(seen, struck=11, until=47)
    assert found.next_step_s == 32
    assert found.repeated == 20
    # 130 steps of 0.1 s each count, of 47 s.
    assert goodput(seen) == pytest.approx(13 / 47)


def test_a_training_that_goes_on():
    seen = lines((0, 0), (5, 50), (10, 100), (15, 150))
    assert recovery(seen, struck=6, until=15).next_step_s == 5
    assert recovery(seen, struck=6, until=15).repeated == 0
    assert goodput(seen) == 1


def test_a_training_that_never_makes_another_step():
    assert recovery(lines((0, 0), (5, 50)), struck=6, until=606).next_step_s == 600
