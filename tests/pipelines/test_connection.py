import argparse
import datetime
import ipaddress
import socket

import pytest

from pipelines import connection
from pipelines.connection import RefusedError, UnansweredError
from tests.stand_ins.pipelines_api import PipelinesApi
from trainer.io.errors import DeployError

pytestmark = pytest.mark.usefixtures("nowhere")


def connect(*arguments, **environment):
    parser = argparse.ArgumentParser()
    connection.add_arguments(parser)
    return connection.connect(parser.parse_args(arguments), {"KUBECONFIG": "/nonexistent/kubeconfig", **environment})


def refused(*arguments, **environment):
    with pytest.raises(DeployError) as caught:
        connect(*arguments, **environment)
    message = str(caught.value)
    assert "\n" not in message
    return message


def unused_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("name", ["KFP_HOST", "KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"])
def test_the_environment_names_the_host(api, capsys, name):
    with connect(**{name: api.host}) as found:
        assert found.user_namespace is None
    assert f"{api.host}, from {name}, without token or cookies" in capsys.readouterr().out


def test_the_flag_goes_before_the_environment(api, capsys):
    connect("--host", f"{api.host}/#/runs", KFP_HOST="http://localhost:1").close()
    assert f"{api.host}, from --host" in capsys.readouterr().out


def test_found_by_kubeconfig_or_service(api, tmp_path, capsys):
    with connect(KUBECONFIG=str(api.kubeconfig(tmp_path / "config"))) as found:
        assert list(connection.every(found.runs.run_service_list_runs, "runs")) == []
        assert found.link("runs/details/1") == (
            "http://localhost:8080/#/runs/details/1  "
            "(after: kubectl port-forward --namespace kubeflow service/ml-pipeline-ui 8080:80)"
        )
    assert "service kubeflow/ml-pipeline, through kubeconfig's context stand-in" in capsys.readouterr().out
    # A namespace that the cluster does not have.
    message = refused("--namespace", "nope", KUBECONFIG=str(api.kubeconfig(tmp_path / "config")))
    assert "context stand-in has no service nope/ml-pipeline: no such namespace" in message
    assert "KFP_NAMESPACE=" in message


def test_in_a_pod_the_service_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "POD_FILES", tmp_path)
    place = connection.find("", "ml", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert place.configuration.host == "http://ml-pipeline.ml.svc.cluster.local:8888"
    assert (
        connection.port_forward(place.namespace) == "kubectl port-forward --namespace ml service/ml-pipeline-ui 8080:80"
    )


def test_nowhere():
    message = refused()
    assert message.startswith("no Kubeflow Pipelines to be found: KFP_HOST is not set")
    assert "kubeconfig cannot be used" in message
    assert message.endswith(
        "such as http://localhost:8080 after: kubectl port-forward --namespace kubeflow service/ml-pipeline-ui 8080:80"
    )


@pytest.mark.parametrize(
    "content", ["clusters: [", "[]", "current-context: gone\ncontexts: []\nclusters: []\nusers: []\n"]
)
def test_a_kubeconfig_that_is_none(tmp_path, content):
    (tmp_path / "config").write_text(content)
    assert "kubeconfig cannot be used" in refused(KUBECONFIG=str(tmp_path / "config"))


def test_nothing_there(api, monkeypatch):
    message = refused(KFP_HOST=f"http://127.0.0.1:{unused_port()}")
    assert "connection refused" in message
    assert "kubectl port-forward --namespace kubeflow service/ml-pipeline-ui 8080:80" in message
    # A network without a way there.
    message = refused(KFP_HOST="http://255.255.255.255")  # no TCP connection goes to everyone
    assert "cannot be reached (" in message
    assert "unreachable" in message
    assert "refused" not in message
    # No such host.
    assert "no such host" in refused(KFP_HOST="http://kubeflow.invalid")
    # No answer in time.
    monkeypatch.setattr(connection, "TIMEOUT_S", (0.1, 0.05))
    api.fail("GET", "/healthz", times=9, seconds=0.15)
    assert "no answer in time (Read timed out. (read timeout=0.05))" in refused(KFP_HOST=api.host)


def test_something_else_there(api, tmp_path, capsys):
    api.fail("GET", "/healthz", page=True)
    message = refused(KFP_HOST=api.host)
    assert "answers with a page instead of the Kubeflow Pipelines API" in message
    assert "set KFP_TOKEN" in message
    # Something else answers.
    message = refused(KFP_HOST=f"{api.host}/elsewhere")
    assert "answers, but not as the Kubeflow Pipelines API (404" in message
    assert "before the #" in message
    # Tls where there is none.
    message = refused(KFP_HOST=api.host.replace("http", "https"))
    assert "does not speak TLS" in message
    assert "give http:// instead" in message
    # A certificate that no one knows.
    with PipelinesApi(certificate=certificate(tmp_path)) as api:
        assert "set KFP_CA_FILE" in refused(KFP_HOST=api.host)
        connect(KFP_HOST=api.host, KFP_CA_FILE=str(tmp_path / "certificate.pem")).close()
        assert "is no file" in refused(KFP_HOST=api.host, KFP_CA_FILE=str(tmp_path / "other.pem"))


def certificate(directory):
    x509 = pytest.importorskip("cryptography.x509", reason="makes the certificate")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(
            name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(days=1)
        )
        .add_extension(address, critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = directory / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return file


def test_tokens_and_cookies(capsys, tmp_path):
    with PipelinesApi(token="secret") as api:
        message = refused(KFP_HOST=api.host)
        assert "wants a login (401: Unauthenticated" in message
        assert "asked without token or cookies; set KFP_TOKEN" in message
        assert "asked with the token of KFP_TOKEN" in refused(KFP_HOST=api.host, KFP_TOKEN="old")
        connect(KFP_HOST=api.host, KFP_TOKEN="secret").close()
    assert "secret" not in capsys.readouterr().out
    # A token in a file is read again.
    file = tmp_path / "token"
    with PipelinesApi(token="first") as api:
        file.write_text("first\n")
        with connect(KFP_HOST=api.host, KF_PIPELINES_SA_TOKEN_PATH=str(file)) as found:
            api.token = "second"
            file.write_text("second\n")
            assert not found.health.healthz_service_get_healthz().multi_user
    # Cookies.
    with PipelinesApi(cookie="authservice_session=abc") as api:
        assert "401" in refused(KFP_HOST=api.host)
        connect(KFP_HOST=api.host, KFP_COOKIES="authservice_session=abc").close()
    assert "with the cookies of KFP_COOKIES" in capsys.readouterr().out


def test_several_users(capsys):
    with PipelinesApi(namespaces={"team-a"}) as api:
        assert refused(KFP_HOST=api.host).endswith("serves several users; name yours: NAMESPACE=...")
        with connect("--namespace", "team-b", KFP_HOST=api.host) as found:
            with pytest.raises(RefusedError) as caught:
                found.pipelines.pipeline_service_get_pipeline_by_name("distillation", **found.in_namespace)
            assert caught.value.status == 403
            assert "is namespace team-b there, and yours?" in str(caught.value)
        with connect(KFP_HOST=api.host, NAMESPACE="team-a") as found:
            assert found.pods_namespace == "team-a"


def test_one_user_has_no_namespace_of_its_own(api, capsys):
    with connect("--namespace", "team", "--kfp-namespace", "ml", KFP_HOST=api.host) as found:
        assert (found.in_namespace, found.pods_namespace) == ({}, "ml")
    assert "team is not used" in capsys.readouterr().out


def test_reading_is_repeated_and_creating_is_not(api):
    with connect(KFP_HOST=api.host) as found:
        api.fail("GET", "/healthz", lost=True)
        found.health.healthz_service_get_healthz()
        assert api.count("GET", "/healthz") == 3
        api.fail("POST", "/experiments", lost=True)
        with pytest.raises(UnansweredError, match="broke before the answer"):
            found.experiments.experiment_service_create_experiment({"display_name": "digits"})
        assert api.count("POST", "/experiments") == 1
        api.fail("GET", "/healthz", status=503, message="no endpoints available")
        with pytest.raises(UnansweredError, match=r"failed \(503: no endpoints available\)"):
            found.health.healthz_service_get_healthz()


def test_lists_come_in_pages(api):
    with connect(KFP_HOST=api.host) as found:
        for name in "abcde":
            found.experiments.experiment_service_create_experiment({"display_name": name})
        listed = connection.every(found.experiments.experiment_service_list_experiments, "experiments")
        assert [experiment.display_name for experiment in listed] == list("abcde")
        filtered = connection.every(
            found.experiments.experiment_service_list_experiments, "experiments", filter=connection.named("d")
        )
        assert [experiment.display_name for experiment in filtered] == ["d"]
