"""The stand-in beside a real kube-apiserver, where its binaries are at hand: both give the same answers."""

import pytest
from kubernetes import config
from kubernetes.client import ApiException

from tests.stand_ins.conftest import Jobs
from tests.stand_ins.kubernetes import real_api_server
from tests.stand_ins.kubernetes.real_api_server import RealApiServer
from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn
from tests.stand_ins.manifests import pytorch_job, train_job

KINDS = {
    "PyTorchJob": ("kubeflow.org", "v1", "pytorchjobs"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
}


def answers(kubeconfig):
    """Code and reason of the answers to a row of requests."""
    seen = []

    def ask(call, *arguments, **options):
        try:
            call(*arguments, **options)
            seen.append((200, ""))
        except ApiException as error:
            seen.append((error.status, error.reason))

    with config.new_client_from_config(str(kubeconfig)) as connection:
        for kind, make in (("PyTorchJob", pytorch_job), ("TrainJob", train_job)):
            jobs = Jobs(connection, *KINDS[kind])
            wrong = make() | {"spec": make()["spec"] | {"more": 1}}
            ask(jobs.create, wrong, field_validation="Strict")
            ask(jobs.create, make("Upper"))
            ask(jobs.create, make())
            ask(jobs.create, make())
            stale = jobs.get("job")
            ask(jobs.patch, "job", {"metadata": {"labels": {"a": "b"}}})
            ask(jobs.replace, "job", stale)
            ask(jobs.list, label_selector="a=b")
            ask(jobs.list, label_selector="a b")
            ask(jobs.patch_status, "job", {"status": {"conditions": []}})
            ask(jobs.delete, "job")
            ask(jobs.get, "job")
        connection.rest_client.pool_manager.clear()
    return seen


def test_a_row_of_requests_is_answered(tmp_path):
    with KubernetesStandIn(tmp_path, operator=False) as cluster:
        codes = [code for code, _ in answers(cluster.kubeconfig)]
    assert codes == [400, 422, 200, 409, 200, 409, 200, 400, 200, 200, 404] * 2


@pytest.mark.skipif(bool(real_api_server.why_missing()), reason=f"no real API server: {real_api_server.why_missing()}")
def test_the_real_server_answers_alike(tmp_path):
    with RealApiServer(tmp_path / "real") as real, KubernetesStandIn(tmp_path, operator=False) as cluster:
        assert answers(real.kubeconfig) == answers(cluster.kubeconfig)
