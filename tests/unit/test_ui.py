"""`vit-distill ui`: which page it names, what it starts, and what it refuses."""

import os
import socket

import pytest
from mlflow.tracking import MlflowClient

from trainer import cli
from trainer.io.errors import EXIT_CODE


@pytest.fixture
def started(monkeypatch):
    """The words of the program that takes the place of the command."""
    words = []
    monkeypatch.setattr(os, "execv", lambda _path, command: words.append(command))
    return words


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_newest_experiment_is_opened_where_trainings_are_shown(mlflow_uri, started, port, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    client = MlflowClient(mlflow_uri)
    client.create_experiment("older")
    newest = client.create_experiment("newest")
    assert cli.main(["ui", "--port", port]) == 0
    view = f"/#/experiments/{newest}/runs?workflowType=machine_learning"
    assert capsys.readouterr().out == f"http://127.0.0.1:{port}{view}\n"
    (command,) = started
    assert command[1:] == ["ui", "--host", "127.0.0.1", "--port", port, "--backend-store-uri", mlflow_uri]
    assert os.access(command[0], os.X_OK)


def test_a_port_that_is_taken_is_one_message(mlflow_uri, started, port, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(port)))
        taken.listen()
        assert cli.main(["ui", "--store", mlflow_uri, "--port", port]) == EXIT_CODE
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: --port {port}: cannot be used (")
    assert printed.err.endswith("; give another one\n")
    assert (printed.out, started) == ("", [])


def test_a_folder_without_runs_is_one_message(tmp_path, started, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ui"]) == EXIT_CODE
    assert "nothing is tracked" in capsys.readouterr().err
    assert not started
