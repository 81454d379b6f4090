"""What goes wrong while a student learns: the run goes on, and the student is the same, bit for bit."""

import itertools
import secrets

import pytest

from tests.cluster.conftest import LONG, deploy, eventually, kubectl, objects, pool
from tests.cluster.faults import FAULTS, Watch, registered

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def settings():
    """Of the next run, each time it is called: another distance between checkpoints, which changes no student.

    So KFP's cache has the teacher from the first run on, and a student never.
    """
    seed, distances = secrets.randbelow(2**31), itertools.count(50)
    return lambda: f"{LONG} run.seed={seed} distill.checkpoint_every={next(distances)}"


@pytest.fixture(scope="module")
def small():
    """A pool whose jobs try nothing again."""
    with pool() as name:
        yield name


@pytest.fixture(scope="module")
def undisturbed(settings, small):
    """A run that nothing befalls."""
    run = deploy(settings(), wait=True, pool=small)
    assert run.exit_code == 0, run.output
    return run


@pytest.fixture
def struck(settings, run_pipeline):
    """Run the pipeline on a pool while these faults strike its distillation, each when a step has been done since the one before."""

    def strike(faults, pool):
        run = run_pipeline(settings(), length="", wait=False, pool=pool)
        with Watch(run, "distill") as watch:

            def stepped(since):
                assert run.phase() in {"Pending", "Running"}, f"the run ended before all of {faults} could strike"
                return len(watch.lines) > since

            for fault in faults:
                seen = len(watch.lines)
                eventually(lambda seen=seen: stepped(seen), seconds=2400, what=f"a step before: {fault}")
                FAULTS[fault](run, "distill")
        assert run.wait().exit_code == 0, run.output
        return run

    return strike


def is_the_same(mlflow, run, other):
    """Whether two runs have each registered one student, and the same."""
    students = registered(mlflow, run) + registered(mlflow, other)
    return len(students) == 2 and len(set(students)) == 1


def attempts(run):
    """Of the jobs that a run has made for its distillation."""
    return [job["metadata"]["labels"]["vit-distillation/attempt"] for job in run.jobs("distill")]


def test_mlflow_is_away_then_memory_is_full_and_then_the_master_is_killed(undisturbed, struck, mlflow, small):
    """One job goes through the first two. Its pool tries nothing again, so that the third one costs it, and a second one is made."""
    run = struck(["MLflow away", "task out of memory", "master killed"], small)
    assert is_the_same(mlflow, run, undisturbed)
    assert sorted(attempts(run)) == ["1", "2"]
    tries = run.task_pods("distill")
    assert len(tries) == 2
    (first,) = (status for status in tries[0]["status"]["containerStatuses"] if status["name"] == "main")
    assert first["state"]["terminated"]["reason"] == "OOMKilled"
    assert "exists already; following it" in kubectl("logs", tries[1]["metadata"]["name"], "--container=main")


def test_the_store_is_away_and_the_controllers_are_restarted(undisturbed, struck, mlflow, small):
    run = struck(["store away", "controllers restarted"], small)
    assert is_the_same(mlflow, run, undisturbed)
    assert attempts(run) == ["1"]


@pytest.fixture
def spot_node():
    """A node that says that it is a spot node, as all nodes of this cluster do meanwhile."""
    label = "eks.amazonaws.com/capacityType"
    kubectl("label", "nodes", "--all", f"{label}=SPOT")
    yield
    kubectl("label", "nodes", "--all", f"{label}-")


def test_a_spot_pool_loses_machines(undisturbed, struck, mlflow, spot_node):
    """One job survives them all."""
    with pool(spot=True) as name:
        run = struck(["master deleted", "worker killed", "node tainted"], name)
    assert is_the_same(mlflow, run, undisturbed)
    assert attempts(run) == ["1"]


def test_an_elastic_pool_loses_a_node(settings, run_pipeline):
    with pool(elastic_min_nodes=1, retries=5) as name:
        run = run_pipeline(settings(), length="", pool=name, wait=False)
        job = f"vit-distillation/run={run.id},vit-distillation/stage=distill"
        last = f"{job},training.kubeflow.org/replica-index=1"

        def training():
            return [
                pod
                for pod in objects("pods", last)
                if pod["status"]["phase"] == "Running"
                and " step " in kubectl("logs", "--selector", job, "--container=pytorch", "--tail=-1", check=False)
            ]

        (pod,) = eventually(training, seconds=2400, what="the student learns")
        kubectl("delete", "pod", pod["metadata"]["name"], "--wait=false")
        assert run.wait().exit_code == 0, run.output
    assert attempts(run) == ["1"]
