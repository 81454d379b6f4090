"""The init container that the training operator puts into workers, by our template."""

from __future__ import annotations

import re

import kubernetes_validate
import pytest
import yaml

from components.launch import IMAGE
from tests.manifests.conftest import MANIFESTS
from tests.manifests.jobs import job, templates
from tests.manifests.pod_security import violations


@pytest.fixture
def init_container(render):
    (config_map,) = render("operator")
    template = config_map["data"]["initContainer.yaml"]
    given = {"InitContainerImage": IMAGE, "MasterAddr": "job-master-0"}
    (container,) = yaml.safe_load(re.sub(r"{{\.(\w+)}}", lambda match: given[match[1]], template))
    return container


def test_waiting_image(init_container, render):
    (_, worker) = templates(job("cpu"))
    pod = {**worker["spec"], "initContainers": [init_container]}
    assert violations(pod) == []
    unnamed = {name: value for name, value in init_container.items() if name != "securityContext"}
    assert violations({**worker["spec"], "initContainers": [unnamed]}), "the operator's own is not"
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "job-worker-0"}, "spec": pod}, "1.36", strict=True
    )
    # It waits for the master by name and asks for little.
    assert "until getent hosts job-master-0;" in init_container["command"][-1]
    assert init_container["resources"]["limits"] == {"cpu": "100m", "memory": "20Mi"}
    # The operator finds it where it looks.
    patch = yaml.safe_load((MANIFESTS / "operator" / "patch.yaml").read_text())["spec"]["template"]["spec"]
    (mount,) = patch["containers"][0]["volumeMounts"]
    (volume,) = patch["volumes"]
    (config_map,) = render("operator")
    assert (mount["name"], mount["mountPath"]) == (volume["name"], "/etc/config")
    assert volume["configMap"]["name"] == config_map["metadata"]["name"]
    assert set(config_map["data"]) == {"initContainer.yaml"}
