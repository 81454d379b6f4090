"""What goes wrong while a student learns: the run goes on, and the student is the same, bit for bit."""

import secrets

import pytest

from tests.cluster.conftest import LONG, deploy, eventually, kubectl, objects, pool
from tests.cluster.faults import FAULTS, Watch, registered

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600, func_only=True)]


@pytest.fixture(scope="module")
def settings():
    """Of all runs, which must make the same student. Each has a pool of its own, so that nothing trained comes from KFP's cache."""
    return f"{LONG} distill.checkpoint_every=50 run.seed={secrets.randbelow(2**31)}"


@pytest.fixture(scope="module")
def undisturbed(settings):
    """A run that nothing befalls."""
    with pool() as name:
        run = deploy(settings, wait=True, pool=name)
    assert run.exit_code == 0, run.output
    return run


@pytest.fixture
def struck(settings, run_pipeline):
    """Run the pipeline on a pool while these faults strike its distillation, each when a step has been done since the one before."""

    def strike(faults, **fields):
        with pool(**fields) as name:
            run = run_pipeline(settings, length="", wait=False, pool=name)
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


@pytest.mark.alone
def test_three_faults_strike_one_training(undisturbed, struck, mlflow):
    """One job goes through the first two. Its pool tries nothing again, so that the third one costs it, and a second one is made."""
    run = struck(["MLflow away", "task out of memory", "master killed"])
    assert is_the_same(mlflow, run, undisturbed)
    assert sorted(attempts(run)) == ["1", "2"]
    tries = run.task_pods("distill")
    assert len(tries) == 2
    (first,) = (status for status in tries[0]["status"]["containerStatuses"] if status["name"] == "main")
    assert first["state"]["terminated"]["reason"] == "OOMKilled"
    assert "exists already; following it" in kubectl("logs", tries[1]["metadata"]["name"], "--container=main")


@pytest.mark.alone
def test_store_is_away_and_controllers_are_restarted(undisturbed, struck, mlflow):
    run = struck(["store away", "controllers restarted"])
    assert is_the_same(mlflow, run, undisturbed)
    assert attempts(run) == ["1"]


@pytest.fixture
def spot_node():
    """A node that says that it is a spot node, as all nodes of this cluster do meanwhile."""
    label = "eks.amazonaws.com/capacityType"
    kubectl("label", "nodes", "--all", f"{label}=SPOT")
    yield
    kubectl("label", "nodes", "--all", f"{label}-")


@pytest.mark.alone  # its taint keeps the pods of others away
def test_a_spot_pool_loses_machines(undisturbed, struck, mlflow, spot_node):
    """One job survives them all."""
    run = struck(["master deleted", "worker killed", "node tainted"], spot=True)
    assert is_the_same(mlflow, run, undisturbed)
    assert attempts(run) == ["1"]


def test_an_elastic_pool_loses_a_node(settings, run_pipeline):
    with pool(elastic_min_nodes=1, retries=5) as name:
        run = run_pipeline(settings, length="", pool=name, wait=False)
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
