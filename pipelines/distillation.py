"""The pipeline: configure -> prepare -> pretrain -> distill -> profile -> evaluate -> register.

One definition for a cluster and for one machine. A task's name is the stage's name; the tasks hand artifacts to one another, and
each gets its own section of the settings only, so that a changed distillation setting leaves the cached teacher valid.
"""

from kfp import dsl

from components.configure import configure
from components.distill import distill
from components.evaluate import evaluate
from components.prepare import prepare
from components.pretrain import pretrain
from components.profile import profile
from components.register import register

NAME = "distillation"


@dsl.pipeline(name=NAME, display_name="Distil a vision transformer")
def distillation(
    recipe: str = "digits",
    overrides: str = "",
    dataset: str = "",
    teacher: str = "",
    experiment: str = "",
    processes_per_node: int = 2,
) -> None:
    """Train or take a teacher, distil a student from it, and prove what was done.

    Args:
        recipe: Name of a recipe in trainer/recipes, such as digits.
        overrides: Settings that differ from the recipe, `distill.epochs=20 distill.temperature=3`; see docs/configuration.md.
        dataset: Images: digits, imagefolder:PATH_OR_URI, manifest:FILE.csv or hub:NAME. Empty: the recipe's.
        teacher: Weights of the teacher: a model directory (path or URI) or timm:NAME. Empty: the recipe's.
        experiment: MLflow experiment. Empty: the recipe's.
        processes_per_node: Training processes on a machine, as many as it has GPUs.
    """
    settings = configure(
        recipe=recipe, overrides=overrides, dataset=dataset, teacher=teacher, experiment=experiment
    ).set_caching_options(False)  # images change and tracking servers go down without a change of parameters
    prepared = prepare(settings=settings.outputs["prepare"], source_version=settings.outputs["source_version"]).outputs[
        "dataset"
    ]
    pretrained = pretrain(
        settings=settings.outputs["pretrain"], processes_per_node=processes_per_node, dataset=prepared
    ).outputs
    distilled = distill(
        settings=settings.outputs["distill"],
        processes_per_node=processes_per_node,
        dataset=prepared,
        teacher=pretrained["teacher"],
    ).outputs
    profiled = profile(
        settings=settings.outputs["profile"],
        pretrain_evidence=pretrained["evidence"],
        distill_evidence=distilled["evidence"],
    ).outputs
    evaluated = evaluate(
        settings=settings.outputs["evaluate"],
        dataset=prepared,
        teacher=pretrained["teacher"],
        student=distilled["student"],
    ).set_caching_options(False)  # latency is the machine's of this run
    register(
        settings=settings.outputs["register"],
        recipe=recipe,
        resolved=settings.outputs["resolved"],
        dataset=prepared,
        teacher=pretrained["teacher"],
        student=distilled["student"],
        pretrain_evidence=pretrained["evidence"],
        distill_evidence=distilled["evidence"],
        report=profiled["report"],
        evaluation=evaluated.outputs["evaluation"],
    ).set_caching_options(False)  # every run has its version in the registry
