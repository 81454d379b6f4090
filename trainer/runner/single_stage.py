"""One stage on given inputs, for use from Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer import config
from trainer.graph import STAGES, Stage
from trainer.io import artifacts
from trainer.io.artifacts import Manifest
from trainer.io.errors import SettingsError
from trainer.io.host import environment_variables
from trainer.io.local_files import with_home
from trainer.runner import local_run


def run_stage(
    name: str, *, recipe: str = "", overrides: str | Iterable[str] = (), processes: int = 0, **directories: str | Path
) -> dict[str, Manifest]:
    """Run one stage on given inputs, as `python -m trainer stage NAME` does.

    Args:
        name: of the stage, such as `evaluate`.
        recipe: takes the stage's settings from this recipe; the defaults without one.
        overrides: `key=value` settings, such as `distill.logit.temperature=2`.
        processes: how many processes train, in a stage that trains; 0: one for each GPU, or else one.
        directories: of each input and output, by the stage's keywords, such as `dataset` and `evaluation`.

    Returns:
        Keyword of each output -> its manifest, whose `figures` are the stage's main numbers.

    Raises:
        SettingsError: there is no such stage, a setting is wrong, or a directory is missing or not the stage's.
        TrainerError: as the stage.
    """
    stage = _stage(name, directories)
    settings = config.resolve(recipe, overrides)
    uris = {keyword: with_home(place) for keyword, place in directories.items()}
    given = {"recipe": recipe, "resolved": settings.model_dump(mode="json")}
    device = {config.DEVICE_VARIABLE: os.environ.get(config.DEVICE_VARIABLE, settings.run.device)}
    with local_run.only_stage_in(uris[keyword] for keyword in stage.outputs), environment_variables(device):
        local_run.run_stage(stage, settings.for_stage(name), uris, processes=processes, given=given)
    return {keyword: artifacts.manifest(uris[keyword], kind) for keyword, kind in stage.outputs.items()}


def _stage(name: str, directories: Mapping[str, object]) -> Stage:
    stage = STAGES.get(name)
    if stage is None:
        raise SettingsError(f"stage {name!r}: there is none of this name; choose from {', '.join(STAGES)}")
    needed = [*stage.inputs, *stage.outputs]
    known = [*needed, *stage.optional_inputs]
    missing = [keyword for keyword in needed if keyword not in directories]
    if missing:
        raise SettingsError(f"stage {name}: needs the directory {missing[0]}; give {', '.join(needed)}")
    foreign = sorted(directories.keys() - {*known})
    if foreign:
        raise SettingsError(f"stage {name}: has no directory {foreign[0]}; it takes {', '.join(known)}")
    return stage
