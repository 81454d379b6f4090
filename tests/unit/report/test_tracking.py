from __future__ import annotations

import http.server
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.utils import validation

from trainer import config
from trainer.config import TrackingSettings
from trainer.io.errors import PreemptedError, SettingsError, TrackingAwayError, TrackingError
from trainer.report import tracking
from trainer.report.tracking import stage_runs
from trainer.report.tracking.stage_runs import STAGE_TAG, UNSENT, stage_run

# MLflow on SQLAlchemy 2.1
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

VARIABLES = (
    tracking.URI,
    tracking.EXPERIMENT_ID,
    tracking.EXPERIMENT_NAME,
    tracking.RUN_ID,
    tracking.RUN,
    tracking.IDENTITY,
)


@pytest.fixture(autouse=True)
def _untracked(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def directory(empty_mlflow_store, tmp_path_factory):
    """Holds the SQLite store that the tests of this module share."""
    return Path(shutil.copy(empty_mlflow_store, tmp_path_factory.mktemp("store") / "mlflow.db")).parent


@pytest.fixture
def store(directory, monkeypatch, request):
    """A real SQLite store; each test is a pipeline run of its own."""
    variables = tracking.environment(TrackingSettings(), directory=directory, run=request.node.name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return tracking.client()


# ---------------------------------------------------------------------------------------------------------------------
# Where


@pytest.mark.parametrize(("given", "asks"), [({}, False), ({"MLFLOW_DISABLE_TELEMETRY": "false"}, True)])
def test_telemetry_of_mlflow_is_off_unless_asked_for(given, asks, tmp_path):
    """Its thread changes the environment while requests read it. MLflow itself turns it off where it sees a test."""
    code = (
        "from trainer.report import tracking; from mlflow.telemetry import client; print(client.get_telemetry_client())"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9", **given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout != "None\n") == asks


def test_setting_goes_before_environment_before_sqlite(monkeypatch, tmp_path):
    default = tracking.environment(TrackingSettings(), directory=tmp_path, run="r")
    assert default[tracking.URI] == f"sqlite:///{tmp_path}/mlflow.db"
    assert default[tracking.RUN] == "r"
    assert default[tracking.EXPERIMENT_NAME] == TrackingSettings().experiment
    monkeypatch.setenv(tracking.URI, "http://from-environment")
    monkeypatch.setenv(tracking.EXPERIMENT_NAME, "from-environment")
    injected = tracking.environment(TrackingSettings(), directory=tmp_path, run="r")
    assert injected[tracking.URI] == "http://from-environment"
    assert injected[tracking.EXPERIMENT_NAME] == "from-environment"
    chosen = tracking.environment(TrackingSettings(uri="http://set", experiment="set"), directory=tmp_path, run="r")
    assert chosen[tracking.URI] == "http://set"
    assert chosen[tracking.EXPERIMENT_NAME] == "set"


def test_switched_off_hides_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(tracking.URI, "http://127.0.0.1:9")
    off = tracking.environment(TrackingSettings(enabled=False), directory=tmp_path, run="r")
    monkeypatch.setenv(tracking.URI, off[tracking.URI])
    tracking.check()
    assert tracking.start_parent({}, {}) is None
    with stage_run("distill", {}) as tracker:
        tracker.metrics(0, {"loss": 1.0})
        assert tracker.run_id is None


def test_nothing_tracked_imports_no_mlflow():
    code = (
        "import sys; from trainer.report import tracking; from trainer.report.tracking.stage_runs import stage_run; tracking.check()\n"
        "with stage_run('distill', {}) as tracker: tracker.metrics(0, {'loss': 1.0})\n"
        "assert 'mlflow' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=300, env=environment, cwd=Path(tracking.__file__).parents[2]
    )


def test_passwords_are_not_shown():
    assert tracking.shown("https://me:secret@host:5000/x") == "https://me:***@host:5000/x"
    assert tracking.shown("postgresql://me:s3cr:t@host/x") == "postgresql://me:***@host/x"
    for plain in ("sqlite:////tmp/a:b@c/mlflow.db", "http://host:5000", "http://me@host", "databricks"):
        assert tracking.shown(plain) == plain


def test_a_full_disk_is_named_as_such(monkeypatch):
    monkeypatch.setenv(tracking.URI, "sqlite:////data/mlflow.db")
    message = r"MLflow at sqlite:////data/mlflow.db: cannot write to .*: the disk is full; free some space"
    with (
        pytest.raises(TrackingError, match=message),
        tracking.explained(),
        Path("/dev/full").open("w", encoding="utf-8") as full,
    ):
        full.write("metrics")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_closed_port_is_reported_within_seconds(monkeypatch):
    uri = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv(tracking.URI, uri)
    start = time.monotonic()
    with pytest.raises(TrackingAwayError, match=rf"MLflow at {uri}: does not answer \(connection refused\)"):
        tracking.check()
    assert time.monotonic() - start < 8


def test_server_that_accepts_and_never_answers_is_reported_within_seconds(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(tracking.URI, f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(TrackingError, match="does not answer"):
            tracking.check()
        assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "refused the credentials"),
        (403, "does not permit this"),
        (404, "failed"),
        (200, "failed"),
        (500, r"keeps answering 500 to /api/2\.0/mlflow/\S+; its own log says why"),
        (503, r"keeps answering 503 to /api/2\.0/mlflow/\S+; its own log says why"),
    ],
)
def test_a_server_that_refuses_is_reported(monkeypatch, status, message):
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<p>this is no MLflow</p>")

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(tracking.URI, f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(TrackingError, match=message) as caught:
            tracking.check()
        assert isinstance(caught.value, TrackingAwayError) == (status >= 500), "whether another try may help"
        server.shutdown()


@pytest.mark.parametrize("uri", ["sqlite:////proc/nowhere/mlflow.db", "nonsense://host", "sqlite:///{file}"])
def test_store_that_cannot_be_used_is_reported_at_once(monkeypatch, tmp_path, uri):
    (tmp_path / "file").write_text("this is no data base, but long enough to be taken for one" * 20)
    monkeypatch.setenv(tracking.URI, uri.format(file=tmp_path / "file"))
    start = time.monotonic()
    with pytest.raises(TrackingError, match="MLflow at"):
        tracking.check()
    assert time.monotonic() - start < 8


def test_the_missing_driver_of_a_database_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.setenv(tracking.URI, "postgresql+psycopg://me:secret@127.0.0.1/x")
    with pytest.raises(TrackingError, match=r"me:\*\*\*@127.* needs the Python package psycopg, the driver"):
        tracking.check()


def test_run_of_folder_whose_name_is_not_utf8(monkeypatch, mlflow_uri):
    monkeypatch.setenv(tracking.URI, mlflow_uri)
    monkeypatch.setenv(tracking.RUN, "a\udcff")
    with pytest.raises(TrackingError, match="surrogates not allowed"):
        tracking.start_parent({}, {})


NAMES = [
    *("champion", "latest", "Latest", "LATEST-1", "v1", "V22", "v1a", "", " ", "a b", "a.b", "a/b", "a:b", ".", ".."),
    *("..a", ".a", "a..b", "é", "a_b-c", "a" * 255, "a" * 256, "a" * 500, "a" * 501, "2024", "a@b", "a'b"),
]


def is_refused_by_mlflow(name: str, *checks: Callable[[str], object]) -> bool:
    try:
        for check in checks:
            check(name)
    except MlflowException:
        return True
    return False


def is_refused_by_us(section: str, setting: str, name: str) -> bool:
    try:
        config.validate_section(section, {setting: name})
    except SettingsError:
        return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_names_are_refused_as_mlflow_refuses_them(name: str) -> None:
    alias = validation._validate_model_alias_name, validation._validate_model_alias_name_reserved
    assert is_refused_by_us("register", "alias", name) == is_refused_by_mlflow(name, *alias)
    model = is_refused_by_mlflow(name, validation._validate_model_name) or len(name) > 256  # what its databases take
    assert is_refused_by_us("register", "model_name", name) == model
    experiment = is_refused_by_mlflow(name, validation._validate_experiment_name)
    assert is_refused_by_us("tracking", "experiment", name) == experiment


def test_name_that_mlflow_refuses_is_named_with_what_it_takes() -> None:
    with pytest.raises(SettingsError, match=r"^register\.alias: must be an alias .*, got 'latest'"):
        config.resolve("", "register.alias=latest")


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def test_trials_are_nested_below_their_search(store):
    tracking.start_parent({}, {})
    with stage_run("search", {}) as search:
        search.nested("trial 0", {"distill.drop_path": 0.1}, [(5, "val_score", 0.4), (60, "val_score", 0.9)])
        search.nested("trial 1", {"distill.drop_path": 0.3}, [])
    experiment = store.get_run(search.run_id).info.experiment_id
    below = f"tags.`mlflow.parentRunId` = '{search.run_id}'"
    trials = {run.info.run_name: run for run in store.search_runs([experiment], below)}
    assert {name: run.info.status for name, run in trials.items()} == {"trial 0": "FINISHED", "trial 1": "FAILED"}
    assert trials["trial 0"].data.params == {"distill.drop_path": "0.1"}
    scores = store.get_metric_history(trials["trial 0"].info.run_id, "val_score")
    assert [(one.step, one.value) for one in scores] == [(5, 0.4), (60, 0.9)]


def test_stages_are_nested_in_one_parent(store, request):
    tracking.check()
    parent = tracking.start_parent({"run": {"seed": 3}}, {"recipe": "digits"})
    with stage_run("pretrain", {"mae": {"epochs": 4}}) as pretrain:
        pass
    with stage_run("distill", {}) as distill:
        pass
    assert tracking.start_parent({}, {}) == parent
    run = store.get_run(parent)
    assert run.info.run_name == request.node.name
    assert run.data.params == {"run.seed": "3"}
    assert run.data.tags["recipe"] == "digits"
    for stage, tracker in (("pretrain", pretrain), ("distill", distill)):
        nested = store.get_run(tracker.run_id)
        assert nested.data.tags["mlflow.parentRunId"] == parent
        assert nested.data.tags[STAGE_TAG] == stage
        assert nested.info.status == "FINISHED"
    assert store.get_run(pretrain.run_id).data.params == {"mae.epochs": "4"}
    tracking.finish_parent()
    assert store.get_run(parent).info.status == "FINISHED"


def test_two_runs_that_create_the_experiment_at_once(store, monkeypatch):
    """Both have seen that it is not there before one of them has made it."""
    monkeypatch.setenv(tracking.EXPERIMENT_NAME, "made by two")
    both, get = threading.Barrier(2, timeout=60), MlflowClient.get_experiment_by_name

    def get_at_once(client, name):
        found = get(client, name)
        if found is None:
            both.wait()
        return found

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", get_at_once)
    with ThreadPoolExecutor(2) as pool:
        for checked in [pool.submit(tracking.check) for _ in range(2)]:
            checked.result()
    assert get(store, "made by two").lifecycle_stage == "active"


def test_injected_parent_is_used_and_left_running(store, monkeypatch):
    experiment = store.create_experiment("somebody else's")
    injected = store.create_run(experiment).info.run_id
    monkeypatch.setenv(tracking.RUN_ID, injected)
    tracking.check()
    assert tracking.start_parent({"a": 1}, {}) == injected
    with stage_run("distill", {}) as tracker:
        pass
    nested = store.get_run(tracker.run_id)
    assert nested.data.tags["mlflow.parentRunId"] == injected
    assert nested.info.experiment_id == experiment
    tracking.finish_parent()
    assert store.get_run(injected).info.status == "RUNNING"
    assert store.get_run(injected).data.params == {"a": "1"}


def test_injected_parent_that_does_not_exist_is_reported(store, monkeypatch):
    monkeypatch.setenv(tracking.RUN_ID, "0" * 32)
    with pytest.raises(TrackingError, match="0" * 32):
        tracking.check()


def test_end_of_stage_tells_how_it_ended(store):
    with pytest.raises(ValueError, match="loss"), stage_run("distill", {}) as failed:
        raise ValueError("loss is not finite")
    with pytest.raises(KeyboardInterrupt), stage_run("distill", {}) as killed:
        raise KeyboardInterrupt
    assert store.get_run(failed.run_id).info.status == "FAILED"
    assert store.get_run(failed.run_id).data.tags[tracking.ERROR_TAG] == "ValueError: loss is not finite"
    assert store.get_run(killed.run_id).info.status == "KILLED"


def descend(tracker, place, steps, error=None):
    """What a training records that goes over these steps, and ends in an error if one is given."""
    tracker.resume(str(place))
    for step in steps:
        tracker.metrics(step, {"loss": 10.0 - step})
    if error is not None:
        raise error


def test_a_resumed_training_continues_its_run(store, tmp_path):
    with pytest.raises(PreemptedError), stage_run("distill", {}, training="t1") as first:
        descend(first, tmp_path, range(4), PreemptedError("asked to end"))
    assert store.get_run(first.run_id).info.status == "KILLED"
    with pytest.raises(ValueError, match="bug"), stage_run("distill", {}, training="t1") as second:
        descend(second, tmp_path, range(2, 6), ValueError("bug"))  # from a checkpoint after two steps
    with stage_run("distill", {}, training="t1") as third:
        descend(third, tmp_path, range(5, 8))
    assert first.run_id == second.run_id == third.run_id
    points = store.get_metric_history(first.run_id, "loss")
    assert [(point.step, point.value) for point in points] == [(step, 10.0 - step) for step in range(8)]
    run = store.get_run(first.run_id)
    assert run.info.status == "FINISHED"
    assert tracking.ERROR_TAG not in run.data.tags, "of a try that did not last"
    system = [point.step for point in store.get_metric_history(first.run_id, "system/cpu_utilization_percentage")]
    assert system == list(range(len(system))), "samples of the machine are counted on"


def test_unsent_points_are_sent_by_the_next_try(store, tmp_path):
    place = str(tmp_path)
    with stage_run("distill", {}, training="killed") as known:
        known.metrics(0, {"loss": 3.0})
    client = tracking.client()
    client.update_run(known.run_id, status="RUNNING")  # as SIGKILL leaves it
    (tmp_path / UNSENT).write_text(json.dumps([["loss", 3.0, 5, 0], ["loss", 2.0, 6, 1], ["rate", 0.5, 6, 1]]))
    with stage_run("distill", {}, training="killed") as tracker:
        tracker.resume(place)
        tracker.metrics(1, {"loss": 2.0, "rate": 0.5})
        tracker.metrics(2, {"loss": 1.0, "rate": 0.25})
    assert tracker.run_id == known.run_id
    losses = sorted(store.get_metric_history(tracker.run_id, "loss"), key=lambda point: point.step)
    assert [(point.step, point.value) for point in losses] == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert [point.timestamp for point in losses][1] == 6, "when it was measured"
    assert [point.step for point in store.get_metric_history(tracker.run_id, "rate")] == [1, 2]


def test_what_server_has_not_got_is_kept_beside_checkpoint(store, tmp_path, monkeypatch):
    monkeypatch.setattr(stage_runs._Sender, "start", lambda self: None)  # a server that takes nothing
    monkeypatch.setattr(stage_runs._Sender, "join", lambda self, timeout: None)
    with stage_run("distill", {}, training="kept") as tracker:
        tracker.keep()
        assert not (tmp_path / UNSENT).exists()
        tracker.resume(str(tmp_path))
        tracker.metrics(7, {"loss": 0.5, "val_loss": float("nan")})
        tracker.keep()
        (name, value, time_ms, step), unknown = json.loads((tmp_path / UNSENT).read_text(), parse_constant=pytest.fail)
        assert unknown[:2] == ["val_loss", "NaN"]
        tracker.resume(str(tmp_path))  # which reads it again
    assert (name, value, step) == ("loss", 0.5, 7)
    assert abs(time_ms / 1000 - time.time()) < 60


@pytest.mark.parametrize("content", ["[", '[["loss", "x", 1, 2]]', '{"a": 1}'])
def test_kept_points_that_cannot_be_read_are_named_and_left_out(store, tmp_path, caplog, content):
    (tmp_path / UNSENT).write_text(content)
    with stage_run("distill", {}, training=content[:1]) as tracker:
        tracker.resume(str(tmp_path))
        tracker.metrics(0, {"loss": 1.0})
    assert str(tmp_path / UNSENT) in caplog.text
    assert [point.step for point in store.get_metric_history(tracker.run_id, "loss")] == [0]


def test_other_ranks_record_nothing(store):
    before = len(store.search_runs([experiment.experiment_id for experiment in store.search_experiments()]))
    with stage_run("distill", {}, active=False) as tracker:
        tracker.metrics(0, {"loss": 1.0})
        tracker.file(Path("/nowhere"))
    assert tracker.run_id is None
    assert before == len(store.search_runs([experiment.experiment_id for experiment in store.search_experiments()]))


def test_metrics_arrive_with_their_steps_and_cost_little(store):
    values = [1 / (step + 1) for step in range(2500)]
    with stage_run("distill", {}) as tracker:
        start = time.thread_time()  # what other programs have of the cores does not count
        for step, value in enumerate(values):
            tracker.metrics(step, {"loss": value})
        seconds = time.thread_time() - start
    history = sorted(store.get_metric_history(tracker.run_id, "loss"), key=lambda metric: metric.step)
    assert [(metric.step, metric.value) for metric in history] == list(enumerate(values))
    assert seconds / len(values) < 1e-3


def test_points_that_are_refused_hold_nothing_up(store, caplog):
    with stage_run("distill", {}) as tracker:
        tracker.metrics(0, {"loss": float("nan")})
        tracker.metrics(1, {"loss": 2.0})
    assert store.get_run(tracker.run_id).data.metrics["loss"] == 2.0
    # A refused batch does not hold up the next.
    with stage_run("distill", {}) as tracker:
        tracker.metrics(0, {"a name that MLflow refuses?": 1.0})
        time.sleep(2.5)
        tracker.metrics(1, {"loss": 2.0})
    assert store.get_run(tracker.run_id).data.metrics["loss"] == 2.0
    assert "refused" in caplog.text


def test_tags_arrive_also_where_points_are_refused(store):
    with stage_run("distill", {}) as tracker:
        tracker.tag("trainer.finding.distill.overfitting", "first")
        tracker.metrics(0, {"x" * 300: 1.0})  # MLflow refuses names of more than 250 letters
        tracker.tag("long", "y" * 10_000)
    tags = store.get_run(tracker.run_id).data.tags
    assert tags["trainer.finding.distill.overfitting"] == "first"
    assert set(tags["long"]) == {"y"}


def test_files_are_kept_beside_the_store(store, directory, tmp_path):
    (tmp_path / "page.html").write_text("<p>page</p>")
    with stage_run("evaluate", {}) as tracker:
        tracker.file(tmp_path / "page.html")
    assert [file.path for file in store.list_artifacts(tracker.run_id)] == ["page.html"]
    assert list((directory / "mlartifacts").rglob("page.html"))


def test_more_and_longer_settings_than_mlflow_takes_at_once(store):
    settings = {"section": {f"setting{index}": index for index in range(250)}, "long": "x" * 10_000}
    with stage_run("distill", settings) as tracker:
        pass
    params = store.get_run(tracker.run_id).data.params
    assert len(params) == 251
    assert params["section.setting249"] == "249"
    assert len(params["long"]) == 6000


def test_what_differs_from_the_defaults_comes_first(store):
    settings = config.resolve("digits", "distill.epochs=3 run.seed=4")
    run = store.get_run(tracking.start_parent(settings.model_dump(mode="json"), {}))
    names = list(run.data.params)
    defaults = tracking.parameters(config.resolve().model_dump(mode="json"))
    same = [name for name in names if defaults.get(name) == run.data.params[name] and not config.copied_from(name)]
    copied = [name for name in names if config.copied_from(name)]
    assert len(same) > 100
    assert len(copied) > 100
    assert names[-len(same) - len(copied) :] == same + copied
    first = names[: -len(same) - len(copied)]
    assert {"distill.epochs", "run.seed", "distill.seed", "pretrain.teacher.architecture"} < set(first)
    assert len(first) < 100

    with stage_run("distill", settings.for_stage("distill")) as tracker:
        pass
    names = list(store.get_run(tracker.run_id).data.params)
    assert names.index("epochs") < names.index("beta1")
    assert names.index("epochs") < len([name for name in first if name.startswith("distill.")])


def test_an_interrupted_run_goes_on_in_its_parent(store):
    parent = tracking.start_parent({"seed": 1}, {})
    tracking.finish_parent("FAILED")
    assert tracking.start_parent({"seed": 1, "new": 5}, {}) == parent
    assert store.get_run(parent).info.status == "RUNNING"
    assert store.get_run(parent).data.params == {"seed": "1", "new": "5"}
    assert tracking.start_parent({}, {}) == parent


@pytest.mark.parametrize("ended", ["FINISHED", "FAILED", ""])
def test_other_settings_open_new_parent_that_names_former_one(store, caplog, ended):
    caplog.set_level(logging.INFO)
    former = tracking.start_parent({"seed": 1, "run": {"device": "cpu"}}, {"recipe": "digits"})
    if ended:
        tracking.finish_parent(ended)
    new = tracking.start_parent({"seed": 2, "run": {"device": "cpu"}}, {"recipe": "digits"})
    assert new != former
    assert store.get_run(new).data.params == {"seed": "2", "run.device": "cpu"}
    assert store.get_run(new).data.tags[tracking.FORMER_TAG] == former
    assert store.get_run(former).data.params["seed"] == "1"
    assert store.get_run(former).info.status == (ended or "KILLED")
    (line,) = [line for line in caplog.messages if "changed" in line]
    assert new in line
    assert former in line
    assert "seed" in line
    with stage_run("distill", {}) as tracker:  # in another process, which knows no settings of the run
        pass
    assert store.get_run(tracker.run_id).data.tags["mlflow.parentRunId"] == new
    assert tracking.start_parent({"seed": 2}, {}) == new
    tracking.finish_parent()
    assert store.get_run(new).info.status == "FINISHED"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"args": {}}, {"args": {"depth": 2}}),
        ({"args": {"depth": 2}}, {"args": {}}),
        ({"args": {"depth": 2}}, {"args": {"depth": 2, "width": 8}}),
        ({"args": {"depth": 2, "width": 8}}, {"args": {"depth": 2}}),
        ({"blocks": {}}, {"blocks": {"0": 1}}),
        ({"blocks": {"0": 1}}, {"blocks": {}}),
        ({"low_resolution": None}, {"low_resolution": {"epochs": 3}}),
        ({"low_resolution": {"epochs": 3}}, {"low_resolution": None}),
    ],
)
def test_a_group_with_other_members_is_another_setting(store, before, after):
    before, after = ({"distill": one, "run": {"seed": 1}} for one in (before, after))
    first = tracking.start_parent(before, {})
    assert tracking.start_parent(before, {}) == first
    second = tracking.start_parent(after, {})
    assert second != first
    assert store.get_run(second).data.params == tracking.parameters(after)
    assert tracking.start_parent(after, {}) == second


def test_a_start_killed_early_is_the_same_run(store, monkeypatch):
    settings = {"distill": {"args": {"depth": 2, "width": 8}, "epochs": 3}, "run": {"seed": 1}}
    monkeypatch.setattr(tracking, "_PARAMS_A_BATCH", 1)
    recorded, plain = [], MlflowClient.log_batch

    def log_batch(*arguments, **keywords):
        if len(recorded) == 1:
            raise KeyboardInterrupt
        recorded.append(plain(*arguments, **keywords))

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "log_batch", log_batch)
        with pytest.raises(KeyboardInterrupt):
            tracking.start_parent(settings, {})
    started = store.get_run(tracking.find_parent(store))
    assert started.data.params == {"distill.args.depth": "2"}
    assert tracking.start_parent(settings, {}) == started.info.run_id
    assert store.get_run(started.info.run_id).data.params == tracking.parameters(settings)


def test_parent_that_another_program_made_keeps_its_first_values(store, monkeypatch, caplog):
    injected = store.create_run(store.create_experiment("of somebody else")).info.run_id
    monkeypatch.setenv(tracking.RUN_ID, injected)
    assert tracking.start_parent({"seed": 1}, {}) == tracking.start_parent({"seed": 2}, {}) == injected
    assert f"MLflow run {injected} keeps the first values of seed" in caplog.text


def test_an_early_failure_keeps_the_former_status(store):
    former = tracking.start_parent({"seed": 1}, {})
    tracking.finish_parent()
    tracking.finish_parent("FAILED", "prepare: the disk is full")
    assert store.get_run(former).info.status == "FINISHED"
    assert tracking.ERROR_TAG not in store.get_run(former).data.tags


def test_runs_of_one_name_in_two_places_have_each_their_parent(directory, store, monkeypatch):
    def parent(identity):
        variables = tracking.environment(TrackingSettings(), directory=directory, run="shelf", identity=identity)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return tracking.start_parent({}, {})

    here, there = parent("one"), parent("two")
    assert here != there
    assert parent("one") == here
    assert {store.get_run(run).info.run_name for run in (here, there)} == {"shelf"}


def test_all_billed_runs_are_listed(store, monkeypatch, tmp_path):
    (tmp_path / tracking.BILL).write_text("{}")
    for name in ("other", "bills", "another"):
        experiment = store.create_experiment(name, artifact_location=(tmp_path / "artifacts").as_uri())
        for number in range(5):
            run = store.create_run(experiment, run_name=f"{name} {number}", start_time=1 + number).info.run_id
            store.log_metric(run, "bill/seconds", float(number))  # the first one has no bill
            store.log_artifact(run, str(tmp_path / tracking.BILL))
    for search in ("search_runs", "search_experiments"):
        monkeypatch.setattr(MlflowClient, search, partialmethod(getattr(MlflowClient, search), max_results=2))
    assert [name for name, *_ in tracking.billed_runs("bills")] == [f"bills {number}" for number in range(1, 5)]


# ---------------------------------------------------------------------------------------------------------------------
# A server that goes away


@pytest.fixture
def server(directory, store, monkeypatch):
    """A real MLflow server process on the shared store."""
    store.search_experiments()
    port = free_port()
    monkeypatch.setenv(tracking.URI, f"http://127.0.0.1:{port}")
    with serving(directory, port) as process:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield process


@pytest.mark.long
def test_a_model_travels_through_the_server(object_store, directory, store, tmp_path, monkeypatch):
    """As of a server in a cluster, whose store's address means nothing outside."""
    store.search_experiments()
    port = free_port()
    monkeypatch.setenv(tracking.URI, f"http://127.0.0.1:{port}")
    (tmp_path / "model.txt").write_text("weights")
    with serving(directory, port, object_store.uri("mlflow")) as process:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        client = tracking.client()
        run = client.create_run(client.create_experiment("in a store")).info
        monkeypatch.setenv("MLFLOW_MULTIPART_UPLOAD_MINIMUM_FILE_SIZE", "1")
        with tracking.uploading():
            client.log_artifact(run.run_id, str(tmp_path / "model.txt"), "model")
        client.create_registered_model("in-a-store")
        client.create_model_version("in-a-store", f"{run.artifact_uri}/model", run.run_id)
        version, files, passed = tracking.registered_model("models:/in-a-store/1", tmp_path / "fetched")
        assert (version, passed) == ("models:/in-a-store/1", True)
        assert (files / "model.txt").read_text() == "weights"
        assert object_store.sent("model.txt")
        assert not [request for request in object_store.requests if "X-Amz-Signature" in request.query]
        # A version without its files, as where a bucket's rule has deleted them, is one of unknown classes.
        client.set_registered_model_alias("in-a-store", "champion", "1")
        stays = tracking.other_classes("in-a-store", "champion", list)
        assert re.match(
            r"models:/in-a-store@champion is version 1, whose classes cannot be read \(keeps answering 500", stays
        )

        # Whoever wants these addresses has them, here of a store that wants another kind of signature.
        monkeypatch.setenv("MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD", "true")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with pytest.raises(TrackingError, match="failures occurred while downloading"):
            tracking.registered_model("models:/in-a-store/1", tmp_path / "again")
        assert [request for request in object_store.requests if "X-Amz-Signature" in request.query]


@contextmanager
def serving(directory, port, destination=None):
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{directory}/mlflow.db"]
    command += ["--artifacts-destination", destination or str(directory / "served")]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        stop(process)


def wait_for(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"{url} does not answer")


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


@pytest.mark.slow
def test_server_that_dies_costs_points_but_not_training(server, store, caplog, monkeypatch):
    monkeypatch.setattr(stage_runs, "_EXIT_S", 3.0)
    caplog.set_level(logging.WARNING)
    tracking.check()
    with stage_run("distill", {"epochs": 2}) as tracker:
        for step in range(50):
            tracker.metrics(step, {"loss": 1.0 / (step + 1)})
        deadline = time.monotonic() + 30
        while len(store.get_metric_history(tracker.run_id, "loss")) < 50 and time.monotonic() < deadline:
            time.sleep(0.2)
        stop(server)
        start = time.perf_counter()
        for step in range(50, 100):
            tracker.metrics(step, {"loss": 0.5})
            time.sleep(0.05)
        assert time.perf_counter() - start < 5
        end = time.monotonic()
    assert time.monotonic() - end < 3 + 10 + 10, "the end waits for a server that is gone"
    assert len(store.get_metric_history(tracker.run_id, "loss")) == 50
    waits = [record for record in caplog.records if "the training continues" in record.getMessage()]
    assert len(waits) == 1, "one warning for one failure"
    assert any("points and tags were not sent" in record.getMessage() for record in caplog.records)
    monkeypatch.setattr(tracking, "PATIENCE_S", 0.0)
    with pytest.raises(TrackingError, match="connection refused"), stage_run("evaluate", {}):
        raise AssertionError("a stage does not start without its server")


@pytest.mark.slow
def test_a_stage_waits_for_an_absent_server(directory, store, caplog, monkeypatch):
    store.search_experiments()
    port = free_port()
    monkeypatch.setenv(tracking.URI, f"http://127.0.0.1:{port}")
    started = []
    # The server is started only when the stage has waited for it once.
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: (started or start(), sleep(seconds)))
    with ExitStack() as stack:

        def start():
            started.append(stack.enter_context(serving(directory, port)))

        with stage_run("evaluate", {}) as tracker:
            pass
    assert started
    assert store.get_run(tracker.run_id).info.status == "FINISHED"
    assert caplog.text.count("waiting for MLflow for up to 300 s") == 1
    assert "connection refused" in caplog.text


def test_outside_a_run_nobody_waits_for_a_server(monkeypatch):
    monkeypatch.setenv(tracking.URI, f"http://127.0.0.1:{free_port()}")
    begin = time.monotonic()
    with pytest.raises(TrackingAwayError, match="connection refused"), stage_run("evaluate", {}):
        raise AssertionError("a stage does not start without its server")
    assert time.monotonic() - begin < 10


def test_groups_of_names_are_one_parameter():
    settings = {
        "pretrain": {"label_map": {"granny smith!": 948, "pear": "n07768694"}, "teacher": {"args": {"depth": 2}}},
        "distill": {"student": {"args": {}}},
    }
    assert tracking.parameters(settings) == {
        "pretrain.label_map": "{'granny smith!': 948, 'pear': 'n07768694'}",
        "pretrain.teacher.args.depth": "2",
        "distill.student.args": "{}",
    }
