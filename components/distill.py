"""The task `distill`: data set and teacher, or its recorded outputs -> student."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def distill(
    settings: str,
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    teacher_outputs: str,
    dataset: dsl.Input[dsl.Dataset],
    teacher: dsl.Input[dsl.Model],
    student: dsl.Output[dsl.Model],
    evidence: dsl.Output[dsl.Artifact],
    job: dsl.Output[dsl.Artifact],
) -> None:
    """Train the student on the teacher's logits and the labels.

    Args:
        settings: The section `distill`, as JSON.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool to train on; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Training processes on each machine; 0: one for each of its devices.
        teacher_outputs: Where the teacher's recorded outputs are; empty: the teacher runs in every step.
        dataset: The prepared data set.
        teacher: The teacher's model directory.
        student: The student's model directory.
        evidence: What the training recorded of itself.
        job: What was launched where, how it ended, and its logs.
    """
    from components import task
    from components.launching import Place, Training

    training = Training(
        stage="distill",
        settings=settings,
        inputs={"dataset": dataset.uri, "teacher": teacher.uri, "teacher_outputs": teacher_outputs},
        outputs={"student": student, "evidence": evidence},
        place=Place(pool=pool, nodes=nodes, processes_per_node=processes_per_node),
        job=job,
    )
    task.train(training)
