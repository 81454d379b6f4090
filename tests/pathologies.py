"""Trainings that something is wrong with: the real distillation of the digits, with a fault put into one of its parts.

A fault is a function that gives a context: whatever it changes holds while the training runs. With several processes each of them enters
it, so it has to be a function that another process can import; `on_rank` keeps it to one of them.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.distillations import QUICK, TINY
from tests.forks import CONTEXT
from trainer import config
from trainer.config.rules import RuleSettings
from trainer.data.batch import Batch
from trainer.data.loader import MicroBatches
from trainer.objectives.distillation.objective import DistillObjective
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.rules import judge
from trainer.profiling.rules.lifecycle import OwnOverhead
from trainer.profiling.rules.outcomes import Case, Finding, Outcome
from trainer.stages import distill, pretrain
from trainer.training import loop

torch.set_num_threads(1)  # other processes of the tests want a core too

Fault = Callable[[], AbstractContextManager[object]]

SETTINGS = QUICK | {
    "epochs": 8,
    "warmup_epochs": 1,
    "log_every": 5,
    "validate_every_epochs": 4,
    "evidence": {"system_interval_s": 0.05, "operators_at": (20,), "operators_steps": 3, "tensors_every": 10},
}
"""A healthy distillation of 80 steps in one or two seconds."""
TEACHER = {
    "teacher": {"architecture": "vit_tiny_patch16_224", "args": TINY | {"patch_size": 4, "embed_dim": 96, "depth": 2}},
    "mae": {"epochs": 0},
    "finetune": {name: value for name, value in QUICK.items() if name in config.FinetuneSettings.model_fields}
    | {
        "epochs": 12,
        "warmup_epochs": 1,
        "label_smoothing": 0.0,
        "layer_decay": 1.0,
        "drop_path": 0.0,
        "compile": "off",
    },
    "workers": 0,
}
"""A teacher that reads digits well, in seconds; it is large enough that loading is a small part of a step, as it is in real trainings."""


@dataclass(frozen=True, kw_only=True)
class Patient:
    """What is distilled, and where its outputs go."""

    dataset: str
    teacher: str
    folder: Path

    def distill(
        self, *, fault: Fault = nullcontext, processes: int = 1, teacher_outputs: str | None = None, **settings: Any
    ) -> TrainingEvidence:
        """Distill with a fault, and give what the training recorded of itself.

        Args:
            fault: what is wrong in every process while it trains; nothing where it is not given.
            processes: that train together; 1 trains in this process.
            teacher_outputs: recorded outputs, for `teacher="recorded"`.
            settings: of the section `distill`, beside `SETTINGS`.
        """
        output = self.folder / uuid.uuid4().hex
        section = SETTINGS | settings
        places = {"dataset": self.dataset, "teacher": self.teacher, "teacher_outputs": teacher_outputs}
        places |= {"student": str(output / "student"), "evidence": str(output / "evidence")}
        if processes == 1:
            _distill(fault, section, places)
        else:
            together(processes, _distill, fault, section, places)
        (training,) = read_evidence(output / "evidence").trainings
        return training


def train_teacher(dataset: str, folder: Path) -> str:
    """A teacher that has learned the digits; gives its model directory."""
    settings = config.validate(config.PretrainSettings, TEACHER)
    pretrain.run(settings, dataset=dataset, teacher=folder / "teacher", evidence=folder / "evidence")
    return str(folder / "teacher")


_OF_TESTS = {("note", "teacher_share"), ("note", "cores_oversubscribed")}
"""Severity and rule of what is due to how, and where, these tests train."""
RULES = RuleSettings(own_overhead=OwnOverhead(fewest_seconds=600))
"""Ten samples of the system where a usual training takes one cost too much; nothing else differs from the defaults."""


def judged(training: TrainingEvidence, rules: RuleSettings | None = None) -> dict[str, Outcome]:
    case = Case(training=training, rules=rules or RULES)
    return {rule.name: outcome for rule, outcome in judge(case).items()}


def findings(training: TrainingEvidence, rules: RuleSettings | None = None) -> dict[str, str]:
    """Name of each rule that finds something -> what.

    But for notes on the teacher's part of a step, which is large wherever the student is as small as in these tests, and on cores that
    other programs on this machine take, such as other tests.
    """
    return {
        name: outcome.text
        for name, outcome in judged(training, rules).items()
        if isinstance(outcome, Finding) and (outcome.severity, name) not in _OF_TESTS
    }


def fired(training: TrainingEvidence, rules: RuleSettings | None = None) -> set[str]:
    """Names of the rules that find something."""
    return set(findings(training, rules))


def _distill(fault: Fault, section: dict[str, Any], places: dict[str, Any]) -> None:
    with fault():
        distill.run(config.validate(config.DistillSettings, section), **places)


def together(processes: int, function: Callable[..., None], *arguments: object) -> None:
    """Run a function in processes that torch's agent starts, as `trainer.runner.launch` lets it."""
    launch_config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=CONTEXT.get_start_method(),
    )
    elastic_launch(launch_config, function)(*arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Faults


@contextmanager
def on_rank(rank: int, fault: Fault) -> Iterator[None]:
    with fault() if int(os.environ["RANK"]) == rank else nullcontext():
        yield


@contextmanager
def before_each(owner: Any, name: str, action: Callable[[], object]) -> Iterator[None]:
    """`action` before each call of a method, which then does its work as ever."""
    method = getattr(owner, name)

    def called(*arguments: Any, **keywords: Any) -> Any:
        action()
        return method(*arguments, **keywords)

    with patch.object(owner, name, called):
        yield


class _Struck(MicroBatches):
    """Micro-batches before each of which the process that loads it does something."""

    action: Callable[[], object]

    def __getitem__(self, position: int) -> Batch:
        self.action()
        return super().__getitem__(position)


@contextmanager
def before_batch(action: Callable[[], object]) -> Iterator[None]:
    """`action`, which a loader process can import, before each micro-batch."""

    def make(*arguments: Any, **keywords: Any) -> MicroBatches:
        batches = _Struck(*arguments, **keywords)
        batches.action = action
        return batches

    with patch.object(loop, "MicroBatches", make):
        yield


before_forward = partial(before_each, DistillObjective, "__call__")


def compute(seconds: float) -> None:
    """Keep a core busy for so much of its own time, however much of it others get."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
