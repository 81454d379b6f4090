"""The task `warm_up`: data set -> compiled graphs in the compile cache, and a report on them."""

from typing import NamedTuple

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def warm_up(
    settings: str,
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    dataset: str,
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Warmed", [("warmed_uri", str)]
):
    """Compile beforehand what the trainings need; gives where the report is. Without `enabled` nothing is launched.

    Args:
        settings: The section `warm_up`, as JSON.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool of the trainings; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set, its URI and digest.
    """
    from components import task
    from components.launching import Placement

    place = Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
    return task.warm_up(settings, {"dataset": dataset}, place)
