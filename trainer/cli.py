"""The command line: `python -m trainer run | stage | compare | bill | config | recipes`, or `vit-distill` where it is installed."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from trainer import __version__, config, launch, limits, stages, tracking
from trainer.errors import (
    CRASH_EXIT_CODE,
    CRASHED_NODE_EXIT_CODE,
    EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    CrashError,
    PreemptedError,
    SettingsError,
    TrainerError,
    make_directory,
    writing_to,
)
from trainer.signals import Terminated, ended_by_sigterm

SCRIPT = "vit-distill"
"""What the script is called that an installation brings."""

_DESCRIPTION = """Train a vision-transformer teacher, distil it into a student, and prove what was done.

  %(prog)s run digits                          the whole run on the bundled digits
  %(prog)s run grocery --set data.source=imagefolder:/photos
  %(prog)s compare runs/A runs/B               before and after
  %(prog)s config digits                       every setting with its meaning
  %(prog)s stage evaluate --help               one stage on given inputs
  %(prog)s forecast runs/latest --nodes 1 4    time and dollars where `tune` has measured
  %(prog)s bill runs/latest                    what a run took and cost; of several, side by side"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code. A user's error ends in one message, and `--debug` adds the traceback."""
    options = _parser().parse_args(arguments)
    worker, node = getattr(options, "worker", False), getattr(options, "node", False)
    _set_up_logging(quiet=worker and os.environ.get("RANK", "0") != "0")
    try:
        with ended_by_sigterm():
            options.command(options)
    except TrainerError as error:
        return _fail(error, options, worker=worker, node=node)
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt as request:
        if worker:
            return PREEMPTED_EXIT_CODE
        print("interrupted; what was written is kept, and the same command goes on from there", file=sys.stderr)
        return PREEMPTED_EXIT_CODE if isinstance(request, Terminated) else INTERRUPTED_EXIT_CODE
    except Exception as error:
        if not worker and not node:
            raise
        return _crash(f"{type(error).__name__}: {error} (its traceback stands above)", worker=worker)
    return 0


def _fail(error: TrainerError, options: argparse.Namespace, *, worker: bool, node: bool) -> int:
    if worker:
        if not isinstance(error, PreemptedError):
            launch.record_failure(str(error), traceback.format_exc() if options.debug else "")
        return _exit_code(error)
    if options.debug:
        traceback.print_exc()
    if node:
        launch.leave_last_words(str(error))
    print(f"{'ended' if isinstance(error, PreemptedError) else 'error'}: {error}", file=sys.stderr)
    return CRASHED_NODE_EXIT_CODE if node and isinstance(error, CrashError) else _exit_code(error)


def _exit_code(error: TrainerError) -> int:
    """Tells whoever started this process whether to start it again: not after what would come again, such as the user's own mistake."""
    if isinstance(error, PreemptedError):
        return PREEMPTED_EXIT_CODE
    return CRASH_EXIT_CODE if error.passing else EXIT_CODE


def _crash(message: str, *, worker: bool) -> int:
    """An exception that nobody expected, in a process whose message somebody waits for."""
    if worker:
        launch.record_failure(message, traceback.format_exc())
    else:
        traceback.print_exc()
        launch.leave_last_words(message)
        print(f"error: {message}", file=sys.stderr)
    return CRASH_EXIT_CODE


def _set_up_logging(*, quiet: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(limits.PrintableFormatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, handlers=[handler], force=True)
    for name in ("httpx", "urllib3", "alembic", "mlflow", "matplotlib", "fsspec", "datasets", "aiobotocore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _parser() -> argparse.ArgumentParser:
    script = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(
        prog=SCRIPT if script == SCRIPT else "python -m trainer",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_stage(commands)
    _add_compare(commands)
    _add_forecast(commands)
    _add_bill(commands)
    _add_config(commands)
    listing = commands.add_parser("recipes", help="list the recipes", description="List the recipes.")
    listing.set_defaults(command=_recipes)
    return parser


Commands = argparse._SubParsersAction  # argparse has no public name for it


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="change settings, such as distill.temperature=2 (`python -m trainer config RECIPE` lists them)",
    )
    _add_debug(parser)


def _add_processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="how many processes train (default: one for each GPU, or else one)",
    )


def positive(text: str) -> int:
    """A number for argparse, which has to be 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def _add_run(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="run all stages of a recipe",
        description="Run all stages of a recipe on this machine and print what came out. A run that was interrupted goes on where it "
        "stood when it is started again with the same --output.",
    )
    parser.add_argument("recipe", help="a name (`python -m trainer recipes`) or the path of a TOML file")
    _add_settings(parser)
    parser.add_argument("--output", metavar="DIR", help="where to write (default: runs/<time>-<recipe>)")
    _add_processes(parser)
    parser.set_defaults(command=_run)


def _add_stage(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "stage", help="run one stage on given inputs", description="Run one stage on given inputs."
    )
    names = parser.add_subparsers(title="stages", required=True, metavar="NAME")
    for stage in stages.STAGES.values():
        _add_one_stage(names, stage)


def _add_one_stage(names: Commands[argparse.ArgumentParser], stage: stages.Stage) -> None:
    text = f"{stage.summary[0].upper()}{stage.summary[1:]}."
    parser = names.add_parser(stage.name, help=stage.summary, description=text)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--recipe", default="", help="take the stage's settings from this recipe (default: the defaults)"
    )
    source.add_argument(
        "--settings",
        metavar="JSON",
        help="the stage's settings as a JSON object, as another stage's manifest shows them",
    )
    _add_settings(parser)
    for name, kind in stage.inputs.items():
        parser.add_argument(f"--{launch.flag(name)}", required=True, metavar="DIR", help=f"input: a {kind} directory")
    for name, kind in stage.optional_inputs.items():
        parser.add_argument(f"--{launch.flag(name)}", metavar="DIR", help=f"input, if needed: a {kind} directory")
    for name, kind in stage.outputs.items():
        parser.add_argument(
            f"--{launch.flag(name)}", required=True, metavar="DIR", help=f"output: the {kind} directory to write"
        )
    if stage.launched:
        _add_processes(parser)
        # How a launcher calls this: one training process; one node of a cluster's job, which starts such processes.
        parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
        parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(command=_stage, stage=stage)


def _add_compare(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "compare",
        help="put two runs or trainings side by side",
        description="Put two runs or trainings side by side, before and after: settings, accuracy, cost, phases, operators, use of the "
        "machine, findings. Each is the directory of a run, of its report, or of evidence, here or in a store.",
    )
    parser.add_argument("before", metavar="A")
    parser.add_argument("after", metavar="B")
    parser.add_argument("--output", metavar="FILE", help="write the comparison as a page (HTML), too")
    _add_debug(parser)
    parser.set_defaults(command=_compare)


def _add_forecast(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "forecast",
        help="show what a distillation will take where it was tried",
        description="Show time and dollars of a distillation on every pool where the stage tune tried it, and on other numbers of nodes.",
    )
    parser.add_argument("tunings", nargs="+", metavar="TUNING", help="what tune wrote, or the directory of its run")
    parser.add_argument(
        "--nodes", type=positive, nargs="+", default=[], metavar="N", help="numbers of nodes (default: those tried)"
    )
    default = config.TuneSettings.model_fields["assumed_efficiency"].default
    parser.add_argument(
        "--efficiency",
        type=fraction,
        default=default,
        metavar="E",
        help="speed-up of twice as many nodes, as a share of 2, where only one number was tried (default: %(default)s)",
    )
    _add_debug(parser)
    parser.set_defaults(command=_forecast)


def _add_debug(parser: argparse.ArgumentParser) -> None:
    """Also behind the command; what was said before it stays."""
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )


def fraction(text: str) -> float:
    """A number for argparse, above 0 and up to 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and up to 1, got {text}")
    return value


def _add_bill(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bill",
        help="show what runs took and cost",
        description="Show what a run took and cost, stage by stage, or what several reached for their money: rates, accuracy, time, "
        "dollars. A run has a bill when its stage register is done. TRAINER_PLACE gives this machine a price (docs/cluster.md).",
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="directory of a run, or of its registration")
    parser.add_argument(
        "--experiment",
        metavar="NAME",
        help=f"all runs of an MLflow experiment, too ({tracking.URI}, or else runs/mlflow.db)",
    )
    _add_debug(parser)
    parser.set_defaults(command=_bill)


def _add_config(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "config",
        help="show the resolved settings, each with its meaning",
        description="Show every setting that a recipe resolves to, with its type, limits and meaning.",
    )
    parser.add_argument("recipe", nargs="?", default="", help="a recipe (default: the defaults alone)")
    _add_settings(parser)
    parser.add_argument("--json", action="store_true", help="print the values alone, as JSON")
    parser.set_defaults(command=_config)


def _run(options: argparse.Namespace) -> None:
    from trainer import runner, summary

    result = runner.run(options.recipe, options.overrides, output=options.output, processes=options.processes or 0)
    print(limits.printable(summary.table(result)))


def _stage(options: argparse.Namespace) -> None:
    stage: stages.Stage = options.stage
    settings = config.resolve(options.recipe, options.overrides)
    os.environ.setdefault(config.DEVICE_VARIABLE, settings.run.device)
    section = json.dumps(settings.for_stage(stage.name)) if options.settings is None else _checked_json(options)
    given = {name: getattr(options, name) for name in stage.all_inputs}
    inputs = {name: value for name, value in given.items() if value is not None}
    outputs = {name: getattr(options, name) for name in stage.outputs}
    if stage.launched and not options.worker:
        config.validate_section(stage.section, json.loads(section))
        spec = launch.JobSpec(
            stage=stage.name,
            settings=json.loads(section),
            inputs=inputs,
            outputs=outputs,
            processes_per_node=options.processes or launch.processes_here(os.environ[config.DEVICE_VARIABLE]),
        )
        if options.node:
            launch.join_node(spec)
        else:
            launch.LocalLauncher().run(spec)
        return
    further = {"recipe": options.recipe, "resolved": settings.model_dump(mode="json")} if stage.takes_recipe else {}
    stages.call(stage.name, section, {**inputs, **outputs}, **further)


def _checked_json(options: argparse.Namespace) -> str:
    if options.overrides:
        raise SettingsError(
            "--settings gives all settings of the stage, so --set cannot change them; use --recipe with --set"
        )
    try:
        values = limits.parse_json(options.settings)
    except ValueError as error:
        raise SettingsError(f"--settings {options.settings!r} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"--settings {options.settings!r} is not a JSON object")
    return str(options.settings)


def _compare(options: argparse.Namespace) -> None:
    from trainer.profiling import compare, sides
    from trainer.profiling.report import comparison

    compared = compare.compare(sides.read_side(options.before), sides.read_side(options.after))
    print(limits.printable(compare.text(compared)))
    if options.output:
        page = Path(options.output)
        if page.is_dir():
            raise SettingsError(
                f"--output {page} is a directory; give the name of a file, such as {page / 'comparison.html'}"
            )
        make_directory(page.parent)
        with writing_to(page):
            page.write_text(comparison.build(compared), encoding="utf-8")
        print(f"\nAs a page: {page}")


def _forecast(options: argparse.Namespace) -> None:
    from trainer.tuning import outlook

    tunings = outlook.read_tunings(options.tunings)
    forecast = outlook.outlook(tunings, options.nodes, assumed_efficiency=options.efficiency)
    print(limits.printable("\n".join(outlook.lines(forecast))))


def _bill(options: argparse.Namespace) -> None:
    from trainer import price_performance, runner, summary

    if not options.runs and not options.experiment:
        raise SettingsError(
            "bill: name the directories of runs, such as runs/latest, or an MLflow experiment with --experiment"
        )
    read = [price_performance.read_run(run) for run in options.runs]
    entries = [entry for entry, _ in read]
    if options.experiment:
        if (store := tracking.local_store(runner.RUNS)).exists():
            os.environ.setdefault(tracking.URI, f"sqlite:///{store}")
        entries += price_performance.read_experiment(options.experiment)
    if len(entries) == 1 and read:
        print(limits.printable("\n".join(summary.bill_table(read[0][1]))))
    else:
        print(limits.printable("\n".join(price_performance.lines(entries))))


def _config(options: argparse.Namespace) -> None:
    settings = config.resolve(options.recipe, options.overrides)
    if options.json:
        print(json.dumps(settings.model_dump(mode="json"), indent=2))
        return
    for name, value, kind, meaning in config.walk(settings):
        print(f"{name} = {json.dumps(value)}\n    {meaning} ({kind})")


def _recipes(_options: argparse.Namespace) -> None:
    for name, text in config.recipes().items():
        print(f"{name:<12}{text}")
    print(
        f"\nThey stand in {Path(config.RECIPES)}; a recipe is also any TOML file that states what differs from the defaults."
    )
