"""Jobs as the launcher renders them, to hold against the manifests."""

from __future__ import annotations

from dataclasses import replace

from components.launch import pools
from components.launch.job_manifest import BACKENDS, Identity
from trainer.graph import JobSpec

IDENTITY = Identity(run="run", task="distill")


def spec(nodes=2):
    """A training; its settings do not matter here."""
    return JobSpec(
        stage="distill",
        settings={},
        inputs={"dataset": "s3://bucket/dataset"},
        outputs={"student": "s3://bucket/student"},
        nodes=nodes,
        processes_per_node=0,
    )


def job(name, *, nodes=2, run=IDENTITY.run, attempt=1, **changes):
    """A PyTorchJob on a pool, some of whose fields may be changed; on one node where that is all the pool can join."""
    pool = pools.get(name).model_copy(update=changes)
    return BACKENDS["pytorchjob"].render(
        spec(nodes if pool.joins_nodes else 1), pool, replace(IDENTITY, run=run, attempt=attempt)
    )


def templates(manifest):
    return [replica["template"] for replica in manifest["spec"]["pytorchReplicaSpecs"].values()]
