"""Real recordings of small trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.profiling.large import enlarged, made_up_answers
from trainer.config import EvidenceSettings
from trainer.io import artifacts
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.findings import Answer
from trainer.profiling.recorder import Recorder

Record = Callable[..., Recorder]


def record_training(
    *,
    name: str = "distill",
    steps: int = 12,
    rank: int = 0,
    world_size: int = 1,
    images: int = 32,
    window: tuple[int, int] = (4, 2),
    interval_s: float = 0.05,
    named_range: str = "attention",
) -> Recorder:
    """Train a little on the CPU and record it."""
    torch.set_num_threads(1)
    settings = EvidenceSettings(system_interval_s=interval_s, operators_at=(window[0],), operators_steps=window[1])
    recorder = Recorder(settings, name=name, device=torch.device("cpu"), rank=rank, world_size=world_size)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    timeline = recorder.timeline
    with recorder:
        for step in range(steps):
            with timeline.step(step, images=images):
                with timeline.span("data"):
                    batch = torch.rand(32, 64)
                with timeline.span("forward"):
                    with timeline.span(named_range):
                        output = model(batch)
                    loss = output.square().mean()
                with timeline.span("backward"):
                    loss.backward()
                with timeline.span("optimizer"):
                    optimizer.step()
            recorder.metrics(step, {"loss": loss.item(), "learning_rate": 1e-3})
            if step % 4 == 3:
                with timeline.span("evaluate"):
                    model(batch)
                recorder.metrics(step, {"val_top1": 0.5})
    return recorder


@pytest.fixture(scope="session")
def record() -> Record:
    return record_training


@pytest.fixture(scope="session")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with two trainings, the second of two ranks."""
    path = tmp_path_factory.mktemp("evidence")
    recorders = [
        record_training(name="mae", steps=3),
        record_training(rank=0, world_size=2, steps=40),
        record_training(rank=1, world_size=2, steps=40),
    ]
    with artifacts.create(path, "evidence", settings={}, parents={"dataset": "the digits"}) as draft:
        for recorder in recorders:
            recorder.write(draft.path)
    return path


@pytest.fixture(scope="session")
def plain(evidence: Path) -> list[TrainingEvidence]:
    """Two short trainings that were really recorded."""
    return list(read_evidence(evidence).trainings)


@pytest.fixture(scope="session")
def large(plain: list[TrainingEvidence]) -> TrainingEvidence:
    """A distillation over 64 GPUs, with full tables, 300 tensors and 24 blocks of attention."""
    return enlarged(plain[1])


@pytest.fixture(scope="session")
def answers() -> list[Answer]:
    """Findings of every severity, rules that found nothing, and rules that could not judge."""
    return made_up_answers()
