"""The task `reinforce`: data set and teacher -> teacher outputs."""

from typing import NamedTuple

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def reinforce(
    settings: str,
    distill_teacher: str,
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    dataset: str,
    teacher: str,
    recording: dsl.Output[dsl.HTML],
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Recorded", [("teacher_outputs_uri", str)]
):
    """Record the teacher's outputs on augmented views of the training images; gives where they are. Without `recorded` nothing is launched.

    Args:
        settings: The section `reinforce`, as JSON.
        distill_teacher: `recorded`, or `online` where the teacher runs in every step of the distillation.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool to run on; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set, its URI and digest.
        teacher: The teacher's model directory, its URI and digest.
        recording: What the recorded outputs hold, as a page.
    """
    from components import task
    from components.launching import Placement

    place = Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
    inputs = {"dataset": dataset, "teacher": teacher}
    return task.reinforce(settings, distill_teacher, inputs, place, recording)
