"""What happens when training processes are asked to end, or do not come to their meetings."""

import signal
import time

import pytest

from tests import groups
from tests.groups import Fault
from trainer.io import artifacts
from trainer.io.errors import CRASH_EXIT_CODE, PREEMPTED_EXIT_CODE

SETTINGS = {"epochs": 3, "checkpoint_every": 5}


def checkpoints(distillation):
    root = groups.notes(distillation).parent / "checkpoints"
    return sorted(path.parent.name for path in root.glob("*/step-*/manifest.json"))


@pytest.mark.slow
def test_all_processes_end_at_one_step(distillation):
    training = distillation("asked", **SETTINGS)
    began = time.monotonic()
    ended = groups.run(training, processes=2, fault=Fault(sends=signal.SIGTERM, step=11, rank=1))
    assert ended.codes == [PREEMPTED_EXIT_CODE] * 2
    assert ended.messages == [""] * 2, "nothing has failed"
    assert time.monotonic() - began < 60
    (*_, newest) = checkpoints(training)
    assert 12 <= int(newest.split("-")[1]) <= 14
    assert not artifacts.exists(training.outputs["student"])


@pytest.mark.slow
def test_a_request_in_the_first_step_keeps_nothing(distillation):
    training = distillation("first", **SETTINGS)
    assert groups.run(training, fault=Fault(sends=signal.SIGTERM, step=0)).codes == [PREEMPTED_EXIT_CODE]
    assert checkpoints(training) == []


@pytest.mark.slow
def test_a_stopped_process_is_named(distillation):
    training = distillation("stopped", **SETTINGS)
    fault = Fault(sends=signal.SIGSTOP, step=7, rank=1)
    ended = groups.run(training, processes=3, fault=fault, TRAINER_WAIT_S="3")
    assert ended.codes == [CRASH_EXIT_CODE, -signal.SIGKILL, CRASH_EXIT_CODE], "to be tried again"
    expected = "rank 1 did not come to step 8 within 3 s"
    assert all(message.startswith(expected) for message in (ended.messages[0], ended.messages[2])), ended.messages
    assert checkpoints(training) == ["step-00000005-g001"]


@pytest.mark.slow
def test_loader_process_that_hangs_ends_training_with_message(distillation):
    training = distillation("hanging", workers=1, **SETTINGS)
    ended = groups.run(training, fault=Fault(step=7, loading=True), TRAINER_WAIT_S="4")
    assert ended.codes == [CRASH_EXIT_CODE]
    assert "none of 1 loader processes had a batch within 2 s, so one of them hangs" in ended.messages[0]
