"""A real kube-apiserver, behind the same few names as the stand-in, without operator and kubelet.

`KUBEBUILDER_ASSETS` names the folder with `etcd` and `kube-apiserver`, as envtest has them; `KUBEFLOW_CRDS` the one with the CRDs. Run on
2026-11-23 with Kubernetes 1.34.3, built from its Go module, and etcd 3.4.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import kubernetes.client
import kubernetes.config
import urllib3
import yaml

from tests.stand_ins.kubernetes import crds
from tests.stand_ins.kubernetes.pod_environment import free_port

VARIABLE = "KUBEBUILDER_ASSETS"
_START_S = 60.0
_POLL_S = 0.2


def why_missing() -> str:
    """Why no real API server can be started here, or nothing."""
    for variable in (VARIABLE, crds.VARIABLE):
        if not os.environ.get(variable):
            return f"{variable} is not set"
    return ""


class RealApiServer:
    """etcd and kube-apiserver as local processes; use it in a `with` block. Objects can be written, but nothing acts on them."""

    def __init__(self, folder: Path, *, namespace: str = "kubeflow") -> None:
        self.folder, self.namespace = folder, namespace
        self.kubeconfig = folder / "kubeconfig"
        self._token = secrets.token_hex(16)
        self._port = free_port()
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._stack:
            self._start("etcd", self._etcd_arguments(client := free_port(), peer=free_port()))
            self._start("kube-apiserver", self._api_server_arguments(client))
            self._eventually(self._certificate.exists, "kube-apiserver has made its certificate")
            self._write_kubeconfig()
            with self.client() as client:
                self._eventually(lambda: _ready(client), "kube-apiserver is ready")
            self._install()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def client(self) -> kubernetes.client.ApiClient:
        return kubernetes.config.new_client_from_config(str(self.kubeconfig))

    def _start(self, program: str, arguments: Sequence[str]) -> None:
        path = Path(os.environ[VARIABLE]) / program
        output = self._stack.enter_context((self.folder / f"{program}.log").open("wb"))
        process = subprocess.Popen([path, *arguments], stdout=output, stderr=subprocess.STDOUT)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)

    def _etcd_arguments(self, client: int, peer: int) -> list[str]:
        address, peers = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={address}",
            f"--advertise-client-urls={address}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--unsafe-no-fsync=true",
        ]

    def _api_server_arguments(self, etcd: int) -> list[str]:
        key, tokens = self.folder / "service-account.key", self.folder / "tokens.csv"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens.write_text(f"{self._token},tester,1,system:masters\n")
        return [
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://127.0.0.1/",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true",
        ]

    def _write_kubeconfig(self) -> None:
        cluster = {"server": self.url, "certificate-authority": str(self._certificate)}
        content: Mapping[str, Any] = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "real",
            "clusters": [{"name": "real", "cluster": cluster}],
            "users": [{"name": "tester", "user": {"token": self._token}}],
            "contexts": [
                {"name": "real", "context": {"cluster": "real", "user": "tester", "namespace": self.namespace}}
            ],
        }
        self.kubeconfig.write_text(yaml.safe_dump(content))

    @property
    def _certificate(self) -> Path:
        """Made and signed by the server itself."""
        return self.folder / "certificates" / "apiserver.crt"

    def _eventually(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _START_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {_START_S:.0f} s: {what}; see {self.folder}/*.log")
            time.sleep(_POLL_S)

    def _install(self) -> None:
        """The namespace and the CRDs, which are there when their kinds are served."""
        with self.client() as client:
            core, extensions = kubernetes.client.CoreV1Api(client), kubernetes.client.ApiextensionsV1Api(client)
            core.create_namespace({"metadata": {"name": self.namespace}})
            manifests = [yaml.safe_load(path.read_text()) for path in Path(os.environ[crds.VARIABLE]).glob("*.yaml")]
            for manifest in manifests:
                extensions.create_custom_resource_definition(manifest)
            self._eventually(lambda: all(_served(client, manifest) for manifest in manifests), "the CRDs are served")


def _ready(client: kubernetes.client.ApiClient) -> bool:
    try:
        client.call_api("/readyz", "GET", auth_settings=["BearerToken"], _preload_content=False)
    except (kubernetes.client.ApiException, urllib3.exceptions.HTTPError):
        return False
    return True


def _served(client: kubernetes.client.ApiClient, crd: Mapping[str, Any]) -> bool:
    spec = crd["spec"]
    api = kubernetes.client.CustomObjectsApi(client)
    try:
        api.list_cluster_custom_object(spec["group"], spec["versions"][0]["name"], spec["names"]["plural"])
    except kubernetes.client.ApiException as error:
        if error.status != 404:
            raise
        return False
    return True
