"""The task `tune`: data set and teacher -> the settings of the distillation, and what it will take."""

from typing import NamedTuple

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def tune(
    settings: str,
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    dataset: str,
    teacher: str,
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Tuned", [("distill", str), ("distill_teacher", str), ("tuning_uri", str)]
):
    """Try the distillation where it will run; gives its settings, tuned if that is asked for. Without `enabled` nothing is launched.

    Args:
        settings: The section `tune`, as JSON.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool to run on; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set, its URI and digest.
        teacher: The teacher's model directory, its URI and digest.
    """
    from components import task
    from components.launching import Placement

    place = Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
    return task.tune(settings, {"dataset": dataset, "teacher": teacher}, place)
