"""The task `configure`: a recipe and its overrides -> each stage's own section of the settings."""

from typing import NamedTuple

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def configure(
    recipe: str,
    overrides: str,
    dataset: str,
    teacher: str,
    experiment: str,
    pool: str,
    nodes: int,
    processes_per_node: int,
    optional_stages: str,
    generation: str,
    run_name: str,
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Sections",
    [
        ("prepare", str),
        ("warm_up", str),
        ("pretrain", str),
        ("reinforce", str),
        ("tune", str),
        ("distill", str),
        ("profile", str),
        ("evaluate", str),
        ("register", str),
        ("source_version", str),
        ("weights_version", str),
        ("device", str),
        ("resolved", str),
    ],
):
    """Resolve the settings, and make sure that the images and the node pool are there and that tracking answers.

    Args:
        recipe: Name of a recipe.
        overrides: Settings that differ from it, `key=value key=value`.
        dataset: Source of the images, instead of the recipe's.
        teacher: Weights of the teacher, instead of the recipe's.
        experiment: MLflow experiment, instead of the recipe's.
        pool: Node pool that the trainings run on.
        nodes: How many machines of the pool.
        processes_per_node: Training processes on each machine.
        optional_stages: Which of the stages that not every run needs are in this pipeline's graph.
        generation: Of what KFP's cache holds; what was made under another one is not taken from it.
        run_name: As Kubeflow shows the run.
    """
    from components import sections, task
    from components.launching import Placement

    with task.reporting("configure"):
        settings = sections.resolve(recipe, overrides, dataset, teacher, experiment)
        return sections.configure(
            settings,
            Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node),
            optional_stages,
            generation,
            run_name,
        )
