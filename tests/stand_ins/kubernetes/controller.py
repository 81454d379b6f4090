"""What the controllers have in common whose jobs are what one look at a time makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from tests.stand_ins.kubernetes.resources import PODS, Resource
from tests.stand_ins.kubernetes.statuses import ApiError
from tests.stand_ins.kubernetes.store import Object, Store


class Controller(ABC):
    """Reconciles all jobs of a kind. `sync` is called again and again, by one thread."""

    kind: Resource

    def __init__(self, store: Store) -> None:
        self.store = store

    def sync(self) -> None:
        """Take every job one step further."""
        for job in self.store.list(self.kind):
            if "deletionTimestamp" in job["metadata"]:
                continue
            try:
                self.reconcile(job)
            except ApiError as error:
                if error.code not in {404, 409}:  # changed by somebody else meanwhile: the next round sees it
                    raise

    @abstractmethod
    def reconcile(self, job: Object) -> None:
        """Take a job one step further."""

    def pods_of(self, job: Object) -> list[Object]:
        """The pods that belong to a job."""
        return [
            pod
            for pod in self.store.list(PODS, job["metadata"]["namespace"])
            if any(one["uid"] == job["metadata"]["uid"] for one in pod["metadata"].get("ownerReferences") or [])
        ]

    def delete_active(self, pods: Sequence[Object]) -> None:
        """Delete those that have not ended."""
        for pod in pods:
            if pod["status"]["phase"] in {"Pending", "Running"} and "deletionTimestamp" not in pod["metadata"]:
                self.store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def write_status(self, job: Object, status: Object) -> None:
        """Write a job's status if it has changed."""
        if status != job.get("status", {}):
            with self.store.changing(self.kind, job["metadata"]["namespace"], job["metadata"]["name"]) as changed:
                changed["status"] = status
