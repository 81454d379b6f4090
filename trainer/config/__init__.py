"""From a recipe and overrides to the settings of a run, all checked, with a message that names each wrong one.

A recipe (`trainer/config/recipes/NAME.toml`) states only what differs from the defaults; overrides are text (`distill.epochs=2`).
`resolve` turns both into one frozen `Settings`, and fills in what sections take from one another. Every setting stands in `settings`.
Nothing here imports torch.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError

from trainer.config.conflicts import Facts, conflicts, planned
from trainer.config.former_names import FORMER_NAMES
from trainer.config.former_names import with_present_names as with_present_names
from trainer.config.loss_terms import TAUGHT
from trainer.config.search_space import Dimension, parse_dimension
from trainer.config.settings import BUNDLED as BUNDLED
from trainer.config.settings import DEVICE_VARIABLE as DEVICE_VARIABLE
from trainer.config.settings import FOLDERS as FOLDERS
from trainer.config.settings import HOW_PREPARED as HOW_PREPARED
from trainer.config.settings import LOGIT_LOSSES, SoftenedSettings
from trainer.config.settings import TOP_K as TOP_K
from trainer.config.settings import WAIT_VARIABLE as WAIT_VARIABLE
from trainer.config.settings import ClassReference as ClassReference
from trainer.config.settings import Compile as Compile
from trainer.config.settings import DataSettings as DataSettings
from trainer.config.settings import DecodeOn as DecodeOn
from trainer.config.settings import DistillSettings as DistillSettings
from trainer.config.settings import Encoding as Encoding
from trainer.config.settings import EvaluateSettings as EvaluateSettings
from trainer.config.settings import EvidenceSettings as EvidenceSettings
from trainer.config.settings import ExportSettings as ExportSettings
from trainer.config.settings import FeatureFormat as FeatureFormat
from trainer.config.settings import FinetuneSettings as FinetuneSettings
from trainer.config.settings import GateSettings as GateSettings
from trainer.config.settings import LoadingSettings as LoadingSettings
from trainer.config.settings import LogitSettings as LogitSettings
from trainer.config.settings import LoraSettings as LoraSettings
from trainer.config.settings import LowResolutionSettings as LowResolutionSettings
from trainer.config.settings import MaeSettings as MaeSettings
from trainer.config.settings import ModelSettings as ModelSettings
from trainer.config.settings import ModuleWeights as ModuleWeights
from trainer.config.settings import MultiLabelLoss as MultiLabelLoss
from trainer.config.settings import NamedWeights as NamedWeights
from trainer.config.settings import Outside as Outside
from trainer.config.settings import PackageWeights as PackageWeights
from trainer.config.settings import Precision as Precision
from trainer.config.settings import PretrainSettings as PretrainSettings
from trainer.config.settings import ProfileSettings as ProfileSettings
from trainer.config.settings import RegisterSettings as RegisterSettings
from trainer.config.settings import ReinforceSettings as ReinforceSettings
from trainer.config.settings import Resident as Resident
from trainer.config.settings import ResidentSettings as ResidentSettings
from trainer.config.settings import SearchSettings as SearchSettings
from trainer.config.settings import Settings as Settings
from trainer.config.settings import Sharding as Sharding
from trainer.config.settings import TimmWeights as TimmWeights
from trainer.config.settings import TrackingSettings as TrackingSettings
from trainer.config.settings import TrainingSettings as TrainingSettings
from trainer.config.settings import TransformersWeights as TransformersWeights
from trainer.config.settings import TuneSettings as TuneSettings
from trainer.config.settings import ViewSettings as ViewSettings
from trainer.config.settings import ViewsOn as ViewsOn
from trainer.config.settings import WarmUpSettings as WarmUpSettings
from trainer.config.settings import WatchSettings as WatchSettings
from trainer.config.settings import WeightsSettings as WeightsSettings
from trainer.config.settings import Workers as Workers
from trainer.io import limits, local_files
from trainer.io.base_models import Section, explain, flatten, meanings, merge, nearest, texts
from trainer.io.errors import ObjectNotFoundError, SettingsError, StorageError

OPTIMIZATION = "KUBEFLOW_TRAINER_OPT_"
"""What the names of the variables begin with in which Kubeflow Trainer hands a trial its parameters (its KEP 2605)."""
RECIPES = Path(__file__).parent / "recipes"


def recipes() -> dict[str, str]:
    """List the recipes: name -> the first line of its text."""
    paths = sorted(RECIPES.glob("*.toml"))
    return {path.stem: path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("#").strip() for path in paths}


def load_recipe(recipe: str) -> dict[str, Any]:
    """Read the differences from the defaults that a recipe states; `recipe` is a name or the path of a TOML file."""
    is_path = "/" in recipe or recipe.endswith(".toml")
    path = Path(local_files.with_home(recipe)) if is_path else RECIPES / f"{recipe}.toml"
    try:
        # An editor may have begun the text with a byte-order mark.
        return limits.parse_toml(local_files.read_limited(path, limits.TOML_BYTES).decode("utf-8-sig"))
    except ObjectNotFoundError as error:
        known = sorted(recipes())
        beside = [str(one) for one in path.parent.glob("*.toml")] if is_path else []
        where = f" in {Path.cwd()}" if is_path and not path.is_absolute() else ""
        raise SettingsError(
            f"unknown recipe {recipe!r}{where}{nearest(recipe, [*known, *beside])}; known: "
            f"{', '.join(known)}, or the path of a TOML file"
        ) from error
    except StorageError as error:
        raise SettingsError(f"recipe {error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"recipe {path}: is not UTF-8 text ({error}); save it as UTF-8") from error
    except ValueError as error:
        raise SettingsError(f"recipe {path}: cannot be read: {error}") from error


_COPIES = {
    "pretrain.watch": "profile",
    "distill.watch": "profile",
    "tune.distill": "distill",
    "tune.reinforce": "reinforce",
    "tune.budget_usd": "run.budget_usd",
    "tune.budget_hours": "run.budget_hours",
    "search.distill": "distill",
    "search.gate": "evaluate.gate",
    "warm_up.pretrain": "pretrain",
    "warm_up.reinforce": "reinforce",
    "warm_up.distill": "distill",
}
"""What a stage is told of others' settings, by full name, and whose it is."""


def copied_from(name: str) -> str:
    """Return the setting of which one by this full name is a copy that `resolve` makes; empty where it is a setting of its own."""
    copies = (original + name[len(copy) :] for copy, original in _COPIES.items() if f"{name}.".startswith(f"{copy}."))
    return next(copies, "")


def recipe_of(settings: Settings) -> str:
    """Write resolved settings as a recipe: what differs from the defaults, in TOML."""
    defaults, sections = {name: value for name, value, *_ in walk(resolve())}, dict[str, list[str]]()
    for name, value, *_ in walk(settings):
        if value is not None and value != defaults.get(name) and not copied_from(name):
            section, _, key = name.rpartition(".")
            sections.setdefault(section, []).append(f"{key} = {limits.toml_value(value)}")
    return "\n\n".join("\n".join([f"[{section}]", *lines]) for section, lines in sections.items()) + "\n"


def parse_overrides(overrides: str | Iterable[str]) -> dict[str, Any]:
    """Parse `"distill.logit.temperature=2 data.source=digits"` -> `{"distill.logit.temperature": 2, "data.source": "digits"}`.

    A value is read as TOML where it is TOML (numbers, true, quoted text, lists) and as plain text otherwise; a value with spaces
    is quoted as in a shell.
    """
    try:
        items = shlex.split(overrides) if isinstance(overrides, str) else list(overrides)
    except ValueError as error:
        raise SettingsError(f"overrides {overrides!r}: {error}; close the quotation") from error
    parsed = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise SettingsError(f"override {item!r}: is not key=value, such as distill.logit.temperature=2")
        parsed[key] = _parse_value(item, key, text)
    return parsed


def _parse_value(item: str, key: str, text: str) -> Any:
    """Parse the text of the override `item`; a `SettingsError` where a shell has taken a part of it."""
    kind, shown = _kind(key.split(".")), limits.cut(item, 200)
    try:
        found = limits.parse_toml(f"value = {text}")
    except ValueError as error:
        if text[:1] == "{" and text[-1:] == "}" and kind is not str:
            raise SettingsError(
                f'override {shown!r}: is not TOML ({error}); texts within it are quoted, {{A="text"}}'
            ) from error
        if re.fullmatch(r"[+-]?\d{19,}", text) and kind is not str:
            raise SettingsError(f"override {shown!r}: {error}; give a smaller one") from error
        found = {}
    if len(found) == 1:  # after a line break there may be more
        value = found["value"]
        # 2024 may be the name of an experiment, and 2024-11-27 a folder's.
        return value if kind is not str or isinstance(value, (str, list, dict)) else text
    is_group = get_origin(kind) is Mapping or (isinstance(kind, type) and issubclass(kind, Section))
    if is_group and re.match(r"[\w.\"'-]+=", text):
        raise SettingsError(
            f"override {shown!r}: a shell makes several words of {key}={{A=1,B=2}}; quote it, as in '{key}={{{limits.cut(text, 200)}}}'"
        )
    if text[:1] in ("{", "[") and text[-1:] not in ("}", "]"):
        raise SettingsError(
            f"override {shown!r}: ends within its {text[0]}, as where a shell ends a word at a space; quote the whole, '{shown}...'"
        )
    return text


def _kind(path: Sequence[str]) -> Any:
    """Return what a setting holds: a section's class, a type, or None where there is none of this name."""
    section: type[Section] = Settings
    for number, name in enumerate(path, start=1):
        field = section.model_fields.get(name)
        if field is None:
            return None
        options = get_args(field.annotation) or (field.annotation,)
        below = next((one for one in options if isinstance(one, type) and issubclass(one, Section)), None)
        if number == len(path):
            return below or field.annotation
        if below is None:
            return None
        section = below
    return section


def resolve(recipe: str = "", overrides: str | Iterable[str] = ()) -> Settings:
    """Change the defaults by a recipe, and then by overrides; a `SettingsError` names all that is wrong."""
    values = load_recipe(recipe) if recipe else {}
    _put(values, parse_overrides(overrides))
    return _completed(values, recipe)


def resolve_text(text: str) -> Settings:
    """Read resolved settings from the text of `recipe_of`."""
    return _completed(limits.parse_toml(text))


def _completed(values: Mapping[str, Any], recipe: str = "") -> Settings:
    if copies := [
        (name, original) for name in flatten(values, keep=lambda group: not group) if (original := copied_from(name))
    ]:
        raise SettingsError(
            "\n".join(f"{name} is a copy that a run makes of {original}; set that" for name, original in copies)
        )
    defaults = Settings().model_dump(exclude={"distill": {"logit"}})  # each logit loss has defaults of its own
    defaults["register"]["model_name"] = student_name(recipe)
    return _inherit(validate(Settings, merge(defaults, values)))


def _put(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Put settings by their full names into groups of settings, in place of what is there."""
    for key, value in given.items():
        _make_way(values, key, value)
    for key, value in given.items():
        *path, last = key.split(".")
        if len(path) > limits.NESTING:
            raise SettingsError(
                f"override {limits.cut(key, 200)}: names more than {limits.NESTING} groups within one another"
            )
        group = values
        for part in path:
            group = group.setdefault(part, {})
            if not isinstance(group, dict):
                raise SettingsError(f"override {key}: {part} is a value, not a group of settings")
        group[last] = value


def distill_with(distill: DistillSettings, given: Mapping[str, Any]) -> DistillSettings:
    """Return a distillation with other settings, by their full names such as `distill.drop_path`; raises as `validate`."""
    values = {"distill": distill.model_dump(mode="json")}
    _put(values, given)
    return validate(DistillSettings, values["distill"], prefix="distill")


def parameters_of_trial(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that an OptimizationJob of Kubeflow Trainer gives to a trial, by their full names.

    It sets a variable for each: `KUBEFLOW_TRAINER_OPT_DISTILL__DROP_PATH=0.1` is distill.drop_path=0.1.
    """
    given = {
        name.removeprefix(OPTIMIZATION): text for name, text in environment.items() if name.startswith(OPTIMIZATION)
    }
    return parse_overrides(f"{name.lower().replace('__', '.')}={text}" for name, text in sorted(given.items()))


def setting_of(distill: DistillSettings, name: str) -> Any:
    """Return the value of a setting of a distillation by its full name; None where its kind of logit loss does not have it."""
    value: Any = {"distill": distill.model_dump(mode="json")}
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _make_way(recipe: dict[str, Any], key: str, value: Any) -> None:
    """Remove from a recipe what an override replaces: the setting under another name, and what only the recipe's logit loss has."""
    now = FORMER_NAMES[key][0] if key in FORMER_NAMES else key
    if now == "distill.logit.loss":
        logit = _group(recipe, "distill.logit")
        before, after = (LOGIT_LOSSES.get(str(loss)) for loss in (logit.get("loss", "kl"), value))
        if before and after and before is not after:
            shared = SoftenedSettings.model_fields.keys() & after.model_fields.keys()
            for name in before.model_fields.keys() - shared:
                logit.pop(name, None)
    formers = [former for former, (name, _) in FORMER_NAMES.items() if f"{name}.".startswith(f"{key}.")]
    for other in formers if now == key else [now]:
        section, _, name = other.rpartition(".")
        _group(recipe, section).pop(name, None)


def _group(values: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the group of settings at a path; an empty one if there is none."""
    group: Any = values
    for part in path.split("."):
        group = group.get(part) if isinstance(group, dict) else None
    return group if isinstance(group, dict) else {}


def student_name(recipe: str = "") -> str:
    """Return what the students of a recipe are called in the registry: others that a name serves know the same classes."""
    base = RegisterSettings().model_name
    return f"{base}-{Path(recipe).stem}" if recipe else base


def resolve_run(recipe: str, overrides: str | Iterable[str] = (), *, is_prepared: bool = False) -> Settings:
    """Resolve as `resolve` does, for a run of all stages, and refuse what would end a late stage because of an early one's settings.

    Where the data set is prepared already, no source of images has to be named.
    """
    if not recipe:
        raise SettingsError(
            f"no recipe is named; name one of {', '.join(sorted(recipes()))}, or the path of a TOML file"
        )
    settings = resolve(recipe, overrides)
    if not settings.data.source and not is_prepared:
        raise SettingsError(
            f"data.source is empty: the recipe {recipe} is for photos of your own; say where they are, such as "
            "data.source=imagefolder:/photos with a folder for each class (docs/data.md)"
        )
    several = settings.distill.further_teachers
    for name in ("tune", "warm_up") if several else ():
        if getattr(settings, name).enabled:
            raise SettingsError(
                f"{name} tries a distillation from the pipeline's own teacher, but distill.further_teachers names {len(several)} more; set "
                f"{name}.enabled=false (and no budget), or distill.further_teachers=[]"
            )
    if settings.distill.sharding == "fsdp" and settings.tune.enabled:
        raise SettingsError(
            "tune tries a distillation whose processes keep whole models, but distill.sharding is fsdp; set tune.enabled=false (and no "
            "budget), or distill.sharding=auto"
        )
    reinforce = settings.reinforce if settings.distill.reads_recording else None
    facts = Facts(
        distill=settings.distill,
        pretrain=settings.pretrain,
        reinforce=reinforce,
        evaluate=settings.evaluate,
        recorded=[planned(reinforce)] if reinforce else [],
        headless="pretrain.head is none" if settings.pretrain.head == "none" and not several else "",
        multi_label=settings.data.multi_label,
    )
    if mistakes := conflicts(facts):
        raise SettingsError("\n".join(mistakes))
    if settings.search.enabled:
        check_search(settings.search, facts)
    return settings


_SHARED_BY_TRIALS = {f"distill.{name}" for name in ("epochs", "latency_runs", "pause_epochs", "seed", "teacher")}
_RECORDED = {"views", "decode_on", "unlabeled"}
"""Settings of the distillation that its recorded outputs have to be of."""


def search_space(search: SearchSettings) -> dict[str, Dimension]:
    """Return the space of a search by full names of settings; that of `auto` lies around the settings of the distillation."""
    distill = search.distill or DistillSettings()
    if search.space != "auto":
        return {name: parse_dimension(text) for name, text in search.space.items()}
    around = {
        "distill.base_learning_rate": distill.base_learning_rate,
        "distill.weight_decay": distill.weight_decay,
        **{f"distill.{term}_weight": distill.weight(term) for term in TAUGHT if term != "logit"},
    }
    space = {name: Dimension("log", [value / 4, value * 4]) for name, value in around.items() if value}
    if distill.logit_weight:
        if distill.label_weight:
            space["distill.label_weight"] = Dimension("log", [distill.label_weight / 4, distill.label_weight * 4])
        if isinstance(distill.logit, SoftenedSettings):
            space["distill.logit.temperature"] = Dimension("log", [1.0, 8.0])
    return space


def check_search(search: SearchSettings, facts: Facts) -> None:
    """Refuse a space with an unknown setting, a value that its setting does not take, or one that cannot work with the others.

    Args:
        facts: what is known of the run; its `distill` is replaced.
    """
    distill = search.distill or DistillSettings()
    known, mistakes = [name for name, *_ in walk(DistillSettings, "distill")], list[str]()
    groups = {name[:place] for name in known for place in range(len(name)) if name[place] == "."} - {"distill"}
    space = search_space(search)
    for name, dimension in space.items():
        if name in _SHARED_BY_TRIALS:
            mistakes.append(f"search.space: {name} cannot be searched, since all trials share it; leave it out")
            continue
        if name not in {*known, *groups}:
            text = f"search.space: {name} is no setting of the distillation{nearest(name, known)}"
            mistakes.append(f"{text}; `python -m trainer config RECIPE` lists them")
            continue
        if distill.reads_recording and name.split(".")[1] in _RECORDED:
            text = f"search.space: {name} cannot be searched, since all trials learn from outputs that were recorded with one value of it"
            mistakes.append(f"{text}; leave it out, or set distill.teacher=online")
            continue
        for value in dimension.options:
            mistakes += _mistakes({name: value}, distill, facts)
    if not mistakes:  # what fits alone may not fit together
        for (one, first), (other, second) in combinations(space.items(), 2):
            for a, b in product(first.options, second.options):
                if found := _mistakes({one: a, other: b}, distill, facts):
                    mistakes += found
                    break
    if mistakes:
        raise SettingsError("\n".join(mistakes))


def _mistakes(values: Mapping[str, Any], distill: DistillSettings, facts: Facts) -> list[str]:
    """List why a search cannot try these values."""
    named = f"search.space: {' with '.join(f'{name}={value}' for name, value in values.items())}"
    try:
        tried = distill_with(distill, values)
    except SettingsError as error:
        return [f"{named}: {error}"]
    return [f"{named}: {one}" for one in conflicts(replace(facts, distill=tried))]


def _inherit(settings: Settings) -> Settings:
    """Fill what the stages take from `run`, `data` and one another where it is not given."""
    data = settings.data
    inherited: dict[str, Any] = {
        "seed": settings.run.seed,
        "workers": data.workers,
        "views_on": data.views_on,
        "decode_on": data.decode_on,
        "resident": None if data.resident == "auto" else data.resident,
        "deterministic": settings.run.deterministic,
        "augmentation": settings.distill.views,
        "unlabeled": settings.distill.unlabeled,
        "top_k": "all" if settings.distill.needs_all_logits or data.multi_label else TOP_K,
    }
    profile = settings.profile
    if (
        profile.stop_on or profile.rules_from or profile.log_steps
    ):  # else a changed threshold would make a cached teacher's settings others
        shared = {name: getattr(profile, name) for name in ("log_steps", "rules_from", "own_rules", "stop_on", "rules")}
        inherited["watch"] = WatchSettings(**shared)
    sections: dict[str, Any] = {
        stage: _filled(getattr(settings, stage), inherited) for stage in ("pretrain", "reinforce", "distill")
    }
    # Those of `watch` stay as they are: a recording that is not made changes no training.
    rules = settings.profile.rules
    teacher_share = _filled(rules.teacher_share, {"views": settings.reinforce.views})
    rules = rules.model_copy(update={"teacher_share": teacher_share})
    sections["profile"] = settings.profile.model_copy(update={"rules": rules})
    budgets = {"budget_usd": settings.run.budget_usd, "budget_hours": settings.run.budget_hours}
    tune = _filled(settings.tune, {"distill": sections["distill"], "reinforce": sections["reinforce"], **budgets})
    is_limited = bool(tune.budget_usd or tune.budget_hours)
    sections["tune"] = tune.model_copy(update={"enabled": tune.enabled or is_limited})
    if settings.search.enabled:
        # Where it is not read, a changed gate would be another search.
        gate = settings.evaluate.gate if settings.search.cost != "none" else None
        sections["search"] = _filled(settings.search, {"distill": sections["distill"], "gate": gate})
    if settings.warm_up.enabled:  # else every change of a training would make a cached task's settings others
        sections["warm_up"] = _filled(settings.warm_up, sections)
    return settings.model_copy(update=sections)


def _filled(section: AnySection, values: Mapping[str, Any]) -> AnySection:
    missing = {key: value for key, value in values.items() if getattr(section, key, value) is None}
    return section.model_copy(update=missing)


# ---------------------------------------------------------------------------------------------------------------------
# Checks

AnySection = TypeVar("AnySection", bound=Section)


def validate(section: type[AnySection], values: Mapping[str, Any], *, prefix: str = "") -> AnySection:
    """Check the values of a section; a `SettingsError` has every wrong value with its full name, itself, and what is allowed."""
    unprintable = [  # by a terminal or a page
        f"{name} has characters that cannot be shown: {text!r}"
        for name, text in texts(values, prefix)
        if limits.printable_name(text) != text
    ]
    if unprintable:
        raise SettingsError("\n".join(unprintable))
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        known = (full for full, *_ in walk(section, prefix) if not copied_from(full))
        listed = "`python -m trainer config RECIPE` lists all"
        raise SettingsError("\n".join(explain(error, prefix, known=known, listed=listed))) from error


def validate_section(name: str, values: Mapping[str, Any]) -> Section:
    """Check the values of a section of `Settings`; raises as `validate`."""
    section: type[Section] = type(Settings.model_fields[name].get_default())
    return validate(section, values, prefix=name)


def walk(
    section: type[Section] | Section, prefix: str = "", *, every_kind: bool = False
) -> Iterator[tuple[str, Any, str, str]]:
    """Walk through every setting below a section: (full name, value or default, type and limits as text, meaning).

    Where a kind decides which settings a group has, these are those of the chosen kind; of a class, or with `every_kind`, those of all.
    """
    every_kind = every_kind or isinstance(section, type)
    model = section if isinstance(section, type) else type(section)
    for name, field in model.model_fields.items():
        full = f"{prefix}.{name}" if prefix else name
        value = field.get_default(call_default_factory=True) if isinstance(section, type) else getattr(section, name)
        annotation = field.annotation
        if isinstance(field.discriminator, str):  # a group whose kind decides which settings it has
            tag, groups = field.discriminator, get_args(annotation)
            kinds = ", ".join(f"`{group.model_fields[tag].default}`" for group in groups)
            yield f"{full}.{tag}", getattr(value, tag), kinds, meanings(model)[name]
            rows = (row for one in (groups if every_kind else [value]) for row in walk(one, full))
            yield from dict.fromkeys(row for row in rows if row[0] != f"{full}.{tag}")
        elif isinstance(value, Section):
            yield from walk(value, full, every_kind=every_kind)
        elif isinstance(annotation, type) and issubclass(annotation, Section):
            yield from walk(annotation, full, every_kind=every_kind)
        else:
            yield full, value, _schema_text(_properties(model)[name]), meanings(model).get(name, "")


@functools.cache
def _properties(model: type[Section]) -> Mapping[str, Any]:
    properties: Mapping[str, Any] = model.model_json_schema()["properties"]
    return properties


def _schema_text(schema: Mapping[str, Any]) -> str:
    """Describe a property of a JSON schema: `whole number, >= 1`."""
    if "anyOf" in schema:
        return " or ".join(text for option in schema["anyOf"] if (text := _schema_text(option)) != "null")
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "")
    if "$ref" in schema or kind == "object":
        return "group"
    names = {"integer": "whole number", "string": "text", "boolean": "true or false", "array": "list"}
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return ", ".join([names.get(kind, kind), *limits])
