"""From a recipe and overrides to the settings of a run.

A recipe (`trainer/recipes/NAME.toml`) states only what differs from the defaults; overrides are text (`distill.temperature=2`).
`resolve` turns both into one frozen `Settings`, and fills in what sections take from one another.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer import limits, local_files
from trainer.config.checks import AnySection, nearest, validate
from trainer.config.settings import TOP_K, DistillSettings, ReinforceSettings, Settings
from trainer.config.training_settings import ViewSettings, WatchSettings
from trainer.errors import ObjectNotFoundError, SettingsError, StorageError

RECIPES = Path(__file__).parents[1] / "recipes"


def recipes() -> dict[str, str]:
    """List the recipes: name -> the first line of its text."""
    return {path.stem: _first_comment(path) for path in sorted(RECIPES.glob("*.toml"))}


def _first_comment(path: Path) -> str:
    return path.read_text().split("\n", 1)[0].removeprefix("#").strip()


def load_recipe(recipe: str) -> dict[str, Any]:
    """Read the differences from the defaults that a recipe states; `recipe` is a name or the path of a TOML file.

    Raises:
        SettingsError: no such recipe (with the nearest names), or not TOML.
    """
    path = RECIPES / f"{recipe}.toml" if "/" not in recipe and not recipe.endswith(".toml") else Path(recipe)
    try:
        return limits.parse_toml(local_files.read_limited(path, limits.TOML_BYTES).decode())
    except ObjectNotFoundError as error:
        known = sorted(recipes())
        raise SettingsError(
            f"unknown recipe {recipe!r}{nearest(recipe, known)}; known: {', '.join(known)}, or the path of a TOML file"
        ) from error
    except StorageError as error:
        raise SettingsError(f"recipe {error}") from error
    except ValueError as error:
        raise SettingsError(f"recipe {path}: cannot be read: {error}") from error


def parse_overrides(overrides: str | Iterable[str]) -> dict[str, Any]:
    """Parse `"distill.temperature=2 data.source=digits"` -> `{"distill.temperature": 2, "data.source": "digits"}`.

    A value is read as TOML where it is TOML (numbers, true, quoted text, lists) and as plain text otherwise; a value with spaces
    is quoted as in a shell.

    Raises:
        SettingsError: an item is not `key=value`.
    """
    try:
        items = shlex.split(overrides) if isinstance(overrides, str) else list(overrides)
    except ValueError as error:
        raise SettingsError(f"overrides {overrides!r}: {error}; close the quotation") from error
    parsed = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise SettingsError(f"override {item!r}: is not key=value, such as distill.temperature=2")
        parsed[key] = _parse_value(text)
    return parsed


def _parse_value(text: str) -> Any:
    try:
        found = limits.parse_toml(f"value = {text}")
    except ValueError:
        return text
    return found["value"] if len(found) == 1 else text  # after a line break there may be more


def resolve(recipe: str = "", overrides: str | Iterable[str] = ()) -> Settings:
    """Change the defaults by a recipe, and then by overrides.

    Raises:
        SettingsError: an unknown recipe or setting (with the nearest names) or a value that is not allowed.
    """
    values = load_recipe(recipe) if recipe else {}
    for key, value in parse_overrides(overrides).items():
        _set(values, key, value)
    return _inherit(validate(Settings, _merge(Settings().model_dump(), values)))


def resolve_run(recipe: str, overrides: str | Iterable[str] = ()) -> Settings:
    """Resolve as `resolve` does, for a run of all stages, and refuse what would end a late stage because of an early one's settings.

    Raises:
        SettingsError: as `resolve`; or distill would refuse what reinforce is set to record.
    """
    settings = resolve(recipe, overrides)
    mistakes = recording_mistakes(settings.distill, settings.reinforce)
    if settings.distill.reads_recording and mistakes:
        raise SettingsError("\n".join(mistakes))
    return settings


def recording_mistakes(distill: DistillSettings, reinforce: ReinforceSettings) -> list[str]:
    """List why a distillation could not learn from what `reinforce` is set to record; none if it can."""
    mistakes = []
    if distill.feature_weight and not reinforce.features:
        mistakes.append(
            f"distill.feature_weight is {distill.feature_weight:g}, but reinforce.features is false, so there would be no features to "
            "learn from; set reinforce.features=true or distill.teacher=online"
        )
    recorded = dict(reinforce.augmentation or ViewSettings())
    others = [f"{name} ({recorded[name]}, not {value})" for name, value in distill.views if recorded[name] != value]
    if others:
        mistakes.append(
            f"reinforce.augmentation differs from distill.views in {', '.join(others)}, so the student would see other views than the "
            "teacher; leave it out, and it is as distill.views"
        )
    if distill.reads_unlabeled and not reinforce.records_unlabeled:
        mistakes.append(
            "reinforce.unlabeled is false, but distill.unlabeled is true, so nothing would be recorded of images without labels; leave it "
            "out, and it is as distill.unlabeled"
        )
    if reinforce.decode_on != distill.decode_on:
        mistakes.append(
            f"reinforce.decode_on is {reinforce.decode_on}, but distill.decode_on is {distill.decode_on}, which may give other pixels; "
            "leave both out, and they are as data.decode_on"
        )
    return mistakes


def _merge(defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay the changes over the defaults, group by group."""
    merged = dict(defaults)
    for key, value in changes.items():
        default = defaults.get(key)
        both_groups = isinstance(default, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(default, value) if both_groups else value  # type: ignore[arg-type]  # checked the line above
    return merged


def _inherit(settings: Settings) -> Settings:
    """Fill what the stages take from `run`, `data` and one another where it is not given."""
    data = settings.data
    inherited: dict[str, Any] = {
        "seed": settings.run.seed,
        "workers": data.workers,
        "views_on": data.views_on,
        "decode_on": data.decode_on,
        "deterministic": settings.run.deterministic,
        "augmentation": settings.distill.views,
        "unlabeled": settings.distill.unlabeled,
        "top_k": "all" if settings.distill.needs_all_logits else TOP_K,
    }
    if settings.profile.stop_on:  # else a changed threshold would make a cached teacher's settings others
        inherited["watch"] = WatchSettings(stop_on=settings.profile.stop_on, rules=settings.profile.rules)
    sections: dict[str, Any] = {
        stage: _filled(getattr(settings, stage), inherited) for stage in ("pretrain", "reinforce", "distill")
    }
    rules = (
        settings.profile.rules
    )  # those of `watch` stay as they are: a recording that is not made changes no training
    teacher_share = _filled(rules.teacher_share, {"views": settings.reinforce.views})
    rules = rules.model_copy(update={"teacher_share": teacher_share})
    sections["profile"] = settings.profile.model_copy(update={"rules": rules})
    run = settings.run
    budgets = {"budget_usd": run.budget_usd, "budget_hours": run.budget_hours}
    tune = _filled(settings.tune, {"distill": sections["distill"], "reinforce": sections["reinforce"], **budgets})
    is_limited = bool(tune.budget_usd or tune.budget_hours)
    sections["tune"] = tune.model_copy(update={"enabled": tune.enabled or is_limited})
    if settings.warm_up.enabled:  # else every change of a training would make a cached task's settings others
        sections["warm_up"] = _filled(settings.warm_up, sections)
    return settings.model_copy(update=sections)


def _filled(section: AnySection, values: Mapping[str, Any]) -> AnySection:
    """Give the section these values where it has none."""
    missing = {key: value for key, value in values.items() if getattr(section, key, value) is None}
    return section.model_copy(update=missing)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    if len(path) > limits.NESTING:
        raise SettingsError(
            f"override {limits.cut(key, 200)}: names more than {limits.NESTING} groups within one another"
        )
    for part in path:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise SettingsError(f"override {key}: {part} is a value, not a group of settings")
    values[last] = value
