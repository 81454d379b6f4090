"""The stages: one short module each, with `run(settings, *, inputs..., outputs...)`.

This table and `call` are what the command line, the launcher and the pipeline know of them; neither imports torch before a
stage is called.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainer import config
from trainer.artifacts import Kind
from trainer.sections import Section


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage reads and writes."""

    name: str
    settings: type[Section]
    inputs: Mapping[str, Kind]
    """Keyword of each input directory -> kind of artifact."""
    outputs: Mapping[str, Kind]
    """Keyword of each output directory -> kind of artifact."""
    optional_inputs: Mapping[str, Kind] = field(default_factory=dict)
    """Keyword of each input directory that it can do without -> kind of artifact."""
    launched: bool = False
    """Whether it runs as a group of training processes, started by a launcher."""
    summary: str
    """What it does, in one line."""

    @property
    def all_inputs(self) -> dict[str, Kind]:
        """Keyword of each input directory, the optional ones too -> kind of artifact."""
        return {**self.inputs, **self.optional_inputs}


STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            name="prepare",
            settings=config.DataSettings,
            inputs={},
            outputs={"dataset": "dataset"},
            summary="validate, deduplicate, resize, split and describe the images",
        ),
        Stage(
            name="warm_up",
            settings=config.WarmUpSettings,
            inputs={"dataset": "dataset"},
            outputs={"warmed": "warm_up"},
            launched=True,
            summary="compile beforehand: the first steps of each training, thrown away",
        ),
        Stage(
            name="pretrain",
            settings=config.PretrainSettings,
            inputs={"dataset": "dataset"},
            outputs={"teacher": "model", "evidence": "evidence"},
            launched=True,
            summary="make the teacher: masked-autoencoder pretraining, then fine-tuning",
        ),
        Stage(
            name="tune",
            settings=config.TuneSettings,
            inputs={"dataset": "dataset", "teacher": "model"},
            optional_inputs={"teacher_outputs": "teacher_outputs"},
            outputs={"tuning": "tuning"},
            launched=True,
            summary="try the distillation where it will run: better settings, and a forecast of hours and dollars",
        ),
        Stage(
            name="reinforce",
            settings=config.ReinforceSettings,
            inputs={"dataset": "dataset", "teacher": "model"},
            outputs={"teacher_outputs": "teacher_outputs"},
            launched=True,
            summary="record the teacher's outputs on augmented views of the training images",
        ),
        Stage(
            name="distill",
            settings=config.DistillSettings,
            inputs={"dataset": "dataset", "teacher": "model"},
            optional_inputs={"teacher_outputs": "teacher_outputs"},
            outputs={"student": "model", "evidence": "evidence"},
            launched=True,
            summary="train the student on the teacher's logits and the labels",
        ),
        Stage(
            name="profile",
            settings=config.ProfileSettings,
            inputs={"pretrain_evidence": "evidence", "distill_evidence": "evidence"},
            outputs={"report": "report"},
            summary="report where the trainings' time went, what slows or spoils them, and what they cost",
        ),
        Stage(
            name="evaluate",
            settings=config.EvaluateSettings,
            inputs={"dataset": "dataset", "teacher": "model", "student": "model"},
            outputs={"evaluation": "evaluation"},
            summary="measure teacher and student on the test split and judge the student",
        ),
        Stage(
            name="register",
            settings=config.RegisterSettings,
            inputs={
                "dataset": "dataset",
                "teacher": "model",
                "student": "model",
                "pretrain_evidence": "evidence",
                "distill_evidence": "evidence",
                "report": "report",
                "evaluation": "evaluation",
            },
            optional_inputs={"teacher_outputs": "teacher_outputs", "tuning": "tuning", "warmed": "warm_up"},
            outputs={"registration": "registration"},
            summary="log the student to MLflow, register it, and promote it if it passed",
        ),
    )
}


def call(stage: str, settings_json: str, directories: Mapping[str, str], **further: object) -> None:
    """Run a stage in this process.

    Args:
        stage: a key of `STAGES`.
        settings_json: its section of the settings, as a JSON object.
        directories: keyword of each input and output -> its directory.
        further: what only this stage takes, such as register's `recipe` and `resolved`.

    Raises:
        TrainerError: a setting or an input is wrong, or the stage failed in a way that it explains.
    """
    section = config.validate(STAGES[stage].settings, json.loads(settings_json), prefix=config.SECTION_OF_STAGE[stage])
    importlib.import_module(f"trainer.stages.{stage}").run(section, **directories, **further)
