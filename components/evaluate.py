"""The task `evaluate`: teacher, student, data set -> metrics and verdict."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def evaluate(
    settings: str,
    dataset: dsl.Input[dsl.Dataset],
    teacher: dsl.Input[dsl.Model],
    student: dsl.Input[dsl.Model],
    evaluation: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    confusion: dsl.Output[dsl.ClassificationMetrics],
    page: dsl.Output[dsl.HTML],
) -> None:
    """Measure teacher and student on the test split and judge the student.

    Args:
        settings: The section `evaluate`, as JSON.
        dataset: The prepared data set.
        teacher: The teacher's model directory.
        student: The student's model directory.
        evaluation: The measurements and the verdict.
        metrics: The main numbers.
        confusion: The student's confusion matrix on the test split.
        page: All of it, as a page.
    """
    from components import task

    task.run_stage(
        "evaluate",
        settings,
        inputs={"dataset": dataset, "teacher": teacher, "student": student},
        outputs={"evaluation": evaluation},
    )
    task.show_metrics(evaluation, metrics)
    task.show_confusion(evaluation, confusion)
    task.show_page(evaluation, "report.html", page)
