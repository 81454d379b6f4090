"""What happens when a training goes wrong: one message, all processes gone, what was written kept."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from trainer.io import artifacts
from trainer.io.errors import EXIT_CODE, INTERRUPTED_EXIT_CODE, LaunchError

ROOT = Path(__file__).parents[2]
LONG = {"epochs": 400, "checkpoint_every": 10, "ema_decay": 0.9}


def start(distillation, processes=2, **environment):
    return subprocess.Popen(
        [sys.executable, *distillation.arguments(processes)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    )


def workers(process):
    """The training processes, by rank."""
    found = [child for child in psutil.Process(process.pid).children(recursive=True) if "--worker" in child.cmdline()]
    return sorted(found, key=lambda child: int(child.environ()["RANK"]))


def wait_for_checkpoint(distillation, process, name="step-*"):
    root = Path(distillation.outputs["student"]).parent / "checkpoints"
    for _ in range(6000):
        if any(root.glob(f"*/{name}/manifest.json")):
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    pytest.fail("no checkpoint within a minute")


def finish(process, seconds=120):
    """Exit code, what it said, and that nothing of it is left."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    _, errors = process.communicate(timeout=seconds)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    return process.returncode, errors


@pytest.mark.slow
def test_killed_process_is_named_and_others_end_at_once(distillation):
    training = distillation("killed", **LONG)
    process = start(training)
    wait_for_checkpoint(training, process)
    workers(process)[1].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    code, errors = finish(process)
    assert time.monotonic() - begin < 60
    assert code == EXIT_CODE
    assert "error: distill: process 1 of 2: was ended by SIGKILL; the machine may be out of memory" in errors
    assert "Traceback" not in errors
    assert not artifacts.exists(training.outputs["student"])


@pytest.mark.slow
def test_a_bug_shows_its_traceback_once(distillation, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from trainer.objectives.distillation import losses\n"
        "    def agreement(student, teacher):\n"
        "        raise ZeroDivisionError('planted')\n"
        "    losses.agreement = agreement\n"
    )
    code, errors = finish(start(distillation("bug"), PYTHONPATH=f"{tmp_path}:{ROOT}"))
    assert code == EXIT_CODE
    assert errors.count("in agreement") == 1
    assert "error: distill: process 1 of 2: ZeroDivisionError: planted (its traceback stands above)" in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "zero", [False, pytest.param(True, marks=pytest.mark.long)], ids=["whole optimizer", "sharded optimizer"]
)
def test_ctrl_c_ends_all_and_resuming_keeps_weights(distillation, zero):
    settings = LONG | {"epochs": 5, "zero": zero}
    interrupted = distillation("interrupted", **settings)
    process = start(interrupted)
    wait_for_checkpoint(interrupted, process)
    os.killpg(process.pid, signal.SIGINT)
    code, errors = finish(process)
    assert code == INTERRUPTED_EXIT_CODE
    assert "interrupted; what was written is kept" in errors
    assert "Traceback" not in errors
    assert not artifacts.exists(interrupted.outputs["student"])

    interrupted.run(processes=2)
    whole = distillation("whole", **settings).train(processes=2)
    for name, value in whole.weights().items():
        assert torch.equal(interrupted.weights()[name], value), name
    assert not list(Path(interrupted.outputs["student"]).parent.glob("checkpoints/*"))


@pytest.mark.slow
def test_a_diverging_loss_names_step_and_samples(distillation):
    with pytest.raises(LaunchError, match=r"the loss is not finite at step \d+ \(process 0.*samples [0-9a-f]{16} "):
        distillation("diverging", base_learning_rate=1e25, clip_norm=0).run(processes=2)


@pytest.mark.slow
def test_processes_refuse_a_setting_with_a_message(distillation):
    with pytest.raises(LaunchError, match=r"batch_size = 3 cannot be divided among 2 processes x 2 micro-batches"):
        distillation("too-small", batch_size=3, accumulation=2).run(processes=2)
