"""The task `finish`: whatever the others did, nothing of the run stays behind."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def finish(pool: str, status: dsl.PipelineTaskFinalStatus) -> None:
    """Delete the run's jobs that are left on the cluster, and record how the run ended.

    Args:
        pool: Node pool that the trainings ran on; empty: none.
        status: How the other tasks ended.
    """
    from components import finishing, task

    with task.reporting("finish"):
        finishing.finish(pool, status.state, status.error_message)
