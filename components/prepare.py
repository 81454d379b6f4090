"""The task `prepare`: images -> data set."""

from kfp import dsl

from components.image import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def prepare(
    settings: str,
    source_version: str,  # noqa: ARG001  # changes with the images, and with it KFP's cache key
    dataset: dsl.Output[dsl.Dataset],
    card: dsl.Output[dsl.HTML],
) -> None:
    """Validate, deduplicate, resize, split and describe the images.

    Args:
        settings: The section `data`, as JSON.
        source_version: What the images are now; another value makes a cached data set stale.
        dataset: The prepared data set.
        card: What is in it, as a page.
    """
    from components import task

    task.run_stage("prepare", settings, inputs={}, outputs={"dataset": dataset})
    task.show_page(dataset, "card.html", card)
