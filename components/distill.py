"""The task `distill`: data set and teacher, or its recorded outputs -> student."""

from typing import NamedTuple

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def distill(
    settings: str,
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    dataset: str,
    teacher: str,
    teacher_outputs: str,
    student: dsl.Output[dsl.Model],
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Distilled", [("student_uri", str), ("evidence_uri", str)]
):
    """Train the student on the teacher's logits and the labels; gives where it is, and the evidence.

    Args:
        settings: The section `distill`, as JSON.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool to train on; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Training processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set, its URI and digest.
        teacher: The teacher's model directory, its URI and digest.
        teacher_outputs: The teacher's recorded outputs, their URI and digest; empty: the teacher runs in every step.
        student: The student's model directory.
    """
    from components import task
    from components.launching import Placement

    place = Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
    inputs = {"dataset": dataset, "teacher": teacher, "teacher_outputs": teacher_outputs}
    return task.train("distill", settings, inputs, place, {"student": student})
