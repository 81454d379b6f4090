"""Settings are kept in manifests, logs and MLflow, so none may hold a secret; and what a reader is told of a wrong field."""

import pytest
from pydantic import TypeAdapter, ValidationError

from trainer import config
from trainer.io.base_models import StrictModel, holds_secret, meanings, what_is_wrong
from trainer.io.costs import Price
from trainer.io.errors import SettingsError
from trainer.models.served_student.preprocessing import Square, with_present_names
from trainer.profiling.evidence import Category


@pytest.mark.parametrize(
    "text",
    [
        "https://me:planted@host:5000/x",
        "https://planted@host",
        "postgresql+psycopg2://me:plan%2Fted@host/x",
        "s3://AKIA:planted@bucket/key",
        "manifest:https://host/list.csv?X-Amz-Signature=planted",
        "imagefolder:https://host/x?a=b&access_token=planted",
        "https://host/x?sig=planted#y",
    ],
)
def test_a_secret_in_an_address_is_found(text):
    assert holds_secret(text)
    for setting in ("data.source", "tracking.uri", "pretrain.weights"):
        with pytest.raises(SettingsError, match=f"{setting}: holds a password or a token") as caught:
            config.resolve("digits", [f"{setting}={text!r}"])
        assert "planted" not in str(caught.value)


@pytest.mark.parametrize("value", ["distill.student.args.url", "tune.elsewhere"])
def test_also_within_a_setting(value):
    text = "'http://me:planted@host'"
    with pytest.raises(SettingsError, match="holds a password or a token"):
        config.resolve("digits", [f"{value}={text if 'args' in value else f'[{text}]'}"])


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////tmp/a:b@c/mlflow.db",
        "http://host:5000/x?page=2",
        "s3://bucket/me:you@home/keys?",
        "imagefolder:/photos/a@b",
        "hub:name/of:config",
        "databricks",
    ],
)
def test_other_text_is_left_alone(text):
    assert not holds_secret(text)


def test_what_is_wrong_is_first_field_and_its_fault():
    def said(text):
        with pytest.raises(ValidationError) as refused:
            Price.model_validate_json(text)
        return what_is_wrong(refused.value)

    assert said('{"dollars_an_hour": 1, "date": "2026-11", "source": "list"}') == "region is missing"
    assert said("{").startswith("Invalid JSON: ")
    assert what_is_wrong(ValueError("no classes")) == "no classes"


class Cup(StrictModel):
    size: int = 1
    """In milliliters,
    to the brim."""
    color: str = "white"
    handle: bool = True
    """Whether there is one."""

    def full(self) -> bool:
        """No meaning of a field."""
        return False


class Mug(Cup):
    color: str = "blue"
    """Of its outside."""
    lid: bool = False


def test_settings_have_meanings():
    assert meanings(Cup) == {"size": "In milliliters,\nto the brim.", "handle": "Whether there is one."}
    assert meanings(Mug) == {**meanings(Cup), "color": "Of its outside."}
    # Every setting has a meaning.
    assert [name for name, *_, meaning in config.walk(config.Settings) if not meaning] == []


def test_what_last_version_wrote_in_files_is_read():
    square = {"fit": "crop", "size": 32, "max_pixels": 1000, "grey_bits": 12}
    assert Square(**with_present_names(square)).gray_bits == 12
    assert TypeAdapter(Category).validate_python("optimiser") == "optimizer"
