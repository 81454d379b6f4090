"""The compiled pipeline as KFP 2.17's API server makes a Workflow of it, with its controller's defaults filled in."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from components.launch import pools
from pipelines import compile as compilation
from pipelines.distillation import KEPT_S

DEFAULTS = Path(__file__).parent / "controller-defaults.yaml"
PATCH = Path(__file__).parent.parent.parent / "manifests" / "kfp" / "workflow-controller-configmap.yaml"


@pytest.fixture(scope="module")
def documents():
    return list(yaml.safe_load_all(compilation.compiled_text()))


@pytest.fixture(scope="module", params=["KFP's own", "install.sh's"])
def defaults(request):
    """What the controller fills in: on any KFP, and on one that our script has patched."""
    if request.param == "KFP's own":
        return yaml.safe_load(DEFAULTS.read_text())["spec"]
    return yaml.safe_load(yaml.safe_load(PATCH.read_text())["data"]["workflowDefaults"])["spec"]


def merged(default, own):
    """A template's own value goes before the controller's, field by field."""
    if not (isinstance(default, dict) and isinstance(own, dict)):
        return default if own is None else own
    return {key: merged(default.get(key), own.get(key)) for key in {**default, **own}}


def ttl_strategy(platforms):
    """As `buildTTLStrategy` of KFP's Argo compiler: a field that is 0 or missing is left to the controller."""
    given = platforms["platforms"]["kubernetes"]["pipelineConfig"]
    names = {"OnCompletion": "AfterCompletion", "OnSuccess": "AfterSuccess", "OnFailure": "AfterFailure"}
    return {
        f"seconds{there}": given[f"resourceTtl{here}"]
        for here, there in names.items()
        if given.get(f"resourceTtl{here}")
    }


def dags(specification):
    return [specification["root"]["dag"]] + [one["dag"] for one in specification["components"].values() if "dag" in one]


def tasks(specification):
    """Every task of every level, without the groups."""
    return {
        name: task
        for dag in dags(specification)
        for name, task in dag["tasks"].items()
        if "dag" not in specification["components"][task["componentRef"]["name"]]
    }


def test_workflow_is_kept(documents, defaults):
    strategy = merged(defaults["ttlStrategy"], ttl_strategy(documents[1]))
    assert strategy == dict.fromkeys(("secondsAfterCompletion", "secondsAfterSuccess", "secondsAfterFailure"), KEPT_S)
    # So the merge above can fail: this was seen on a cluster.
    strategy = merged(defaults["ttlStrategy"], {"secondsAfterCompletion": KEPT_S})
    assert strategy["secondsAfterSuccess"] == 3600


def test_nothing_takes_an_output_from_a_branch(documents):
    """KFP 2.17 cannot resolve `dsl.OneOf` over a branch whose task comes from the cache: every run after the first would fail."""
    assert "valueFromOneof" not in str(documents[0])
    assert not [
        task
        for dag in dags(documents[0])
        for task in dag["tasks"].values()
        if "condition" in task.get("triggerPolicy", {})
    ]


def test_task_is_tried_again_however_long_its_first_attempt_took(documents, defaults):
    """Argo counts `maxDuration` from the start of the first attempt."""
    longest_job_s = 60 * max(pool.queued_minutes + pool.running_minutes for pool in pools.load().values())
    for name, task in tasks(documents[0]).items():
        policy = task["retryPolicy"]
        backoff = {"duration": policy["backoffDuration"], "maxDuration": policy["backoffMaxDuration"]}
        own = {"limit": str(policy.get("maxRetryCount", 0)), "backoff": backoff}
        strategy = merged(defaults["templateDefaults"]["retryStrategy"], own)
        assert strategy["limit"] == "2", name
        assert float(strategy["backoff"]["maxDuration"].removesuffix("s")) > longest_job_s, name
