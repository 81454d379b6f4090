"""The task `prepare`: images -> data set."""

from typing import NamedTuple

from kfp import dsl

from components.image import IMAGE


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
