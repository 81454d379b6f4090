"""What the command lines share: how they read their options, how they end, and what a shell completes."""

import argparse
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import cli, config
from trainer.graph import STAGES, flag
from trainer.io import commands, limits
from trainer.io.errors import SettingsError

ROOT = Path(__file__).parents[3]


def parsed(*arguments, number=commands.positive, **place):
    parser = argparse.ArgumentParser()
    commands.add_recipe(parser)
    commands.add_overrides(parser)
    commands.add_place(parser, number=number, **place)
    commands.add_debug(parser)
    return vars(parser.parse_args(arguments))


def test_options_are_read(monkeypatch):
    assert parsed(pool="here") == {
        "recipe": "digits", "overrides": [], "pool": "", "nodes": 1, "processes": 0, "debug": False
    }  # fmt: skip
    # Home stands for a tilde that no shell has seen.
    monkeypatch.setenv("HOME", "/home/me")
    options = cli.command_parser().parse_args(
        ["predict", "~/photo.jpg", "a~b", "~", "--model=~/runs/latest", "--output=x~"]
    )
    assert (options.photos, options.model) == (["/home/me/photo.jpg", "a~b", "/home/me"], "/home/me/runs/latest")
    assert options.output == "x~"
    # No setting is lost where the option is given twice.
    given = parsed("--set", "a=1", "b=2", "--pool", "p", "--set", "c=3")["overrides"]
    assert given == ["a=1", "b=2", "c=3"]
    text = commands.as_text(["distill.epochs=3 data.source='imagefolder:/my photos'", "run.seed=1"])
    overrides = {"distill.epochs": 3, "data.source": "imagefolder:/my photos", "run.seed": 1}
    assert config.parse_overrides(text) == overrides
    assert config.parse_overrides(commands.as_text([""])) == {}
    # Numbers may be left for a later check.
    assert parsed("--pool", "p", "--nodes", "0", "--processes", "-1", number=int)["processes"] == -1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pool", "p", "--nodes", "0"], "argument --nodes: must be a whole number >= 1, got '0'"),
        (["--pool", "p", "--processes", "many"], "argument --processes: must be a whole number >= 1, got 'many'"),
        (["--nodes", "2"], "the following arguments are required: --pool"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "1.01", "-1", "nan"])
def test_share_is_above_0_and_up_to_1(text):
    assert commands.fraction("1") == 1
    with pytest.raises(argparse.ArgumentTypeError, match="must be above 0 and up to 1, got "):
        commands.fraction(text)


# ---------------------------------------------------------------------------------------------------------------------
# Ends


def test_endings(capsys):
    def fail():
        print("first")
        raise SettingsError("recipe x: there is none")

    assert commands.exit_code(fail) == 2
    assert capsys.readouterr() == ("first\n", "error: recipe x: there is none\n")
    assert commands.exit_code(fail, debug=True) == 2
    assert "Traceback" in capsys.readouterr().err

    # Other ends.
    def interrupt():
        raise KeyboardInterrupt

    assert commands.exit_code(lambda: None) == 0
    assert commands.exit_code(interrupt, interrupted="what was written is kept") == 130
    assert capsys.readouterr().err == "what was written is kept\n"
    with pytest.raises(ZeroDivisionError):
        commands.exit_code(lambda: 1 / 0)
    # A reader that has seen enough is no error.
    code = "import sys; from trainer.io import commands; sys.exit(commands.exit_code(lambda: print('x' * 10**6, flush=True)))"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=300) == 0


def test_a_terminal_gets_colors_and_wrapped_lines_and_a_log_does_not(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.delenv("NO_COLOR", raising=False)
    record = logging.LogRecord("a", logging.WARNING, "", 0, "many words " * 9, (), None)
    formatter = commands.TerminalFormatter("%(asctime)s  %(message)s", "%H:%M:%S")
    first, *others = formatter.format(record).splitlines()
    assert first.startswith("\x1b[90m")
    assert "\x1b[33m" in first
    assert len(others) == 2
    assert all(line.startswith(" " * 10) for line in others)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in formatter.format(record)
    # A log keeps a message in one line.
    assert "\n" not in limits.PrintableFormatter("%(message)s").format(record)


@pytest.mark.parametrize("arguments", [["recipes"], ["run", "--quiet", "no-such-recipe"]])
def test_quiet_keeps_to_warnings_in_the_processes_of_trainings_too(monkeypatch, arguments):
    monkeypatch.setenv(commands.QUIET, "")
    monkeypatch.delenv(commands.QUIET)
    seen = []
    monkeypatch.setattr(commands, "set_up_logging", lambda *, quiet: seen.append(quiet))
    cli.main(arguments)
    assert seen == ["--quiet" in arguments]
    assert (commands.QUIET in os.environ) == ("--quiet" in arguments)


@pytest.mark.parametrize(("given", "message"), [("recipe=grocery", "RECIPE=grocery"), ("RECIPE=grocery", "")])
def test_make_refuses_a_variable_in_lower_case(given, message):
    ended = subprocess.run(
        ["make", "--dry-run", "help", given], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert message in ended.stderr
    assert (ended.returncode != 0) == bool(message)


# ---------------------------------------------------------------------------------------------------------------------
# Completion

ASK = """
eval "$("$PYTHON" -m trainer completion bash)"
while read -r line; do
  COMP_LINE="$line" COMP_POINT=${#line} COMPREPLY=()
  IFS=' ' read -ra COMP_WORDS <<< "${line//_/ }"
  [[ $line == *_ ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _shtab_vit_distill
  echo "${COMPREPLY[*]}"
done
"""
"""A line to complete, with _ between its words -> what bash would offer."""


def test_bash_completes_commands_options_recipes_and_directories(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "mine.toml").touch()
    (tmp_path / "mine.txt").touch()
    asked = {
        "vit-distill_comp": "compare completion",
        "vit-distill_stage_eval": "evaluate",
        "vit-distill_stage_evaluate_--teach": "--teacher",
        "vit-distill_stage_evaluate_--teacher_ru": "runs",
        "vit-distill_run_dig": "digits",
        "vit-distill_run_mi": "mine.toml",
        "vit-distill_config_--recipe": "",
        "vit-distill_bill_ru": "runs",
        "vit-distill_completion_": "bash zsh",
    }
    reported = subprocess.run(
        ["bash", "-c", ASK],
        input="".join(f"{line}\n" for line in asked),
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert reported.stderr == ""
    assert dict(zip(asked, reported.stdout.splitlines(), strict=True)) == asked


def test_zsh_knows_the_recipes(capsys):
    assert cli.main(["completion", "zsh"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#compdef vit-distill\n")
    assert "'recipes:recipe:(digits few-labels food101" in printed
    assert ":_vit_distill_recipes" in printed


def test_usage_has_the_name_that_was_called(monkeypatch, capsys):
    for program, name in (("/usr/bin/vit-distill", "vit-distill"), ("/x/trainer/__main__.py", "python -m trainer")):
        monkeypatch.setattr(sys, "argv", [program])
        with pytest.raises(SystemExit):
            cli.main(["--help"])
        assert f"usage: {name} [-h]" in capsys.readouterr().out


@pytest.mark.parametrize("stage", STAGES.values(), ids=list(STAGES))
def test_the_help_names_inputs_and_outputs(stage, capsys):
    with pytest.raises(SystemExit):
        cli.main(["stage", stage.name, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for texts, named in (
        (stage.inputs, "input: the {} directory"),
        (stage.optional_inputs, "input, if needed: the {} directory"),
        (stage.outputs, "output: the {} directory to write"),
    ):
        for keyword, kind in texts.items():
            assert f"--{flag(keyword)} DIR {named.format(kind)} " in f"{shown} "


def test_run_takes_settings_as_words_and_as_one_text(capsys):
    parser = commands.module_parser("some.module", "")
    commands.add_run(parser)

    def given(*words):
        return parser.parse_args(["digits", *words]).overrides

    assert given("--overrides", "") == given() == []
    text = "a=1 b='x y'"
    assert given("--set", "c=x y", "d=2", "--overrides", text, "--fresh") == [
        "c=x y",
        "d=2",
        "a=1",
        "b=x y",
        "run.reuse=false",
    ]
    with pytest.raises(SystemExit):
        given("--overrides", "a='x")
    assert """argument --overrides: "a='x": No closing quotation; close the quotation""" in capsys.readouterr().err
