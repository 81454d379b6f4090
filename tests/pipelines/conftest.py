import pytest

from tests.stand_ins.pipelines_api import PipelinesApi


@pytest.fixture
def api():
    with PipelinesApi() as server:
        yield server


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """An environment that names no Kubeflow Pipelines."""
    for name in (
        "KFP_HOST",
        "KFP_ENDPOINT",
        "KF_PIPELINES_ENDPOINT",
        "KF_PIPELINES_UI_ENDPOINT",
        "KFP_TOKEN",
        "KFP_COOKIES",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("KFP_CA_FILE", "NAMESPACE", "KFP_NAMESPACE", "KUBERNETES_SERVICE_HOST", "KF_PIPELINES_SA_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))


@pytest.fixture
def command(capsys):
    """Run a command's main; gives exit code, output and errors."""

    def run(main, *arguments):
        code = main(list(arguments))
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return code, printed.out, printed.err

    return run


@pytest.fixture
def deployed(nowhere, monkeypatch, api):
    """The stand-in, named by KFP_HOST."""
    monkeypatch.setenv("KFP_HOST", api.host)
    return api
