"""The task `evaluate`: teacher, student, data set -> metrics and verdict."""

from typing import NamedTuple

from kfp import dsl

from components.image import IMAGE


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
        student_confusion: The student's confusion matrix on the test split.
    """
    from components import task

    (made,) = task.run_stage("evaluate", settings, {"dataset": dataset, "teacher": teacher, "student": student})
    task.show_evaluation(made, evaluation, metrics, student_confusion)
    return (made,)
