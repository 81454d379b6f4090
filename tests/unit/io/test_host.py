import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from trainer.io import host
from trainer.io.host import EndRequest, Terminated, ended_by_sigterm, environment_variables, usable_cores, usable_memory


@pytest.mark.parametrize(("limit", "cores"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", None)])
def test_a_containers_cpu_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, cores: int | None
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(48)), raising=False)
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cores(tmp_path) == (cores or 48)


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", 48)])
def test_containers_cpu_limit_counts_in_older_form_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(48)), raising=False)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert usable_cores(tmp_path) == cores


def test_without_a_limit_all_cores_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) >= 1


def test_variables_are_put_back_whatever_ends_the_block(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)

    def break_off():
        with environment_variables({"KEPT": "inside", "NEW": "inside"}):
            assert (os.environ["KEPT"], os.environ["NEW"]) == ("inside", "inside")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert os.environ["KEPT"] == "before"
    assert "NEW" not in os.environ


def test_the_start_of_a_process_is_known() -> None:
    code = "import time; now = time.time(); from trainer.io.host import started_unix; print(now, started_unix())"
    before = time.time()
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    now, started = map(float, printed.split())
    assert before - 0.03 < started < now + 0.03, "the operating system counts in hundredths of a second"


def test_memory_is_the_machines_or_the_containers(tmp_path: Path) -> None:
    assert (whole := usable_memory(tmp_path)) == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("max\n")
    assert usable_memory(tmp_path) == whole
    (tmp_path / "memory.max").write_text("4096\n")
    assert usable_memory(tmp_path) == 4096


def test_a_process_without_a_home_gets_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    host.ensure_home()
    assert os.environ["HOME"] == str(tmp_path), "one that is there stays"
    for home in ("/proc/none", "~"):  # a folder that is not there, and what expanduser leaves where none is known
        monkeypatch.setenv("HOME", home)
        host.ensure_home()
        assert Path.home().parent == tmp_path
        assert Path.home().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "utf-8"])
def test_what_terminal_cannot_show_is_escaped_as_in_json(encoding: str) -> None:
    text = "café ☕ 😀 \udcff"  # the last one is of a file name that is not UTF-8
    code = f"from trainer.io import host; host.escape_what_cannot_be_printed(); print({text!a})"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True).stdout
    assert json.loads(f'"{printed.decode(encoding).rstrip()}"') == text
    assert ("é" in printed.decode(encoding)) == (encoding != "ascii")


def test_a_job_counts_from_its_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(host.LAUNCHED_VARIABLE, str(time.time() - 1e6))
    assert host.seconds_since_launch() == pytest.approx(1e6, abs=10)
    monkeypatch.delenv(host.LAUNCHED_VARIABLE)
    by_hand = time.time() - psutil.Process().create_time()
    assert host.seconds_since_launch() == pytest.approx(by_hand, abs=10)


# ---------------------------------------------------------------------------------------------------------------------
# Requests to end


def end_by(number):
    with ended_by_sigterm():
        signal.raise_signal(number)


def test_sigterm_ends_a_block_like_ctrl_c():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated):
        end_by(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as ended:
        end_by(signal.SIGINT)
    assert not isinstance(ended.value, Terminated)
    assert signal.getsignal(signal.SIGTERM) == before


def ask(request, *numbers):
    with request:
        for number in numbers:
            signal.raise_signal(number)


def test_requests_to_end(monkeypatch):
    with pytest.raises(Terminated):
        ask(EndRequest(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as ended:
        ask(EndRequest(), signal.SIGINT)
    assert not isinstance(ended.value, Terminated)
    # A deferred request is noted and the handlers are put back.
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ValueError, match="another reason"):
        later(EndRequest())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    # The same request by two ways is one and a second one ends at once.
    with pytest.raises(ValueError, match="went on"):
        ask_deferred(monkeypatch, 0.5)
    with pytest.raises(Terminated):
        ask_deferred(monkeypatch, 1.5)
    # A request that was not followed is not lost.
    with pytest.raises(Terminated):
        overlook()


def later(request):
    with request:
        request.defer()
        signal.raise_signal(signal.SIGTERM)
        assert request.came
        raise ValueError("the block ends for another reason, and may have looked at the request")


def ask_deferred(monkeypatch, seconds):
    now = 100.0
    monkeypatch.setattr(host.time, "monotonic", lambda: now)
    with EndRequest() as request:
        request.defer()
        signal.raise_signal(signal.SIGTERM)
        now += seconds
        signal.raise_signal(signal.SIGTERM)
        raise ValueError("went on")


def overlook():
    with EndRequest() as request:
        request.defer()
        signal.raise_signal(signal.SIGTERM)
