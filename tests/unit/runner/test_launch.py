import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pynvml
import pytest
import torch
from torch.distributed import TCPStore

from trainer import cli, config, stages
from trainer.graph import JobSpec
from trainer.io.costs import PLACE_VARIABLE
from trainer.io.errors import (
    CRASH_EXIT_CODE,
    CRASHED_NODE_EXIT_CODE,
    EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    CrashError,
    LaunchError,
    LostProcessError,
    PreemptedError,
    SettingsError,
    StorageAwayError,
)
from trainer.io.host import SHUTDOWN_TIMEOUT_S
from trainer.runner import launch

DIRECTORIES = ["--dataset", "/d", "--teacher", "/t", "--student", "/s", "--evidence", "/e"]


def spec(**changes):
    values = {
        "stage": "distill",
        "settings": {"temperature": 2.0, "note": "ä 'quoted' $HOME"},
        "inputs": {"dataset": "/data set", "teacher": "/t"},
        "outputs": {"student": "/s", "evidence": "/e"},
        "processes_per_node": 2,
    }
    return JobSpec(**values | changes)


@pytest.mark.parametrize("name", [name for name, stage in stages.STAGES.items() if stage.launched])
def test_command_is_one_that_command_line_takes(name, monkeypatch):
    stage, called = stages.STAGES[name], {}
    monkeypatch.setattr(stages, "call", lambda *arguments, **_: called.update(arguments=arguments))
    places = {keyword: f"/{keyword}" for keyword in (*stage.all_inputs, *stage.outputs)}
    settings = config.Settings().for_stage(name)
    job = spec(
        stage=name,
        settings=settings,
        inputs={keyword: places[keyword] for keyword in stage.all_inputs},
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
        launch.run_here(spec(nodes=2))


def test_a_wrong_place_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setenv(PLACE_VARIABLE, '{"pool": "workstation", "price": 0.35}')
    with pytest.raises(SettingsError, match=r"TRAINER_PLACE=.*: price is a group of fields"):
        launch.run_here(spec())


def leave(folder, rank, message, when, start=0):
    content = {"message": message, "trace": f"trace of {rank}\n", "start": start}
    (folder / f"{rank}.json").write_text(json.dumps(content))
    os.utime(folder / f"{rank}.json", (when, when))


LOST = "rank 1 went away during step 4 (Connection closed by peer [10.0.0.7]:4711)"


@pytest.mark.parametrize(
    ("exit_codes", "reported", "expected"),
    [
        ({0: 143, 1: 143}, {}, "distill: was asked to end; what was written is kept"),
        ({0: 143, 1: 1}, {1: LOST}, "distill: was asked to end; what was written is kept"),
        ({0: 143, 1: 1}, {1: "ZeroDivisionError: planted"}, "distill: process 1 of 2: ZeroDivisionError: planted"),
        ({0: 143, 1: 1}, {}, "distill: process 1 of 2: ended with exit code 1;"),
        ({0: 143, 1: -9}, {0: LOST}, "distill: process 1 of 2: was ended by SIGKILL"),
        ({0: 1, 1: 1}, {0: LOST, 1: "bug"}, "distill: process 1 of 2: bug"),
        ({0: -6, 1: 1}, {0: LOST, 1: "bug"}, "distill: process 1 of 2: bug"),
        ({0: 1, 1: -6}, {0: LOST}, "distill: process 1 of 2: was ended by SIGABRT"),
    ],
    ids=[
        "all",
        "one missed another",
        "a bug",
        "an end without a message",
        "killed",
        "who missed another is not to blame",
        "nor where it was aborted for that",
        "an abort without a message",
    ],
)
def test_request_to_end_can_be_distinguished_from_failure(tmp_path, exit_codes, reported, expected):
    for rank, message in reported.items():
        leave(tmp_path, rank, message, when=1000 + rank)
    error = launch._explain(spec(), tmp_path, exit_codes)
    assert str(error).startswith(expected)
    assert isinstance(error, PreemptedError) == ("asked to end" in expected)


def test_blame(tmp_path, capsys):
    failures = {
        0: SimpleNamespace(local_rank=0, exitcode=1, timestamp=1000),
        1: SimpleNamespace(local_rank=1, exitcode=-9, timestamp=1030),
    }
    assert launch._first_exit_codes(SimpleNamespace(failures=failures)) == {0: 1}
    # A killed process is to blame before those that miss it.
    leave(tmp_path, 0, "Connection closed by peer", when=100)
    error = launch._explain(spec(), tmp_path, {0: 1, 1: -signal.SIGKILL})
    assert str(error).startswith("distill: process 1 of 2: was ended by SIGKILL; the machine may be out of memory")
    assert capsys.readouterr().err == ""
    # The earliest message is reported with its traceback.
    leave(tmp_path, 0, "Connection closed by peer", when=200)
    leave(tmp_path, 1, "ValueError: planted", when=100)
    error = launch._explain(spec(), tmp_path, {0: 1, 1: 1})
    assert str(error) == "distill: process 1 of 2: ValueError: planted"
    assert capsys.readouterr().err == "trace of 1\n"


def test_ends_without_a_message(tmp_path, monkeypatch, capsys):
    error = launch._explain(spec(processes_per_node=1), tmp_path, {0: 7})
    assert str(error) == "distill: ended with exit code 7; its last lines of output stand above"
    # A process without launcher prints its traceback.
    monkeypatch.delenv(launch.FAILURES_VARIABLE, raising=False)
    launch.record_failure("message", "the trace")
    assert capsys.readouterr().err == "the trace\n"


def test_a_node_is_named_where_there_are_others(tmp_path):
    leave(tmp_path, 0, "dataset /d: no such directory", when=100)
    error = launch._explain(spec(), tmp_path, {0: EXIT_CODE}, node="node 1 of 2")
    assert str(error) == "distill: node 1 of 2, process 0 of 2: dataset /d: no such directory"
    assert not isinstance(error, CrashError)
    alone = launch._explain(spec(processes_per_node=1), tmp_path, {0: 1}, node="node 1 of 2")
    assert str(alone) == "distill: node 1 of 2: dataset /d: no such directory"
    assert isinstance(alone, CrashError)


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: [../gloo/pair.cc:538] Connection closed by peer [10.0.0.1]:1",
        "DistBackendError: NCCL error: remote process exited",
    ],
)
def test_a_process_that_misses_another_node_points_there(tmp_path, message):
    leave(tmp_path, 0, message, when=100)
    error = launch._explain(spec(), tmp_path, {0: 1}, node="node 0 of 2")
    assert str(error).endswith("so another node may have failed first: its log says why")
    assert "another node" not in str(launch._explain(spec(), tmp_path, {0: 1}))


def test_nodes_are_started_with_what_they_need():
    job = spec()
    assert job.arguments("--node")[:5] == ["-m", "trainer", "stage", "distill", "--node"]
    assert [text if text != "--node" else "--worker" for text in job.arguments("--node")] == job.arguments()


@pytest.fixture
def node(monkeypatch, tmp_path):
    """Set the variables of one node, as an operator does; gives the file of its last words."""

    def set_variables(**values):
        for name in [name for name in os.environ if name.startswith(("PET_", "MASTER_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv(launch.TERMINATION_LOG_VARIABLE, str(tmp_path / "termination-log"))
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        return tmp_path / "termination-log"

    return set_variables


def test_a_node_outside_of_a_job_is_refused(node, capsys):
    last_words = node()
    assert cli.main(["stage", "distill", "--node", *DIRECTORIES]) == EXIT_CODE
    printed = capsys.readouterr().err
    assert printed == f"error: {last_words.read_text()}\n"
    assert "distill: --node is for the pods of a cluster's job, but PET_NNODES is not set" in printed


@pytest.mark.parametrize(
    ("name", "value"),
    [("PET_NNODES", "two"), ("PET_NODE_RANK", "x"), ("PET_NPROC_PER_NODE", "many"), ("PET_NNODES", "0")],
)
def test_variables_that_describe_no_node_are_shown(node, name, value, capsys):
    node(**{"PET_NNODES": 2, "PET_NODE_RANK": 1, "PET_NPROC_PER_NODE": 1} | {name: value})
    with pytest.raises(LaunchError, match=f"distill: .*{name}={value}.*: do not describe a node of a job"):
        launch.join_node(spec())


def test_an_absent_first_node_is_not_awaited(node):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        node(PET_NNODES=2, PET_NODE_RANK=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PET_RDZV_CONF="timeout=1")
        with pytest.raises(
            CrashError, match=f"node 1 of 2: the first node did not answer at 127.0.0.1:{port} within 1 s"
        ):
            launch.join_node(spec())


def test_a_restarted_node_waits_for_the_first(monkeypatch):
    """The first node serves a lost group until it notices; who joined that would never meet those that start anew."""
    port = free_port()
    start = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=5)}
    config = SimpleNamespace(rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}", rdzv_configs={"timeout": 1})

    def wait(rank):
        monkeypatch.setenv("PET_NODE_RANK", str(rank))
        launch._wait_for_first_node(config, spec(nodes=3), f"node {rank} of 3")

    lost = TCPStore("127.0.0.1", port, **start)
    wait(0)
    wait(1)
    wait(2)
    with pytest.raises(CrashError, match=f"at 127.0.0.1:{port} within 1 s .it still runs from before this node"):
        wait(1)
    del lost
    anew = []
    monkeypatch.setattr(time, "sleep", lambda _s: anew.append(TCPStore("127.0.0.1", port, **start)))
    wait(1)
    assert len(anew) == 1


def test_an_elastic_node_waits_for_the_meeting_place(monkeypatch):
    port, slept = free_port(), []
    config = SimpleNamespace(rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{port}", rdzv_configs={"timeout": 1})
    launch._wait_for_first_node(config, spec(), "node worker-0")  # this machine: it serves the others itself
    monkeypatch.setattr("trainer.runner.elastic_private.is_this_machine", lambda _host: False)
    with pytest.raises(CrashError, match=f"distill: node worker-1: the first node did not answer at 127.0.0.1:{port}"):
        launch._wait_for_first_node(config, spec(), "node worker-1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds) or listener.listen())
        launch._wait_for_first_node(config, spec(), "node worker-1")
    assert len(slept) == 1


def test_last_words_that_cannot_be_written_are_reported(node, caplog):
    node().mkdir()
    launch.write_termination_message("why")
    assert "the message could not be written to" in caplog.text


def test_unexpected_error_of_node_is_its_last_words(node, monkeypatch, capsys):
    last_words = node()
    monkeypatch.setattr(launch, "join_node", lambda _spec: 1 / 0)
    assert cli.main(["stage", "distill", "--node", *DIRECTORIES]) == CRASH_EXIT_CODE
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert (
        lines[-1]
        == f"error: {last_words.read_text()}"
        == "error: ZeroDivisionError: division by zero (its traceback stands above)"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("a setting"), EXIT_CODE),
        (LostProcessError("rank 1 did not come"), CRASH_EXIT_CODE),
        (StorageAwayError("the store did not answer"), CRASH_EXIT_CODE),
        (PreemptedError("was asked to end"), PREEMPTED_EXIT_CODE),
        (ValueError("a bug"), CRASH_EXIT_CODE),
    ],
)
def test_exit_code_of_process_tells_what_may_pass(monkeypatch, tmp_path, error, code):
    monkeypatch.setenv(launch.FAILURES_VARIABLE, str(tmp_path))
    monkeypatch.setattr(stages, "call", lambda *_, **__: (_ for _ in ()).throw(error))
    assert cli.main(["stage", "distill", "--worker", "--settings", "{}", *DIRECTORIES]) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LaunchError("distill: node 1 of 2: a setting"), EXIT_CODE),
        (CrashError("distill: node 1 of 2: was ended by SIGSEGV"), CRASHED_NODE_EXIT_CODE),
        (PreemptedError("distill: was asked to end"), PREEMPTED_EXIT_CODE),
    ],
)
def test_a_nodes_exit_code_asks_for_a_restart(node, monkeypatch, error, code):
    last_words = node()
    monkeypatch.setattr(launch, "join_node", lambda _spec: (_ for _ in ()).throw(error))
    assert cli.main(["stage", "distill", "--node", *DIRECTORIES]) == code
    assert (code >= 128) == isinstance(error, CrashError | PreemptedError)
    assert last_words.read_text() == str(error)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def silence():
    """A data set that keeps whoever reads it waiting, and the environment for that: a store that takes requests and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        store = f"http://127.0.0.1:{listener.getsockname()[1]}"
        keys = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}
        yield "s3://bucket/silence", {"AWS_ENDPOINT_URL_S3": store, **keys}


@contextmanager
def start_node(rank, port, dataset, folder, **further):
    job = spec(
        settings=config.Settings().for_stage("distill"),
        inputs={"dataset": str(dataset), "teacher": "/none"},
        outputs={"student": str(folder / "student"), "evidence": str(folder / "evidence")},
    )
    environment = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        launch.TERMINATION_LOG_VARIABLE: str(folder / f"last-words-{rank}"),
        **further,
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TRAINER_"))}
    command = [sys.executable, *job.arguments("--node")]
    with subprocess.Popen(command, env={**inherited, **environment}, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            for left in [*workers(process), process] if process.poll() is None else []:
                left.kill()


def workers(process):
    return [child for child in psutil.Process(process.pid).children(recursive=True) if is_worker(child)]


def is_worker(process):
    with suppress(psutil.NoSuchProcess):  # it has just ended
        return "--worker" in process.cmdline()
    return False


@pytest.mark.slow
def test_two_nodes_meet_one_fails_other_is_ended(tmp_path, silence):
    """As on a cluster: the operator sees one pod fail and ends the others."""
    hanging, environment = silence
    port = free_port()
    with (
        start_node(1, port, tmp_path / "missing", tmp_path) as failing,
        start_node(0, port, hanging, tmp_path, **environment) as waiting,
    ):
        errors = failing.communicate(timeout=120)[1].splitlines()
        children = workers(waiting)
        waiting.send_signal(signal.SIGTERM)
        ended = waiting.communicate(timeout=SHUTDOWN_TIMEOUT_S + 30)[1]
    expected = f"distill: node 1 of 2: dataset {tmp_path / 'missing'}: no such directory"
    assert failing.returncode == EXIT_CODE
    assert errors[-1].startswith(f"error: {expected}")
    assert "Traceback" not in "".join(errors)
    assert (tmp_path / "last-words-1").read_text() == errors[-1].removeprefix("error: ")
    assert waiting.returncode == PREEMPTED_EXIT_CODE
    assert "Traceback" not in ended
    assert len(children) == 1
    assert not any(child.is_running() for child in children)


def test_a_killed_process_of_a_node_is_named(node, silence):
    hanging, environment = silence
    node(PET_NNODES=1, PET_NPROC_PER_NODE=1, PET_NODE_RANK=0, PET_MASTER_ADDR="127.0.0.1", PET_MASTER_PORT=free_port())

    def kill_the_worker():
        deadline = time.monotonic() + 120
        while not (found := workers(psutil.Process())) and time.monotonic() < deadline:
            time.sleep(0.05)
        for child in found:
            child.kill()

    killer = threading.Thread(target=kill_the_worker)
    killer.start()
    job = spec(settings={}, inputs={"dataset": hanging, "teacher": "/none"}, environment=environment)
    with pytest.raises(CrashError, match="distill: was ended by SIGKILL"):
        launch.join_node(job)
    killer.join()


def test_gpus_are_those_that_torch_would_use(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "device_count", lambda: 3
    )  # what CUDA_VISIBLE_DEVICES leaves of those of the driver
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    assert launch.gpus() == 3

    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert launch.gpus() == 0


@pytest.mark.parametrize(
    ("gpus", "device", "processes"), [(0, "auto", 1), (4, "auto", 4), (4, "cuda", 4), (4, "cpu", 1)]
)
def test_process_for_each_gpu_that_is_to_be_trained_on(monkeypatch, gpus, device, processes):
    monkeypatch.setattr(launch, "gpus", lambda: gpus)
    assert launch.processes_here(device) == processes
