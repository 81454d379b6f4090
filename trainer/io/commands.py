"""What the command lines share: options that more than one of them has, each declared once, and how a command ends.

They are argparse's. cyclopts and typer would let `python -m trainer --help` take a third and four fifths longer, and the options of the
stages come from a table, not from signatures.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from trainer.graph import Share
from trainer.io import limits
from trainer.io.errors import EXIT_CODE, INTERRUPTED_EXIT_CODE, TrainerError
from trainer.io.host import ended_by_sigterm, ensure_home, escape_what_cannot_be_printed
from trainer.io.local_files import with_home

INTERRUPTED = "interrupted; what was written is kept, and the same command continues from there"

QUIET = "TRAINER_QUIET"
"""Environment variable by which a run with `--quiet` keeps its processes to warnings."""
DEBUG = "TRAINER_DEBUG"
"""Environment variable that does what `--debug` does, for tasks and jobs."""

Subparsers = argparse._SubParsersAction  # argparse has no public name for it
Options = argparse._ActionsContainer  # nor for what a parser and a group of options have in common


class CommandParser(argparse.ArgumentParser):
    """A parser that puts the home directory in the place of `~` where no shell does so, as in `--output=~/runs`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does."""
        words = sys.argv[1:] if args is None else args
        words = [_HOME.sub(lambda found: (found[1] or "") + with_home(found[2]), word) for word in words]
        return super().parse_known_args(words, namespace)


_HOME = re.compile(r"^(--[\w-]+=)?(~[^/]*)(?=/|$)")


def module_parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """Make the parser of `python -m MODULE`; its help shows the text as it is."""
    return CommandParser(
        prog=f"python -m {module}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def number(text: str) -> float:
    """Read a number for argparse, such as 11e6."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from error


def positive(text: str) -> int:
    """Read a whole number for argparse, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Read a time for argparse, from 0 to a day."""
    value = number(text)
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"must be from 0 to 86400, got {text}")
    return value


def fraction(text: str) -> float:
    """Read a number for argparse, above 0 and up to 1."""
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and up to 1, got {text}")
    return value


def share(text: str) -> Share:
    """Read a share for argparse, such as 0/4, the first of four."""
    first, _, of = text.partition("/")
    if not (first.isdecimal() and of.isdecimal() and int(first) < int(of)):
        raise argparse.ArgumentTypeError(f"must be K/N with K from 0 to N - 1, such as 0/4, got {text!r}")
    return Share(int(first), int(of))


def add_with_default(options: Options, name: str, default: object, text: str, **further: Any) -> None:
    """Add an option whose help ends with its default."""
    options.add_argument(name, default=default, help=f"{text} (default: %(default)s)".lstrip(), **further)


def add_recipe(
    options: Options, name: str = "--recipe", *, default: str = "digits", files: bool = True, **further: Any
) -> None:
    """Add the recipe: the option `--recipe`, or the argument `recipe`; `files` says whether it may be a file of this machine."""
    text = "a name (`python -m trainer recipes`)" + (" or the path of a TOML file" if files else "")
    shown = f" (default: {default or 'the defaults alone'})" if name.startswith("-") or further else ""
    options.add_argument(name, default=default, help=text + shown, **further)


def add_overrides(options: Options) -> None:
    """Add the settings that differ from the recipe's: `options.overrides`, a list of texts."""
    text = "change settings, such as distill.logit.temperature=2 (`python -m trainer config RECIPE` lists them)"
    form: dict[str, Any] = {"action": "extend", "nargs": "+", "metavar": "KEY=VALUE"}
    options.add_argument("--set", dest="overrides", default=[], help=text, **form)


def add_search(options: Options, *, quoted: bool = False) -> None:
    """Add `--search` with the settings that a search tries; it extends `options.overrides`, `quoted` where these are `as_text`'s."""

    def space(text: str) -> list[str]:
        return [shlex.quote(one) for one in _space(text)] if quoted else _space(text)

    options.add_argument(
        "--search",
        dest="overrides",
        type=space,
        action="extend",
        nargs="?",
        const=space(""),
        metavar="SPACE",
        help="search for better settings of the distillation first, such as 'distill.drop_path=uniform(0,0.2)'; auto, or nothing: around "
        "the recipe's own (docs/search.md)",
    )


def _space(text: str) -> list[str]:
    """Return the overrides for a search in a space such as `distill.drop_path=uniform(0,0.2) distill.logit.loss=choice(kl,dist)`."""
    space = [word.partition("=") for word in _words(text)] if text.strip() != "auto" else []
    if wrong := next((name for name, equals, _ in space if not equals), None):
        raise argparse.ArgumentTypeError(f"{wrong!r} is not SETTING=VALUES, such as distill.drop_path=uniform(0,0.2)")
    if not space:
        return ["search.enabled=true"]
    values = ",".join(f"{json.dumps(name)}={json.dumps(values)}" for name, _, values in space)
    return ["search.enabled=true", f"search.space={{{values}}}"]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; close the quotation") from error


def add_run(options: Options) -> None:
    """Add the options of a whole run, but for the place of its trainings."""
    add_recipe(options, "recipe")
    add_overrides(options)
    text = "the same in one text, quoted as in a shell, as `make run` and a pipeline's parameter have it"
    options.add_argument("--overrides", type=_words, action="extend", metavar="TEXT", help=text)
    options.add_argument("--output", metavar="DIR", help="where to write (default: runs/<time>-<recipe>)")
    add_search(options)
    options.add_argument("--quiet", action="store_true", help="print warnings and the result alone")
    text = "take nothing from earlier runs beside the output, as run.reuse=false"
    options.add_argument("--fresh", dest="overrides", action="append_const", const="run.reuse=false", help=text)


def add_processes(
    options: Options, *, where: str = "", default: str = "one for each GPU, or else one", number: Callable[[str], int]
) -> None:
    """Add how many processes train (`where`, as in ` on each machine`); 0 where it is not given, which means the default."""
    text = f"how many processes train{where} (default: {default})"
    options.add_argument("--processes", type=number, default=0, metavar="N", help=text)


def add_place(
    options: Options, *, pool: str | None = None, processes: str = "the pool's own", number: Callable[[str], int] = int
) -> None:
    """Add where the trainings run: a node pool, its nodes, and the processes on each.

    `pool` says what it means to name none, and is None where one has to be named; `processes` says what it means to give no number of them.
    """
    text = "node pool of the trainings, from the file TRAINER_POOLS or ours (`python -m components.launch pools` lists them)"
    text += f" (default: {pool})" if pool else ""
    options.add_argument("--pool", required=pool is None, default="", metavar="NAME", help=text)
    add_with_default(options, "--nodes", 1, "machines of the pool", type=number, metavar="N")
    add_processes(options, where=" on each machine", default=processes, number=number)


def add_preparing(options: Options) -> None:
    """Add where the images are prepared."""
    text = "node pool that prepares the images, where they are too many for a task's pod (default: that pod)"
    options.add_argument("--prepare-pool", default="", metavar="NAME", help=text)
    add_with_default(
        options, "--prepare-nodes", 1, "machines of that pool, which share the decoding", type=positive, metavar="N"
    )


def add_debug(options: Options, *, default: Any = None) -> None:
    """Add the option that shows tracebacks; below another command that has it `default` is `argparse.SUPPRESS`, to keep what was given."""
    if default is None:
        default = bool(os.environ.get(DEBUG))
    options.add_argument("--debug", action="store_true", default=default, help="show the traceback of an error")


def add_command(
    subparsers: Subparsers[argparse.ArgumentParser], command: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    """Add a command, named as its function, whose docstring describes it; `text` stands in the list of commands."""
    described = " ".join((command.__doc__ or "").split())
    parser = subparsers.add_parser(command.__name__.strip("_"), help=text, description=described)
    add_debug(parser, default=argparse.SUPPRESS)
    parser.set_defaults(command=command)
    return parser


def as_text(overrides: Iterable[str]) -> str:
    """Overrides as one text, as the pipeline's parameter has them; each may hold several."""
    return " ".join(overrides)


def exit_code(command: Callable[[], object], *, debug: bool = False, interrupted: str = "interrupted") -> int:
    """Run a command; an error that the user can mend ends in one message, with a traceback if `debug`."""
    escape_what_cannot_be_printed()
    try:
        with ended_by_sigterm():
            ensure_home()
            command()
    except TrainerError as error:
        sys.stdout.flush()
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    except BrokenPipeError:
        discard_output()
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    return 0


class TerminalFormatter(limits.PrintableFormatter):
    """Wraps long lines to the terminal's width, and colors: times gray, warnings yellow."""

    def format(self, record: logging.LogRecord) -> str:
        line = textwrap.fill(
            super().format(record), max(40, shutil.get_terminal_size().columns), subsequent_indent=" " * 10
        )
        time, rest = line[:8], line[8:]
        if "NO_COLOR" in os.environ:
            return line
        return f"{_GRAY}{time}{_PLAIN}{_YELLOW + rest + _PLAIN if record.levelno >= logging.WARNING else rest}"


_GRAY, _YELLOW, _PLAIN = "\x1b[90m", "\x1b[33m", "\x1b[0m"


def set_up_logging(*, quiet: bool = False) -> None:
    """Print the log with times, without the chatter of libraries; `quiet` keeps to warnings."""
    handler = logging.StreamHandler()
    formatter = TerminalFormatter if sys.stderr.isatty() else limits.PrintableFormatter
    handler.setFormatter(formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING if quiet else logging.INFO, handlers=[handler], force=True)
    hub_and_stores = ("httpx", "urllib3", "fsspec", "aiobotocore", "datasets")
    for name in (*hub_and_stores, "alembic", "mlflow", "matplotlib", "onnx_ir", "onnxscript"):
        logging.getLogger(name).setLevel(logging.WARNING)


def discard_output() -> None:
    """Send further output nowhere: its reader, such as `head`, is gone, and flushing it would fail when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
