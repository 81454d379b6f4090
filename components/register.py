"""The task `register`: student, metrics, verdict -> MLflow model version."""

from typing import NamedTuple

from kfp import dsl

from components.image import IMAGE


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
        teacher_outputs: The teacher's recorded outputs; empty: the teacher ran in every step.
        tuning: The forecast of the distillation; empty: nobody made one.
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
        "teacher_outputs": teacher_outputs,
        "tuning": tuning,
        "warmed": warmed,
    }
    return task.run_stage("register", settings, inputs, recipe=recipe, resolved=json.loads(resolved))
