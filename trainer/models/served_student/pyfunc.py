"""The student as MLflow loads and asks it.

Unusable input raises MLflow's own error, so that its server answers 400 with one message.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from .preprocessing import BadImageError
from .student import TOP_K, BadParameterError, Photo, Predictor

if TYPE_CHECKING:
    import pandas as pd


class UnusableInputError(MlflowException, ValueError):
    """A photo or a parameter that the student cannot use."""

    def __init__(self, message: str) -> None:
        super().__init__(message, error_code=INVALID_PARAMETER_VALUE)

    def serialize_as_json(self) -> str:
        """Write the answer's body without what MLflow's server puts before the message: the input, up to a whole photo in base64."""
        return json.dumps({"error_code": self.error_code, "message": str(self)})


class RegisteredStudent(Predictor):
    """A student by MLflow's interface."""

    def predict(self, images: Photo | Sequence[Photo], params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Classify as `Predictor.table` does, with `top_k` of the parameters; raises an `UnusableInputError` for unusable input."""
        try:
            return self.table(images, top_k=int((params or {}).get(TOP_K, 0)))
        except (BadImageError, BadParameterError) as error:
            raise UnusableInputError(str(error)) from error

    def get_raw_model(self) -> RegisteredStudent:
        """Return the student without MLflow's checks, for `mlflow.pyfunc.PyFuncModel.get_raw_model`: its `predict` takes lists too."""
        return self


def _load_pyfunc(path: str) -> RegisteredStudent:
    """Load the student for MLflow, whose entry point this is; `path` is the copied directory, `MODEL/data/NAME`."""
    # In a process that loaded another model before, MLflow goes on with the code of that one, whose folder may be gone.
    package = __name__.rpartition(".")[0]
    sys.modules[package].__path__.insert(0, str(Path(path).parents[1] / "code" / package))
    return RegisteredStudent(Path(path))
