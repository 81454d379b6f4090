"""The pipeline's tasks: thin KFP components, one for each stage, and what their bodies call.

Here stand the image that they run on, that of the server, and the extra `kubeflow`, without which this project trains on one machine.
"""

from importlib.util import find_spec

from trainer import __version__

IMAGE_NAME = "vit-distillation"
IMAGE = f"{IMAGE_NAME}:{__version__}"
SERVING_IMAGE = f"{IMAGE_NAME}-serving:{__version__}"  # of the server, which has neither torch nor what trains
IMAGE_VARIABLE = "TRAINER_IMAGE"  # environment variable of a task: the image that it runs on, and its jobs too
INSTALL_EXTRA = "pip install 'vit-distillation-pipeline[kubeflow]'"


def missing_extra(user: str) -> str:
    """Say what `user` lacks to run and how to get it; empty where all of the extra is installed. Imports none of it."""
    absent = [name for name in ("kfp", "kubernetes") if find_spec(name) is None]
    return (
        f"{user} needs {' and '.join(absent)}, not installed here; install the extra: {INSTALL_EXTRA}" if absent else ""
    )
