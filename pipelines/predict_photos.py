"""Predict all photos of a folder or a bucket on a cluster, by a registered student: a pipeline of one task, or of several that share them.

  python -m pipelines.predict_photos --photos s3://BUCKET/photos --output s3://BUCKET/predictions
  python -m pipelines.predict_photos --photos ... --output ... --model models:/vit-student-digits/7 --pool cpu --nodes 16 --wait

The Parquet files are those of `vit-distill predict --output` (docs/serving.md). The version that an alias names is looked up
once. What an earlier run or attempt of it has written is kept, so a run that was stopped is continued by starting it again.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import kfp_server_api
import yaml
from kfp import dsl
from kfp.dsl.graph_component import GraphComponent

from components import kfp_components
from components.kfp_components import on_cluster, on_pool
from components.launch import IMAGE, pools
from components.launch.pools import Pool
from pipelines import compile as compilation
from pipelines import connection, runs
from pipelines.deploy_student import ALIAS, pinned
from pipelines.distillation import SERVICE_ACCOUNT
from trainer import config
from trainer.io import commands, storage
from trainer.io.errors import SettingsError
from trainer.report.tracking import REGISTERED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit code."""
    parser = commands.module_parser("pipelines.predict_photos", __doc__)
    parser.add_argument(
        "--photos", required=True, metavar="URI", help="folder of the photos, in a store that tasks can read"
    )
    parser.add_argument("--output", required=True, metavar="URI", help="folder of the predictions, in such a store")
    commands.add_recipe(parser)
    text = f"registered model, or URI of one or of an export (default: the recipe's, as in {_champion('digits')})"
    parser.add_argument("--model", help=text)
    parser.add_argument(
        "--top", type=commands.positive, default=5, metavar="N", help="labels a photo (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="ask a student that did not pass its gate, too")
    text = "node pool of processors whose resources, node selector and tolerations the task's pods get (default: those of any task)"
    parser.add_argument("--pool", default="", metavar="NAME", help=text)
    text = "pods that share the photos (default: %(default)s)"
    parser.add_argument("--nodes", type=commands.positive, default=1, metavar="N", help=text)
    parser.add_argument("--image", default="", help=f"of the task (default: {IMAGE})")
    parser.add_argument("--experiment", default="batch-prediction", help="of KFP (default: %(default)s)")
    parser.add_argument("--service-account", default=SERVICE_ACCOUNT, metavar="NAME", help="default: %(default)s")
    parser.add_argument("--wait", action="store_true", help="follow the run to its end")
    runs.add_wait(parser)
    connection.add_arguments(parser)
    options = parser.parse_args(arguments)
    options.model = options.model or _champion(options.recipe)
    return commands.exit_code(lambda: predict(options))


def _champion(recipe: str) -> str:
    return f"{REGISTERED}{config.student_name(recipe)}@{ALIAS}"


def predict(options: argparse.Namespace) -> None:
    """Start the run, and follow it where that is wanted."""
    for option in ("photos", "output", "model"):
        place = getattr(options, option)
        if not (storage.is_remote(place) or (option == "model" and place.startswith(REGISTERED))):
            raise SettingsError(
                f"--{option} {place}: a cluster's task cannot reach it; give a URI, such as s3://BUCKET/{option}"
            )
    pipeline = batch_prediction(pools.get(options.pool) if options.pool else None)
    text = compilation.for_cluster(compilation.yaml_of(pipeline), options.image or IMAGE)
    specification, platform = yaml.load_all(text, Loader=yaml.CSafeLoader)
    parameters = {name: getattr(options, name) for name in ("photos", "output", "model", "top", "force")}
    parameters["shares"] = [f"{number}/{options.nodes}" for number in range(options.nodes)]
    if options.model.startswith(REGISTERED):  # a retry must not take another version
        parameters["model"] = pinned(options.model, force=options.force)
    with connection.connect(options) as api:
        request: dict[str, Any] = {
            "experiment_id": runs.experiment(api, options.experiment),
            "pipeline_spec": {"pipeline_spec": specification, "platform_spec": platform},
            "runtime_config": kfp_server_api.V2beta1RuntimeConfig(parameters=parameters),
            "service_account": options.service_account,
        }
        run = runs.start(api, runs.name_of("predict"), request)
        if options.wait:
            runs.follow(api, run.run_id, compilation.task_names(text), hours=options.hours)


def batch_prediction(pool: Pool | None = None) -> GraphComponent:
    """Make the pipeline, for pods on a pool; a `SettingsError` for one of accelerators."""
    if pool and pool.device != "cpu":
        raise SettingsError(
            f'--pool {pool.name}: its accelerators would stand idle, since a student answers on processors; name a pool of device = "cpu"'
        )

    @dsl.pipeline(name="batch-prediction", display_name="Predict photos")
    def pipeline(photos: str, output: str, model: str, top: int, force: bool, shares: list[str]) -> None:
        """Predict the labels of all photos of a folder or a bucket, by a task for each of `shares`."""
        with dsl.ParallelFor(shares) as share:
            given = {"photos": photos, "output": output, "model": model, "top": top, "force": force}
            task = kfp_components.predict_photos(**given, share=share)
            if pool:
                on_pool(task, pool)
            else:
                on_cluster(task)

    made: GraphComponent = pipeline
    return made


if __name__ == "__main__":
    sys.exit(main())
