"""The task `distill`: data set and teacher -> student."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def distill(
    settings: str,
    processes_per_node: int,
    dataset: dsl.Input[dsl.Dataset],
    teacher: dsl.Input[dsl.Model],
    student: dsl.Output[dsl.Model],
    evidence: dsl.Output[dsl.Artifact],
) -> None:
    """Train the student on the teacher's logits and the labels.

    Args:
        settings: The section `distill`, as JSON.
        processes_per_node: Training processes on each machine.
        dataset: The prepared data set.
        teacher: The teacher's model directory.
        student: The student's model directory.
        evidence: What the training recorded of itself.
    """
    from components import task

    task.run_stage(
        "distill",
        settings,
        inputs={"dataset": dataset, "teacher": teacher},
        outputs={"student": student, "evidence": evidence},
        processes_per_node=processes_per_node,
    )
