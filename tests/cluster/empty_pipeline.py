"""Measures what Kubeflow Pipelines itself takes for a run: our graph, with tasks that do nothing, run once and then from the cache.

    python -m tests.cluster.empty_pipeline [--image vit-distillation:0.2.0]

The graph has the tasks of a run, in the same order and the same exit handler, and the same ones are cached.
What a run of the real pipeline takes beyond this is the work of its tasks, and the start of their Python.
"""

import argparse
import secrets
import sys

import kfp_server_api
import yaml
from kfp import dsl

from components.launch import IMAGE
from pipelines import connection, runs
from pipelines.compile import with_image, yaml_of
from trainer.graph import STAGES
from trainer.io import commands


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def nothing(text: str) -> str:
    return text


@dsl.pipeline(name="empty")
def empty(text: str) -> None:
    """Run a task that does nothing for each stage, each after those that it reads from."""
    with dsl.ExitHandler(nothing(text=text).set_caching_options(False).set_display_name("finish"), name="Distillation"):
        configuring = nothing(text=text).set_caching_options(False).set_display_name("configure")
        made: dict[str, dsl.PipelineTask] = {}
        for name, stage in STAGES.items():
            read = {*stage.reads, *stage.reads_if_made}
            decides = {"reinforce": "tune", "search": "tune", "distill": "search"}  # what a stage takes settings from
            waits = {*stage.after, decides.get(name)}
            before = [task for other, task in made.items() if other in waits or {*STAGES[other].makes.values()} & read]
            *_, last = [configuring, *before]
            task = nothing(text=last.output).after(*before)
            made[name] = task.set_caching_options(stage.cached).set_display_name(name)


def main() -> int:
    """Run it twice and print how long each run took; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default=IMAGE, help="of every task (default: %(default)s)")
    connection.add_arguments(parser)
    options = parser.parse_args()
    return commands.exit_code(lambda: measure(options))


def measure(options: argparse.Namespace) -> None:
    """Run it twice and print how long each run took."""
    specification = yaml.safe_load(with_image(yaml_of(empty), options.image))
    text = secrets.token_hex(4)  # no earlier run has it in KFP's cache
    with connection.connect(options) as api:
        for what in ("first", "cached"):
            run = api.runs.run_service_create_run(
                kfp_server_api.V2beta1Run(
                    display_name=f"empty, {what}",
                    experiment_id=runs.experiment(api, "empty"),
                    pipeline_spec=specification,
                    runtime_config=kfp_server_api.V2beta1RuntimeConfig(parameters={"text": text}),
                )
            )
            runs.follow(api, run.run_id, (), hours=1)
            ended = api.runs.run_service_get_run(run.run_id)
            print(f"{what}: {(ended.finished_at - ended.created_at).total_seconds():.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
