"""The command line: `python -m trainer run | stage | compare | bill | predict | config | ...`, or `vit-distill` where it is installed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import __version__, config, stages
from trainer.graph import ALONE, SEARCH, flag
from trainer.io import commands, errors, limits, storage
from trainer.io.commands import Subparsers
from trainer.io.errors import DataError, SettingsError, TrainerError
from trainer.io.formatting import aligned
from trainer.io.host import Terminated, ended_by_sigterm, ensure_home, escape_what_cannot_be_printed
from trainer.report import tracking
from trainer.runner import launch

if TYPE_CHECKING:
    from trainer.models.served_student.student import Prediction

logger = logging.getLogger(__name__)

SCRIPT = "vit-distill"  # what the script is called that an installation brings


_DESCRIPTION = """Train a vision-transformer teacher, distill it into a student, and prove what was done.

  %(prog)s run digits                          the whole run on the bundled digits
  %(prog)s run grocery --set data.source=imagefolder:/photos
  %(prog)s compare runs/A runs/B               before and after
  %(prog)s config digits                       every setting with its meaning
  %(prog)s stage evaluate --help               one stage on given inputs
  %(prog)s forecast runs/latest --nodes 1 4    time and dollars where `tune` has measured
  %(prog)s search runs/latest                 what a search has found, trial by trial
  %(prog)s bill runs/latest                    what a run took and cost; of several, side by side
  %(prog)s predict photo.jpg                   what the latest run's student says of photos
  %(prog)s drift runs/latest predictions       whether new predictions still look like those that were judged
  %(prog)s export runs/latest --output served  that student as an ONNX file, the fastest that passes its gate
  %(prog)s serve served                        that file behind HTTP, with a page to try it
  %(prog)s ui                                  MLflow's pages on what was tracked
  %(prog)s completion bash                     a script by which a shell completes these words"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code. A user's error ends in one message, and `--debug` adds the traceback."""
    options = command_parser().parse_args(arguments)
    escape_what_cannot_be_printed()
    if getattr(options, "quiet", False):
        os.environ[commands.QUIET] = "1"  # for the processes of trainings, too
    commands.set_up_logging(
        quiet=commands.QUIET in os.environ or (options.worker and os.environ.get("RANK", "0") != "0")
    )
    try:
        with ended_by_sigterm():
            ensure_home()
            options.command(options)
    except TrainerError as error:
        return _fail(error, options)
    except BrokenPipeError:
        commands.discard_output()
    except KeyboardInterrupt as request:
        if options.worker:
            return errors.PREEMPTED_EXIT_CODE
        print(commands.INTERRUPTED, file=sys.stderr)
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
            launch.write_termination_message(message)
            print(f"error: {message}", file=sys.stderr)
        return errors.CRASH_EXIT_CODE
    return 0


def _fail(error: TrainerError, options: argparse.Namespace) -> int:
    """Report an error; the exit code tells whoever started this process whether to start it again: not where the error would come again."""
    preempted = isinstance(error, errors.PreemptedError)
    code = errors.CRASH_EXIT_CODE if error.is_transient else errors.EXIT_CODE
    code = errors.PREEMPTED_EXIT_CODE if preempted else code
    if options.worker:
        if not preempted:
            launch.record_failure(str(error), traceback.format_exc() if options.debug else "")
        return code
    if options.debug:
        traceback.print_exc()
    if options.node:
        launch.write_termination_message(str(error))
    print(f"{'ended' if preempted else 'error'}: {error}", file=sys.stderr)
    return errors.CRASHED_NODE_EXIT_CODE if options.node and isinstance(error, errors.CrashError) else code


def command_parser(program: str = "") -> argparse.ArgumentParser:
    """Build the parser of all commands; `program` is its name in messages, by default the one it was started by."""
    script = Path(sys.argv[0]).name
    parser: argparse.ArgumentParser = commands.CommandParser(
        prog=program or (SCRIPT if script == SCRIPT else "python -m trainer"),
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands.add_debug(parser)
    parser.set_defaults(worker=False, node=False, share=None)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_run,
        _add_stage,
        _add_compare,
        _add_watch,
        _add_forecast,
        _add_search,
        _add_bill,
        _add_predict,
        _add_drift,
        _add_export,
        _add_config,
        _add_serve,
        _add_ui,
        partial(commands.add_command, command=_recipes, text="list the recipes"),
        _add_completion,
    ):
        add(subparsers)
    return parser


def _add_run(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _run, "run all stages of a recipe")
    commands.add_run(parser)
    commands.add_processes(parser, default="one for each GPU, or else two", number=commands.positive)


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
            *((name, True, f"input: the {kind} directory") for name, kind in stage.inputs.items()),
            *((name, False, f"input, if needed: the {kind} directory") for name, kind in stage.optional_inputs.items()),
            *((name, True, f"output: the {kind} directory to write") for name, kind in stage.outputs.items()),
        ]
        for name, required, text in directories:
            parser.add_argument(f"--{flag(name)}", required=required, metavar="DIR", help=text)
        if stage.trains:
            commands.add_processes(parser, number=commands.positive)
        if stage.launched:
            # How a launcher calls this: one training process; one node of a cluster's job, which starts such processes.
            parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
        if stage.launched or stage.shared:
            parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
        if stage.shared:
            text = (
                "on each of N machines: the share of the work that this one does, from 0/N; that one makes the output"
            )
            parser.add_argument("--share", type=commands.share, metavar="K/N", help=text)
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
    """Run all stages of a recipe on this machine and print what came out. What an earlier run made from the same images, settings and code
    is taken from it, and an interrupted training continues.
    """
    from trainer.report import finished_run
    from trainer.runner import local_run

    result, page = local_run.run(options.recipe, options.overrides, output=options.output, processes=options.processes)
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
    if stage.name == "distill" and not options.worker and (given := config.parameters_of_trial(os.environ)):
        distill = config.validate(config.DistillSettings, section, prefix="distill")
        section = config.distill_with(distill, given).model_dump(mode="json")
        logger.info("distill  a trial with %s", ", ".join(f"{name}={value}" for name, value in given.items()))
    keywords = (*stage.all_inputs, *stage.outputs)
    directories = {name: value for name in keywords if (value := getattr(options, name)) is not None}
    helps = options.share is not None and options.share.number > 0
    if options.worker or options.node or helps:  # whoever launched this, or has the first share, holds the outputs
        _start_stage(options, settings, section, directories)
        return
    from trainer.runner import local_run

    with local_run.only_stage_in(directories[name] for name in stage.outputs):
        _start_stage(options, settings, section, directories)


def _start_stage(
    options: argparse.Namespace, settings: config.Settings, section: Any, directories: Mapping[str, str]
) -> None:
    stage: stages.Stage = options.stage
    if options.worker:
        stages.call(stage.name, json.dumps(section), directories)
    elif options.share:
        config.validate_section(stage.section, section)
        stages.call(stage.name, json.dumps(section), directories, share=options.share)
    elif options.node:
        config.validate_section(stage.section, section)
        launch.join_node(launch.job_of(stage, section, directories, options.processes))
    else:
        from trainer.runner import local_run

        config.validate_section(stage.section, section)
        given = {"recipe": options.recipe, "resolved": settings.model_dump(mode="json")}
        count = options.processes if stage.trains else 0
        local_run.run_stage(stage, section, directories, processes=count, given=given)


def _config(options: argparse.Namespace) -> None:
    """Show every setting that a recipe resolves to, with its type, limits and meaning."""
    settings = config.resolve(options.recipe, options.overrides)
    if options.json:
        print(json.dumps(settings.model_dump(mode="json"), indent=2))
        return
    for name, value, kind, meaning in config.walk(settings):
        if not config.copied_from(name):
            print(f"{name} = {json.dumps(value)}\n    {meaning} ({kind})")


def _recipes(_options: argparse.Namespace) -> None:
    """List the recipes."""
    print("\n".join(aligned([*config.recipes().items()])))
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
    parser = command_parser(SCRIPT)
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


# ---- The commands that read what runs left. What one needs is imported when it runs, so that the others start at once.


def _add_watch(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _watch, "follow a running training in the terminal")
    parser.add_argument("run", metavar="RUN", help="the folder of the run, here or in a store")
    commands.add_with_default(parser, "--interval", 5, "seconds between two looks", type=commands.positive, metavar="N")
    parser.add_argument("--once", action="store_true", help="show the state once, and end")


def _watch(options: argparse.Namespace) -> None:
    """Show a running training until it ends, or Ctrl-C: steps, rates, where a step's time goes, the machine, findings."""
    from trainer.profiling import live_status

    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not options.once else ""
    live_status.watch(
        options.run,
        interval_s=options.interval,
        once=options.once,
        show=lambda text: print(f"{clear}{text}", flush=True),
    )


def _add_compare(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _compare, "put two runs or trainings side by side")
    parser.add_argument("before", metavar="A")
    parser.add_argument("after", metavar="B")
    parser.add_argument("--output", metavar="FILE", help="write the comparison as a page (HTML), too")


def _compare(options: argparse.Namespace) -> None:
    """Put two runs or trainings side by side, before and after: settings, accuracy, cost, phases, operators, use of the machine,
    findings. Each is the directory of a run, of its report, or of evidence, here or in a store.
    """
    from trainer.profiling import compare

    compared = compare.compare(*map(compare.read_compared_run, (options.before, options.after)))
    print(limits.printable(compare.text(compared)))
    if options.output:
        _write_page(options.output, compare.page(compared))


def _write_page(output: str, content: str) -> None:
    page = Path(output)
    if page.is_dir():
        raise SettingsError(
            f"--output {page} is a directory; give the name of a file, such as {page / 'comparison.html'}"
        )
    errors.make_directory(page.parent)
    with errors.writing_to(page):
        page.write_text(content, encoding="utf-8")
    print(f"\nAs a page: {page}")


def _add_forecast(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _forecast, "show what a distillation will take where it was tried")
    parser.add_argument("tunings", nargs="+", metavar="TUNING", help="what tune wrote, or the directory of its run")
    text = "numbers of nodes (default: those tried)"
    parser.add_argument("--nodes", type=commands.positive, nargs="+", default=[], metavar="N", help=text)
    default = config.TuneSettings.model_fields["assumed_efficiency"].default
    text = "speed-up of twice as many nodes, as a share of 2, where only one number was tried"
    commands.add_with_default(parser, "--efficiency", default, text, type=commands.fraction, metavar="E")


def _forecast(options: argparse.Namespace) -> None:
    """Show time and dollars of a distillation on every pool where the stage tune tried it, and on other numbers of nodes."""
    from trainer.stages.tuning.tuning_schema import forecast_table, read_tunings, table_lines

    forecasts = forecast_table(read_tunings(options.tunings), options.nodes, assumed_efficiency=options.efficiency)
    print(limits.printable("\n".join(table_lines(forecasts))))


def _add_search(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _search, "show what a search has found")
    parser.add_argument("run", metavar="RUN", help="the directory of a run")
    text = "write the settings of the run, with what was found, as a recipe: `make run RECIPE=FILE`"
    parser.add_argument("--recipe", metavar="FILE", help=text)
    text = "open Optuna's dashboard on the trials instead, at this port of this machine (default: 8080); needs the package optuna-dashboard"
    parser.add_argument("--dashboard", type=commands.positive, nargs="?", const=8080, metavar="PORT", help=text)


def _search(options: argparse.Namespace) -> None:
    """Show the trials of a search, the best first, and what was chosen. `run RECIPE --search` makes one (docs/search.md)."""
    from trainer.report import finished_run
    from trainer.stages.searching import search_page
    from trainer.stages.searching.search_schema import read_search

    found = read_search(finished_run.find(options.run, SEARCH))
    if options.recipe is not None:
        resolved = storage.read_json(storage.join(options.run, finished_run.SUMMARY))["settings"]
        # What is found need not be searched again.
        settings = config.validate(config.Settings, resolved | {"search": {}})
        storage.write_bytes(options.recipe, f"# {found.reason}\n\n{config.recipe_of(settings)}".encode())
        return
    if options.dashboard is None:
        print(limits.printable("\n".join(search_page.lines(found))))
        return
    if importlib.util.find_spec("optuna_dashboard") is None:
        raise SettingsError(
            "--dashboard needs the package optuna-dashboard; pip install 'vit-distillation-pipeline[search]'"
        )
    from optuna_dashboard import run_server

    print(f"http://127.0.0.1:{options.dashboard}  (Ctrl-C ends it)")
    run_server(search_page.storage(found), host="127.0.0.1", port=options.dashboard)


def _add_bill(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _bill, "show what runs took and cost")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="directory of a run, or of its registration")
    text = f"all runs of an MLflow experiment, too ({tracking.URI}, or else runs/mlflow.db)"
    parser.add_argument("--experiment", metavar="NAME", help=text)


def _bill(options: argparse.Namespace) -> None:
    """Show what a run took and cost, stage by stage, or compare several runs: rates, accuracy, time, dollars. A run has
    a bill when its stage register is done. TRAINER_PLACE gives this machine a price (docs/costs.md).
    """
    from trainer.report import finished_run
    from trainer.runner import local_run

    if not options.runs and not options.experiment:
        raise SettingsError(
            "bill: name the directories of runs, such as runs/latest, or an MLflow experiment with --experiment"
        )
    read = [finished_run.read_run(run) for run in options.runs]
    entries = [entry for entry, _ in read]
    if options.experiment:
        local_run.track_here()
        entries += finished_run.read_experiment(options.experiment)
    alone = len(entries) == 1 and read
    lines = finished_run.bill_table(read[0][1]) if alone else finished_run.price_table(entries)
    print(limits.printable("\n".join(lines)))


def _add_predict(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _predict, "show what a student says of photos")
    parser.add_argument("photos", nargs="+", metavar="FILE", help="an image file; with --output one folder or URI")
    parser.add_argument("--output", metavar="DIR", help="folder or URI for the predictions of a whole folder")
    text = "directory of a run or of a model, or a registered one, such as models:/vit-student-digits@champion"
    commands.add_with_default(parser, "--model", "runs/latest", text, metavar="DIR")
    commands.add_with_default(parser, "--top", 5, "how many labels", type=commands.positive, metavar="K")
    parser.add_argument("--json", action="store_true", help="print a list of objects, as JSON")
    parser.add_argument("--force", action="store_true", help="ask a student that did not pass its gate, too")
    text = "on each of N machines with the same --output: the share of the photos that this one begins with, from 0/N"
    parser.add_argument("--share", type=commands.share, default=ALONE, metavar="K/N", help=text)


def _predict(options: argparse.Namespace) -> None:
    """Show the most probable labels of each photo, and where the model knows more of its classes the answer of the hierarchy and the
    attributes. With --output, classify all photos of a folder or bucket into Parquet files; the same command continues one that was
    stopped.
    """
    from trainer.models.served_student.preprocessing import BadImageError
    from trainer.predict import batch_prediction, photo_classifier

    if options.share.of > 1 and not options.output:
        raise SettingsError("predict --share: serves a whole folder; give --output DIR, which all machines reach")
    if options.output and (len(options.photos) != 1 or options.json):
        raise SettingsError(
            "predict --output takes one folder or URI of photos, and no --json: it writes Parquet files"
        )
    if not options.output and (folders := list(filter(os.path.isdir, options.photos))):
        raise SettingsError(
            f"predict {folders[0]}: is a folder; give --output DIR, into which the predictions of all its photos are written"
        )
    if not options.output and (missing := list(filterfalse(os.path.exists, options.photos))):
        raise SettingsError(f"predict {missing[0]}: there is no such file; give paths of photos")
    model = photo_classifier.load_model(options.model, judged=not options.force)
    if options.output:
        logger.info("%s", model)
        made = batch_prediction.predict_folder(
            model, options.photos[0], options.output, top=options.top, share=options.share
        )
        print(batch_prediction.line(made, options.output))
        return
    try:
        said = model.predictions(options.photos, top=options.top)
    except BadImageError as error:
        raise DataError(f"{error}; mend the photo or leave it out") from error
    logger.info("%s", model)
    if options.json:
        found = [
            # Only models for several labels a photo name some.
            {"photo": photo} | {key: value for key, value in asdict(one).items() if key != "named" or value is not None}
            for photo, one in zip(options.photos, said, strict=True)
        ]
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    for photo, one in zip(options.photos, said, strict=True):
        print(limits.printable("\n".join([photo, *(f"  {line}" for line in photo_classifier.lines(one))])))


def _add_drift(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _drift, "compare new predictions with the evaluation of a run")
    parser.add_argument("run", metavar="RUN", help="directory of the run whose student made the predictions")
    text = "what `predict --output` or a server wrote: a folder or a file, here or in a store"
    parser.add_argument("predictions", metavar="PREDICTIONS", help=text)
    text = "least share of the predictions that has to fall elsewhere to count as drift"
    commands.add_with_default(parser, "--limit", 0.1, text, type=commands.fraction, metavar="D")
    parser.add_argument("--output", metavar="FILE", help="write the comparison as a page (HTML), too")


def _drift(options: argparse.Namespace) -> None:
    """Compare how often each class is predicted, and how sure the predictions are, with the predictions of a run's student on its
    test photos. Needs no labels.
    """
    from trainer.predict import drift

    found = drift.compare(options.run, options.predictions, limit=options.limit)
    print(limits.printable("\n".join(drift.lines(found))))
    if options.output:
        _write_page(options.output, drift.page(found, options.run))
    logger.info("compared with the evaluation of %s", storage.with_target(options.run))


def _add_export(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _export, "write a run's student as an ONNX file")
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    parser.add_argument("--output", required=True, metavar="DIR", help="where to write")
    parser.add_argument("--no-int8", dest="quantized", action="store_false", help="leave int8 out")
    parser.add_argument("--openvino", action="store_true", help="try each variant in OpenVINO too")
    parser.add_argument("--force", action="store_true", help="keep fp32 where nothing passes the gate")


def _export(options: argparse.Namespace) -> None:
    """Write the student of a run as ONNX, check its answers on the run's validation images, try int8, measure all of it on this machine,
    and keep the fastest that keeps the answers and passes the gate of the run on its test images, with a card that says how to feed it.
    Needs the extra `export`.
    """
    from trainer.stages.onnx_export import exporting, variants

    logger.info("%s: its student is exported", storage.with_target(options.run))
    made = exporting.export(
        options.run, options.output, quantized=options.quantized, openvino=options.openvino, force=options.force
    )
    print(
        limits.printable("\n".join([*variants.table(made.candidates, made.chosen), "", f"written to {made.directory}"]))
    )


def _add_serve(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _serve, "answer photos over HTTP with an exported student")
    add = partial(commands.add_with_default, parser)
    parser.add_argument(
        "export",
        metavar="EXPORT",
        help="the directory of a run, or of what `export` wrote, here or in a store; or a registered model, such as "
        "models:/vit-student-digits@champion",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine alone)"
    )
    add("--port", 8000, "", type=int, metavar="N")
    add("--name", "student", "what the protocol calls the model")
    parser.add_argument(
        "--beside", default="", metavar="MODEL", help="a model whose answer stands beside, such as a run's teacher"
    )
    parser.add_argument(
        "--threads", type=commands.positive, default=0, metavar="N", help="threads of the model (default: one a core)"
    )
    add("--batch-size", 16, "photos computed together", type=commands.positive, metavar="N")
    add(
        "--wait-ms",
        2.0,
        "milliseconds that a photo waits for others on an idle server",
        type=commands.seconds,
        metavar="T",
    )
    add("--in-flight", 64, "requests at a time; further ones are refused", type=commands.positive, metavar="N")
    add("--timeout", 10, "seconds for a request", type=commands.positive, metavar="S")
    text = "seconds to keep running, not ready, after SIGTERM"
    add("--drain", 0.0, text, type=commands.seconds, metavar="S")
    parser.add_argument(
        "--log",
        default="",
        metavar="FILE",
        help="append label and probability of predictions to a file, for `drift`; -: standard output",
    )
    add("--log-share", 1.0, "share of the predictions in it", type=commands.fraction, metavar="P")
    parser.add_argument(
        "--log-photos",
        default="",
        metavar="DIR",
        help="keep the photos that `POST /predict` got of that sample, by SHA-256",
    )
    parser.add_argument("--force", action="store_true", help="serve an export that did not pass its gate, too")


def _serve(options: argparse.Namespace) -> None:
    """Answer photos over HTTP, by `POST /predict` and the Open Inference Protocol v2, and serve a page to try it. Needs the extra
    `serve`.
    """
    for name in ("fastapi", "onnxruntime", "prometheus_client", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise SettingsError(f"serve: needs the package {name}; pip install 'vit-distillation-pipeline[serve]'")
    from trainer.predict import photo_classifier
    from trainer.predict.serving import server

    judged = not options.force
    model = photo_classifier.load_model(options.export, judged=judged, exported=True, threads=options.threads)
    logger.info("%s", model)
    beside: Callable[[bytes, int], Prediction] | None = None
    if options.beside:
        other = photo_classifier.load_model(options.beside)

        def beside(photo: bytes, top: int) -> Prediction:
            return other.predictions([photo], top=top)[0]

    most = server.ServerLimits(
        batch_size=options.batch_size,
        wait_ms=options.wait_ms,
        in_flight=options.in_flight,
        timeout_s=options.timeout,
        drain_s=options.drain,
    )
    if options.log_photos and not options.log:
        raise SettingsError("--log-photos: goes with the predictions of --log FILE; give that too")
    with ExitStack() as opened:
        log = None
        if options.log:
            file, photos_kept = Path(options.log), Path(options.log_photos) if options.log_photos else None
            if photos_kept is not None:
                errors.make_directory(photos_kept)
            stream = sys.stdout
            if options.log != "-":
                errors.make_directory(file.parent)
                with errors.writing_to(file):
                    stream = opened.enter_context(file.open("a", encoding="utf-8"))
            log = server.PredictionLog(stream, share=options.log_share, photos=photos_kept)
        photos = server.PhotoServer(model, name=options.name, most=most, log=log, beside=beside)
        server.serve(photos, host=options.host, port=options.port)


def _add_ui(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_command(subparsers, _ui, "serve MLflow's pages on what was tracked")
    parser.add_argument(
        "--store", default="", metavar="URI", help=f"what to show (default: {tracking.URI}, or else runs/mlflow.db)"
    )
    commands.add_with_default(parser, "--port", 5000, "", type=commands.positive, metavar="N")


def _ui(options: argparse.Namespace) -> None:
    """Serve MLflow's pages on what was tracked, until Ctrl-C, and print the address of the experiment that changed last."""
    from trainer.runner import local_run

    if options.store:
        os.environ[tracking.URI] = options.store
    local_run.track_here()
    newest, store = tracking.newest_experiment(), str(tracking.uri())
    # Without the workflow's type MLflow opens on the traces of language models.
    view = f"/#/experiments/{newest}/runs?workflowType=machine_learning" if newest else ""
    if store.startswith(("http://", "https://")):  # a server has its own pages, at an address that a browser takes
        print(f"{tracking.shown(store).rstrip('/')}{view}")
        return
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as MLflow's server does
        try:
            free.bind(("127.0.0.1", options.port))
        except (OSError, OverflowError) as error:
            raise SettingsError(f"--port {options.port}: cannot be used ({error}); give another one") from error
    print(f"http://127.0.0.1:{options.port}{view}", flush=True)
    script = str(Path(sys.executable).with_name("mlflow"))
    os.execv(script, [script, "ui", "--host", "127.0.0.1", "--port", str(options.port), "--backend-store-uri", store])
