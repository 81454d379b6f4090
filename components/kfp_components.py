"""The components of the pipeline: `configure`, one for each stage in the order of the graph (`trainer/graph.py`), and `finish`;
`predict_photos` is of a pipeline of its own (`pipelines/predict_photos.py`).

Each is thin: at most five statements, counted by a test, which call `components.task`. What a signature has beside its stage's inputs is
of Kubeflow Pipelines: the stage's settings, the place of a training, what else makes a cached result stale, and the artifacts that a
person opens.

KFP ships the source of a component's function alone and evaluates its annotations there. So this module does without
`from __future__ import annotations`, and what a body needs is imported inside it.
"""

from typing import NamedTuple

from kfp import dsl

from components.launch import IMAGE


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
    fresh: bool,
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
        ("export", str),
        ("register", str),
        ("source_version", str),
        ("teacher_weights_version", str),
        ("student_weights_version", str),
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
        fresh: Whether earlier cached results no longer count, in this run and in later ones.
        run_name: As Kubeflow shows the run.
    """
    from components import launching, sections, task

    with task.reporting("configure"):
        settings = sections.resolve(recipe, overrides, dataset, teacher, experiment)
        place = launching.Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
        return sections.configure(settings, place, task.generation(fresh=fresh), run_name)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def prepare(
    settings: str,
    source_version: str,  # noqa: ARG001  # changes with the images, and with it KFP's cache key
    data_card: dsl.Output[dsl.HTML],
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Prepared", [("dataset_uri", str)]
):
    """Validate, deduplicate, resize, split and describe the images; gives where the data set is.

    Args:
        settings: The section `data`, as JSON.
        source_version: What the images are now; another value makes a cached data set stale.
        data_card: What is in the data set, as a page.
    """
    from components import task

    (dataset,) = task.run_stage("prepare", settings, {})
    task.show_page(dataset, "card.html", data_card)
    return (dataset,)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def warm_up(
    settings: str,
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    dataset: str,
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Warmed", [("warmed_uri", str)]
):
    """Compile beforehand what the trainings need; gives where the report is. Without `enabled` nothing is launched.

    Args:
        settings: The section `warm_up`, as JSON.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool of the trainings; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set, its URI and digest.
    """
    from components import launching, task

    place = launching.Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
    return task.warm_up(settings, {"dataset": dataset}, place)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def pretrain(
    settings: str,
    teacher_weights_version: str,  # noqa: ARG001  # changes with given weights, and with it KFP's cache key
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    dataset: str,
    teacher: dsl.Output[dsl.Model],
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Pretrained", [("teacher_uri", str), ("evidence_uri", str)]
):
    """Make the teacher: masked-autoencoder pretraining, then fine-tuning; or take given weights. Gives where it is, and the evidence.

    Args:
        settings: The section `pretrain`, as JSON.
        teacher_weights_version: What given weights are now; another value makes a cached teacher stale.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool to train on; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Training processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set, its URI and digest.
        teacher: The teacher's model directory.
    """
    from components import launching, task

    place = launching.Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
    return task.train("pretrain", settings, {"dataset": dataset}, place, {"teacher": teacher})


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def tune(
    settings: str,
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    dataset: str,
    teacher: str,
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Tuned", [("distill", str), ("distill_teacher", str), ("tuning_uri", str)]
):
    """Try the distillation where it will run; gives its settings, tuned if that is asked for. Without `enabled` nothing is launched.

    Args:
        settings: The section `tune`, as JSON.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool to run on; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set, its URI and digest.
        teacher: The teacher's model directory, its URI and digest.
    """
    from components import launching, task

    place = launching.Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
    return task.tune(settings, {"dataset": dataset, "teacher": teacher}, place)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def reinforce(
    settings: str,
    distill_teacher: str,
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    dataset: str,
    teacher: str,
    recording: dsl.Output[dsl.HTML],
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Recorded", [("teacher_outputs_uri", str)]
):
    """Record the teacher's outputs on augmented views of the training images; gives where they are. Without `recorded` nothing is launched.

    Args:
        settings: The section `reinforce`, as JSON.
        distill_teacher: `recorded`, or `online` where the teacher runs in every step of the distillation.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool to run on; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set, its URI and digest.
        teacher: The teacher's model directory, its URI and digest.
        recording: What the recorded outputs hold, as a page.
    """
    from components import launching, task

    place = launching.Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
    inputs = {"dataset": dataset, "teacher": teacher}
    return task.reinforce(settings, distill_teacher, inputs, place, recording)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def distill(
    settings: str,
    student_weights_version: str,  # noqa: ARG001  # changes with given weights, and with it KFP's cache key
    device: str,  # noqa: ARG001  # changes with run.device, and with it KFP's cache key
    pool: str,
    nodes: int,
    processes_per_node: int,
    dataset: str,
    teacher: str,
    teacher_outputs: str,
    student: dsl.Output[dsl.Model],
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Distilled", [("student_uri", str), ("evidence_uri", str)]
):
    """Train the student on the teacher's logits and the labels; gives where it is, and the evidence.

    Args:
        settings: The section `distill`, as JSON.
        student_weights_version: What the weights are now that the student starts from; another value makes a cached student stale.
        device: Kind of the devices that it runs on; another one makes a cached result stale.
        pool: Node pool to train on; empty: this task's own machine.
        nodes: How many machines of the pool.
        processes_per_node: Training processes on each machine; 0: one for each of its devices.
        dataset: The prepared data set, its URI and digest.
        teacher: The teacher's model directory, its URI and digest.
        teacher_outputs: The teacher's recorded outputs, their URI and digest; empty: the teacher runs in every step.
        student: The student's model directory.
    """
    from components import launching, task

    place = launching.Placement(pool=pool, nodes=nodes, processes_per_node=processes_per_node)
    inputs = {"dataset": dataset, "teacher": teacher, "teacher_outputs": teacher_outputs}
    return task.train("distill", settings, inputs, place, {"student": student})


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def profile(
    settings: str,
    pretrain_evidence: str,
    distill_evidence: str,
    profile: dsl.Output[dsl.HTML],
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Profiled", [("report_uri", str)]
):
    """Report where the trainings' time went, what slows or spoils them, and what they cost; gives where the report is.

    Args:
        settings: The section `profile`, as JSON.
        pretrain_evidence: What the teacher's training recorded of itself, its URI and digest.
        distill_evidence: What the student's training recorded of itself, its URI and digest.
        profile: The report, as a page.
    """
    from components import task

    inputs = {"pretrain_evidence": pretrain_evidence, "distill_evidence": distill_evidence}
    (report,) = task.run_stage("profile", settings, inputs)
    task.show_page(report, "report.html", profile)
    return (report,)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    settings: str,
    dataset: str,
    teacher: str,
    student: str,
    evaluation: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
    student_confusion: dsl.Output[dsl.ClassificationMetrics],
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Evaluated", [("evaluation_uri", str)]
):
    """Measure teacher and student on the test split and judge the student; gives where the measurements are.

    Args:
        settings: The section `evaluate`, as JSON.
        dataset: The prepared data set, its URI and digest.
        teacher: The teacher's model directory, its URI and digest.
        student: The student's model directory, its URI and digest.
        evaluation: The measurements and the verdict, as a page.
        metrics: The main numbers.
        student_confusion: The student's confusion matrix on the test split, of at most 200 classes.
    """
    from components import task

    (made,) = task.run_stage("evaluate", settings, {"dataset": dataset, "teacher": teacher, "student": student})
    task.show_evaluation(made, evaluation, metrics, student_confusion)
    return (made,)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def export(
    settings: str,
    dataset: str,
    student: str,
    evaluation: str,
    variants: dsl.Output[dsl.HTML],
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Exported", [("exported_uri", str)]
):
    """Write the student as ONNX and choose the fastest variant that passes; gives where it is. Without `enabled` nothing is done.

    Args:
        settings: The section `export`, as JSON.
        dataset: The prepared data set, its URI and digest.
        student: The student's model directory, its URI and digest.
        evaluation: The measurements and the verdict, their URI and digest.
        variants: What each variant measured, as a page.
    """
    from components import task

    return task.export(settings, {"dataset": dataset, "student": student, "evaluation": evaluation}, variants)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def register(
    settings: str,
    recipe: str,
    resolved: str,
    dataset: str,
    teacher: str,
    student: str,
    pretrain_evidence: str,
    distill_evidence: str,
    report: str,
    evaluation: str,
    exported: str,
    teacher_outputs: str,
    tuning: str,
    warmed: str,
) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Registered", [("registration_uri", str)]
):
    """Log the student to MLflow, register it, and promote it if it passed; gives where the summary of the run is.

    Args:
        settings: The section `register`, as JSON.
        recipe: The recipe's name.
        resolved: All settings of the run, as JSON.
        dataset: The prepared data set, its URI and digest.
        teacher: The teacher's model directory, its URI and digest.
        student: The student's model directory, its URI and digest.
        pretrain_evidence: What the teacher's training recorded of itself.
        distill_evidence: What the student's training recorded of itself.
        report: The report on both trainings.
        evaluation: The measurements and the verdict.
        exported: The student as an ONNX file; empty: it was not exported.
        teacher_outputs: The teacher's recorded outputs; empty: the teacher ran in every step.
        tuning: The forecast of the distillation; empty: none was made.
        warmed: The report on what was compiled beforehand; empty: nothing was.
    """
    import json

    from components import task

    inputs = {
        "dataset": dataset,
        "teacher": teacher,
        "student": student,
        "pretrain_evidence": pretrain_evidence,
        "distill_evidence": distill_evidence,
        "report": report,
        "evaluation": evaluation,
        "exported": exported,
        "teacher_outputs": teacher_outputs,
        "tuning": tuning,
        "warmed": warmed,
    }
    return task.run_stage("register", settings, inputs, recipe=recipe, resolved=json.loads(resolved))


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finish(pool: str, status: dsl.PipelineTaskFinalStatus) -> None:
    """Delete the run's jobs that are left on the cluster, and record how the run ended.

    Args:
        pool: Node pool that the trainings ran on; empty: none.
        status: How the other tasks ended.
    """
    from components import task
    from components.launch import finishing

    with task.reporting("finish"):
        finishing.finish(pool, status.state, status.error_message)


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def predict_photos(photos: str, model: str, output: str, top: int, force: bool) -> NamedTuple(  # type: ignore[valid-type]  # KFP evaluates the annotation where no class of ours is at hand
    "Predicted", [("photos", int), ("unreadable", int)]
):
    """Predict the labels of all photos of a folder or a bucket, in Parquet files; what is there already is kept.

    Args:
        photos: URI of the folder.
        model: A registered model, such as models:/vit-student-digits@champion, or the URI of a model or an export.
        output: URI of the folder to write.
        top: How many labels each photo gets.
        force: Ask a student that did not pass its gate, too.
    """
    from components import task

    return task.predict(photos, model, output, top, force)
