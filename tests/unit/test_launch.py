import json
import os
import signal

import pytest

from trainer import config, launch, stages
from trainer.errors import LaunchError


def spec(**changes):
    values = {
        "stage": "distill",
        "settings": {"temperature": 2.0, "note": "ä 'quoted' $HOME"},
        "inputs": {"dataset": "/data set", "teacher": "/t"},
        "outputs": {"student": "/s", "evidence": "/e"},
        "processes_per_node": 2,
    }
    return launch.JobSpec(**values | changes)


@pytest.mark.parametrize("name", [name for name, stage in stages.STAGES.items() if stage.launched])
def test_the_command_is_one_that_the_command_line_takes(name, monkeypatch):
    from trainer import cli

    stage, called = stages.STAGES[name], {}
    monkeypatch.setattr(stages, "call", lambda *arguments, **_: called.update(arguments=arguments))
    places = {keyword: f"/{keyword}" for keyword in (*stage.inputs, *stage.outputs)}
    settings = config.Settings().for_stage(name)
    job = spec(
        stage=name,
        settings=settings,
        inputs={keyword: places[keyword] for keyword in stage.inputs},
        outputs={keyword: places[keyword] for keyword in stage.outputs},
    )
    arguments = job.arguments()
    assert arguments[:2] == ["-m", "trainer"]
    assert cli.main(arguments[2:]) == 0
    assert called["arguments"][0] == name
    assert json.loads(called["arguments"][1]) == settings
    assert called["arguments"][2] == places


def test_several_nodes_are_refused_here():
    with pytest.raises(LaunchError, match="2 nodes were asked for, but this machine is one"):
        launch.LocalLauncher().run(spec(nodes=2))


def leave(folder, rank, message, when, start=0):
    content = {"message": message, "trace": f"trace of {rank}\n", "start": start}
    (folder / f"{rank}.json").write_text(json.dumps(content))
    os.utime(folder / f"{rank}.json", (when, when))


def test_the_earliest_message_is_told_with_its_traceback(tmp_path, capsys):
    leave(tmp_path, 0, "Connection closed by peer", when=200)
    leave(tmp_path, 1, "ValueError: planted", when=100)
    error = launch._explain(spec(), tmp_path, {0: 1, 1: 1})
    assert str(error) == "distill: process 1 of 2: ValueError: planted"
    assert capsys.readouterr().err == "trace of 1\n"


def test_a_killed_process_is_to_blame_before_those_that_miss_it(tmp_path, capsys):
    leave(tmp_path, 0, "Connection closed by peer", when=100)
    error = launch._explain(spec(), tmp_path, {0: 1, 1: -signal.SIGKILL})
    assert str(error).startswith("distill: process 1 of 2: was ended by SIGKILL; the machine may be out of memory")
    assert capsys.readouterr().err == ""


def test_a_silent_end_is_told_by_its_exit_code(tmp_path):
    error = launch._explain(spec(processes_per_node=1), tmp_path, {0: 7})
    assert str(error) == "distill: ended with exit code 7; its last lines of output stand above"


def test_a_process_without_launcher_prints_its_traceback(monkeypatch, capsys):
    monkeypatch.delenv(launch.FAILURES_VARIABLE, raising=False)
    launch.record_failure("message", "the trace")
    assert capsys.readouterr().err == "the trace\n"
