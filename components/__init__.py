"""The pipeline's tasks as components of Kubeflow Pipelines, for pipelines of one's own too: `from components import prepare, distill`.

A component is made when it is first asked for, so that the launcher can be imported without `kfp`.
"""

from typing import Any

from trainer.graph import STAGES


def __getattr__(name: str) -> Any:
    """Return the component of that name, or `on_cluster`, which prepares a task of one for a cluster."""
    if name in STAGES:
        from components.kfp_components import of_stages

        return of_stages[name]
    if name == "on_cluster":
        from components.kfp_components import on_cluster

        return on_cluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
