"""The task `pretrain`: data set -> teacher."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def pretrain(
    settings: str,
    processes_per_node: int,
    dataset: dsl.Input[dsl.Dataset],
    teacher: dsl.Output[dsl.Model],
    evidence: dsl.Output[dsl.Artifact],
) -> None:
    """Make the teacher: masked-autoencoder pretraining, then fine-tuning; or take given weights.

    Args:
        settings: The section `pretrain`, as JSON.
        processes_per_node: Training processes on each machine.
        dataset: The prepared data set.
        teacher: The teacher's model directory.
        evidence: What the training recorded of itself.
    """
    from components import task

    task.run_stage(
        "pretrain",
        settings,
        inputs={"dataset": dataset},
        outputs={"teacher": teacher, "evidence": evidence},
        processes_per_node=processes_per_node,
    )
