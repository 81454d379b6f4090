"""What goes wrong while a student learns: the run goes on, and the student is the same, bit for bit."""

import pytest

from tests.cluster.conftest import LONG, deploy, eventually, kubectl, objects, pool
from tests.cluster.faults import FAULTS, Watch, registered

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]
SETTINGS = f"{LONG} run.seed=11"


@pytest.fixture(scope="module")
def undisturbed():
    """A run that nothing befalls. Its pool is its own, so that nothing is taken from a cache."""
    with pool() as name:
        run = deploy(SETTINGS, wait=True, pool=name)
    assert run.exit_code == 0, run.output
    return run


def struck(run_pipeline, name, faults):
    """A run in whose distillation these faults strike, one after the other, each when a step has been done since the one before."""
    run = run_pipeline(SETTINGS, length="", pool=name, wait=False)
    with Watch(run, "distill") as watch:
        for fault in faults:
            seen = len(watch.lines)
            eventually(lambda seen=seen: len(watch.lines) > seen, seconds=2400, what=f"a step before: {fault}")
            FAULTS[fault](run, "distill")
    assert run.wait().exit_code == 0, run.output
    return run


def is_the_same(mlflow, run, other):
    """Whether two runs have each registered one student, and the same."""
    students = registered(mlflow, run) + registered(mlflow, other)
    return len(students) == 2 and len(set(students)) == 1


@pytest.mark.parametrize("faults", [["MLflow away"], ["store away"], ["task killed", "controllers restarted"]], ids=str)
def test_the_training_goes_on_without_what_is_around_it(undisturbed, run_pipeline, mlflow, faults):
    """Its pool tries nothing again, and it needs one job."""
    with pool() as name:
        run = struck(run_pipeline, name, faults)
    assert is_the_same(mlflow, run, undisturbed)
    (job,) = run.jobs("distill")
    assert job["metadata"]["labels"]["vit-distillation/attempt"] == "1"
    if "task killed" in faults:
        tries = run.task_pods("distill")
        assert len(tries) == 2
        assert "goes on already; followed further" in kubectl("logs", tries[1]["metadata"]["name"], "--container=main")


@pytest.fixture
def spot_node():
    """A node that says that it is a spot node, as all nodes of this cluster do meanwhile."""
    label = "eks.amazonaws.com/capacityType"
    kubectl("label", "nodes", "--all", f"{label}=SPOT")
    yield
    kubectl("label", "nodes", "--all", f"{label}-")


def test_a_spot_pool_loses_machines(undisturbed, run_pipeline, mlflow, spot_node):
    """One job survives them all."""
    with pool(spot=True) as name:
        run = struck(run_pipeline, name, ["master deleted", "worker killed", "node tainted"])
    assert is_the_same(mlflow, run, undisturbed)
    (job,) = run.jobs("distill")
    assert job["metadata"]["labels"]["vit-distillation/attempt"] == "1"


def test_a_job_that_may_not_try_again_is_made_again(undisturbed, run_pipeline, mlflow):
    with pool() as name:
        run = struck(run_pipeline, name, ["master killed"])
    assert is_the_same(mlflow, run, undisturbed)
    assert {job["metadata"]["labels"]["vit-distillation/attempt"] for job in run.jobs("distill")} == {"1", "2"}


def test_an_elastic_pool_loses_a_node(run_pipeline):
    with pool(elastic_min_nodes=1, retries=5) as name:
        run = run_pipeline(LONG, length="", pool=name, wait=False)
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
    (only,) = run.jobs("distill")
    assert only["metadata"]["labels"]["vit-distillation/attempt"] == "1"
