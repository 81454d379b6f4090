"""Train a vision-transformer teacher, distill it into a student, and prove what was done.

This package knows torch and timm; it knows nothing of kfp or kubernetes. For use from Python it offers:

    load_model      a trained model, to be asked about photos
    run_stage       a stage on given inputs
    record          any training loop, to learn what slows or spoils it
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.doctor import record
    from trainer.predict.photo_classifier import load_model
    from trainer.runner.single_stage import run_stage

__version__ = "0.2.0"
__all__ = ["__version__", "load_model", "record", "run_stage"]

_MODULES = {
    "load_model": "trainer.predict.photo_classifier",
    "record": "trainer.doctor",
    "run_stage": "trainer.runner.single_stage",
}


def __getattr__(name: str) -> object:
    """Import the public names when they are first asked for: every process of this project imports the package, most need none of them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
