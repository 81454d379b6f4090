"""The graph of stages: what each one reads and makes, where it runs, and when it is needed. Every stage is declared here, once.

From here follow the plan of a run on this machine, the kinds of artifacts, the sections of the settings, the bill, the command line, the
tasks of the pipeline, and docs/stages.md. The module stands beside the package `stages` and not in it, because it imports nothing of ours:
what is below the stages reads it too, such as `artifacts` and `config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

Kind = Literal[
    "dataset",
    "warm_up",
    "model",
    "teacher_outputs",
    "tuning",
    "search",
    "evidence",
    "report",
    "evaluation",
    "registration",
    "checkpoint",
    "export",
]
"""What an artifact holds; no stage hands checkpoints to another."""

SCHEMA_VERSIONS: Mapping[Kind, int] = dict.fromkeys(get_args(Kind), 1) | {
    "teacher_outputs": 2,
    "evidence": 3,
    "report": 2,
    "checkpoint": 2,
    "evaluation": 2,
}
"""The version of each kind's content, 1 if nothing else is said; a reader refuses any other."""

# What the name of weights that no stage made begins with, in the setting `weights` or `architecture`:
TIMM = "timm:"  # pretrained weights of timm
TRANSFORMERS = "transformers:"  # a model of the Transformers library
MODULE = "module:"  # a function that returns a network
PACKAGE = "package:"  # weights from an installed Python package


@dataclass(frozen=True, kw_only=True)
class ArtifactSpec:
    """An artifact of a run."""

    name: str
    """As the stages that read it call it."""
    kind: Kind
    folder: str = ""
    """Its folder in a local run; by default its name, with hyphens."""
    task_folder: str = ""
    """Its folder in a task of the pipeline; by default the keyword of the stage's output. A page for Kubeflow's UI may have that name."""

    def __post_init__(self) -> None:
        if not self.folder:
            object.__setattr__(self, "folder", self.name.replace("_", "-"))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage reads and makes, where it runs, and when it is needed."""

    name: str
    """Also of its module in `trainer/stages`, and of its component."""
    summary: str
    """What it does, in one line."""
    title: str
    """What Kubeflow's UI calls it."""
    section: str = ""
    """The section of `Settings` that it reads; by default the one of its name."""
    reads: tuple[ArtifactSpec, ...] = ()
    reads_if_made: tuple[ArtifactSpec, ...] = ()
    """What it can do without."""
    makes: Mapping[str, ArtifactSpec] = field(default_factory=dict)
    """Keyword of each output -> the artifact. By the first one the stage is billed."""
    pages: Mapping[str, str] = field(default_factory=dict)
    """Name of a page in Kubeflow's UI -> its file in the first output."""
    takes_recipe: bool = False
    """Whether it is also given the name of the recipe and all resolved settings of the run."""
    launched: bool = False
    """Whether it runs as a group of training processes: on a cluster as a job on the node pool, not in its task's own pod."""
    launches: bool = False
    """Whether it launches trainings itself, wherever those of a run train."""
    shared: bool = False
    """Whether further machines can take a `Share` of its work: on a cluster then as a job of its own, if a pool is named for it."""
    after: tuple[str, ...] = ()
    """Stages that it waits for without reading what they make."""
    needed_if: str = ""
    """Full name of the setting, or of a property of a section, that is true where a run needs the stage; empty: every run needs it."""
    decided_by: str = ""
    """The stage that may still decide that this one is needed."""
    cached: bool = True
    """Whether a run may take its result from another one: from Kubeflow's cache, or from a run beside it on this machine."""
    kept: bool = True
    """Whether a local run keeps its result from an earlier run in the same output."""
    tied_to_place: bool = False
    """Whether its result holds for the machines that it was made on alone: their pool, number, processes and price."""

    def __post_init__(self) -> None:
        if not self.section:
            object.__setattr__(self, "section", self.name)

    @property
    def inputs(self) -> dict[str, Kind]:
        """Keyword of each input that it needs -> kind of artifact."""
        return {spec.name: spec.kind for spec in self.reads}

    @property
    def optional_inputs(self) -> dict[str, Kind]:
        """Keyword of each input that it can do without -> kind of artifact."""
        return {spec.name: spec.kind for spec in self.reads_if_made}

    @property
    def all_inputs(self) -> dict[str, Kind]:
        """Keyword of each input, the optional ones too -> kind of artifact."""
        return {**self.inputs, **self.optional_inputs}

    @property
    def outputs(self) -> dict[str, Kind]:
        """Keyword of each output -> kind of artifact."""
        return {keyword: spec.kind for keyword, spec in self.makes.items()}

    @property
    def trains(self) -> bool:
        """Whether it has a place to train: as a group of processes itself, or by the trainings that it launches."""
        return self.launched or self.launches

    def is_needed(self, settings: object) -> bool:
        """Return whether a run with these settings (`trainer.config.Settings`) needs the stage."""
        return not self.needed_if or bool(attrgetter(self.needed_if)(settings))


DATASET = ArtifactSpec(name="dataset", kind="dataset")
WARMED = ArtifactSpec(name="warmed", kind="warm_up", folder="warm-up")
TEACHER = ArtifactSpec(name="teacher", kind="model")
PRETRAIN_EVIDENCE = ArtifactSpec(name="pretrain_evidence", kind="evidence")
TUNING = ArtifactSpec(name="tuning", kind="tuning")
SEARCH = ArtifactSpec(name="search", kind="search")
TEACHER_OUTPUTS = ArtifactSpec(name="teacher_outputs", kind="teacher_outputs")
STUDENT = ArtifactSpec(name="student", kind="model")
DISTILL_EVIDENCE = ArtifactSpec(name="distill_evidence", kind="evidence")
REPORT = ArtifactSpec(name="report", kind="report")
EVALUATION = ArtifactSpec(name="evaluation", kind="evaluation", task_folder="measurements")
EXPORTED = ArtifactSpec(name="exported", kind="export")
REGISTRATION = ArtifactSpec(name="registration", kind="registration")

STAGES: Mapping[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            name="prepare",
            title="Prepare data",
            summary="validate, deduplicate, resize, split and describe the images",
            section="data",
            makes={"dataset": DATASET},
            pages={"data_card": "card.html"},
            shared=True,
        ),
        Stage(
            name="warm_up",
            title="Warm up",
            summary="compile beforehand: the first steps of each training, thrown away",
            reads=(DATASET,),
            makes={"warmed": WARMED},
            launched=True,
            needed_if="warm_up.enabled",
            tied_to_place=True,
        ),
        Stage(
            name="pretrain",
            title="Pretrain teacher",
            summary="make the teacher: masked-autoencoder pretraining, then fine-tuning",
            reads=(DATASET,),
            makes={"teacher": TEACHER, "evidence": PRETRAIN_EVIDENCE},
            launched=True,
            after=("warm_up",),  # whose output is no input, so that a cached teacher stays valid
        ),
        Stage(
            name="tune",
            title="Tune",
            summary="try the distillation where it will run: better settings, and a forecast of hours and dollars",
            reads=(DATASET, TEACHER),
            # In a run they never are: what is tuned decides whether they are recorded.
            reads_if_made=(TEACHER_OUTPUTS,),
            makes={"tuning": TUNING},
            launched=True,
            needed_if="tune.enabled",
            tied_to_place=True,
        ),
        Stage(
            name="reinforce",
            title="Record teacher outputs",
            summary="record the teacher's outputs on augmented views of the training images",
            reads=(DATASET, TEACHER),
            makes={"teacher_outputs": TEACHER_OUTPUTS},
            pages={"recording": "report.html"},
            launched=True,
            needed_if="distill.reads_recording",
            decided_by="tune",
        ),
        Stage(
            name="search",
            title="Search",
            summary="try other settings of the distillation, and take those with which the student is more accurate",
            reads=(DATASET, TEACHER),
            reads_if_made=(TEACHER_OUTPUTS,),
            makes={"search": SEARCH},
            pages={"trials": "search.html"},
            launches=True,
            needed_if="search.enabled",
        ),
        Stage(
            name="distill",
            title="Distill student",
            summary="train the student on the teacher's logits and the labels",
            reads=(DATASET, TEACHER),
            reads_if_made=(TEACHER_OUTPUTS,),
            makes={"student": STUDENT, "evidence": DISTILL_EVIDENCE},
            launched=True,
        ),
        Stage(
            name="profile",
            title="Profile trainings",
            summary="report where the trainings' time went, what slows or spoils them, and what they cost",
            reads=(PRETRAIN_EVIDENCE, DISTILL_EVIDENCE),
            makes={"report": REPORT},
            pages={"profile": "report.html"},
        ),
        Stage(
            name="evaluate",
            title="Evaluate",
            summary="measure teacher and student on the test split and judge the student",
            reads=(DATASET, TEACHER, STUDENT),
            makes={"evaluation": EVALUATION},
            pages={"evaluation": "report.html"},
            launched=True,
            cached=False,  # latency is that of the machine of this run
        ),
        Stage(
            name="export",
            title="Export student",
            summary="write the student as ONNX, measure its variants, and choose the fastest that passes the gate",
            reads=(DATASET, STUDENT, EVALUATION),
            makes={"exported": EXPORTED},
            pages={"variants": "export.html"},
            needed_if="export.enabled",
        ),
        Stage(
            name="register",
            title="Register",
            summary="log the student to MLflow, register it, and promote it if it passed",
            reads=(DATASET, TEACHER, STUDENT, PRETRAIN_EVIDENCE, DISTILL_EVIDENCE, REPORT, EVALUATION),
            # All but the first for the bill and the summary:
            reads_if_made=(EXPORTED, TEACHER_OUTPUTS, TUNING, SEARCH, WARMED),
            makes={"registration": REGISTRATION},
            takes_recipe=True,
            # Every run has its own version in the registry, one for all tries at this stage.
            cached=False,
            kept=False,
        ),
    )
}
"""In the order in which they run, so that each stands behind those whose artifacts it reads."""


def flag(name: str) -> str:
    """Return the command-line flag of an input or output: `pretrain_evidence` -> `pretrain-evidence`."""
    return name.replace("_", "-")


class Share(NamedTuple):
    """What one of several machines does of a stage's work; the first one makes the result, with what the others have done. Also of a batch
    prediction's.
    """

    number: int = 0
    of: int = 1


ALONE = Share()


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A stage to be run by a group of processes, or by machines that take shares of its work."""

    stage: str
    part: str = ""  # which of several jobs, where a task launches them
    settings: Mapping[str, Any]  # the stage's section
    inputs: Mapping[str, str]  # keyword of each input -> its URI
    outputs: Mapping[str, str]  # keyword of each output -> its URI
    processes_per_node: int = 1
    nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)  # further environment variables of every process

    def arguments(self, role: str = "--worker", *further: str) -> list[str]:
        """Return what follows `python` in every process, or with `--node` on every node of a cluster's job, which starts the processes."""
        places = {**self.inputs, **self.outputs}
        directories = [text for name, uri in places.items() for text in (f"--{flag(name)}", uri)]
        return [
            "-m",
            "trainer",
            "stage",
            self.stage,
            role,
            *further,
            "--settings",
            json.dumps(self.settings),
            *directories,
        ]
