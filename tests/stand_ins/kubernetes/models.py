"""Manifests against the models of the generated Python clients: types, required fields, unknown fields."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import kubeflow.training.models
import kubernetes.client
import pydantic

from tests.stand_ins.kubernetes.resources import (
    CONFIG_MAPS,
    EVENTS,
    JOBS,
    PODS,
    PYTORCHJOBS,
    SECRETS,
    TRAINJOBS,
    Resource,
)

_MODELS = {
    PODS: "V1Pod",
    EVENTS: "CoreV1Event",
    CONFIG_MAPS: "V1ConfigMap",
    SECRETS: "V1Secret",
    PYTORCHJOBS: "KubeflowOrgV1PyTorchJob",
    JOBS: "V1Job",
}
_PLAIN: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "datetime": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}
_SWAGGER_NAMES = {"str": "string", "datetime": "string", "int": "integer", "float": "number", "bool": "boolean"}
_CONTAINER = re.compile(r"(?P<kind>list\[|dict\(str, )(?P<item>.+)[\])]")
_QUANTITIES = {"limits", "requests", "sizeLimit", "divisor"}
"""Fields that hold quantities: the models say text, the server takes numbers too."""


@dataclass
class Problems:
    """What is wrong with a manifest."""

    unknown: list[str] = field(default_factory=list)
    """Paths of fields that the schema lacks."""
    invalid: list[str] = field(default_factory=list)
    """Causes, each `path: what is wrong`."""

    def wrong_type(self, path: str, value: object, wanted: str) -> None:
        self.invalid.append(f'{path}: Invalid value: "{json_type(value)}": {path} in body must be of type {wanted}')


def check(manifest: Mapping[str, Any], resource: Resource, problems: Problems) -> None:
    """Add what is wrong with a manifest by its kind's model."""
    if resource == TRAINJOBS:
        _check_train_job(manifest, problems)
    else:
        _check(manifest, _MODELS[resource], "", problems)


def json_type(value: object) -> str:
    """The name of a value's type in JSON schema."""
    types = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", type(None): "null"}
    return types.get(type(value), "object")


def _check(value: Any, type_: str, path: str, problems: Problems) -> None:
    if type_ in _PLAIN:
        _check_plain(value, type_, path, problems)
    elif match := _CONTAINER.fullmatch(type_):
        _check_items(value, match, path, problems)
    elif type_ != "object":
        _check_model(value, type_, path, problems)


def _check_plain(value: Any, type_: str, path: str, problems: Problems) -> None:
    if path.rpartition(".")[2] in _QUANTITIES and isinstance(value, int | float):
        return
    if not isinstance(value, _PLAIN[type_]) or (isinstance(value, bool) and type_ != "bool"):
        problems.wrong_type(path, value, _SWAGGER_NAMES[type_])


def _check_items(value: Any, match: re.Match[str], path: str, problems: Problems) -> None:
    is_list = match["kind"] == "list["
    if not isinstance(value, list if is_list else dict):
        problems.wrong_type(path, value, "array" if is_list else "object")
        return
    items = enumerate(value) if is_list else value.items()
    for key, item in items:
        quantity = path.rpartition(".")[2] in _QUANTITIES and isinstance(item, int | float)
        if not quantity:
            _check(item, match["item"], f"{path}[{key}]" if is_list else f"{path}.{key}", problems)


def _check_model(value: Any, type_: str, path: str, problems: Problems) -> None:
    if not isinstance(value, dict):
        problems.wrong_type(path, value, "object")
        return
    model = _model(type_)
    if model is None:  # kubeflow-training names some models that no package has
        return
    attributes = {name: attribute for attribute, name in model.attribute_map.items()}
    for key, item in value.items():
        inner = f"{path}.{key}" if path else key
        if key not in attributes:
            problems.unknown.append(inner)
        elif item is not None:
            _check(item, model.openapi_types[attributes[key]], inner, problems)
    for name in _required(type_):
        if value.get(name) is None:
            problems.invalid.append(f"{path}.{name}: Required value".removeprefix("."))


def _model(name: str) -> Any:
    return getattr(kubeflow.training.models, name, None) or getattr(kubernetes.client, name, None)


@functools.cache
def _required(type_: str) -> tuple[str, ...]:
    """Names of the fields that a model does not let be empty."""
    model = _model(type_)
    configuration = kubernetes.client.Configuration()
    configuration.client_side_validation = False
    instance = model(local_vars_configuration=configuration)
    configuration.client_side_validation = True

    def is_required(attribute: str) -> bool:
        try:
            setattr(instance, attribute, None)
        except ValueError:
            return True
        return False

    return tuple(name for attribute, name in model.attribute_map.items() if is_required(attribute))


def _check_train_job(manifest: Mapping[str, Any], problems: Problems) -> None:
    """The models of Trainer are pydantic's: they check types and required fields, and what they drop is unknown."""
    models = importlib.import_module("kubeflow_trainer_api.models")  # half a second that most tests need not wait
    try:
        model = models.TrainerV1alpha1TrainJob.from_dict(dict(manifest))
    except pydantic.ValidationError as error:
        problems.invalid += [
            f"{'.'.join(str(key) for key in one['loc'])}: Invalid value: {one['msg']}" for one in error.errors()
        ]
    else:
        _find_dropped(manifest, model.to_dict(), "", problems)


def _find_dropped(given: Any, kept: Any, path: str, problems: Problems) -> None:
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for key, item in given.items():
            inner = f"{path}.{key}" if path else key
            if key in kept:
                _find_dropped(item, kept[key], inner, problems)
            elif item not in (None, {}, []):
                problems.unknown.append(inner)
    elif isinstance(given, list) and isinstance(kept, list):
        for index, (item, other) in enumerate(zip(given, kept, strict=True)):
            _find_dropped(item, other, f"{path}[{index}]", problems)
