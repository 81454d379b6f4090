import functools
import os
import re
import signal
import subprocess
import sys

import kfp_server_api as models
import pytest
import yaml

from pipelines import compile as compilation
from pipelines import deploy, runs, undeploy, versions
from pipelines.distillation import NAME
from tests.stand_ins.pipelines_api import state
from trainer import __version__
from trainer.io.errors import SettingsError

compiled_text, for_cluster = functools.cache(compilation.compiled_text), functools.cache(compilation.for_cluster)

pytestmark = pytest.mark.usefixtures("deployed")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Compile once for all, and look at runs often."""
    monkeypatch.setattr(compilation, "compiled_text", compiled_text)
    monkeypatch.setattr(compilation, "for_cluster", for_cluster)
    monkeypatch.setattr(runs, "INTERVALS_S", (0.02, 0.1))


def test_the_same_content_is_uploaded_once(api, command):
    code, output, _ = command(deploy.main)
    assert code == 0
    name = re.search(
        rf"{NAME} ({re.escape(__version__)}-[0-9a-f]{{12}}): uploaded; {api.host}/#/pipelines/details/", output
    )[1]
    code, output, _ = command(deploy.main)
    assert code == 0
    assert f"{NAME} {name}: version already there" in output
    assert api.count("POST", "/pipelines/upload_version") == 1
    (version,) = api.store.versions.values()
    assert (version.name, version.display_name) == (name, name)
    (pipeline,) = api.store.pipelines.values()
    assert "service account vit-distillation" in pipeline.description
    assert "service account vit-distillation" in version.description
    assert not api.store.runs


def test_another_image_is_another_version(api, command):
    for image in ("registry.example.com/vit:1", "registry.example.com/vit:2"):
        assert command(deploy.main, "--image", image)[0] == 0
    assert len(api.store.versions) == 2
    uploaded = next(yaml.load_all(list(api.store.versions.values())[1].pipeline_spec["text"], Loader=yaml.CSafeLoader))
    executors = uploaded["deploymentSpec"]["executors"].values()
    assert {executor["container"]["image"] for executor in executors} == {"registry.example.com/vit:2"}


@pytest.mark.parametrize(
    ("image", "reported"),
    [("registry.example.com/vit:1", True), (f"registry.example.com/vit@sha256:{'0' * 64}", False), ("vit:1", False)],
)
def test_image_that_its_tag_alone_names_is_reported(api, command, image, reported):
    code, output, _ = command(deploy.main, "--image", image)
    assert code == 0
    assert (f"{image} is named by a tag, behind which another image may stand tomorrow" in output) is reported
    (version,) = api.store.versions.values()
    executors = next(yaml.load_all(version.pipeline_spec["text"], Loader=yaml.CSafeLoader))["deploymentSpec"][
        "executors"
    ].values()
    for executor in executors:
        assert executor["container"]["image"] == image
        assert executor["container"]["env"] == [{"name": "TRAINER_IMAGE", "value": image}]


def test_somebody_else_deploys_at_the_same_time(api, command):
    api.fail("POST", "/pipelines", twice=True)
    api.fail("POST", "/pipelines/upload_version", twice=True)
    code, output, _ = command(deploy.main)
    assert code == 0
    assert "version already there" in output
    assert (len(api.store.pipelines), len(api.store.versions)) == (1, 1)


def test_a_stale_file_is_not_deployed(api, command, monkeypatch, tmp_path):
    stale = tmp_path / "distillation.yaml"
    stale.write_text(compilation.COMPILED.read_text() + "# edited\n")
    monkeypatch.setattr(compilation, "COMPILED", stale)
    code, _, errors = command(deploy.main)
    assert code == 2
    assert "run `make compile`" in errors
    assert api.requests == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "digit"], "unknown recipe"),
        (["--set", "distill.epoch=3"], "distill.epoch"),
        (["--recipe", "mine/photos.toml"], "is a file of this machine"),
        (["--pool", "gpu"], "unknown pool 'gpu'"),
        (["--pool", "cpu", "--nodes", "0"], "nodes must be >= 1, got 0"),
        (["--processes", "-1"], "processes_per_node must be >= 0"),
        (["--pool", "gpu-a100", "--processes", "99"], "processes_per_node"),
        (["--wait"], "WAIT=1 follows a run; add RUN=1"),
        (["--cron", "0 3 * *"], "five fields"),
    ],
)
def test_what_is_wrong_ends_before_anything_is_sent(api, command, arguments, message):
    code, output, errors = command(deploy.main, *arguments)
    assert code == 2
    assert errors.startswith("error: ")
    assert message in errors
    assert output == ""
    assert api.requests == []


def test_run_gets_parameters_experiment_and_account(api, command):
    arguments = [
        "--recipe",
        "grocery",
        "--set",
        "distill.epochs=3",
        "--pool",
        "cpu",
        "--nodes",
        "2",
        "--processes",
        "1",
        "--prepare-pool=cpu",
        "--prepare-nodes=3",
    ]
    code, output, _ = command(deploy.main, "--run", "--experiment", "food", *arguments)
    assert code == 0
    (run,) = api.store.runs.values()
    assert run.runtime_config.parameters == {
        "recipe": "grocery",
        "overrides": "distill.epochs=3",
        "dataset": "",
        "teacher": "",
        "experiment": "food",
        "pool": "cpu",
        "nodes": 2,
        "processes_per_node": 1,
        "prepare_pool": "cpu",
        "prepare_nodes": 3,
        "fresh": False,
    }
    assert run.service_account == "vit-distillation"
    assert run.pipeline_version_reference.pipeline_version_id in api.store.versions
    assert re.fullmatch(r"grocery \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", run.display_name)
    assert api.store.experiments[run.experiment_id].display_name == "food"
    assert f"run {run.display_name}: {api.host}/#/runs/details/{run.run_id}" in output


def test_run_is_on_cpu_pool_unless_another_is_named(api, command):
    command(deploy.main, "--run")
    (run,) = api.store.runs.values()
    assert run.runtime_config.parameters["pool"] == "cpu"


def test_parameters_that_version_does_not_have_are_refused(api, command, monkeypatch):
    known = runs.request
    monkeypatch.setattr(runs, "request", lambda *given: known(*given[:-1], {**given[-1], "color": "red"}))
    code, _, errors = command(deploy.main, "--run")
    assert code == 2
    assert "parameter(s) provided are not required by pipeline: color" in errors


def test_waiting_shows_states_of_tasks_as_they_change(api, command):
    api.script = [
        state("PENDING"),
        state("RUNNING", configure="RUNNING"),
        state("RUNNING", configure="RUNNING"),
        state("RUNNING", configure="SUCCEEDED", prepare="RUNNING"),
        state("SUCCEEDED", configure="SUCCEEDED", prepare="SUCCEEDED"),
    ]
    code, output, _ = command(deploy.main, "--run", "--wait")
    assert code == 0
    shown = [line.split("] ")[1] for line in output.splitlines() if line.startswith("[")]
    assert shown == [
        "run: pending",
        "configure: running",
        "run: running",
        "configure: succeeded",
        "prepare: running",
        "prepare: succeeded",
        "run: succeeded",
    ]


def test_run_that_fails_says_what_its_tasks_said_last(api, command):
    api.script = [state("FAILED", "workflow failed", configure="SUCCEEDED", distill="FAILED")]
    api.workflow = {
        "status": {
            "nodes": {"1": failed_pod("distill.executor(0)", "main: Error (exit code 1): error: distill: no\nroom")}
        }
    }
    code, _, errors = command(deploy.main, "--run", "--wait")
    (run,) = api.store.runs.values()
    assert code == 2
    assert errors.splitlines() == [
        f"error: run {run.display_name} ended as FAILED: workflow failed",
        "  distill failed: distill: no room",
        f"  look at {api.host}/#/runs/details/{run.run_id}",
        f"  or read: kubectl logs --namespace kubeflow --selector pipeline/runid={run.run_id} --container main --prefix --tail 30",
    ]


def failed_pod(name, message, **further):
    node = {
        "name": f"distillation-x7k2p.root.exit-handler-1.{name}",
        "type": "Pod",
        "phase": "Failed",
        "message": message,
    }
    return node | {"startedAt": "2026-01-31T12:00:00Z"} | further


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([failed_pod("pretrain.executor", "OOMKilled (exit code 137)")], {"pretrain": "OOMKilled (exit code 137)"}),
        ([failed_pod("pretrain-driver", "main: Error (exit code 1)")], {"pretrain": "main: Error (exit code 1)"}),
        (
            [
                failed_pod("pretrain.executor(1)", "error: second", startedAt="2026-01-31T12:10:00Z"),
                failed_pod("pretrain.executor(0)", "main: Error (exit code 1): for now: first"),
            ],
            {"pretrain": "second"},
        ),
        ([failed_pod("pretrain.executor", "", phase="Error"), failed_pod("", "deadline", type="DAG")], {}),
        ([failed_pod("pretrain.executor", "error: old", phase="Succeeded")], {}),
    ],
    ids=["killed", "driver", "the last attempt", "nothing said", "not failed"],
)
def test_the_last_words_of_a_task(nodes, words):
    workflow = {"status": {"nodes": {str(index): node for index, node in enumerate(nodes)}}}
    assert runs.last_words(workflow, {"pretrain", "distill"}) == words


@pytest.mark.parametrize("ended", ["CANCELED", "SKIPPED"])
def test_only_success_is_success(api, command, ended):
    api.script = [state(ended)]
    assert command(deploy.main, "--run", "--wait")[0] == 2


def test_waiting_outlasts_an_api_that_is_away(api, command, caplog):
    api.script = [state("RUNNING"), state("SUCCEEDED")]
    command(deploy.main, "--run")
    (run,) = api.store.runs
    api.fail("GET", f"/runs/{run}", times=2, status=503)
    assert command(runs.main, "follow", run)[0] == 0
    assert caplog.text.count("asking again") == caplog.text.count("Kubeflow Pipelines answers again") == 1


def test_waiting_has_limits(api, command, monkeypatch):
    api.script = [state("RUNNING")]
    # A kubeflow that keeps no workflow says the states.
    command(deploy.main, "--run")
    (run,) = api.store.runs
    code, _, errors = command(runs.main, "follow", run, "--hours", "0.0001")
    assert code == 2
    assert "has not ended within 0.0001 hours; the run continues, follow it again" in errors
    monkeypatch.setattr(runs, "AWAY_S", 0.1)
    api.fail("GET", f"/runs/{run}", times=99, status=503)
    code, _, errors = command(runs.main, "follow", run)
    assert code == 2
    assert "503" in errors
    assert "the run continues, follow it again" in errors


def test_a_token_that_expires_while_waiting(api, command):
    api.script = [state("RUNNING")]
    command(deploy.main, "--run")
    (run,) = api.store.runs
    api.fail("GET", f"/runs/{run}", status=401, message="expired")
    code, _, errors = command(runs.main, "follow", run)
    assert code == 2
    assert "wants a login (401: expired)" in errors
    assert f"the run continues, follow it again: python -m pipelines.runs follow {run}" in errors


def test_lost_answer_does_not_start_second_run(api, command):
    api.fail("POST", "/runs", lost=True)
    code, output, _ = command(deploy.main, "--run", "--wait")
    assert code == 0
    assert "note: the answer to the start was lost, but the run is there" in output
    assert len(api.store.runs) == 1


def test_a_failed_start_differs_from_an_unknown_one(api, command):
    api.fail("POST", "/runs", status=500, message="database is away")
    code, _, errors = command(deploy.main, "--run")
    assert code == 2
    assert "500: database is away" in errors
    assert "look once more before you start another" in errors
    api.fail("POST", "/runs", lost=True)
    api.fail("GET", "/runs", times=9, status=503)
    code, _, errors = command(deploy.main, "--run")
    assert code == 2
    assert "whether run 'digits" in errors
    assert len(api.store.runs) == 1


def test_a_run_is_stopped(api, command):
    api.script = [state("RUNNING")]
    command(deploy.main, "--run")
    (run,) = api.store.runs
    assert command(runs.main, "stop", run)[:1] == (0,)
    code, output, _ = command(runs.main, "stop", run)
    assert code == 0
    assert re.search(f"run {run} is cancel(ing|ed); there is nothing to stop", output)
    code, _, errors = command(runs.main, "follow", run)
    assert code == 2
    assert "ended as CANCELED" in errors
    code, _, errors = command(runs.main, "follow", "nonsense")
    assert code == 2
    assert f"there is no run nonsense at {api.host}" in errors


def test_schedule_is_made_once_and_changed_in_its_place(api, command):
    code, output, _ = command(deploy.main, "--cron", "0 3 * * *")
    assert code == 0
    assert "schedule 'scheduled digits' at '0 0 3 * * *' (seconds first): made" in output
    (first,) = api.store.schedules.values()
    assert (first.status, first.max_concurrency, first.no_catchup) == ("ENABLED", "1", True)
    assert first.trigger.cron_schedule.cron == "0 0 3 * * *"
    assert "already there" in command(deploy.main, "--cron", "0 3 * * *")[1].splitlines()[-1]
    assert list(api.store.schedules.values()) == [first]
    for changed in (
        ["--cron", "0 4 * * *"],
        ["--cron", "0 4 * * *", "--set", "run.seed=1"],
        ["--cron", "0 4 * * *", "--image", "x:2"],
    ):
        command(deploy.main, *changed)
        (schedule,) = api.store.schedules.values()
        assert schedule.recurring_run_id != first.recurring_run_id
        first = schedule
    command(deploy.main, "--cron", "0 4 * * *", "--recipe", "grocery")
    assert {schedule.display_name for schedule in api.store.schedules.values()} == {
        "scheduled digits",
        "scheduled grocery",
    }
    assert not api.store.runs


def test_schedule_that_was_switched_off_is_on_again(api, command):
    command(deploy.main, "--cron", "0 3 * * *")
    (old,) = api.store.schedules.values()
    old.status = "DISABLED"
    command(deploy.main, "--cron", "0 3 * * *")
    (new,) = api.store.schedules.values()
    assert (new.status, new.recurring_run_id != old.recurring_run_id) == ("ENABLED", True)


def test_old_schedule_outlives_new_one_that_is_refused(api, command):
    command(deploy.main, "--cron", "0 3 * * *")
    api.fail("POST", "/recurringruns", status=400, message="no")
    code, _, errors = command(deploy.main, "--cron", "0 4 * * *")
    assert code == 2
    assert "refuses (400: no)" in errors
    assert [schedule.trigger.cron_schedule.cron for schedule in api.store.schedules.values()] == ["0 0 3 * * *"]


@pytest.mark.parametrize("text", ["* * * * *", "*/15 0-6 1,15 * 1-5", "59 23 31 12 6"])
def test_cron_gets_its_seconds(text):
    assert versions.cron_of(text) == f"0 {text}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0 3 * * *", "five fields"),
        ("nightly", "five fields"),
        ("60 3 * * *", "the minute must be"),
        ("0 24 * * *", "the hour must be"),
        ("0 3 0 * *", "the day must be"),
        ("0 3 * 13 *", "the month must be"),
        ("0 3 * * 7", "the weekday must be"),
        ("5-3 3 * * *", "the minute must be"),
        ("*/0 3 * * *", "the minute must be"),
        ("0, 3 * * *", "the minute must be"),
    ],
)
def test_a_wrong_cron(text, message):
    with pytest.raises(SettingsError, match=message):
        versions.cron_of(text)


def test_undeploying_removes_this_contents_version_and_its_schedules(api, command):
    command(deploy.main, "--cron", "0 3 * * *")
    command(deploy.main, "--image", "x:2", "--recipe", "grocery", "--cron", "0 3 * * *")
    code, output, _ = command(undeploy.main)
    assert code == 0
    assert output.splitlines()[1:] == [
        "removed: schedule 'scheduled digits'",
        f"removed: version {versions.name_of(for_cluster(compiled_text(), deploy.IMAGE))}",
    ]
    (left,) = api.store.versions.values()
    assert [schedule.display_name for schedule in api.store.schedules.values()] == ["scheduled grocery"]
    code, output, _ = command(undeploy.main)
    assert code == 0
    assert f"is not there; nothing to remove; there: {left.name}" in output
    assert "warning: these schedules still start runs: 'scheduled grocery'; IMAGE=, VERSION= or ALL=1" in output
    (schedule,) = api.store.schedules.values()
    schedule.status = "DISABLED"
    assert "still start runs" not in command(undeploy.main)[1]
    assert command(undeploy.main, "--version", left.name)[0] == 0
    assert not api.store.versions
    assert not api.store.schedules


def test_all_runs_are_of_one_version(api, command):
    for arguments in (
        [],
        ["--run"],
        ["--run", "--set", "tune.enabled=true"],
        ["--run", "--fresh", "--cron", "0 3 * * *"],
    ):
        assert command(deploy.main, *arguments)[0] == 0
    assert len(api.store.versions) == 1
    assert [run.runtime_config.parameters.get("fresh") for run in api.store.runs.values()] == [False, False, True]
    (schedule,) = api.store.schedules.values()
    assert "fresh" not in schedule.runtime_config.parameters
    assert "FRESH=1 is of a run; add RUN=1" in command(deploy.main, "--fresh")[2]


def test_undeploying_everything(api, command):
    for image in ("x:1", "x:2", "x:3"):
        command(deploy.main, "--image", image, "--cron", "0 3 * * *", "--run")
    (schedule,) = api.store.schedules.values()
    schedule.trigger = models.V2beta1Trigger(periodic_schedule=models.V2beta1PeriodicSchedule(interval_second="3600"))
    code, output, _ = command(undeploy.main, "--all")
    assert code == 0
    assert output.count("removed: version") == 3
    assert output.splitlines()[-1] == f"removed: pipeline {NAME}"
    assert not api.store.pipelines
    assert not api.store.versions
    assert not api.store.schedules
    assert len(api.store.runs) == 3
    code, output, _ = command(undeploy.main, "--all")
    assert code == 0
    assert output.splitlines()[-1] == f"pipeline {NAME} is not there; nothing to remove"


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return {**kept, "PYTHONUNBUFFERED": "1", **changes}


def test_make_hands_everything_on(api, command, tmp_path):
    """To an interpreter in the place of Python that shows what it was given, which then is given to the command."""
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$KFP_HOST" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    given = ["KFP_HOST=http://kfp:80", "RUN=1", "WAIT=1", "CRON=*/5 3 * * *", "SET=run.seed=7", "IMAGE=x:1"]
    shown = subprocess.run(
        ["make", "-o", ".venv/.ready", "deploy-pipeline", f"VENV={tmp_path}", "READY=", *given],
        capture_output=True,
        text=True,
        env=environment(KFP_HOST=""),
        check=True,
    )
    host, *words = shown.stdout.splitlines()
    assert [host, *words[:2]] == ["http://kfp:80", "-m", "pipelines.deploy"]
    assert command(deploy.main, *words[2:])[0] == 0
    (run,) = api.store.runs.values()
    assert (run.state, run.runtime_config.parameters["overrides"]) == ("SUCCEEDED", "run.seed=7")
    (schedule,) = api.store.schedules.values()
    assert schedule.trigger.cron_schedule.cron == "0 */5 3 * * *"
    uploaded = next(
        yaml.load_all(next(iter(api.store.versions.values())).pipeline_spec["text"], Loader=yaml.CSafeLoader)
    )
    assert {one["container"]["image"] for one in uploaded["deploymentSpec"]["executors"].values()} == {"x:1"}
    ended = subprocess.run(
        ["make", "--dry-run", "undeploy-pipeline", "VERSION=0.2.0-abc", "ALL=1"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert '-m pipelines.undeploy --image "$IMAGE" --version "$VERSION" --all' in ended.stdout


def test_breaking_off_the_wait_leaves_the_run(api):
    api.script = [state("RUNNING", configure="RUNNING")]
    command = [sys.executable, "-m", "pipelines.deploy", "--run", "--wait"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(KFP_HOST=api.host)
    ) as process:
        for line in process.stdout:
            if "configure: running" in line:
                break
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    (run,) = api.store.runs
    assert process.returncode == 130
    assert f"the run continues. Stop it: python -m pipelines.runs stop {run}" in errors
    assert "Traceback" not in errors
    assert api.store.runs[run].state == "RUNNING"


@pytest.mark.parametrize("main", [deploy.main, undeploy.main, runs.main])
def test_help_names_what_is_needed(main, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    output = capsys.readouterr().out
    for word in ("python -m pipelines", "--host", "KFP_HOST", "KFP_TOKEN", "KFP_COOKIES", "--namespace"):
        assert word in output
