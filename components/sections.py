"""The settings of a pipeline run, resolved once and cut into what each stage reads."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from trainer import config, tracking
from trainer.artifacts import canonical_json
from trainer.data import sources


class Sections(NamedTuple):
    """Each stage's own section, as JSON; and what the images are now."""

    prepare: str
    pretrain: str
    distill: str
    profile: str
    evaluate: str
    register: str
    source_version: str
    resolved: str
    """All settings, for the record."""


def resolve(
    recipe: str, overrides: str = "", dataset: str = "", teacher: str = "", experiment: str = ""
) -> config.Settings:
    """The settings of a run from the pipeline's parameters, of which the named ones go before `overrides`.

    Raises:
        SettingsError: an unknown recipe or setting, or a value that is not allowed.
    """
    named = {"data.source": dataset, "pretrain.weights": teacher, "tracking.experiment": experiment}
    return config.resolve(recipe, " ".join([overrides, *_as_overrides(named)]))


def _as_overrides(named: Mapping[str, str]) -> list[str]:
    """Quoted twice: as TOML text, so that a name like `1` stays text, and for the shell's rules."""
    return [shlex.quote(f"{key}={json.dumps(value)}") for key, value in named.items() if value]


def configure(settings: config.Settings) -> Sections:
    """Check what can be checked before anything expensive, and give each stage its own section.

    Raises:
        DataError: the images are not there.
        TrackingError: MLflow does not answer or refuses.
    """
    source_version = sources.source_version(settings.data.source)
    tracking.check()
    resolved = settings.model_dump(mode="json")
    tracking.start_parent(resolved, {"trainer.source_version": source_version})
    own = {stage: canonical_json(settings.for_stage(stage)) for stage in config.SECTION_OF_STAGE}
    return Sections(**own, source_version=source_version, resolved=canonical_json(resolved))
