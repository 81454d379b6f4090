"""The TrainingRuntime whose JobSet starts again: what it does with each exit code, and that jobs and Trainer find it.

Of JobSet 0.12: the reason of a Job that `podFailurePolicy` failed is `PodFailurePolicy`; the first rule that fits decides; without one, the
JobSet starts again until `maxRestarts`.
"""

import os
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from components.launch import pools
from components.launch.job_manifest import BACKENDS, RETRYING_RUNTIME, TRAINJOB_NODE
from tests.manifests.jobs import job
from tests.stand_ins.kubernetes import crds
from trainer.io.errors import CRASH_EXIT_CODE, CRASHED_NODE_EXIT_CODE, EXIT_CODE, PREEMPTED_EXIT_CODE


@pytest.fixture
def runtime(render):
    (found,) = render("components/trainer")
    return found


def outcome(runtime, exit_code):
    """What becomes of a JobSet one of whose pods ended so."""
    spec = runtime["spec"]["template"]["spec"]
    (replicated,) = spec["replicatedJobs"]
    batch = replicated["template"]["spec"]
    assert batch["backoffLimit"] == 0
    assert batch["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy needs it"
    (container,) = batch["template"]["spec"]["containers"]
    (rule,) = batch["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["containerName"]) == ("FailJob", container["name"])
    reason = "PodFailurePolicy" if exit_code in rule["onExitCodes"]["values"] else "BackoffLimitExceeded"
    fitting = [one["action"] for one in spec["failurePolicy"]["rules"] if reason in one["onJobFailureReasons"]]
    return fitting[0] if fitting else "RestartJobSet"


def test_a_failed_pod_starts_all_again_unless_it_would_fail_again(runtime):
    assert {code: outcome(runtime, code) for code in (CRASH_EXIT_CODE, EXIT_CODE, 127)} == {
        CRASH_EXIT_CODE: "FailJobSet",
        EXIT_CODE: "FailJobSet",
        127: "FailJobSet",
    }
    for code in (PREEMPTED_EXIT_CODE, CRASHED_NODE_EXIT_CODE, 137, 139):
        assert outcome(runtime, code) == "RestartJobSet"
    # As a PyTorchJob of such a pool does, by the policy ExitCode: below 128 for good.
    assert job("cpu", retries=2)["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "ExitCode"
    most = next(rule.le for rule in pools.Pool.model_fields["retries"].metadata if hasattr(rule, "le"))
    assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] >= most


def test_jobs_and_trainer_find_it(runtime):
    assert runtime["metadata"]["name"] == RETRYING_RUNTIME
    assert runtime["metadata"]["namespace"] == "kubeflow"
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == TRAINJOB_NODE
    # By this label Trainer knows which of the jobs `trainer` of a TrainJob is about.
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == BACKENDS["trainjob"].container


def test_pods_have_what_a_patch_leaves_out(runtime):
    """The token of the account is the launcher's business; Kueue's TrainJobs lose the grace period."""
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    other = job("cpu", retries=2)["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    for name in ("automountServiceAccountToken", "enableServiceLinks", "terminationGracePeriodSeconds"):
        assert pod[name] == other[name]


def test_names_of_rules_pass_the_webhook(runtime):
    """JobSet's webhook refuses others, which no schema says (`pkg/webhooks/jobset_webhook.go` of 0.12)."""
    for rule in runtime["spec"]["template"]["spec"]["failurePolicy"]["rules"]:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        assert len(rule["name"]) <= 128


def test_it_is_valid_by_the_real_crd(runtime):
    path = Path(os.environ.get(crds.VARIABLE, "")) / "trainer.kubeflow.org_trainingruntimes.yaml"
    if crds.VARIABLE not in os.environ or not path.exists():
        pytest.skip(f"{crds.VARIABLE} names no folder with {path.name}")
    (version,) = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["spec"]["versions"]
    schema = crds.strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(runtime, schema)
    runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestart"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(runtime, schema)
