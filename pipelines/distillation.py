"""The pipeline: configure -> prepare -> [warm_up] -> pretrain -> [tune] -> [reinforce] -> distill -> profile, evaluate -> register; finish
in any case.

One definition for a cluster and for one machine. A task's name is the stage's name; the tasks hand references to artifacts to one another
(`components/references.py`), and each gets its own section of the settings only, so that a changed distillation setting leaves the cached
teacher valid.

The stages in brackets are in the graph where they are asked for. `definition` makes it with those that a run's settings need, because each
task costs a cluster two pods and some twenty seconds, also one that does nothing; `distillation` has all of them, and there warm_up,
tune and reinforce hand on an empty reference where they are not wanted. A task's cache key is the same in every such graph. There is no
`dsl.If`: KFP 2.17 cannot take an output from a branch (`dsl.OneOf`) whose task comes from its cache.

pretrain waits for warm_up and takes nothing from it, so that a cached teacher stays valid; tune hands on the settings of the
distillation, which it may change.

The exit handler costs a level in Kubeflow's UI and a driver's pod. It stays because nothing else of a run is started when a task's pod
was lost or the run was stopped, and only then do jobs on the node pools and the run in MLflow need somebody who ends them.
"""

from collections.abc import Collection

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from components.configure import configure
from components.distill import distill
from components.evaluate import evaluate
from components.finish import finish
from components.prepare import prepare
from components.pretrain import pretrain
from components.profile import profile
from components.register import register
from components.reinforce import reinforce
from components.sections import OPTIONAL_STAGES
from components.task import RECORDED
from components.tune import tune
from components.warm_up import warm_up
from pipelines.pods import SMALL, WORK, on_cluster

NAME = "distillation"
KEPT_S = 7 * 24 * 3600
"""How long the pods of a run and their logs stay on the cluster after its end."""


def definition(optional: Collection[str] = OPTIONAL_STAGES, generation: str = "") -> BaseComponent:
    """The pipeline.

    Args:
        optional: which of `OPTIONAL_STAGES` are in its graph.
        generation: another one takes nothing from KFP's cache that was made under this.
    """

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
        place = {"pool": pool, "nodes": nodes, "processes_per_node": processes_per_node}
        finishing = finish(pool=pool).set_caching_options(False).set_display_name("Finish")
        with dsl.ExitHandler(on_cluster(finishing, SMALL), name="Distillation"):
            configuring = configure(
                recipe=recipe,
                overrides=overrides,
                dataset=dataset,
                teacher=teacher,
                experiment=experiment,
                optional_stages=" ".join(optional),
                generation=generation,
                run_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
                **place,
            ).set_caching_options(False)  # images change and tracking servers go down without a change of parameters
            settings = on_cluster(configuring, WORK).set_display_name("Configure").outputs
            training = {"device": settings["device"], **place}

            preparing = prepare(settings=settings["prepare"], source_version=settings["source_version"])
            data = {"dataset": on_cluster(preparing, WORK).set_display_name("Prepare data").outputs["dataset_uri"]}

            if "warm_up" in optional:
                warming = warm_up(settings=settings["warm_up"], **training, **data)
                on_cluster(warming, SMALL).set_display_name("Warm up")

            pretraining = pretrain(
                settings=settings["pretrain"], weights_version=settings["weights_version"], **training, **data
            )
            on_cluster(pretraining, SMALL).set_display_name("Pretrain teacher")
            if "warm_up" in optional:
                pretraining.after(warming)
            models = {"teacher": pretraining.outputs["teacher_uri"]}

            if "tune" in optional:
                tuning = tune(settings=settings["tune"], **training, **data, **models)
                on_cluster(tuning, SMALL).set_display_name("Tune")

            if "reinforce" in optional:
                reinforcing = reinforce(
                    settings=settings["reinforce"],
                    distill_teacher=tuning.outputs["distill_teacher"] if "tune" in optional else RECORDED,
                    **training,
                    **data,
                    **models,
                )
                on_cluster(reinforcing, SMALL).set_display_name("Record teacher outputs")
            recorded = reinforcing.outputs["teacher_outputs_uri"] if "reinforce" in optional else ""

            distilling = distill(
                settings=tuning.outputs["distill"] if "tune" in optional else settings["distill"],
                teacher_outputs=recorded,
                **training,
                **data,
                **models,
            )
            on_cluster(distilling, SMALL).set_display_name("Distil student")
            evidence = {
                "pretrain_evidence": pretraining.outputs["evidence_uri"],
                "distill_evidence": distilling.outputs["evidence_uri"],
            }
            models["student"] = distilling.outputs["student_uri"]

            profiling = profile(settings=settings["profile"], **evidence)
            on_cluster(profiling, WORK).set_display_name("Profile trainings")

            evaluating = evaluate(settings=settings["evaluate"], **data, **models)
            evaluating.set_caching_options(False)  # latency is the machine's of this run
            on_cluster(evaluating, WORK).set_display_name("Evaluate")

            registering = register(
                settings=settings["register"],
                recipe=recipe,
                resolved=settings["resolved"],
                report=profiling.outputs["report_uri"],
                evaluation=evaluating.outputs["evaluation_uri"],
                teacher_outputs=recorded,
                tuning=tuning.outputs["tuning_uri"] if "tune" in optional else "",
                warmed=warming.outputs["warmed_uri"] if "warm_up" in optional else "",
                **data,
                **models,
                **evidence,
            ).set_caching_options(False)  # every run has its version in the registry, one for all tries at this task
            on_cluster(registering, WORK).set_display_name("Register")

    return distillation


distillation = definition()
