"""The task `pretrain`: data set -> teacher."""

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
    dataset: dsl.Input[dsl.Dataset],
    teacher: dsl.Output[dsl.Model],
    evidence: dsl.Output[dsl.Artifact],
    job: dsl.Output[dsl.Artifact],
) -> None:
    """Make the teacher: masked-autoencoder pretraining, then fine-tuning; or take given weights.

    Args:
        settings: The section `pretrain`, as JSON.
        weights_version: What given weights are now; another value makes a cached teacher stale.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool to train on; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Training processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set.
        teacher: The teacher's model directory.
        evidence: What the training recorded of itself.
        job: What was launched where, how it ended, and its logs.
    """
    from components import task
    from components.launching import Place, Training

    training = Training(
        stage="pretrain",
        settings=settings,
        inputs={"dataset": dataset.uri},
        outputs={"teacher": teacher, "evidence": evidence},
        place=Place(pool=pool, nodes=nodes, processes_per_node=processes_per_node),
        job=job,
    )
    task.train(training)
