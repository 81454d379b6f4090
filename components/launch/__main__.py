"""The command line of the launcher for clusters: `python -m components.launch render | pools | reap`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

import yaml

from components.launch import missing_extra, pools
from components.launch.job_manifest import (
    BACKENDS,
    DEFAULT_NAMESPACE,
    Identity,
    backend_of,
    default_namespace,
)
from trainer import config
from trainer.graph import STAGES, JobSpec, Stage, flag
from trainer.io import commands
from trainer.io.errors import LaunchError, TrainerError
from trainer.io.formatting import aligned

_DESCRIPTION = """Show node pools and jobs, and delete jobs that were left over.

  python -m components.launch pools                                   the node pools
  python -m components.launch render --pool gpu-a100 --nodes 4        the job that a training there would be
  python -m components.launch reap --older-than 2d --dry-run          jobs that were left over on the cluster
  python -m components.launch reap --orphaned                         those whose task's pod has ended"""

LAUNCHED: Mapping[str, Stage] = {name: stage for name, stage in STAGES.items() if stage.launched or stage.shared}
DIRECTORIES = sorted({name for stage in LAUNCHED.values() for name in (*stage.all_inputs, *stage.outputs)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. A user's error ends in one message."""
    options = _parser().parse_args(arguments)
    return commands.exit_code(lambda: options.command(options))


def _parser() -> argparse.ArgumentParser:
    parser = commands.module_parser("components.launch", _DESCRIPTION)
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    render = subparsers.add_parser(
        "render",
        help="print the job that would be sent",
        description="Print the manifest of a training as it would be sent from here, with the image and the environment of this shell. "
        "Nothing is sent.",
    )
    commands.add_place(render, number=commands.positive)
    render.add_argument(
        "--backend",
        choices=[name for name, backend in BACKENDS.items() if not backend.independent],
        help="kind of a training's job (default: the pool's own)",
    )
    render.add_argument("--stage", choices=list(LAUNCHED), default="distill", help="default: %(default)s")
    commands.add_recipe(render)
    commands.add_overrides(render)
    render.add_argument("--run", default="example", metavar="NAME", help="name of the run (default: %(default)s)")
    render.add_argument("--namespace", default=DEFAULT_NAMESPACE, help="default: %(default)s")
    for name in DIRECTORIES:
        render.add_argument(f"--{flag(name)}", metavar="URI", help=f"default: s3://bucket/RUN/{name}")
    render.set_defaults(command=_render)
    text = "List the node pools: what a node is, how many processes train on it, and its price."
    subparsers.add_parser("pools", help="list the node pools", description=text).set_defaults(command=_pools)
    reap = subparsers.add_parser(
        "reap",
        help="delete jobs that were left over",
        description="Delete jobs of this project with their pods: ended ones by age, orphaned ones, or all of a run or namespace. Jobs of "
        "others are never touched. The cluster is the one of KUBECONFIG, the pod's own, or ~/.kube/config.",
    )
    scope = reap.add_mutually_exclusive_group(required=True)
    scope.add_argument("--run", type=_name, metavar="NAME", help="the jobs of one run, running ones too")
    scope.add_argument(
        "--older-than", metavar="AGE", help="jobs that have ended and were created longer ago than 30m, 2h, 7d"
    )
    scope.add_argument(
        "--orphaned",
        action="store_true",
        help="jobs that still run although the pod of their task ended more than two minutes ago; runs whose task `finish` did not "
        "complete are ended in MLflow; a CronJob runs this",
    )
    scope.add_argument("--all", action="store_true", help="all jobs of all runs, running ones too")
    reap.add_argument("--dry-run", action="store_true", help="only list what would be deleted")
    reap.add_argument("--namespace", default=default_namespace(), help="default: %(default)s")
    reap.set_defaults(command=_reap)
    return parser


def _name(text: str) -> str:
    if not text:  # a shell's variable that is not set must not mean every run
        raise argparse.ArgumentTypeError("is empty; name a run, or use --all")
    return text


def _render(options: argparse.Namespace) -> None:
    pool, stage = pools.get(options.pool), LAUNCHED[options.stage]
    settings = config.resolve(options.recipe, options.overrides)
    inputs = stage.all_inputs if settings.distill.reads_recording else stage.inputs
    uris = {name: getattr(options, name) or f"s3://bucket/{options.run}/{name}" for name in DIRECTORIES}
    spec = JobSpec(
        stage=stage.name,
        settings=settings.for_stage(stage.name),
        inputs={name: uris[name] for name in inputs},
        outputs={name: uris[name] for name in stage.outputs},
        nodes=options.nodes,
        processes_per_node=options.processes,
    )
    job = Identity(run=options.run, task=stage.name, namespace=options.namespace)
    if options.backend:
        pool = pool.model_copy(update={"backend": options.backend})
    manifest = backend_of(spec, pool).render(spec, pool, job)
    # The body that is sent: YAML would use anchors for objects that occur twice.
    plain = json.loads(json.dumps(manifest))
    print(yaml.safe_dump(plain, sort_keys=False, width=140), end="")


def _reap(options: argparse.Namespace) -> None:
    if message := missing_extra("reap", ["kubernetes"]):
        raise LaunchError(message)
    from components.launch import finishing, reaper
    from components.launch.client import Cluster

    least_s = 0.0 if options.older_than is None else reaper.parse_age(options.older_than)
    done = "would be deleted" if options.dry_run else "deleted"
    count = 0
    with Cluster.connect(options.namespace) as cluster:
        if options.orphaned and not options.dry_run:
            try:
                for run in finishing.end_left_runs(cluster):
                    print(f"ended in MLflow: the run {run}, whose task `finish` did not complete")
            except TrainerError as error:  # the jobs cost money and are deleted all the same
                print(f"warning: runs may be left open in MLflow: {error}", file=sys.stderr)
        found = reaper.find_orphaned(cluster) if options.orphaned else reaper.find(cluster, options.run or "")
        for job in (job for job in found if job.age_s >= least_s):
            if options.older_than is not None and not job.over:
                print(f"left, since it has not ended: {job}")
            elif options.dry_run or reaper.delete(cluster, job):
                print(f"{done}: {job}")
                count += 1
            else:
                print(f"skipped, since it was changed or deleted meanwhile: {job}")
    print(f"{count} of this project's jobs {done} in namespace {options.namespace}")


def _pools(_options: argparse.Namespace) -> None:
    rows = [("pool", "instance", "devices", "processes", "$/h", "price of"), *map(_row, pools.load().values())]
    print("\n".join(aligned(rows)))


def _row(pool: pools.Pool) -> tuple[str, ...]:
    devices = f"{pool.accelerators} {pool.device}" if pool.accelerators else f"{pool.resources['cpu']} cores"
    price = ("varies", "") if pool.spot else ("", "")
    if pool.price:
        old = "; look it up again" if pool.price.doubt() else ""
        origin = f"{pool.price.date} ({pool.price.age_days()} days old{old}), {pool.price.region}"
        price = (f"{pool.price.dollars_an_hour:.2f}", origin)
    return (pool.name, pool.instance or "any", devices, str(pool.processes_per_node), *price)


if __name__ == "__main__":
    sys.exit(main())
