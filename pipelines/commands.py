"""What the commands share: the options for the pipeline's parameters, and how a command ends."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable

from components.launching import Placement
from trainer.errors import EXIT_CODE, INTERRUPTED_EXIT_CODE, TrainerError
from trainer.signals import ended_by_sigterm


def exit_code(command: Callable[[], object], *, debug: bool = False, interrupted: str = "interrupted") -> int:
    """Run a command; an error that the user can mend ends in one message.

    Args:
        command: what is to be done.
        debug: whether to show the traceback of such an error.
        interrupted: what to say after Ctrl-C or SIGTERM.
    """
    try:
        with ended_by_sigterm():
            command()
    except TrainerError as error:
        sys.stdout.flush()
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    return 0


def add_recipe(
    parser: argparse._ActionsContainer,
    *,
    recipe: str = "a name or the path of a TOML file",
    dataset: str = "images, instead of the recipe's data.source",
) -> None:
    """Add the options for what is to be run.

    Args:
        parser: of the command.
        recipe: what the command takes as --recipe.
        dataset: what the option --dataset means.
    """
    parser.add_argument("--recipe", default="digits", help=f"{recipe} (default: %(default)s)")
    parser.add_argument(
        "--set",
        dest="overrides",
        default="",
        metavar="TEXT",
        help="settings that differ from the recipe, key=value key=value; docs/configuration.md lists them",
    )
    parser.add_argument("--dataset", default="", help=dataset)


def add_models(parser: argparse._ActionsContainer) -> None:
    """Add the options for the teacher and for where the run is tracked."""
    parser.add_argument(
        "--teacher", default="", help="weights of the teacher, instead of the recipe's pretrain.weights"
    )
    parser.add_argument(
        "--experiment", default="", help="MLflow experiment, instead of the recipe's tracking.experiment"
    )


def add_place(parser: argparse._ActionsContainer, *, pool: str, processes: str = "the pool's own") -> None:
    """Add the options for where the trainings run.

    Args:
        parser: of the command.
        pool: what is meant without --pool; empty where one has to be named.
        processes: what is meant without --processes.
    """
    parser.add_argument(
        "--pool",
        default="",
        required=not pool,
        help="node pool of the trainings, from the file TRAINER_POOLS or ours"
        + (f" (default: {pool})" if pool else ""),
    )
    parser.add_argument("--nodes", type=int, default=1, help="machines of the pool (default: %(default)s)")
    parser.add_argument(
        "--processes", type=int, default=0, help=f"training processes on each machine (default: {processes})"
    )


def texts(options: argparse.Namespace) -> dict[str, str]:
    """The pipeline's parameters that `add_recipe` and `add_models` give, by their names."""
    names = ("recipe", "overrides", "dataset", "teacher", "experiment")
    return {name: getattr(options, name) for name in names}


def placement(options: argparse.Namespace, default_pool: str = "") -> Placement:
    """Where the trainings run, as `add_place` gives it."""
    return Placement(pool=options.pool or default_pool, nodes=options.nodes, processes_per_node=options.processes)
