"""How the stand-in for the Kubeflow Pipelines API reads and writes: by the models of kfp-server-api and by kfp's own loader."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import kfp_server_api as models
from kfp import components
from kfp.pipeline_spec.pipeline_spec_pb2 import ParameterType, PipelineSpec

LONG = ("max_concurrency", "interval_second")
"""Fields that the models call text because JSON has no long numbers; the backend takes numbers too."""
PLAIN = {"str": [str], "int": [int, str], "bool": [bool], "datetime": [str]}
KINDS = {
    "STRING": [str],
    "NUMBER_INTEGER": [int, float],
    "NUMBER_DOUBLE": [int, float],
    "BOOLEAN": [bool],
    "LIST": [list],
    "STRUCT": [dict],
}

load = functools.cache(components.load_component_from_text)


class RefusedError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def read(kind: str, body: bytes) -> Any:
    """A request's body as its model."""
    checked(kind, json.loads(body))
    response = type("Response", (), {"data": body})()
    with models.ApiClient() as client:
        return client.deserialize(response, kind)


def written(answer: Any) -> Any:
    """A model as JSON."""
    with models.ApiClient() as client:
        return client.sanitize_for_serialization(answer)


def checked(kind: str, value: Any, where: str = "") -> None:
    """Refuse what is not of a model, as the backend refuses an unknown or ill-typed field.

    Args:
        kind: of kfp-server-api: the name of a model, `str`, `list[...]` or `dict(str, ...)`.
        value: as JSON gave it.
        where: path of the value, for the message.
    """
    if kind == "object":
        return
    if kind in PLAIN:
        if type(value) not in PLAIN[kind]:
            raise RefusedError(400, f"proto: invalid value for {kind} field {where}: {value!r}")
    elif kind.startswith("list["):
        for item in value:
            checked(kind[5:-1], item, where)
    elif kind.startswith("dict("):
        for key, item in value.items():
            checked(kind.split(", ", 1)[1][:-1], item, f"{where}.{key}")
    else:
        _checked_model(getattr(models, kind), value, where)


def _checked_model(model: Any, value: Any, where: str) -> None:
    allowed = getattr(model, "allowable_values", None)
    if allowed is not None:
        if value not in [*allowed, *range(len(allowed))]:  # by name or by number, as in all JSON of protobuf
            raise RefusedError(400, f"proto: invalid value for enum field {where}: {value!r}")
        return
    fields = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
    for key, item in value.items():
        if key not in fields:
            raise RefusedError(400, f'proto: unknown field "{key}" in {where or model.__name__}')
        checked("int" if key in LONG else fields[key], item, f"{where}.{key}")


def check_parameters(pipeline: PipelineSpec, given: Mapping[str, Any]) -> None:
    """Refuse parameters that are not the pipeline's, as the backend does: missing, ill-typed, unknown."""
    declared = pipeline.root.input_definitions.parameters
    for name, parameter in declared.items():
        if name not in given:
            if not parameter.is_optional and not parameter.HasField("default_value"):
                raise RefusedError(
                    400, f"parameter {name} is not optional, yet has neither default nor user provided value"
                )
        elif type(given[name]) not in KINDS[ParameterType.ParameterTypeEnum.Name(parameter.parameter_type)]:
            raise RefusedError(400, f"input parameter {name} is not of its type: {given[name]!r}")
    unknown = sorted(set(given) - set(declared))
    if unknown:
        raise RefusedError(400, f"parameter(s) provided are not required by pipeline: {', '.join(unknown)}")
