"""A whole run whose trainings are jobs on a cluster's node pool: `python -m components.pool_run RECIPE --pool NAME`.

Everything else runs on this machine, as in `python -m trainer run`. Data sets and models are exchanged with the jobs through
`TRAINER_ARTIFACTS`.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence

from components import launching
from components.launch import missing_extra
from components.launching import Placement
from trainer import config
from trainer.graph import JobSpec
from trainer.io import artifacts, commands, limits, storage
from trainer.io.errors import LaunchError, SettingsError
from trainer.io.host import environment_variables
from trainer.report import finished_run
from trainer.runner import local_run, preflight


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. A user's error ends in one message."""
    parser = commands.module_parser("components.pool_run", __doc__)
    commands.add_run(parser)
    commands.add_place(parser)
    commands.add_debug(parser)
    options = parser.parse_args(arguments)
    commands.set_up_logging(quiet=options.quiet)
    return commands.exit_code(lambda: _run(options), debug=options.debug, interrupted=commands.INTERRUPTED)


def _run(options: argparse.Namespace) -> None:
    if message := missing_extra("a run on a node pool"):
        raise LaunchError(message)
    place = Placement(pool=options.pool, nodes=options.nodes, processes_per_node=options.processes)
    settings = config.resolve_run(options.recipe, options.overrides)
    place.check(warms_up=settings.warm_up.enabled, notify=settings.run.notify)
    if not place.pool:
        raise SettingsError("--pool is empty; name a node pool (`python -m components.launch pools` lists them)")
    preflight.check_budgets(settings, place.machines())
    place.check_cache("pretrain", settings.pretrain, {})
    place.check_cache("distill", settings.distill, {})
    exchange = launching.exchange_folder()
    storage.children(exchange)  # a store that refuses, or does not answer, is reported before the work
    named = os.environ.get(artifacts.CHECKPOINTS_VARIABLE, "")
    checkpoints = named if storage.is_remote(named) else storage.join(exchange, "checkpoints")

    def start(spec: JobSpec, stop: threading.Event | None = None) -> None:
        job = "-".join(filter(None, [spec.stage, spec.part]))
        record = storage.join(storage.parent(next(iter(spec.outputs.values()))), "jobs", job)
        launching.launch(spec, place, record, stop=stop)

    with environment_variables({artifacts.CHECKPOINTS_VARIABLE: checkpoints}):
        result, page = local_run.run(
            options.recipe,
            options.overrides,
            output=options.output,
            processes=place.processes(settings.run.device),
            start=start,
            device=place.device(settings.run.device),
            place=place.machines(),
        )
    print(limits.printable(finished_run.table(result, page)))


if __name__ == "__main__":
    sys.exit(main())
