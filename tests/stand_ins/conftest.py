import pytest
from kubernetes import client, config

from tests.stand_ins.kubernetes.stand_in import KubernetesStandIn


@pytest.fixture
def cluster(tmp_path):
    with KubernetesStandIn(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def connection(cluster):
    """The real client, connected as its users do."""
    with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
        yield connection
        connection.rest_client.pool_manager.clear()


@pytest.fixture
def core(connection):
    return client.CoreV1Api(connection)


class Jobs:
    """The calls for one kind of job, without the repetition of group, version and namespace."""

    def __init__(self, connection, group="kubeflow.org", version="v1", plural="pytorchjobs"):
        self.api = client.CustomObjectsApi(connection)
        self.kind = (group, version, "kubeflow", plural)

    def create(self, manifest, **options):
        return self.api.create_namespaced_custom_object(*self.kind, manifest, **options)

    def get(self, name):
        return self.api.get_namespaced_custom_object(*self.kind, name)

    def list(self, **query):
        return self.api.list_namespaced_custom_object(*self.kind, **query)

    def patch(self, name, body):
        return self.api.patch_namespaced_custom_object(*self.kind, name, body)

    def patch_status(self, name, body):
        return self.api.patch_namespaced_custom_object_status(*self.kind, name, body)

    def replace(self, name, body):
        return self.api.replace_namespaced_custom_object(*self.kind, name, body)

    def delete(self, name, **options):
        return self.api.delete_namespaced_custom_object(*self.kind, name, **options)


@pytest.fixture
def jobs(connection):
    return Jobs(connection)
