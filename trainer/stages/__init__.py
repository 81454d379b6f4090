"""The stages: one short module each, with `run(settings, *, inputs..., outputs...)`.

`settings` is the stage's section; inputs and outputs are the artifacts that `trainer.graph` names, each the URI or path of its directory.
`run` raises the `TrainerError` of whatever it calls; its docstring says what it refuses by itself.

`call` is how the command line, the launcher and the pipeline run one; it imports no torch before the stage is known.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping

from trainer import config
from trainer.graph import STAGES, Stage
from trainer.io import artifacts

__all__ = ["STAGES", "Stage", "call"]


def call(stage: str, settings_json: str, directories: Mapping[str, str], **further: object) -> None:
    """Run a stage in this process; an `ArtifactError` if its inputs do not belong together, an `OutputError` if an output is not its own.

    Args:
        stage: a key of `STAGES`.
        settings_json: its section of the settings, as a JSON object.
        directories: keyword of each input and output -> its directory.
        further: arguments of this stage alone, such as register's `recipe` and `resolved`.
    """
    section = config.validate_section(STAGES[stage].section, json.loads(settings_json))
    if len(inputs := STAGES[stage].all_inputs) > 1:
        artifacts.check_related(directories, inputs)
    outputs = {name: uri for name, uri in directories.items() if name in STAGES[stage].outputs}
    artifacts.check_outputs(outputs, {name: uri for name, uri in directories.items() if name in inputs})
    importlib.import_module(f"trainer.stages.{stage}").run(section, **directories, **further)
