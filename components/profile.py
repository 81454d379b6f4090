"""The task `profile`: evidence -> report."""

from typing import NamedTuple

from kfp import dsl

from components.image import IMAGE


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
