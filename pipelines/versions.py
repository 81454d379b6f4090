"""The pipeline and its versions, as Kubeflow Pipelines keeps them."""

from __future__ import annotations

import datetime
import hashlib
import re
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import kfp_server_api

from pipelines.connection import Api, every
from pipelines.distillation import NAME
from pipelines.refusals import CONFLICT, NOT_FOUND, RefusedError
from trainer import __version__
from trainer.graph import OPTIONAL_STAGES

_GENERATION = re.compile(r"-fresh-(\d{8}t\d{6}z)$")


def content_of(text: str) -> str:
    """Name the versions of one content: by the project's version and a digest of the whole compiled pipeline with its image."""
    return f"{__version__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def name_of(content: str, optional: Collection[str], generation: str) -> str:
    """Name a version: `0.1.0-0123456789ab`, `0.1.0-0123456789ab-plain`, `0.1.0-0123456789ab-tune-reinforce-fresh-20260131t120000z`.

    Args:
        content: of `content_of`.
        optional: the stages of `OPTIONAL_STAGES` that its graph has.
        generation: of `generation`.
    """
    stages = "" if set(optional) == set(OPTIONAL_STAGES) else f"-{'-'.join(optional) or 'plain'}".replace("_", "-")
    return f"{content}{stages}{f'-fresh-{generation}' if generation else ''}"


def is_of(name: str, content: str) -> bool:
    """Check whether a version of this name is one of a content's."""
    return name == content or name.startswith(f"{content}-")


def generation(api: Api) -> str:
    """Return when everything was last to be made again, as the versions' names say; empty if never.

    KFP can neither forget a cached result nor replace one. So a parameter of the first task that is cached changes, for every version
    from then on.
    """
    found = pipeline(api)
    names = versions(api, found.pipeline_id) if found else ()
    return max((match[1] for name in names if (match := _GENERATION.search(name))), default="")


def next_generation() -> str:
    """Make a generation that is newer than those before."""
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%dt%H%M%Sz}"


def pipeline(api: Api) -> Any | None:
    """Find the pipeline; None where it was never uploaded."""
    try:
        return api.pipelines.pipeline_service_get_pipeline_by_name(NAME, **api.in_namespace)
    except RefusedError as error:
        if error.status != NOT_FOUND:
            raise
        return None


def versions(api: Api, pipeline_id: str) -> dict[str, Any]:
    """List the versions of a pipeline, by name."""
    listed = every(api.pipelines.pipeline_service_list_pipeline_versions, "pipeline_versions", pipeline_id=pipeline_id)
    return {version.name: version for version in listed}


def upload(api: Api, name: str, text: str) -> Any:
    """Upload a compiled pipeline as a version, unless it is there, and report which.

    Raises:
        DeployError: the API refuses.
    """
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
        if error.status != CONFLICT:  # someone else was faster
            raise
        return pipeline(api)


def _upload(api: Api, pipeline_id: str, name: str, text: str) -> tuple[Any, bool]:
    """Upload a version; gives it, and whether it was uploaded by someone else at the same time."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / f"{NAME}.yaml"
        file.write_text(text)
        try:
            return api.uploads.upload_pipeline_version(str(file), name=name, pipelineid=pipeline_id), False
        except RefusedError as error:
            if error.status != CONFLICT:
                raise
    return versions(api, pipeline_id)[name], True
