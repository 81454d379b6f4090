"""The student as MLflow loads and asks it.

What cannot be used is refused by MLflow's own error, so that its server answers 400 with one message.
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
from .student import BadParameterError, Photo, ServedStudent

if TYPE_CHECKING:
    import pandas as pd


class UnusableInputError(MlflowException, ValueError):
    """A photo or a parameter that the student cannot use."""

    def __init__(self, message: str) -> None:
        super().__init__(message, error_code=INVALID_PARAMETER_VALUE)

    def serialize_as_json(self) -> str:
        """Write the answer's body without what MLflow's server puts before the message: the input, up to a whole photo in base64."""
        return json.dumps({"error_code": self.error_code, "message": str(self)})


class RegisteredStudent(ServedStudent):
    """A student that raises what MLflow's server can tell the client, who would get a traceback for any other exception."""

    def predict(self, images: Photo | Sequence[Photo], params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Classify as `ServedStudent.predict` does, but raise an `UnusableInputError` for what cannot be used."""
        try:
            return super().predict(images, params)
        except (BadImageError, BadParameterError) as error:
            raise UnusableInputError(str(error)) from error


def _load_pyfunc(path: str) -> RegisteredStudent:
    """Load the student for MLflow, whose entry point this is; `path` is the copied directory, `MODEL/data/NAME`."""
    # In a process that loaded another model before, MLflow goes on with the code of that one, whose folder may be gone.
    package = __name__.rpartition(".")[0]
    sys.modules[package].__path__.insert(0, str(Path(path).parents[1] / "code" / package))
    return RegisteredStudent(Path(path))
