"""The way to a service of the cluster through its API server, for who has a kubeconfig and no other way in."""

from __future__ import annotations

from typing import Any

import yaml
from kubernetes import config


class NoKubeconfigError(Exception):
    """There is no kubeconfig that can be used; the text says why."""


def pass_through(configuration: Any, *, kubeconfig: str | None, namespace: str, service: str, port: str) -> str:
    """Let a generated client's requests reach a service, as kubeconfig's user.

    Args:
        configuration: the client's, with the fields of `kubernetes.client.Configuration`; changed.
        kubeconfig: its file, or several as in KUBECONFIG; None for the usual place.
        namespace: where the service is.
        service: its name.
        port: name of its port.

    Returns:
        The name of kubeconfig's context.

    Raises:
        NoKubeconfigError: none was found, or it cannot be read.
    """
    try:
        _, context = config.list_kube_config_contexts(kubeconfig)
        config.load_kube_config(kubeconfig, client_configuration=configuration)
    except (config.ConfigException, OSError, yaml.YAMLError, TypeError) as error:  # TypeError: YAML of another form
        raise NoKubeconfigError(f"kubeconfig cannot be used ({' '.join(str(error).split())})") from error
    address = f"{configuration.host}/api/v1/namespaces/{namespace}/services/{service}:{port}/proxy"
    refresh = configuration.refresh_api_key_hook

    def refresh_token(changed: Any) -> None:
        """Renewing the user's token, which comes before each request, puts the API server's own address and hook back."""
        if refresh:
            refresh(changed)
        changed.host, changed.refresh_api_key_hook = address, refresh_token

    configuration.host, configuration.refresh_api_key_hook = address, refresh_token
    return str(context["name"])
