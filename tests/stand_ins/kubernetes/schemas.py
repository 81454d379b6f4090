"""Whether the real API server would take a manifest.

Judged by names (always); by the models of `kubernetes`, `kubeflow-training` and `kubeflow-trainer-api` (always), strictly: types,
required fields, unknown fields; by some values and rules that models lack, such as those of the training operator's webhook
(always); and by the schemas of the real CRDs, where the environment variable `KUBEFLOW_CRDS` names a folder that holds them.

An unknown field is refused, as the launcher asks the real server to (`fieldValidation=Strict`); by default that drops it and warns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.stand_ins.kubernetes import admission, crds, job_controller, models, names, pod_templates, statuses
from tests.stand_ins.kubernetes.models import Problems
from tests.stand_ins.kubernetes.resources import JOBS, PODS, PYTORCHJOBS, RESOURCES, Resource

_RESOURCES = {(resource.api_version, resource.kind): resource for resource in RESOURCES.values()}


def check(manifest: Mapping[str, Any]) -> None:
    """Take a manifest with all that follows from it, for tests of what is rendered: a job's pods too.

    Raises:
        ApiError: as the real API server would, of the manifest or of a pod that the operator makes of it.
    """
    admit(manifest)
    if manifest["kind"] == PYTORCHJOBS.kind:
        job = pod_templates.defaulted(manifest)
        job["metadata"] = {"uid": "0", **job["metadata"]}
        for role in job["spec"]["pytorchReplicaSpecs"]:
            admit({"apiVersion": PODS.api_version, "kind": PODS.kind, **pod_templates.render(job, role, 0)})
    if manifest["kind"] == JOBS.kind:
        job = {**manifest, "metadata": {"uid": "0", **manifest["metadata"]}}
        admit({"apiVersion": PODS.api_version, "kind": PODS.kind, **job_controller.render(job, 0)})


def admit(manifest: Mapping[str, Any]) -> None:
    """Take a manifest, or refuse it as the real API server would.

    Raises:
        ApiError: 400 for unknown fields, 422 for invalid values, 403 for what a webhook denies.
    """
    resource = _resource(manifest)
    metadata = manifest.get("metadata") or {}
    name = str(metadata.get("name") or metadata.get("generateName") or "")
    problems = Problems()
    models.check(manifest, resource, problems)
    crds.check(manifest, resource, problems)
    if problems.unknown:
        raise statuses.unknown_fields(resource, sorted(set(problems.unknown)))
    if not problems.invalid:
        problems.invalid += names.metadata_problems(metadata)
        problems.invalid += admission.value_problems(manifest, resource)
    if problems.invalid:
        raise statuses.invalid(resource, name, list(dict.fromkeys(problems.invalid)))
    denied = admission.webhook_problems(manifest, resource)
    if denied:
        raise statuses.denied_by_webhook(admission.WEBHOOKS[resource], denied)


def _resource(manifest: Mapping[str, Any]) -> Resource:
    found = _RESOURCES.get((manifest.get("apiVersion", ""), manifest.get("kind", "")))
    if found is None:
        raise statuses.bad_request(
            f'no matches for kind "{manifest.get("kind")}" in version "{manifest.get("apiVersion")}"'
        )
    return found
