"""Train a vision-transformer teacher, distill it into a student, and prove what was done.

This package knows torch and timm; it knows nothing of kfp or kubernetes. For use from Python it offers what `trainer.api` describes:

    load_model      a trained model, to be asked about photos
    run_stage       a stage on given inputs
    record          any training loop, to learn what slows or spoils it
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.api import load_model, record, run_stage

__version__ = "0.2.0"
__all__ = ["__version__", "load_model", "record", "run_stage"]


def __getattr__(name: str) -> object:
    """Import the public names when they are first asked for: every process of this project imports the package, most need none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("trainer.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
