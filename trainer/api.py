"""The public API: load a model and ask it about photos, run a stage, record a training loop of one's own.

The names are there as `trainer.load_model`, `trainer.run_stage` and `trainer.record`. Importing this module imports neither torch nor timm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import artifacts, config, runner
from trainer.artifacts import Manifest
from trainer.errors import SettingsError
from trainer.graph import STAGES, Stage
from trainer.host import environment_variables
from trainer.photo_classifier import PhotoClassifier, load_model

if TYPE_CHECKING:
    from torch import nn

    from trainer.own_loop import LoopRecording

__all__ = ["PhotoClassifier", "load_model", "record", "run_stage"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


def run_stage(
    name: str,
    *,
    recipe: str = "",
    overrides: str | Iterable[str] = (),
    processes: int = 0,
    **directories: str | Path,
) -> dict[str, Manifest]:
    """Run one stage on given inputs, as `python -m trainer stage NAME` does.

    Args:
        name: of the stage, such as `evaluate`.
        recipe: takes the stage's settings from this recipe; the defaults without one.
        overrides: `key=value` settings, such as `distill.temperature=2`.
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
    uris = {keyword: str(place) for keyword, place in directories.items()}
    given = {"recipe": recipe, "resolved": settings.model_dump(mode="json")}
    with environment_variables({config.DEVICE_VARIABLE: os.environ.get(config.DEVICE_VARIABLE, settings.run.device)}):
        runner.run_stage(stage, settings.for_stage(name), uris, processes=processes, given=given)
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


def record(name: str, output: str | Path, *, model: nn.Module | None = None) -> LoopRecording:
    """Record a training loop of your own, and report what slows or spoils it.

        with trainer.record("segmentation", "profile", model=model) as recording:
            for images, targets in recording.steps(loader):
                with recording.span("forward"):
                    loss = criterion(model(images), targets)
                with recording.span("backward"):
                    loss.backward()
                with recording.span("optimizer"):
                    optimizer.step()
                recording.log(loss=loss.item())

    Args:
        name: of the training, for the report.
        output: directory for `report/report.html` and, in `evidence`, what it was made of.
        model: what is trained, on its device, not compiled and not wrapped. The span `optimizer` looks at its weights now and then;
            without it only time and machine are judged.

    Raises:
        SettingsError: the name cannot be a file's.
    """
    if not _NAME.fullmatch(name):
        raise SettingsError(f"record: the name {name!r} must be of letters, digits, dots and dashes, 64 at most")
    from trainer.own_loop import LoopRecording

    return LoopRecording(name, Path(output), model)
