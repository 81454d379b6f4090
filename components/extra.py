"""The extra `kubeflow`, without which this project trains on one machine: what it brings, and what to say where it is missing."""

from importlib.util import find_spec

PACKAGES = ("kfp", "kubernetes")
INSTALL = "pip install 'vit-distillation-pipeline[kubeflow]'"


def missing(user: str) -> str:
    """Say what `user` lacks to run and how to get it; empty where all of the extra is installed. Imports none of it."""
    absent = [name for name in PACKAGES if find_spec(name) is None]
    return f"{user} needs {' and '.join(absent)}, not installed here; install the extra: {INSTALL}" if absent else ""
