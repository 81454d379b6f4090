"""prepare: validate, deduplicate, resize, split and describe the images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from trainer.config import HOW_PREPARED, DataSettings
from trainer.data.class_tables import source_version
from trainer.data.preparation import decode_cache_uri, decode_share, list_images, prepare
from trainer.graph import ALONE, Share
from trainer.io import artifacts, storage
from trainer.io.artifacts import Manifest
from trainer.io.errors import ArtifactError, OutputError
from trainer.report import tracking
from trainer.report.tracking.stage_runs import stage_run


def run(settings: DataSettings, *, dataset: str | Path, share: Share = ALONE) -> Manifest | None:
    """Prepare the images of `settings.source` into the directory `dataset`.

    Images that an interrupted preparation has decoded are kept beside the checkpoints, or for good where the settings say, and not decoded
    again. There, too, other machines may decode a share of them, for the one with the first share to use.

    Returns:
        The data set's manifest, on the machine that makes it.
    """
    _check_places(settings, dataset)
    # For those who call the stage itself: folders of other splits are removed.
    artifacts.check_outputs({"dataset": dataset}, {})
    values = settings.model_dump(mode="json", exclude=set(HOW_PREPARED))
    cache_uri = _cache_uri(settings, dataset)
    if share.number:
        ended = partial(_is_made, dataset, values)
        decode_share(settings, cache_uri, share, ended=ended, remote=storage.is_remote(dataset))
        return None
    remote = storage.is_remote(dataset)
    # A run on this machine may reuse it (on a cluster Kubeflow's cache has its own key). The version is read before the images, so that
    # one that changes meanwhile is noticed by the next run; and both before the data set that is there goes.
    version = None if remote else source_version(settings) or None
    with stage_run("prepare", values) as tracker:
        given = list_images(settings)
        with artifacts.create(dataset, "dataset", settings=values) as draft:
            draft.source_version = version
            figures = prepare(settings, draft.path, cache_uri=cache_uri, remote=remote, share=share, given=given)
            draft.figures |= figures
            tracker.metrics(0, tracking.numbers(draft.figures))
    forget(settings, dataset)
    return artifacts.manifest(dataset, "dataset")


def _check_places(settings: DataSettings, dataset: str | Path) -> None:
    """Refuse to write into the folder of the images: they would be replaced, or what is written taken for images."""
    named = settings.source.partition(":")[2]
    if not named or storage.is_remote(named) or not Path(named).is_dir():
        return
    for name, place in {"the output": str(dataset), "data.keep_decoded": settings.keep_decoded}.items():
        is_local = place and not storage.is_remote(place)
        if is_local and storage.local_path(place).resolve().is_relative_to(Path(named).resolve()):
            raise OutputError(f"{name} {place}: lies in the folder of the images, {named}; name one outside of it")


def _is_made(dataset: str | Path, settings: Mapping[str, object]) -> bool:
    """Return whether a data set with these settings is there: an older one that is about to be replaced may have others."""
    try:
        return artifacts.manifest(dataset, "dataset").settings == settings
    except ArtifactError:  # none; an older one that is removed meanwhile, or is of another version
        return False


def forget(settings: DataSettings, dataset: str | Path) -> None:
    """Remove what is decoded and not needed any more, also by a machine that was ended in its share of a finished preparation."""
    if not settings.keep_decoded:
        storage.remove(_cache_uri(settings, dataset))


def _cache_uri(settings: DataSettings, dataset: str | Path) -> str:
    return decode_cache_uri(settings, settings.keep_decoded or artifacts.unfinished(dataset))
