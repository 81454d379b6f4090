"""The task `warm_up`: data set -> compiled graphs in the compile cache, and a report on them."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def warm_up(
    settings: str,
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    dataset: dsl.Input[dsl.Dataset],
    warmed: dsl.Output[dsl.Artifact],
    job: dsl.Output[dsl.Artifact],
) -> str:
    """Compile beforehand what the trainings need; gives where the report is. Without `enabled` nothing is launched.

    Args:
        settings: The section `warm_up`, as JSON.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool of the trainings; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set.
        warmed: What was compiled for which training, and how long that took.
        job: What was launched where, how it ended, and its logs.
    """
    from components import task
    from components.launching import Place, Training

    training = Training(
        stage="warm_up",
        settings=settings,
        inputs={"dataset": dataset.uri},
        outputs={"warmed": warmed},
        place=Place(pool=pool, nodes=nodes, processes_per_node=processes_per_node),
        job=job,
    )
    return task.warm_up(training)
