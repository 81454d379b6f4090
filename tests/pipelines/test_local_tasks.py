"""`kfp.local` as it runs here, with small pipelines of real tasks."""

import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from kfp import compiler, dsl

from components import references
from pipelines import local_tasks

ROOT = Path(__file__).parent.parent.parent


@dsl.component(base_image="test", install_kfp_package=False)
def make(text: str) -> NamedTuple("Made", [("model_uri", str)]):
    from pathlib import Path

    from kfp import dsl

    from components import references
    from trainer.io import artifacts

    print("making")
    place = dsl.get_uri("model")
    with artifacts.create(place, "model", settings={"text": text}):
        (Path(place) / "weights").write_text(text)
    return (references.to(place, "model"),)


@dsl.component(base_image="test", install_kfp_package=False)
def use(model: str) -> str:
    from pathlib import Path

    from components import references

    return (Path(references.uri_of(model)) / "weights").read_text()


@dsl.component(base_image="test", install_kfp_package=False)
def fail(message: str) -> str:
    from components import task
    from trainer.io.errors import DataError

    print("working")
    with task.reporting("fail"):
        raise DataError(message)


@dsl.component(base_image="test", install_kfp_package=False)
def die() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


@dsl.component(base_image="test", install_kfp_package=False)
def hang() -> None:
    import signal
    import subprocess
    import sys

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.run([sys.executable, "-c", "import time; print('hanging', flush=True); time.sleep(600)"], check=True)


@dsl.pipeline(name="good")
def good(text: str = "weights") -> None:
    use(model=make(text=text).outputs["model_uri"]).set_caching_options(False)


@dsl.pipeline(name="failing")
def failing(message: str = "no images") -> None:
    fail(message=message)


@dsl.pipeline(name="dying")
def dying() -> None:
    die()


@dsl.pipeline(name="hanging")
def hanging() -> None:
    hang()


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def started(self, name: str) -> None:
        self.events.append(("started", name))

    def line(self, text: str) -> None:
        self.events.append(("line", text))

    def ended(self, task: local_tasks.Task) -> None:
        self.events.append(("cached" if task.cached else "ran", task.name))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    runs = iter(range(100))

    def run(pipeline, *, fresh=False, **parameters):
        path = tmp_path / "pipeline.yaml"
        compiler.Compiler().compile(pipeline, str(path))
        recorder, log = Recorder(), io.StringIO()
        log.name = "kfp.log"
        tasks = local_tasks.run(
            path.read_text(),
            parameters,
            directory=tmp_path / str(next(runs)),
            cache_root=tmp_path / "cache",
            fresh=fresh,
            log=log,
            reporter=recorder,
        )
        return tasks, recorder.events

    return run


def made(tasks):
    """Where `make` left its artifact."""
    return references.uri_of(tasks["make"].outputs["model_uri"])


def outcome(events, name):
    return next(what for what, which in events if which == name and what in {"cached", "ran"})


def test_tasks_are_reported_in_order_with_their_own_lines_only(run, capsys):
    tasks, events = run(good)
    assert events[:4] == [("started", "make"), ("line", "making"), ("ran", "make"), ("started", "use")]
    assert [event for event in events if event[0] == "line" and event[1]] == [("line", "making")]
    assert tasks["use"].outputs == {"Output": "weights"}
    assert capsys.readouterr().out == ""


def test_what_is_unchanged_comes_from_the_cache(run):
    first, _ = run(good)
    second, events = run(good)
    assert (outcome(events, "make"), outcome(events, "use")) == ("cached", "ran")
    assert made(second) == made(first)
    assert second["use"].outputs == {"Output": "weights"}


def test_another_parameter_is_not_in_the_cache(run):
    run(good)
    tasks, events = run(good, text="other")
    assert outcome(events, "make") == "ran"
    assert tasks["use"].outputs == {"Output": "other"}


def test_a_damaged_artifact_is_made_again(run):
    first, _ = run(good)
    (Path(made(first)) / "weights").write_text("weirdos")  # as long as `weights`
    tasks, events = run(good)
    assert outcome(events, "make") == "ran"
    assert tasks["use"].outputs == {"Output": "weights"}
    _, events = run(good)
    assert outcome(events, "make") == "cached"


def test_a_removed_artifact_is_made_again(run):
    first, _ = run(good)
    shutil.rmtree(made(first))
    _, events = run(good)
    assert outcome(events, "make") == "ran"


def test_an_artifact_that_another_one_replaced_is_made_again(run):
    first, _ = run(good)
    other, _ = run(good, text="other")
    path = made(first)
    shutil.rmtree(path)
    shutil.copytree(made(other), path)
    tasks, events = run(good)
    assert outcome(events, "make") == "ran"
    assert tasks["use"].outputs == {"Output": "weights"}


def test_fresh_makes_all_again_and_replaces_what_was_there(run):
    run(good)
    second, events = run(good, fresh=True)
    assert outcome(events, "make") == "ran"
    third, events = run(good)
    assert outcome(events, "make") == "cached"
    assert made(third) == made(second)


def test_a_failed_task_ends_the_run_with_its_own_message(run, capsys):
    with pytest.raises(local_tasks.TaskError, match=r"^fail: no\nimages$"):
        run(failing, message="no\nimages")
    assert capsys.readouterr().err == ""


def test_a_killed_task_ends_the_run(run):
    with pytest.raises(local_tasks.TaskError, match=r"^die: ended with exit code"):
        run(dying)


def test_kfp_is_left_as_it_was(run):
    from kfp.local import cache, subprocess_task_handler
    from kfp.local.orchestrator import task_executor

    before = (cache.get_local_cache, subprocess_task_handler.run_local_subprocess, task_executor.execute_single_task)
    with pytest.raises(local_tasks.TaskError):
        run(failing)
    assert before == (
        cache.get_local_cache,
        subprocess_task_handler.run_local_subprocess,
        task_executor.execute_single_task,
    )


_HANG = """
import sys
from pathlib import Path
from kfp import compiler
sys.path.insert(0, sys.argv[2])
import test_local_tasks as tests
from components import references
from pipelines import local_tasks

class Printer(tests.Recorder):
    def line(self, text):
        sys.__stdout__.write(text + "\\n")
        sys.__stdout__.flush()

local_tasks.GRACE_S = 3.0
folder = Path(sys.argv[1])
compiler.Compiler().compile(tests.hanging, str(folder / "p.yaml"))
with (folder / "log").open("w") as log:
    local_tasks.run((folder / "p.yaml").read_text(), {}, directory=folder / "run", cache_root=folder / "cache",
                    fresh=False, log=log, reporter=Printer())
"""


def test_an_interruption_ends_all_processes_even_those_that_do_not_listen(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _HANG, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline().strip() == "hanging"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        process.communicate()
    assert not [member for member in family if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
