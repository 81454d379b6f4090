"""The launcher for clusters: runs a stage as a job on a node pool. The only package that knows Kubernetes.

Here are also the names of the images, of jobs and of the server, and the check for the extra `kubeflow`.

From the lowest layer to the highest:

    pools           node pools: where a job can run, what it gets there, what that costs
    job_manifest    what is sent: identity, pods, PyTorchJob and TrainJob; rendered by pure functions
    client          requests to the API server, what its errors mean, retries; the only module that imports `kubernetes`
    job_progress    what was observed of a job: messages, limits, outcome, cause; without clock and server
    readers         the threads that watch objects and read logs
    job             the job of a task, created once or adopted; the record that is kept of it
    launcher        submit, follow, explain, retry
    reaper          jobs that are no longer followed
    finishing       what is left of a run when it has ended
"""

from collections.abc import Sequence
from importlib.util import find_spec

from trainer import __version__

IMAGE_NAME = "vit-distillation"
IMAGE = f"{IMAGE_NAME}:{__version__}"
SERVING_IMAGE = f"{IMAGE_NAME}-serving:{__version__}"  # of the server, which has neither torch nor what trains
IMAGE_VARIABLE = "TRAINER_IMAGE"  # environment variable of a task: the image that it runs on, and its jobs too
INSTALL_EXTRA = "pip install 'vit-distillation-pipeline[kubeflow]'"


def missing_extra(user: str, needed: Sequence[str] = ("kfp", "kubernetes")) -> str:
    """Say what `user` lacks to run and how to get it; empty where all that it needs is installed. Imports none of it."""
    absent = [name for name in needed if find_spec(name) is None]
    return (
        f"{user} needs {' and '.join(absent)}, not installed here; install the extra: {INSTALL_EXTRA}" if absent else ""
    )
