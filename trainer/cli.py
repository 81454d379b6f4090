"""The command line: `python -m trainer run | stage | compare | bill | predict | config | ...`, or `vit-distill` where it is installed."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainer import __version__, commands, config, errors, launch, limits, result_commands, stages
from trainer.commands import Subparsers
from trainer.errors import SettingsError, TrainerError
from trainer.host import Terminated, ended_by_sigterm

SCRIPT = "vit-distill"  # what the script is called that an installation brings


_DESCRIPTION = """Train a vision-transformer teacher, distil it into a student, and prove what was done.

  %(prog)s run digits                          the whole run on the bundled digits
  %(prog)s run grocery --set data.source=imagefolder:/photos
  %(prog)s compare runs/A runs/B               before and after
  %(prog)s config digits                       every setting with its meaning
  %(prog)s stage evaluate --help               one stage on given inputs
  %(prog)s forecast runs/latest --nodes 1 4    time and dollars where `tune` has measured
  %(prog)s bill runs/latest                    what a run took and cost; of several, side by side
  %(prog)s predict photo.jpg                   what the latest run's student says of photos
  %(prog)s drift runs/latest predictions       whether new predictions still look like those that were judged
  %(prog)s export runs/latest --output served  that student as an ONNX file, the fastest that passes its gate
  %(prog)s serve served                        that file behind HTTP, with a page to try it
  %(prog)s ui                                  MLflow's pages on what was tracked
  %(prog)s completion bash                     a script by which a shell completes these words"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code. A user's error ends in one message, and `--debug` adds the traceback."""
    options = _parser().parse_args(arguments)
    _set_up_logging(quiet=options.worker and os.environ.get("RANK", "0") != "0")
    try:
        with ended_by_sigterm():
            options.command(options)
    except TrainerError as error:
        return _fail(error, options)
    except BrokenPipeError:
        commands.discard_output()
    except KeyboardInterrupt as request:
        if options.worker:
            return errors.PREEMPTED_EXIT_CODE
        print("interrupted; what was written is kept, and the same command continues from there", file=sys.stderr)
        return errors.PREEMPTED_EXIT_CODE if isinstance(request, Terminated) else errors.INTERRUPTED_EXIT_CODE
    except Exception as error:
        if not options.worker and not options.node:
            raise
        # The launcher of this process waits for a message.
        message = f"{type(error).__name__}: {error} (its traceback stands above)"
        if options.worker:
            launch.record_failure(message, traceback.format_exc())
        else:
            traceback.print_exc()
            launch.leave_last_words(message)
            print(f"error: {message}", file=sys.stderr)
        return errors.CRASH_EXIT_CODE
    return 0


def _fail(error: TrainerError, options: argparse.Namespace) -> int:
    """Report an error; the exit code tells whoever started this process whether to start it again: not where the error would come again."""
    preempted = isinstance(error, errors.PreemptedError)
    code = errors.CRASH_EXIT_CODE if error.passing else errors.EXIT_CODE
    code = errors.PREEMPTED_EXIT_CODE if preempted else code
    if options.worker:
        if not preempted:
            launch.record_failure(str(error), traceback.format_exc() if options.debug else "")
        return code
    if options.debug:
        traceback.print_exc()
    if options.node:
        launch.leave_last_words(str(error))
    print(f"{'ended' if preempted else 'error'}: {error}", file=sys.stderr)
    return errors.CRASHED_NODE_EXIT_CODE if options.node and isinstance(error, errors.CrashError) else code


def _set_up_logging(*, quiet: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(limits.PrintableFormatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, handlers=[handler], force=True)
    hub_and_stores = ("httpx", "urllib3", "fsspec", "aiobotocore", "datasets")
    for name in (*hub_and_stores, "alembic", "mlflow", "matplotlib", "onnx_ir", "onnxscript"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _parser(program: str = "") -> argparse.ArgumentParser:
    script = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(
        prog=program or (SCRIPT if script == SCRIPT else "python -m trainer"),
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands.add_debug(parser)
    parser.set_defaults(worker=False, node=False)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_run,
        _add_stage,
        result_commands.add_compare,
        result_commands.add_forecast,
        result_commands.add_bill,
        result_commands.add_predict,
        result_commands.add_drift,
        result_commands.add_export,
        _add_config,
        result_commands.add_serve,
        result_commands.add_ui,
        partial(commands.add_command, command=_recipes, text="list the recipes"),
        _add_completion,
    ):
        add(subparsers)
    return parser


def _add_run(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _run, "run all stages of a recipe")
    commands.add_recipe(parser, "recipe")
    commands.add_overrides(parser)
    parser.add_argument("--output", metavar="DIR", help="where to write (default: runs/<time>-<recipe>)")
    commands.add_processes(parser, number=commands.positive)


def _add_stage(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "stage", help="run one stage on given inputs", description="Run one stage on given inputs."
    )
    names = parser.add_subparsers(title="stages", required=True, metavar="NAME")
    for stage in stages.STAGES.values():
        text = f"{stage.summary[0].upper()}{stage.summary[1:]}."
        parser = names.add_parser(stage.name, help=stage.summary, description=text)
        source = parser.add_mutually_exclusive_group()
        commands.add_recipe(source, default="")
        text = "the stage's settings as a JSON object, as another stage's manifest shows them"
        source.add_argument("--settings", metavar="JSON", help=text)
        commands.add_overrides(parser)
        commands.add_debug(parser, default=argparse.SUPPRESS)
        directories = [
            *((name, True, f"input: a {kind} directory") for name, kind in stage.inputs.items()),
            *((name, False, f"input, if needed: a {kind} directory") for name, kind in stage.optional_inputs.items()),
            *((name, True, f"output: the {kind} directory to write") for name, kind in stage.outputs.items()),
        ]
        for name, required, text in directories:
            parser.add_argument(f"--{launch.flag(name)}", required=required, metavar="DIR", help=text)
        if stage.launched:
            commands.add_processes(parser, number=commands.positive)
            # How a launcher calls this: one training process; one node of a cluster's job, which starts such processes.
            parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
            parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
        parser.set_defaults(command=_stage, stage=stage)


def _add_config(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _config, "show the resolved settings, each with its meaning")
    commands.add_recipe(parser, "recipe", default="", nargs="?")
    commands.add_overrides(parser)
    parser.add_argument("--json", action="store_true", help="print the values alone, as JSON")


def _add_completion(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "completion",
        help=f"print what completes {SCRIPT} in a shell",
        description=f"Print a script by which a shell completes the words of {SCRIPT}. For bash, in ~/.bashrc: "
        f'eval "$({SCRIPT} completion bash)".',
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(command=_completion)


def _run(options: argparse.Namespace) -> None:
    """Run all stages of a recipe on this machine and print what came out. A run that was interrupted goes on where it stood when it is
    started again with the same --output.
    """
    from trainer import finished_run, runner

    result, page = runner.run(options.recipe, options.overrides, output=options.output, processes=options.processes)
    print(limits.printable(finished_run.table(result, page)))


def _stage(options: argparse.Namespace) -> None:
    stage: stages.Stage = options.stage
    settings = config.resolve(options.recipe, options.overrides)
    os.environ.setdefault(config.DEVICE_VARIABLE, settings.run.device)
    section: Any = settings.for_stage(stage.name)
    if options.settings is not None:
        if options.overrides:
            raise SettingsError(
                "--settings gives all settings of the stage, so --set cannot change them; use --recipe with --set"
            )
        try:
            section = limits.parse_json(options.settings)
        except ValueError as error:
            raise SettingsError(f"--settings {options.settings!r} is not JSON: {error}") from error
        if not isinstance(section, dict):
            raise SettingsError(f"--settings {options.settings!r} is not a JSON object")
    keywords = (*stage.all_inputs, *stage.outputs)
    directories = {name: value for name in keywords if (value := getattr(options, name)) is not None}
    if stage.launched and not options.worker:
        config.validate_section(stage.section, section)
        run = launch.join_node if options.node else launch.run_here
        run(launch.job_of(stage, section, directories, options.processes))
        return
    further = {"recipe": options.recipe, "resolved": settings.model_dump(mode="json")} if stage.takes_recipe else {}
    stages.call(stage.name, json.dumps(section), directories, **further)


def _config(options: argparse.Namespace) -> None:
    """Show every setting that a recipe resolves to, with its type, limits and meaning."""
    settings = config.resolve(options.recipe, options.overrides)
    if options.json:
        print(json.dumps(settings.model_dump(mode="json"), indent=2))
        return
    for name, value, kind, meaning in config.walk(settings):
        print(f"{name} = {json.dumps(value)}\n    {meaning} ({kind})")


def _recipes(_options: argparse.Namespace) -> None:
    """List the recipes."""
    for name, text in config.recipes().items():
        print(f"{name:<12}{text}")
    print(
        f"\nThey stand in {Path(config.RECIPES)}; a recipe is also any TOML file that states what differs from the defaults."
    )


def _completion(options: argparse.Namespace) -> None:
    import shtab

    recipes, function = " ".join(config.recipes()), f"_{SCRIPT.replace('-', '_')}_recipes"
    preamble = {
        "bash": f"""{function}() {{ compgen -W "{recipes}" -- "$1"; compgen -f -X '!*.toml' -- "$1"; compgen -d -- "$1"; }}""",
        "zsh": f"""{function}() {{ _alternative 'recipes:recipe:({recipes})' 'files:file:_files -g "*.toml"'; }}""",
    }
    parser = _parser(SCRIPT)
    for action in _actions(parser):
        if action.dest == "recipe":
            action.complete = dict.fromkeys(preamble, function)  # type: ignore[attr-defined]  # where shtab looks for it
        elif action.metavar in ("DIR", "A", "B", "RUN", "TUNING"):  # what directories are called in usage
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar == "FILE":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell, preamble=preamble[options.shell]))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, Subparsers):
            for below in action.choices.values():
                yield from _actions(below)
