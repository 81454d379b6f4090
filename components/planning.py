"""The plan of a run on a node pool: `python -m components.planning RECIPE --images 11e6 --bytes 200e3 --pool gpu-a100 --nodes 4`.

`trainer.runner.plan` has the arithmetic; here pools and the pods of tasks become the room that it reckons with, and `configure` asks
whether a run can work before it starts.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace

from components.launch import pools
from components.launch.job_manifest import CACHE_FRACTION
from components.launch.pools import Pool
from components.launching import WORK, Placement, preparing
from trainer import config
from trainer.config import Settings
from trainer.data.sources import SourceState
from trainer.io import commands, limits
from trainer.io.costs import Machines
from trainer.io.errors import SettingsError
from trainer.runner import plan
from trainer.runner.plan import PEAK_FLOPS, Place, Room, SourceSize


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan and return the exit code: 0, or 2 where a stage cannot work."""
    parser = commands.module_parser("components.planning", __doc__)
    commands.add_recipe(parser, "recipe")
    commands.add_overrides(parser)
    parser.add_argument("--images", type=_count, required=True, metavar="N", help="photos of the source, such as 11e6")
    commands.add_with_default(parser, "--bytes", 150e3, "of a photo's file, in the mean", type=_count, metavar="N")
    commands.add_with_default(
        parser, "--labeled", 1.0, "share of them with a label", type=commands.fraction, metavar="X"
    )
    commands.add_place(parser, number=commands.positive)
    commands.add_preparing(parser)
    commands.add_with_default(parser, "--task-disk", WORK.disk, "disk of the nodes of the other stages", metavar="SIZE")
    commands.add_debug(parser)
    options = parser.parse_args(arguments)
    return commands.exit_code(lambda: _plan(options), debug=options.debug)


def _count(text: str) -> int:
    value = commands.number(text)
    if not 1 <= value <= 1e12:
        raise argparse.ArgumentTypeError(f"must be from 1 to 1e12, got {text}")
    return int(value)


def _plan(options: argparse.Namespace) -> None:
    settings = config.resolve(options.recipe, options.overrides)
    trainings = Placement(pool=options.pool, nodes=options.nodes, processes_per_node=options.processes or 0)
    where = _place(trainings, preparing(options.prepare_pool, options.prepare_nodes))
    try:
        where = replace(where, task=replace(where.task, disk=pools.quantity(options.task_disk)))
    except ValueError as error:
        raise SettingsError(f"--task-disk {error}") from error
    photos = SourceSize(images=options.images, file_bytes=options.bytes, labeled=options.labeled)
    plans = plan.plan(settings, photos, where)
    print(limits.printable("\n".join(plan.table(plans, where))))
    plan.check(plans)


def check(settings: Settings, source: SourceState, placement: Placement, preparing: Placement | None = None) -> None:
    """Raise a `SettingsError` where a run on a pool cannot work with what its source holds: the limit, the number, the way out."""
    if placement.pool and source.images:
        photos = SourceSize(images=source.images, file_bytes=source.bytes / source.images)
        place = _place(placement, preparing)
        if os.environ.get("KFP_POD_NAME"):  # other tasks' pods are on nodes like this one
            there = shutil.disk_usage(tempfile.gettempdir()).free
            place = replace(place, task=replace(place.task, disk=there))
        plan.check(plan.plan(settings, photos, place))


def _place(placement: Placement, preparing: Placement | None) -> Place:
    placement.check()
    if not placement.pool:
        raise SettingsError("--pool is empty; name a node pool (`python -m components.launch pools` lists them)")
    pool = pools.get(placement.pool)
    peak = PEAK_FLOPS.get(pool.instance.partition(".")[0], math.nan) if pool.accelerators else 0.0
    return Place(
        node=_room(pool),
        machines=pool.place(placement.nodes, placement.processes_per_node),
        peak_flops=peak,
        task=Room(
            cores=pools.quantity(WORK.cpu_limit),
            memory=pools.quantity(WORK.memory_limit),
            disk=pools.quantity(WORK.disk),
        ),
        preparing=_machines(preparing) if preparing else None,
    )


def _machines(placement: Placement) -> tuple[Room, Machines]:
    pool = pools.get(placement.pool)
    return _room(pool), pool.place(placement.nodes, placement.processes_per_node)


def _room(pool: Pool) -> Room:
    return Room(
        cores=pool.cpus,
        memory=pools.quantity(pool.resources["memory"]),
        disk=CACHE_FRACTION * pools.quantity(pool.cache),
        hours=pool.running_minutes / 60,
    )


if __name__ == "__main__":
    sys.exit(main())
