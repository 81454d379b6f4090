"""The task `pretrain`: data set -> teacher."""

from typing import NamedTuple

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def pretrain(
    settings: str,
    weights_version: str,  # noqa: ARG001  # changes with given weights, and with it KFP's cache key
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    dataset: str,
    teacher: dsl.Output[dsl.Model],
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Pretrained", [("teacher_uri", str), ("evidence_uri", str)]
):
    """Make the teacher: masked-autoencoder pretraining, then fine-tuning; or take given weights. Gives where it is, and the evidence.

    Args:
        settings: The section `pretrain`, as JSON.
        weights_version: What given weights are now; another value makes a cached teacher stale.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool to train on; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Training processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set, its URI and digest.
        teacher: The teacher's model directory.
    """
    from components import task
    from components.launching import Placement

    place = Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
    return task.train("pretrain", settings, {"dataset": dataset}, place, {"teacher": teacher})
