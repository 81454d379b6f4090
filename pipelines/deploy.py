"""Upload the pipeline to Kubeflow Pipelines, and run it there now or on a schedule.

  python -m pipelines.deploy                                            upload a version; one of the same content is not repeated
  python -m pipelines.deploy --run --wait                               and run it; the exit code tells how the run ended
  python -m pipelines.deploy --run --recipe grocery --pool gpu-a100 --nodes 4 --set "distill.epochs=20"
  python -m pipelines.deploy --run --fresh                              make everything again, and take that from KFP's cache from now on
  python -m pipelines.deploy --cron "0 3 * * *"                         and run it every night at three, UTC

`python -m pipelines.undeploy` removes it, `python -m pipelines.runs` follows or stops a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from components import sections
from components.launch import IMAGE
from pipelines import compile as compilation
from pipelines import connection, runs, versions
from pipelines.distillation import SERVICE_ACCOUNT, add_parameters, given_parameters, given_place, given_preparing
from trainer.io import commands
from trainer.io.errors import SettingsError

MLFLOW_UI = "Open http://localhost:5000 after: kubectl --namespace kubeflow port-forward service/mlflow 5000"
"""The way to the MLflow that `manifests/install.sh` puts beside Kubeflow."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code. An error that the user can mend ends in one message."""
    parser = commands.module_parser("pipelines.deploy", __doc__)
    parser.add_argument("--image", default="", help=f"image of every task (default: {IMAGE})")
    start = parser.add_argument_group("running it")
    start.add_argument("--run", action="store_true", help="start a run now")
    start.add_argument(
        "--fresh",
        action="store_true",
        help="make everything again: what was made until now is taken from KFP's cache neither now nor later",
    )
    start.add_argument("--wait", action="store_true", help="follow that run to its end")
    runs.add_wait(start)
    start.add_argument(
        "--cron", default="", metavar="TEXT", help='a run at these times, "minute hour day month weekday" in UTC'
    )
    start.add_argument("--service-account", default=SERVICE_ACCOUNT, metavar="NAME", help="default: %(default)s")
    group = parser.add_argument_group("the pipeline's parameters")
    add_parameters(group)
    connection.add_arguments(parser)
    options = parser.parse_args(arguments)
    return commands.exit_code(lambda: deploy(options))


def deploy(options: argparse.Namespace) -> None:
    """Check everything that can be checked here, before anything is sent, then upload, schedule, run, wait."""
    for name, what in (("wait", "WAIT=1 follows a run"), ("fresh", "FRESH=1 is of a run")):
        if getattr(options, name) and not options.run:
            raise SettingsError(f"{what}; add RUN=1")
    if Path(options.recipe).suffix:
        raise SettingsError(
            f"recipe {options.recipe} is a file of this machine, which a cluster's tasks cannot read; "
            "put it into trainer/config/recipes and build an image with it, or give its settings with SET"
        )
    place, parameters = given_place(options), given_parameters(options)
    place.check()
    preparing = given_preparing(options)
    settings = sections.resolve(**parameters)
    cron = versions.cron_of(options.cron) if options.cron else ""
    starts = bool(options.run or cron)
    image = options.image or IMAGE
    text = compilation.for_cluster(compilation.committed_text(), image)
    with connection.connect(options) as api:
        version = versions.upload(api, versions.name_of(text), text)
        if "/" in options.image and "@" not in options.image:
            print(
                f"{image} is named by a tag, behind which another image may stand tomorrow; its digest names it for good: "
                f"IMAGE=$(docker image inspect --format '{{{{index .RepoDigests 0}}}}' {image})"
            )
        if not starts:
            return
        experiment = settings.tracking.experiment
        request = partial(runs.request, version, runs.experiment(api, experiment), options.service_account)
        given = {**parameters, **dataclasses.asdict(place), **preparing}
        if cron:
            versions.put_schedule(api, f"scheduled {options.recipe}", cron, request(given))
        if options.run:
            name = runs.name_of(options.recipe)
            described = f"In MLflow: run {name!r} of the experiment {experiment!r}. {MLFLOW_UI}"
            run = runs.start(api, name, request({**given, "fresh": options.fresh}), described)
            if options.wait:
                runs.follow(api, run.run_id, compilation.task_names(text), hours=options.hours)


if __name__ == "__main__":
    sys.exit(main())
