"""One job for a task, whatever happens to requests and answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from components.launch.client import ApiRetry, ClusterError, ForbiddenError, KindNotInstalledError
from components.launch.job import TaskJob, differences
from components.launch.job_manifest import BACKENDS, HASH_ANNOTATION, Owner
from tests.stand_ins.kubernetes.resources import PYTORCHJOBS
from trainer.io import artifacts
from trainer.io.errors import LaunchError


@pytest.fixture
def kubernetes(still_kubernetes):
    return still_kubernetes


@pytest.fixture
def job(kubernetes, cluster, pool, identity, spec):
    """A job, not yet submitted; changes by keyword."""

    def job(*, owner=None, spec=spec, pool=pool):
        return TaskJob(cluster, BACKENDS["pytorchjob"], spec, pool, replace(identity, owner=owner))

    return job


def only(kubernetes):
    (found,) = kubernetes.list(PYTORCHJOBS)
    return found


def owner(kubernetes, name):
    return Owner(name=name, uid=kubernetes.add_pod(name)["metadata"]["uid"])


def attempts(kubernetes):
    return sorted(found["metadata"]["labels"]["vit-distillation/attempt"] for found in kubernetes.list(PYTORCHJOBS))


def end(kubernetes, name, condition):
    with kubernetes.store.changing(PYTORCHJOBS, "kubeflow", name) as found:
        found.setdefault("status", {})["conditions"] = [{"type": condition, "status": "True"}]


def test_job_is_made_with_labels_hash_and_owner(kubernetes, job):
    task = owner(kubernetes, "task")
    made = job(owner=task)
    assert made.submit(ApiRetry(5))
    metadata = only(kubernetes)["metadata"]
    assert metadata["name"] == made.name
    assert metadata["uid"] == made.uid
    assert metadata["labels"]["vit-distillation/run"] == "20261121-digits"
    assert metadata["labels"]["vit-distillation/task"] == metadata["labels"]["vit-distillation/stage"] == "distill"
    assert metadata["annotations"][HASH_ANNOTATION]
    assert [(one["kind"], one["uid"]) for one in metadata["ownerReferences"]] == [("Pod", task.uid)]


def test_attempts(kubernetes, job, monkeypatch):
    monkeypatch.setattr(artifacts, "exists", lambda _: False)
    first, second, third = job(), job(), job()
    first.submit(ApiRetry(5))
    end(kubernetes, first.name, "Failed")
    second.submit(ApiRetry(5))
    end(kubernetes, second.name, "Succeeded")
    third.submit(ApiRetry(5))
    assert len({first.name, second.name, third.name}) == 3
    assert attempts(kubernetes) == ["1", "2", "3"]


@pytest.mark.parametrize(("there", "number"), [(True, "1"), (False, "2")], ids=["all there", "one is gone"])
def test_job_that_succeeded_unseen_is_taken_if_all_it_made_is_there(kubernetes, job, spec, monkeypatch, there, number):
    monkeypatch.setattr(artifacts, "exists", lambda uri: there or uri != spec.outputs["student"])
    first, second = job(), job(owner=owner(kubernetes, "task-2"))
    first.submit(ApiRetry(5))
    end(kubernetes, first.name, "Succeeded")
    assert second.submit(ApiRetry(5)) == (not there)
    assert (second.name == first.name) == there
    assert attempts(kubernetes)[-1] == number


def test_a_job_under_deletion_is_not_adopted(kubernetes, job):
    first, second = job(), job()
    first.submit(ApiRetry(5))
    with kubernetes.store.changing(PYTORCHJOBS, "kubeflow", first.name) as going:
        going["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["example.com/slow"]}
    assert second.submit(ApiRetry(5))
    assert second.name != first.name


def test_a_cleaned_up_attempt_leaves_its_name_used(kubernetes, job):
    first, second, third = job(), job(), job()
    for one in (first, second):
        one.submit(ApiRetry(5))
        end(kubernetes, one.name, "Failed")
    kubernetes.delete(PYTORCHJOBS, first.name)
    assert third.submit(ApiRetry(5))
    assert attempts(kubernetes) == ["2", "3"]


def test_running_job_is_adopted_and_belongs_to_new_pod(kubernetes, job):
    first, second = owner(kubernetes, "task-1"), owner(kubernetes, "task-2")
    before, after = job(owner=first), job(owner=second)
    before.submit(ApiRetry(5))
    assert not after.submit(ApiRetry(5))
    assert (after.name, after.uid) == (before.name, before.uid)
    assert [one["uid"] for one in only(kubernetes)["metadata"]["ownerReferences"]] == [second.uid]


def test_job_adopted_without_pod_has_no_owner(kubernetes, job):
    job(owner=owner(kubernetes, "task")).submit(ApiRetry(5))
    job().submit(ApiRetry(5))
    assert not only(kubernetes)["metadata"].get("ownerReferences")


def test_job_with_another_specification_is_refused_with_what_differs(kubernetes, job, spec, pool):
    job().submit(ApiRetry(5))
    other = job(spec=replace(spec, nodes=3), pool=pool.model_copy(update={"image": "trainer:2"}))
    with pytest.raises(LaunchError) as refused:
        other.submit(ApiRetry(5))
    message = str(refused.value)
    assert message.startswith(f"job {only(kubernetes)['metadata']['name']} of this run and task exists already")
    assert "Worker.replicas: 1 -> 2" in message
    assert "-> trainer:2" in message
    assert "kubectl delete pytorchjobs.kubeflow.org" in message
    assert not other.delete()  # it is not ours
    assert len(kubernetes.list(PYTORCHJOBS)) == 1


def test_answer_that_is_lost_does_not_make_two_jobs(kubernetes, job):
    kubernetes.faults.lose_answer("create", "pytorchjobs")
    made = job()
    assert not made.submit(ApiRetry(5))  # found: it was there
    assert only(kubernetes)["metadata"]["uid"] == made.uid


@pytest.mark.parametrize("code", [429, 500, 503])
def test_creation_is_retried_when_the_server_is_busy(kubernetes, job, code):
    kubernetes.faults.fail(code, times=2, verb="create")
    assert job().submit(ApiRetry(5))
    assert len(kubernetes.list(PYTORCHJOBS)) == 1


def test_an_interrupted_creation_is_found_and_deleted(kubernetes, job):
    made = job()
    kubernetes.faults.lose_answer("create", "pytorchjobs")
    without_retries = ApiRetry(0)
    with pytest.raises(ClusterError):
        made.submit(without_retries)
    assert len(kubernetes.list(PYTORCHJOBS)) == 1
    assert made.delete()
    kubernetes.wait_for(lambda: kubernetes.list(PYTORCHJOBS) == [])
    assert made.is_gone()


def test_a_denied_creation_names_the_missing_rule(kubernetes, job):
    kubernetes.faults.deny("create", "pytorchjobs")
    with pytest.raises(ForbiddenError) as denied:
        job().submit(ApiRetry(5))
    message = str(denied.value)
    assert "no right to create pytorchjobs.kubeflow.org in namespace kubeflow" in message
    assert 'User "system:serviceaccount:kubeflow:vit-distillation"' in message
    assert (
        'apiGroups: ["kubeflow.org"], resources: [pytorchjobs], verbs: [create, delete, get, list, patch, watch]'
        in message
    )
    assert "apply the overlay that set up this namespace again (manifests/base/role.yaml" in message


def test_cluster_without_operator_says_what_to_install(kubernetes, job):
    kubernetes.uninstall("pytorchjobs")
    with pytest.raises(
        KindNotInstalledError, match=r"this cluster has no pytorchjobs.kubeflow.org \(version v1\): install"
    ):
        job().submit(ApiRetry(5))


def test_manifest_that_server_refuses_ends_with_its_words(kubernetes, job):
    def renderer(*arguments):
        manifest = BACKENDS["pytorchjob"].renderer(*arguments)
        manifest["metadata"]["labels"]["bad label"] = "x"
        return manifest

    wrong = job()
    wrong.backend = replace(wrong.backend, renderer=renderer)
    with pytest.raises(ClusterError, match="answered 4"):
        wrong.submit(ApiRetry(5))
    assert not wrong.delete()


def test_differences_are_listed_by_path():
    existing = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "a"},
        "spec": {
            "runPolicy": {"backoffLimit": 0},
            "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
            "args": ["-m", "trainer"],
        },
    }
    wanted = {
        **existing,
        "metadata": {"name": "b"},
        "spec": {
            "runPolicy": {"backoffLimit": 3, "suspend": True},
            "env": [{"name": "A", "value": "1"}, {"name": "NEW", "value": "x"}, {"name": "B", "value": "3"}],
            "args": ["-m", "other"],
        },
    }
    assert differences(existing, existing | {"metadata": {}}) == []
    assert differences(existing, wanted) == [
        "spec.runPolicy.backoffLimit: 0 -> 3",
        "spec.runPolicy.suspend: unset -> true",
        "spec.env[B].value: 2 -> 3",
        'spec.env[NEW]: unset -> {"name":"NEW","value":"x"}',
        "spec.args[1]: trainer -> other",
    ]
    assert differences(existing, existing | {"spec": {}})[0] == 'spec.runPolicy: {"backoffLimit":0} -> unset'
