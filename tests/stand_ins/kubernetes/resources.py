"""The kinds of objects that the stand-in keeps, and how their paths and names are written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A kind of object, all of them namespaced."""

    group: str = ""
    version: str = "v1"
    plural: str
    kind: str
    has_status: bool = False
    """Whether `.../status` is an endpoint of its own; then `status` can be written there only."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As messages name it: `pods`, `pytorchjobs.kubeflow.org`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS = Resource(plural="pods", kind="Pod", has_status=True)
EVENTS = Resource(plural="events", kind="Event")
CONFIG_MAPS = Resource(plural="configmaps", kind="ConfigMap")
SECRETS = Resource(plural="secrets", kind="Secret")
PYTORCHJOBS = Resource(group="kubeflow.org", plural="pytorchjobs", kind="PyTorchJob", has_status=True)
TRAINJOBS = Resource(
    group="trainer.kubeflow.org", version="v1alpha1", plural="trainjobs", kind="TrainJob", has_status=True
)
JOBS = Resource(group="batch", plural="jobs", kind="Job", has_status=True)
WORKFLOWS = Resource(group="argoproj.io", version="v1alpha1", plural="workflows", kind="Workflow")

RESOURCES = {
    resource.plural: resource
    for resource in (PODS, EVENTS, CONFIG_MAPS, SECRETS, PYTORCHJOBS, TRAINJOBS, JOBS, WORKFLOWS)
}
