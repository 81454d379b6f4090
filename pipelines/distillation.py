"""The pipeline: configure -> prepare -> warm_up -> pretrain -> tune -> [reinforce] -> distill -> profile -> evaluate -> register;
finish in any case.

One definition for a cluster and for one machine. A task's name is the stage's name; the tasks hand artifacts to one another, and
each gets its own section of the settings only, so that a changed distillation setting leaves the cached teacher valid.

warm_up and tune run always, and do something only with `warm_up.enabled` and `tune.enabled`. pretrain waits for warm_up and takes nothing
from it, so that a cached teacher stays valid; tune hands on the settings of the distillation, which it may change. reinforce runs only with
`distill.teacher=recorded`. What reads its output gets a URI, not an artifact: KFP chooses between parameters of two branches, but not
between artifacts (`kfp.local` raises, and so did the backend of 2.16). The lineage stands in our manifests.
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
from components.skip_reinforce import skip_reinforce
from components.tune import tune
from components.warm_up import warm_up
from pipelines.pods import SMALL, WORK, on_cluster

NAME = "distillation"
RETRIES = 2
"""A pod that was taken away is started again; a job that still runs is then followed further, not started twice."""
KEPT_S = 7 * 24 * 3600
"""How long the pods of a run and their logs stay on the cluster after its end."""


@dsl.pipeline(
    name=NAME,
    display_name="Distil a vision transformer",
    pipeline_config=dsl.PipelineConfig(ttl_seconds_after_finished=KEPT_S),
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
        prepared = on_cluster(preparing, WORK, retries=RETRIES).outputs["dataset"]
        warming = warm_up(
            settings=settings.outputs["warm_up"],
            device=settings.outputs["device"],
            pool=pool,
            nodes=nodes,
            processes_per_node=processes_per_node,
            dataset=prepared,
        )
        warmed = on_cluster(warming, SMALL, retries=RETRIES).outputs["Output"]
        pretraining = pretrain(
            settings=settings.outputs["pretrain"],
            weights_version=settings.outputs["weights_version"],
            device=settings.outputs["device"],
            pool=pool,
            nodes=nodes,
            processes_per_node=processes_per_node,
            dataset=prepared,
        ).after(warming)
        pretrained = on_cluster(pretraining, SMALL, retries=RETRIES).outputs
        tuning = tune(
            settings=settings.outputs["tune"],
            device=settings.outputs["device"],
            pool=pool,
            nodes=nodes,
            processes_per_node=processes_per_node,
            dataset=prepared,
            teacher=pretrained["teacher"],
        )
        tuned = on_cluster(tuning, SMALL, retries=RETRIES).outputs
        # A condition on a named output needs its Else here: without one, `kfp.local` can not resolve it and skips the branch.
        with dsl.If(tuned["distill_teacher"] == "recorded", name="recorded"):
            reinforcing = reinforce(
                settings=settings.outputs["reinforce"],
                device=settings.outputs["device"],
                pool=pool,
                nodes=nodes,
                processes_per_node=processes_per_node,
                dataset=prepared,
                teacher=pretrained["teacher"],
            )
            on_cluster(reinforcing, SMALL, retries=RETRIES)
        with dsl.Else(name="online"):
            skipping = on_cluster(skip_reinforce(), SMALL, retries=RETRIES)
        recorded = dsl.OneOf(reinforcing.outputs["Output"], skipping.output)
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
        distilled = on_cluster(distilling, SMALL, retries=RETRIES).outputs
        profiling = profile(
            settings=settings.outputs["profile"],
            pretrain_evidence=pretrained["evidence"],
            distill_evidence=distilled["evidence"],
        )
        profiled = on_cluster(profiling, WORK, retries=RETRIES).outputs
        evaluating = evaluate(
            settings=settings.outputs["evaluate"],
            dataset=prepared,
            teacher=pretrained["teacher"],
            student=distilled["student"],
        ).set_caching_options(False)  # latency is the machine's of this run
        evaluated = on_cluster(evaluating, WORK, retries=RETRIES).outputs
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
        on_cluster(registering, WORK)
