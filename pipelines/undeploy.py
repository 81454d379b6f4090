"""Remove from Kubeflow Pipelines what `python -m pipelines.deploy` put there; runs and what they made stay.

  python -m pipelines.undeploy                          the versions of this content and their schedules
  python -m pipelines.undeploy --version 0.2.0-0123456789ab
  python -m pipelines.undeploy --all                    the pipeline with all its versions and schedules

What is not there needs no removing, and is no error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from components.launch import IMAGE
from pipelines import compile as compilation
from pipelines import connection, versions
from pipelines.connection import Api
from pipelines.distillation import NAME
from trainer.io import commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    parser = commands.module_parser("pipelines.undeploy", __doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--version", default="", metavar="NAME", help="a version by its name")
    what.add_argument("--all", action="store_true", help="the pipeline with all its versions")
    parser.add_argument("--image", default="", help=f"image that this content was deployed with (default: {IMAGE})")
    connection.add_arguments(parser)
    options = parser.parse_args(arguments)
    return commands.exit_code(lambda: undeploy(options))


def undeploy(options: argparse.Namespace) -> None:
    """Remove a version, or all, and say what was removed; what is not there needs no removing."""
    wanted = options.version
    if not (options.all or wanted):
        wanted = versions.name_of(compilation.for_cluster(compilation.committed_text(), options.image or IMAGE))
    with connection.connect(options) as api:
        pipeline = versions.pipeline(api)
        if pipeline is None:
            print(f"pipeline {NAME} is not there; nothing to remove")
        elif options.all:
            for schedule in versions.schedules(api, pipeline.pipeline_id):  # also of versions that are gone
                versions.remove_schedule(api, schedule)
            _remove(api, pipeline.pipeline_id, versions.versions(api, pipeline.pipeline_id))
            api.pipelines.pipeline_service_delete_pipeline(pipeline.pipeline_id)
            print(f"removed: pipeline {NAME}")
        else:
            there = versions.versions(api, pipeline.pipeline_id)
            _remove(api, pipeline.pipeline_id, {wanted: there[wanted]} if wanted in there else {})
            if wanted not in there:
                others = ", ".join(there) or "no version"
                print(f"version {wanted} is not there; nothing to remove; there: {others}")
                schedules = versions.schedules(api, pipeline.pipeline_id)
                if still := [one for one in schedules if one.status == "ENABLED"]:
                    names = ", ".join(repr(one.display_name) for one in still)
                    print(
                        f"warning: these schedules still start runs: {names}; IMAGE=, VERSION= or ALL=1 chooses what is removed"
                    )


def _remove(api: Api, pipeline_id: str, doomed: Mapping[str, Any]) -> None:
    """Remove these versions, and before them the schedules that start them."""
    ids = {version.pipeline_version_id for version in doomed.values()}
    for schedule in versions.schedules(api, pipeline_id):
        if schedule.pipeline_version_reference.pipeline_version_id in ids:
            versions.remove_schedule(api, schedule)
    for name, version in doomed.items():
        api.pipelines.pipeline_service_delete_pipeline_version(pipeline_id, version.pipeline_version_id)
        print(f"removed: version {name}")


if __name__ == "__main__":
    sys.exit(main())
