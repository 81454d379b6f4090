"""The pipeline and its versions, as Kubeflow Pipelines keeps them."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import kfp_server_api

from pipelines.connection import Api, every
from pipelines.distillation import NAME
from pipelines.refusals import CONFLICT, NOT_FOUND, RefusedError
from trainer import __version__


def name_of(text: str) -> str:
    """The version's name: the project's version and what the compiled pipeline with its image holds."""
    return f"{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def pipeline(api: Api) -> Any | None:
    """The pipeline, or None where it was never uploaded."""
    try:
        return api.pipelines.pipeline_service_get_pipeline_by_name(NAME, **api.in_namespace)
    except RefusedError as error:
        if error.status != NOT_FOUND:
            raise
        return None


def versions(api: Api, pipeline_id: str) -> dict[str, Any]:
    """Name -> version."""
    listed = every(api.pipelines.pipeline_service_list_pipeline_versions, "pipeline_versions", pipeline_id=pipeline_id)
    return {version.name: version for version in listed}


def upload(api: Api, text: str) -> Any:
    """The version of a compiled pipeline, which is uploaded unless it is there; says which.

    Raises:
        DeployError: the API refuses.
    """
    name = name_of(text)
    found = pipeline(api) or _create(api)
    version = versions(api, found.pipeline_id).get(name)
    known = version is not None
    if version is None:
        version, known = _upload(api, found.pipeline_id, name, text)
    state = "version already there" if known else "uploaded"
    print(
        f"{NAME} {name}: {state}; {api.link(f'pipelines/details/{version.pipeline_id}/version/{version.pipeline_version_id}')}"
    )
    return version


def _create(api: Api) -> Any:
    body = kfp_server_api.V2beta1Pipeline(
        name=NAME, display_name=NAME, description="Distil a vision transformer", **api.in_namespace
    )
    try:
        return api.pipelines.pipeline_service_create_pipeline(body)
    except RefusedError as error:
        if error.status != CONFLICT:  # somebody else was faster
            raise
        return pipeline(api)


def _upload(api: Api, pipeline_id: str, name: str, text: str) -> tuple[Any, bool]:
    """The version, and whether somebody else has just uploaded it."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / f"{NAME}.yaml"
        file.write_text(text)
        try:
            return api.uploads.upload_pipeline_version(str(file), name=name, pipelineid=pipeline_id), False
        except RefusedError as error:
            if error.status != CONFLICT:
                raise
    return versions(api, pipeline_id)[name], True
