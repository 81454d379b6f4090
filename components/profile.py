"""The task `profile`: evidence -> report."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def profile(
    settings: str,
    pretrain_evidence: dsl.Input[dsl.Artifact],
    distill_evidence: dsl.Input[dsl.Artifact],
    report: dsl.Output[dsl.Artifact],
    page: dsl.Output[dsl.HTML],
) -> None:
    """Report where the trainings' time went, what slows or spoils them, and what they cost.

    Args:
        settings: The section `profile`, as JSON.
        pretrain_evidence: What the teacher's training recorded of itself.
        distill_evidence: What the student's training recorded of itself.
        report: The report.
        page: The report, as a page.
    """
    from components import task

    evidence = {"pretrain_evidence": pretrain_evidence, "distill_evidence": distill_evidence}
    task.run_stage("profile", settings, inputs=evidence, outputs={"report": report})
    task.show_page(report, "report.html", page)
