"""Settings under the names of the last version: in recipes, overrides, and what earlier runs recorded."""

import json
import logging

import pytest

from trainer import config
from trainer.config import former_names
from trainer.config.former_names import FORMER_NAMES
from trainer.io.errors import SettingsError
from trainer.profiling.evidence import ContextRecord
from trainer.training.checkpoints import differences

LOGIT = {
    "distill.logit_loss": ("dist", {"loss": "dist"}),
    "distill.temperature": (3.0, {"temperature": 3.0}),
    "distill.standardize_logits": (True, {"standardize": True}),
    "distill.dkd_alpha": (2.0, {"loss": "dkd", "alpha": 2.0}),
    "distill.dkd_beta": (5.0, {"loss": "dkd", "beta": 5.0}),
    "distill.dist_beta": (5.0, {"loss": "dist", "beta": 5.0}),
    "distill.dist_gamma": (4.0, {"loss": "dist", "gamma": 4.0}),
}
"""Former name -> a value, and what it is now."""
FLAT = {
    "logit_loss": "kl",
    "temperature": 2.0,
    "standardize_logits": False,
    "dkd_alpha": 1.0,
    "dkd_beta": 8.0,
    "dist_beta": 1.0,
    "dist_gamma": 1.0,
}
"""The defaults, as the last version recorded them."""


@pytest.fixture(autouse=True)
def _warn_again():
    former_names._warn.cache_clear()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def warning(former):
    return f"the setting {former} is now {FORMER_NAMES[former][0]}; the next version will refuse the old name"


def test_each_former_name_is_tested():
    assert FORMER_NAMES.keys() == LOGIT.keys() | {"data.grey_bits", "profile.rules.poor_initialisation"}
    there = {name for name, *_ in config.walk(config.Settings)}
    assert {now for now, _ in FORMER_NAMES.values()} <= there | {"profile.rules.poor_initialization"}  # a group


@pytest.mark.parametrize("former", LOGIT)
@pytest.mark.parametrize("place", ["recipe", "override", "recorded"])
def test_former_names_of_the_logit_loss_are_read(former, place, caplog, tmp_path):
    value, now = LOGIT[former]
    name, loss = former.removeprefix("distill."), {} if former == "distill.logit_loss" else now
    kind = {"logit": {"loss": loss["loss"]}} if "loss" in loss else {}
    if place == "recorded":
        settings = config.DistillSettings.model_validate(kind | {name: value})
    elif place == "recipe":
        recipe = tmp_path / "mine.toml"
        lines = [f"{name} = {json.dumps(value)}", *(f'logit.loss = "{one["loss"]}"' for one in kind.values())]
        recipe.write_text("\n".join(["[distill]", *lines]))
        settings = config.resolve(str(recipe)).distill
    else:
        further = [f"distill.logit.loss={one['loss']}" for one in kind.values()]
        settings = config.resolve("digits", [f"{former}={json.dumps(value)}", *further]).distill
    assert settings == config.DistillSettings.model_validate(settings.model_dump() | {"logit": now})
    assert warnings(caplog) == [warning(former)]


@pytest.mark.parametrize(
    ("overrides", "former", "value"),
    [
        ("data.grey_bits=12", "data.grey_bits", lambda settings: settings.data.gray_bits == 12),
        (
            "profile.rules.poor_initialisation.enabled=false",
            "profile.rules.poor_initialisation",
            lambda settings: not settings.profile.rules.poor_initialization.enabled,
        ),
    ],
)
def test_other_former_names_are_read(overrides, former, value, caplog):
    assert value(config.resolve("digits", overrides))
    assert warnings(caplog) == [warning(former)]


@pytest.mark.parametrize(
    ("recipe", "overrides", "logit"),
    [
        ("temperature = 3", "distill.logit.temperature=4", {"temperature": 4}),
        ("logit.temperature = 3", "distill.temperature=4", {"temperature": 4}),
        ("temperature = 3", ['distill.logit={loss="dkd"}'], {"loss": "dkd"}),
        ("temperature = 3", "distill.logit.loss=dkd", {"loss": "dkd", "temperature": 3}),
        ("temperature = 3", "distill.logit.loss=hard", {"loss": "hard"}),
        ("logit = { loss = 'dkd', beta = 3 }", "distill.logit_loss=dist", {"loss": "dist"}),
        ("logit_loss = 'dkd'\ndkd_beta = 3", "distill.logit_loss=dist", {"loss": "dist"}),
        ("dkd_beta = 3\ndist_beta = 4", "distill.logit_loss=dkd", {"loss": "dkd", "beta": 3}),
        ("dkd_beta = 3\ndist_beta = 4", "distill.logit.loss=dist", {"loss": "dist", "beta": 4}),
        ("dkd_beta = 3", "", {}),
    ],
)
def test_an_override_counts_more_than_a_recipe_whichever_name_they_use(recipe, overrides, logit, tmp_path):
    (tmp_path / "mine.toml").write_text(f"[distill]\n{recipe}\n")
    found = config.resolve(str(tmp_path / "mine.toml"), overrides).distill
    assert found == config.DistillSettings.model_validate(found.model_dump() | {"logit": logit})


@pytest.mark.parametrize("loss", ["kl", "hard", "dkd", "dist"])
def test_recorded_settings_of_each_logit_loss_are_read(loss):
    """All settings of all losses stood there, whichever was chosen."""
    recorded = FLAT | {"logit_loss": loss}
    assert config.DistillSettings.model_validate(recorded) == config.DistillSettings(logit={"loss": loss})
    tune = config.TuneSettings.model_validate({"distill": recorded})
    assert tune.distill == config.DistillSettings(logit={"loss": loss})
    everything = {"distill": recorded | {"epochs": 3}, "tune": {"distill": recorded}, "run": {"seed": 1}}
    now = config.DistillSettings(logit={"loss": loss}).logit.model_dump()
    assert config.with_present_names(everything) == {
        "distill": {"logit": now, "epochs": 3},
        "tune": {"distill": {"logit": now}},
        "run": {"seed": 1},
    }
    assert ContextRecord(settings=recorded).settings == {"logit": now}


def test_a_checkpoint_of_the_last_version_is_of_the_same_settings():
    now = config.DistillSettings().model_dump(mode="json")
    was = {name: value for name, value in now.items() if name != "logit"} | FLAT
    assert differences((was, {}), (now, {}), section="distill") == []
    assert differences((was | {"temperature": 3.0}, {}), (now, {}), section="distill") == [
        "distill.logit.temperature was 3.0, is 2.0"
    ]


def test_a_wrong_value_is_named_by_the_present_name():
    with pytest.raises(SettingsError, match=r"distill.logit.temperature must be > 0.*, got -1"):
        config.resolve("digits", "distill.temperature=-1")
