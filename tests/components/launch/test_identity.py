import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.launch import identity
from components.launch.identity import Identity, Owner
from trainer.errors import LaunchError

MANIFEST = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {"name": "a"},
    "spec": {
        "runPolicy": {"backoffLimit": 0},
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        "args": ["-m", "trainer"],
    },
}


@given(run=st.text(), task=st.text(), attempt=st.integers(1, 10**6))
@settings(max_examples=200, deadline=None)
def test_any_run_gives_names_and_labels_that_kubernetes_takes(run, task, attempt):
    job = Identity(run=run, task=task, attempt=attempt)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name)
    assert len(job.name) <= 40
    assert "--" not in job.name
    for value in job.labels("distill").values():
        assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("20261121-101010-digits", "distill-20261121-101010-digi-"),
        ("0f4f6e0c-8a4e-4f0f-9c0e-1d7d3f6f8a11", "distill-0f4f6e0c-8a4e-4f0f-9-"),
        ("Größe 7", "distill-gr-e-7-"),
        ("数字", "distill-run-"),
    ],
)
def test_a_name_begins_with_the_task_and_the_run(run, words):
    assert Identity(run=run, task="distill").name.startswith(words)


def test_runs_tasks_and_attempts_have_names_of_their_own():
    jobs = [
        Identity(run=run, task=task, attempt=attempt)
        for run in ("a" * 60 + "1", "a" * 60 + "2", "A", "a")
        for task in ("pretrain", "distill")
        for attempt in (1, 2)
    ]
    assert len({job.name for job in jobs}) == len(jobs)
    assert Identity(run="a", task="distill").name == Identity(run="a", task="distill", namespace="other").name


def test_labels_of_different_runs_differ_and_valid_ones_are_kept():
    assert identity.label_value("20261121-101010-digits") == "20261121-101010-digits"
    assert identity.label_value("a b") != identity.label_value("a-b")
    assert identity.label_value("x" * 64) != identity.label_value("x" * 65)


def test_the_environment_of_a_task_names_its_job(monkeypatch):
    for name, value in {
        "KFP_RUN_ID": "run-1",
        "TRAINER_RUN": "other",
        "KFP_POD_NAME": "pod",
        "KFP_POD_UID": "uid",
        "TRAINER_NAMESPACE": "team",
    }.items():
        monkeypatch.setenv(name, value)
    job = identity.from_environment("distill", attempt=2)
    assert job == Identity(run="run-1", task="distill", attempt=2, namespace="team", owner=Owner(name="pod", uid="uid"))
    assert identity.from_environment("distill", namespace="mine").namespace == "mine"
    monkeypatch.delenv("KFP_RUN_ID")
    monkeypatch.delenv("KFP_POD_UID")
    job = identity.from_environment("distill")
    assert (job.run, job.owner) == ("other", None)


def test_without_a_run_there_is_no_name(monkeypatch):
    monkeypatch.delenv("KFP_RUN_ID", raising=False)
    monkeypatch.delenv("TRAINER_RUN", raising=False)
    with pytest.raises(
        LaunchError, match="distill: nothing names the run, so its job can have no name; set TRAINER_RUN"
    ):
        identity.from_environment("distill")


def test_the_job_belongs_to_its_tasks_pod():
    job = Identity(run="a", task="distill", owner=Owner(name="pod", uid="u-1"))
    metadata = job.metadata("distill", MANIFEST)
    assert metadata["ownerReferences"] == [{"apiVersion": "v1", "kind": "Pod", "name": "pod", "uid": "u-1"}]
    assert "ownerReferences" not in Identity(run="a", task="distill").metadata("distill", MANIFEST)


def test_the_hash_is_of_the_specification_alone():
    same = MANIFEST | {"metadata": {"name": "b"}, "status": {"conditions": []}}
    other = MANIFEST | {"spec": MANIFEST["spec"] | {"args": []}}
    assert identity.spec_hash(MANIFEST) == identity.spec_hash(same)
    assert identity.spec_hash(MANIFEST) != identity.spec_hash(other)
    assert identity.spec_hash(MANIFEST) != identity.spec_hash(MANIFEST | {"kind": "TrainJob"})


def test_differences_are_listed_by_path():
    wanted = {
        **MANIFEST,
        "metadata": {"name": "b"},
        "spec": {
            "runPolicy": {"backoffLimit": 3, "suspend": True},
            "env": [{"name": "A", "value": "1"}, {"name": "NEW", "value": "x"}, {"name": "B", "value": "3"}],
            "args": ["-m", "other"],
        },
    }
    assert identity.differences(MANIFEST, MANIFEST | {"metadata": {}}) == []
    assert identity.differences(MANIFEST, wanted) == [
        "spec.runPolicy.backoffLimit: 0 -> 3",
        "spec.runPolicy.suspend: unset -> true",
        "spec.env[B].value: 2 -> 3",
        'spec.env[NEW]: unset -> {"name":"NEW","value":"x"}',
        "spec.args[1]: trainer -> other",
    ]
    assert identity.differences(MANIFEST, MANIFEST | {"spec": {}})[0] == 'spec.runPolicy: {"backoffLimit":0} -> unset'
