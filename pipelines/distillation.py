"""The pipeline: configure -> prepare -> warm_up -> pretrain -> tune -> reinforce -> distill -> profile -> evaluate -> register;
finish in any case.

One definition for a cluster and for one machine. A task's name is the stage's name; the tasks hand artifacts to one another, and
each gets its own section of the settings only, so that a changed distillation setting leaves the cached teacher valid.

Every task is always in the graph: KFP cannot take an output from a branch (`dsl.OneOf`) whose task comes from its cache. warm_up, tune and
reinforce do something only with `warm_up.enabled`, `tune.enabled` and `distill.teacher=recorded`, and else give an empty place. pretrain
waits for warm_up and takes nothing from it, so that a cached teacher stays valid; tune hands on the settings of the distillation, which
it may change. What reads an output that may be empty gets a URI, not an artifact.
"""

from kfp import dsl

from components.configure import configure
from components.distill import distill
from components.evaluate import evaluate
from components.finish import finish
from components.prepare import prepare
from components.pretrain import pretrain
from components.profile import profile
from components.register import register
from components.reinforce import reinforce
from components.tune import tune
from components.warm_up import warm_up
from pipelines.pods import SMALL, WORK, on_cluster

NAME = "distillation"
KEPT_S = 7 * 24 * 3600
"""How long the pods of a run and their logs stay on the cluster after its end."""


@dsl.pipeline(
    name=NAME,
    display_name="Distil a vision transformer",
    pipeline_config=dsl.PipelineConfig(
        ttl_seconds_after_finished=KEPT_S,
        ttl_seconds_after_success=KEPT_S,  # KFP's controller has an hour for each end that is left open
        ttl_seconds_after_failure=KEPT_S,
    ),
)
def distillation(
    recipe: str = "digits",
    overrides: str = "",
    dataset: str = "",
    teacher: str = "",
    experiment: str = "",
    pool: str = "",
    nodes: int = 1,
    processes_per_node: int = 0,
) -> None:
    """Train or take a teacher, distil a student from it, and prove what was done.

    Args:
        recipe: Name of a recipe in trainer/recipes, such as digits.
        overrides: Settings that differ from the recipe, `distill.epochs=20 distill.temperature=3`; see docs/configuration.md.
        dataset: Images: digits, imagefolder:PATH_OR_URI, manifest:FILE.csv or hub:NAME. Empty: the recipe's.
        teacher: Weights of the teacher: a model directory (path or URI) or timm:NAME. Empty: the recipe's.
        experiment: MLflow experiment. Empty: the recipe's.
        pool: Node pool that the trainings run on, such as cpu or gpu-a100. Empty: on this machine, not on a cluster.
        nodes: Machines of the pool for each training.
        processes_per_node: Training processes on each machine. 0: one for each of its devices.
    """
    finished = on_cluster(finish(pool=pool), SMALL).set_caching_options(False)
    with dsl.ExitHandler(finished, name="stages"):
        settings = on_cluster(
            configure(
                recipe=recipe,
                overrides=overrides,
                dataset=dataset,
                teacher=teacher,
                experiment=experiment,
                pool=pool,
                nodes=nodes,
                processes_per_node=processes_per_node,
            ),
            WORK,
        ).set_caching_options(False)  # images change and tracking servers go down without a change of parameters
        preparing = prepare(settings=settings.outputs["prepare"], source_version=settings.outputs["source_version"])
        prepared = on_cluster(preparing, WORK).outputs["dataset"]
        warming = warm_up(
            settings=settings.outputs["warm_up"],
            device=settings.outputs["device"],
            pool=pool,
            nodes=nodes,
            processes_per_node=processes_per_node,
            dataset=prepared,
        )
        warmed = on_cluster(warming, SMALL).outputs["Output"]
        pretraining = pretrain(
            settings=settings.outputs["pretrain"],
            weights_version=settings.outputs["weights_version"],
            device=settings.outputs["device"],
            pool=pool,
            nodes=nodes,
            processes_per_node=processes_per_node,
            dataset=prepared,
        ).after(warming)
        pretrained = on_cluster(pretraining, SMALL).outputs
        tuning = tune(
            settings=settings.outputs["tune"],
            device=settings.outputs["device"],
            pool=pool,
            nodes=nodes,
            processes_per_node=processes_per_node,
            dataset=prepared,
            teacher=pretrained["teacher"],
        )
        tuned = on_cluster(tuning, SMALL).outputs
        reinforcing = reinforce(
            settings=settings.outputs["reinforce"],
            distill_teacher=tuned["distill_teacher"],
            device=settings.outputs["device"],
            pool=pool,
            nodes=nodes,
            processes_per_node=processes_per_node,
            dataset=prepared,
            teacher=pretrained["teacher"],
        )
        recorded = on_cluster(reinforcing, SMALL).outputs["Output"]
        distilling = distill(
            settings=tuned["distill"],
            device=settings.outputs["device"],
            pool=pool,
            nodes=nodes,
            processes_per_node=processes_per_node,
            teacher_outputs=recorded,
            dataset=prepared,
            teacher=pretrained["teacher"],
        )
        distilled = on_cluster(distilling, SMALL).outputs
        profiling = profile(
            settings=settings.outputs["profile"],
            pretrain_evidence=pretrained["evidence"],
            distill_evidence=distilled["evidence"],
        )
        profiled = on_cluster(profiling, WORK).outputs
        evaluating = evaluate(
            settings=settings.outputs["evaluate"],
            dataset=prepared,
            teacher=pretrained["teacher"],
            student=distilled["student"],
        ).set_caching_options(False)  # latency is the machine's of this run
        evaluated = on_cluster(evaluating, WORK).outputs
        registering = register(
            settings=settings.outputs["register"],
            recipe=recipe,
            resolved=settings.outputs["resolved"],
            teacher_outputs=recorded,
            tuning=tuned["uri"],
            warmed=warmed,
            dataset=prepared,
            teacher=pretrained["teacher"],
            student=distilled["student"],
            pretrain_evidence=pretrained["evidence"],
            distill_evidence=distilled["evidence"],
            report=profiled["report"],
            evaluation=evaluated["evaluation"],
        ).set_caching_options(False)  # every run has its version in the registry
        on_cluster(registering, WORK, retries=0)  # and no more than one
