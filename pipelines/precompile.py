"""Compile beforehand what a recipe's trainings need on a node pool, ahead of any run.

  python -m pipelines.precompile --pool neuron-trn1 --recipe grocery
  python -m pipelines.precompile --pool neuron-trn1-16 --nodes 4 --dataset s3://BUCKET/prepared

From this machine, as `make run POOL=...`: the images are prepared here, and the stage warm_up runs as a job on the pool. The trainings
find the graphs if recipe, settings, pool, nodes and processes are the same, and the image of the job too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from components import launching, task
from components.launching import Placement
from trainer import config, stages
from trainer.graph import JobSpec
from trainer.io import commands, storage
from trainer.io.errors import make_directory
from trainer.runner import local_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code. An error that the user can mend ends in one message."""
    parser = commands.module_parser("pipelines.precompile", __doc__)
    commands.add_place(parser)
    commands.add_recipe(parser)
    commands.add_overrides(parser)
    parser.add_argument(
        "--dataset", default="", metavar="URI", help="a prepared data set (default: the recipe's images, prepared here)"
    )
    options = parser.parse_args(arguments)
    task.log_plainly()
    return commands.exit_code(lambda: warm_up(options))


def warm_up(options: argparse.Namespace) -> None:
    """Run the stage warm_up as a job, after checking that it can work, and leave its report and the job's record below `runs`."""
    overrides = commands.as_text([*options.overrides, "warm_up.enabled=true"])
    settings = config.resolve_run(options.recipe, overrides, is_prepared=bool(options.dataset))
    place = Placement(pool=options.pool, nodes=options.nodes, processes_per_node=options.processes)
    place.check(warms_up=True)
    storage.children(launching.exchange_folder())  # a store that refuses, or is not there, is reported before the work
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{Path(options.recipe).stem}-warm-up"
    directory = local_run.RUNS / name  # no run, so runs/latest stays where it is
    make_directory(directory)
    os.environ.setdefault("TRAINER_RUN", name)
    dataset = options.dataset
    if not dataset:
        dataset = str(directory / "dataset")
        stages.call("prepare", json.dumps(settings.for_stage("prepare")), {"dataset": dataset})
    warmed = str(directory / "warmed")
    spec = JobSpec(
        stage="warm_up", settings=settings.for_stage("warm_up"), inputs={"dataset": dataset}, outputs={"warmed": warmed}
    )
    launching.launch(spec, place, record=str(directory / "job"))
    print(f"what was compiled: {warmed}")


if __name__ == "__main__":
    sys.exit(main())
