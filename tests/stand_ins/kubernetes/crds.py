"""Manifests against the schemas of real CRDs, where `KUBEFLOW_CRDS` names a folder that holds them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.stand_ins.kubernetes.models import Problems, json_type
from tests.stand_ins.kubernetes.resources import Resource

VARIABLE = "KUBEFLOW_CRDS"


def check(manifest: Mapping[str, Any], resource: Resource, problems: Problems) -> None:
    """Add what is wrong with a manifest by its CRD's schema, if that is at hand."""
    folder = os.environ.get(VARIABLE)
    if not folder or not resource.group or resource.group == "batch":  # which is Kubernetes' own
        return
    for error in _validator(Path(folder), resource).iter_errors(manifest):
        path = _path(error)
        if error.validator == "additionalProperties":
            unknown = error.instance.keys() - error.schema.get("properties", {}).keys()
            problems.unknown += [f"{path}.{name}".removeprefix(".") for name in unknown]
        elif error.validator == "required":
            missing = error.validator_value - error.instance.keys()
            problems.invalid += [f"{path}.{name}: Required value".removeprefix(".") for name in sorted(missing)]
        elif error.validator == "type":
            wanted = error.validator_value
            problems.wrong_type(path, error.instance, wanted if isinstance(wanted, str) else " or ".join(wanted))
        else:
            problems.invalid.append(f'{path}: Invalid value: "{json_type(error.instance)}": {error.message}')


def _path(error: jsonschema.ValidationError) -> str:
    parts = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in error.absolute_path]
    return "".join(parts).removeprefix(".")


@functools.cache
def _validator(folder: Path, resource: Resource) -> jsonschema.Draft202012Validator:
    crd = yaml.load((folder / f"{resource.group}_{resource.plural}.yaml").read_text(), Loader=yaml.CSafeLoader)
    version = next(one for one in crd["spec"]["versions"] if one["name"] == resource.version)
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # the server's own, with fields that a CRD does not list
    return jsonschema.Draft202012Validator(schema)


def strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Kubernetes' dialect as plain JSON schema: closed objects, `int-or-string`, required lists as sets."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    plain = {key: value for key, value in schema.items() if not key.startswith("x-") and key not in _DROPPED}
    if "properties" in schema:
        plain["properties"] = {name: strict(inner) for name, inner in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            plain["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), Mapping):
        plain["additionalProperties"] = strict(schema["additionalProperties"])
    if "items" in schema:
        plain["items"] = strict(schema["items"])
    return plain


_DROPPED = {"description", "format", "nullable", "default", "anyOf"}
"""Without meaning here; `anyOf` stands only where a quantity may be a number."""
