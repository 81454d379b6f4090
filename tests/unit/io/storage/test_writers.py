"""One writer an output: who is refused, who is not, and what is left."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.io import artifacts
from trainer.io.errors import OutputError
from trainer.io.storage.writers import LOCK, one_writer
from trainer.runner import local_run

HOLD = """
import sys
from trainer.io.storage.writers import one_writer
with one_writer(sys.argv[1:]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds outputs until it is killed."""
    started = []

    def hold(*outputs):
        words = [sys.executable, "-c", HOLD, *map(str, outputs)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_writer_waits_or_takes_over(holder, tmp_path):
    output = tmp_path / "run"
    process = holder(output)
    message = rf"cannot write to {output}: process {process.pid} on .*, since 20.*, is writing there; wait until it has"
    with pytest.raises(OutputError, match=message), local_run.only_run_in(output):
        pass
    with one_writer([tmp_path / "another"]):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (output / LOCK).exists()
    with (
        local_run.only_run_in(output),
        pytest.raises(OutputError, match=f"process {os.getpid()} on"),
        one_writer([output]),
    ):
        pass
    assert list(tmp_path.iterdir()) == [output], "what was made and not written to is gone"
    assert list(output.iterdir()) == []


def test_run_and_stage_alone_keep_each_other_out(holder, tmp_path, monkeypatch):
    run, student = tmp_path / "run", tmp_path / "run" / "student"
    process = holder(student)
    with (
        pytest.raises(OutputError, match=f"cannot write to {student}: process {process.pid} "),
        local_run.only_run_in(run),
    ):
        pass
    with local_run.only_stage_in([str(run / "evaluation")]):
        pass  # two stages beside one another
    process.kill()
    process.wait()
    with local_run.only_run_in(run):
        with (
            pytest.raises(OutputError, match=f"cannot write to {run}: process "),
            local_run.only_stage_in([str(student)]),
        ):
            pass
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path / "empty")
        with local_run.only_stage_in(["."]):  # whose folder is not itself
            pass
        with local_run.only_stage_in(["s3://bucket/student"]):
            pass
    with local_run.only_stage_in([str(student)]):
        pass


def test_the_lock_is_no_part_of_an_artifact(tmp_path):
    with one_writer([tmp_path / "student"]), artifacts.create(tmp_path / "student", "model", settings={}) as draft:
        (draft.path / "config.json").write_text("{}")
    assert [*artifacts.read(tmp_path / "student", "model").files] == ["config.json"]


def test_a_lock_that_stays_hides_no_error(tmp_path, monkeypatch):
    def refuse(self, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OutputError, match="the disk is full"), one_writer([tmp_path]):
        raise OutputError("the disk is full")
    with one_writer([tmp_path]):
        assert (tmp_path / LOCK).exists()
