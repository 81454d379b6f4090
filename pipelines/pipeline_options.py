"""The pipeline's parameters as options of a command."""

from __future__ import annotations

import argparse

from components.launching import Placement
from trainer import commands


def add(options: commands.Options, *, files: bool, pool: str, processes: str) -> None:
    """Add an option for each parameter of the pipeline.

    Args:
        options: of a command.
        files: whether the recipe may be a file of this machine.
        pool: what it means to name none.
        processes: what it means to give no number of them.
    """
    commands.add_recipe(options, files=files)
    commands.add_overrides(options)
    options.add_argument("--dataset", default="", help="images, instead of the recipe's data.source")
    options.add_argument(
        "--teacher", default="", help="weights of the teacher, instead of the recipe's pretrain.weights"
    )
    options.add_argument(
        "--experiment",
        default="",
        help="of MLflow, and of KFP on a cluster, instead of the recipe's tracking.experiment",
    )
    commands.add_place(options, pool=pool, processes=processes)


def values(options: argparse.Namespace) -> dict[str, str]:
    """Return the values of those that `add` added, but for the place."""
    named = {name: getattr(options, name) for name in ("recipe", "dataset", "teacher", "experiment")}
    return {**named, "overrides": commands.as_text(options.overrides)}


def place(options: argparse.Namespace, *, default_pool: str = "") -> Placement:
    """Return where the trainings run; not checked."""
    return Placement(pool=options.pool or default_pool, nodes=options.nodes, processes_per_node=options.processes)
