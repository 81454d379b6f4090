"""Recipes and overrides that someone has written who wants more than settings."""

import os

import pytest

from trainer import config
from trainer.io import limits
from trainer.io.errors import SettingsError


def test_an_override_is_one_setting():
    for further in ("evil = 3", "[run]\nseed = 3"):
        with pytest.raises(
            SettingsError, match=r"distill.logit.temperature has characters that cannot be shown: '2\\n"
        ):
            config.resolve("", [f"distill.logit.temperature=2\n{further}"])


@pytest.mark.parametrize("text", ["\x1b]0;owned\x07", "a\nb", "\u202egpj", "a\0b", "\ud800"])
def test_text_that_cannot_be_shown_is_refused_wherever_it_stands(text):
    for values, name in (
        ({"data": {"source": text}}, "data.source"),
        ({"distill": {"student": {"architecture": "vit", "args": {"pool": text}}}}, "distill.student.args.pool"),
        ({"profile": {"stop_on": ["loss", text]}}, "profile.stop_on"),
    ):
        with pytest.raises(SettingsError, match=f"{name} has characters that cannot be shown") as caught:
            config.validate(config.Settings, values)
        assert limits.printable(str(caught.value)) == str(caught.value)


def test_a_name_of_a_setting_cannot_steer_a_terminal():
    with pytest.raises(SettingsError, match=r"unknown setting \\x1b\[2J"):
        config.resolve("", ["\x1b[2J=1"])


def test_absurd_depth_size_and_number_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="names more than 32 groups within one another"):
        config.resolve("", [f"{'a.' * 5000}b=1"])
    with pytest.raises(SettingsError, match=r"override 'distill.batch_size=\[\[.*ends within its \[") as caught:
        config.resolve("", ["distill.batch_size=" + "[" * 3000])
    assert len(str(caught.value)) < 1000
    with pytest.raises(SettingsError) as caught:
        config.resolve("", [f"no{number}=1" for number in range(1000)])
    assert len(str(caught.value).splitlines()) == 31
    assert str(caught.value).endswith("and 970 more")
    for text in (f"a = {'[' * 3000}", f"run.seed = {'9' * 40}", f"run.seed = {'9' * 5000}"):
        (tmp_path / "own.toml").write_text(text)
        with pytest.raises(SettingsError, match=r"own.toml: cannot be read: "):
            config.resolve(str(tmp_path / "own.toml"))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("a\0b.toml", "cannot be a path"),
        ("x" * 5000 + ".toml", "cannot be a path"),
        ("/dev/zero", "it is no regular file"),
        ("/proc/self/mem", "cannot be read"),
        ("../../etc/passwd", "unknown recipe"),
        ("\x1b[2J", r"unknown recipe '\\x1b\[2J'"),
        ("..", r"unknown recipe '\.\.'"),
    ],
)
def test_what_is_no_recipe_is_refused(recipe, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=message):
        config.resolve(recipe)


def test_a_pipe_for_a_recipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "own.toml")
    with pytest.raises(SettingsError, match="it is no regular file"):
        config.resolve(str(tmp_path / "own.toml"))
