"""The task `register`: student, metrics, verdict -> MLflow model version."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def register(
    settings: str,
    recipe: str,
    resolved: str,
    teacher_outputs: str,
    tuning: str,
    warmed: str,
    dataset: dsl.Input[dsl.Dataset],
    teacher: dsl.Input[dsl.Model],
    student: dsl.Input[dsl.Model],
    pretrain_evidence: dsl.Input[dsl.Artifact],
    distill_evidence: dsl.Input[dsl.Artifact],
    report: dsl.Input[dsl.Artifact],
    evaluation: dsl.Input[dsl.Artifact],
    registration: dsl.Output[dsl.Artifact],
) -> None:
    """Log the student to MLflow, register it, and promote it if it passed.

    Args:
        settings: The section `register`, as JSON.
        recipe: The recipe's name.
        resolved: All settings of the run, as JSON.
        teacher_outputs: Where the teacher's recorded outputs are; empty: the teacher ran in every step.
        tuning: Where the forecast of the distillation is; empty: nobody made one.
        warmed: Where the report on what was compiled beforehand is; empty: nothing was.
        dataset: The prepared data set.
        teacher: The teacher's model directory.
        student: The student's model directory.
        pretrain_evidence: What the teacher's training recorded of itself.
        distill_evidence: What the student's training recorded of itself.
        report: The report on both trainings.
        evaluation: The measurements and the verdict.
        registration: The registered version, and the summary of the whole run.
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
    }
    run = {
        "recipe": recipe,
        "resolved": json.loads(resolved),
        "teacher_outputs": teacher_outputs or None,
        "tuning": tuning or None,
        "warmed": warmed or None,
    }
    task.run_stage("register", settings, inputs=inputs, outputs={"registration": registration}, **run)
