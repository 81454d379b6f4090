"""The kinds of job that a cluster can run; this table is where one is chosen by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from components.image import IMAGE, IMAGE_VARIABLE
from components.launch import environment, pod, pytorchjob, trainjob
from components.launch.identity import Identity
from components.launch.pools import Pool
from components.launch.state import JobState
from trainer.launch import JobSpec


@dataclass(frozen=True, kw_only=True)
class Backend:
    """How a job is written, found and read on a cluster."""

    group: str
    version: str
    plural: str
    kind: str
    container: str
    """The name of the training container in a job's pods."""
    renderer: Callable[[JobSpec, Pool, Identity], dict[str, Any]]
    """A pure function; `render` adds to it what the launching process hands on."""
    state: Callable[[Mapping[str, Any]], JobState]
    """A job as the API server shows it -> how it stands."""
    pod_selector: Callable[[str], str]
    """A job's name -> the label selector of its pods."""
    replica: Callable[[Mapping[str, str]], str]
    """A pod's labels -> its part in the job, such as `worker-3`."""

    def render(self, spec: JobSpec, pool: Pool, identity: Identity) -> dict[str, Any]:
        """The manifest of a job as it is sent, with what this process hands on: its environment, and its image.

        Raises:
            TrainerError: the job does not fit the pool or the backend.
        """
        given = environment.handed_on(os.environ)
        image = pod.image(pool, os.environ.get(IMAGE_VARIABLE) or IMAGE)
        return self.renderer(
            replace(spec, environment=given | dict(spec.environment)),
            pool.model_copy(update={"image": image}),
            identity,
        )


BACKENDS: Mapping[str, Backend] = {
    module.KIND.lower(): Backend(
        group=module.GROUP,
        version=module.VERSION,
        plural=module.PLURAL,
        kind=module.KIND,
        container=container,
        renderer=module.render,
        state=module.status,
        pod_selector=module.pod_selector,
        replica=module.replica,
    )
    for module, container in ((pytorchjob, pytorchjob.CONTAINER), (trainjob, trainjob.NODE))
}
"""Name of a pool's backend -> the backend."""
