"""Write `pipelines/compiled/distillation.yaml`, or check that it is fresh: `python -m pipelines.compile [--check]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler
from kfp.dsl.graph_component import GraphComponent

from components.launch import IMAGE_VARIABLE
from pipelines.distillation import NAME, distillation
from trainer.io import commands
from trainer.io.errors import DeployError

COMPILED = Path(__file__).parent / "compiled" / f"{NAME}.yaml"


def compiled_text() -> str:
    """Compile the pipeline to KFP's YAML."""
    return yaml_of(distillation)


def yaml_of(pipeline: GraphComponent) -> str:
    """Compile any pipeline to KFP's YAML, without the descriptions of its tasks' parameters: a run's Workflow has two to six of each."""
    for component in pipeline.pipeline_spec.components.values():
        for values in (component.input_definitions, component.output_definitions):
            for one in (*values.parameters.values(), *values.artifacts.values()):
                one.ClearField("description")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{NAME}.yaml"
        compiler.Compiler().compile(pipeline, str(path))
        return path.read_text(encoding="utf-8")


def committed_text() -> str:
    """Return the compiled pipeline as it is committed; a `DeployError` if the definition says something else now."""
    text = compiled_text()
    if not COMPILED.is_file() or COMPILED.read_text(encoding="utf-8") != text:
        raise DeployError(
            f"{COMPILED} is not what pipelines/distillation.py compiles to; run `make compile` and commit it"
        )
    return text


def for_cluster(text: str, image: str) -> str:
    """Put every task of a compiled pipeline on an image, which the tasks find in `TRAINER_IMAGE` for their jobs."""
    return with_image(text, image, env=[{"name": IMAGE_VARIABLE, "value": image}])


def with_image(text: str, image: str, **container: Any) -> str:
    """Put every task of a compiled pipeline on another image, and whatever else of its container is given."""
    specification, *platforms = yaml.load_all(text, Loader=yaml.CSafeLoader)
    for executor in specification["deploymentSpec"]["executors"].values():
        executor["container"] |= {"image": image, **container}
    return yaml.safe_dump_all([specification, *platforms], sort_keys=False)


def task_names(text: str) -> set[str]:
    """List the tasks of a compiled pipeline, also those inside groups, without the groups themselves."""
    specification = next(iter(yaml.load_all(text, Loader=yaml.CSafeLoader)))
    # No component of ours is used twice, so a task's executor has its name.
    return {name.removeprefix("exec-") for name in specification["deploymentSpec"]["executors"]}


def main(arguments: list[str] | None = None) -> int:
    """Write the file, or with `--check` compare it; returns the exit code."""
    parser = commands.module_parser("pipelines.compile", __doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the file is not what would be written"
    )
    if not parser.parse_args(arguments).check:
        COMPILED.parent.mkdir(exist_ok=True)
        COMPILED.write_text(compiled_text(), encoding="utf-8")
        return 0
    try:
        committed_text()
    except DeployError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
