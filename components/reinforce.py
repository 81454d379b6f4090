"""The task `reinforce`: data set and teacher -> teacher outputs."""

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
    dataset: dsl.Input[dsl.Dataset],
    teacher: dsl.Input[dsl.Model],
    teacher_outputs: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
    job: dsl.Output[dsl.Artifact],
) -> str:
    """Record the teacher's outputs on augmented views of the training images; gives where they are. Without `recorded` nothing is launched.

    Args:
        settings: The section `reinforce`, as JSON.
        distill_teacher: `recorded`, or `online` where the teacher runs in every step of the distillation.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool to run on; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set.
        teacher: The teacher's model directory.
        teacher_outputs: The teacher's recorded outputs.
        page: What they hold, as a page.
        job: What was launched where, how it ended, and its logs.
    """
    from components import task
    from components.launching import Place, Training

    training = Training(
        stage="reinforce",
        settings=settings,
        inputs={"dataset": dataset.uri, "teacher": teacher.uri},
        outputs={"teacher_outputs": teacher_outputs},
        place=Place(pool=pool, nodes=nodes, processes_per_node=processes_per_node),
        job=job,
    )
    return task.reinforce(training, distill_teacher, page)
