"""Jobs as the launcher renders them, to hold against the manifests."""

from __future__ import annotations

from components.launch import pools
from components.launch.backends import BACKENDS
from components.launch.identity import Identity
from trainer.launch import JobSpec


def job(name, *, nodes=2, **changes):
    """A PyTorchJob on a pool, some of whose fields may be changed."""
    spec = JobSpec(
        stage="distill",
        settings={},
        inputs={"dataset": "s3://bucket/dataset"},
        outputs={"student": "s3://bucket/student"},
        nodes=nodes,
        processes_per_node=0,
    )
    pool = pools.get(name).model_copy(update=changes)
    return BACKENDS["pytorchjob"].renderer(spec, pool, Identity(run="run", task="distill"))


def templates(manifest):
    """The pod template of each role."""
    return [replica["template"] for replica in manifest["spec"]["pytorchReplicaSpecs"].values()]
