import kfp_server_api
import pytest
import yaml

from components.launch import service_proxy

ADDRESS = "https://cluster.example:6443/api/v1/namespaces/kubeflow/services/ml-pipeline:http/proxy"


def pass_through(directory, user):
    kubeconfig = directory / "config"
    content = {
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": "https://cluster.example:6443"}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
    }
    kubeconfig.write_text(yaml.safe_dump(content))
    configuration = kfp_server_api.Configuration()
    context = service_proxy.pass_through(
        configuration, kubeconfig=str(kubeconfig), namespace="kubeflow", service="ml-pipeline", port="http"
    )
    assert context == "here"
    return configuration


@pytest.mark.parametrize("user", [{"token": "secret"}, {}])
def test_the_address_is_the_services_for_every_request(tmp_path, user):
    configuration = pass_through(tmp_path, user)
    for _ in range(3):
        credentials = configuration.auth_settings()
        assert configuration.host == ADDRESS
        assert bool(credentials) == bool(user)


def test_no_kubeconfig(tmp_path):
    with pytest.raises(service_proxy.NoKubeconfigError, match="kubeconfig cannot be used"):
        service_proxy.pass_through(
            kfp_server_api.Configuration(), kubeconfig=str(tmp_path / "none"), namespace="a", service="b", port="http"
        )
