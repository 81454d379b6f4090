from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from trainer import artifacts
from trainer.billing import make_bill
from trainer.profiling.evidence import Curve, TrainingEvidence, read_evidence
from trainer.profiling.recorder import Recorder
from trainer.profiling.report import build, facts
from trainer.profiling.summary import summarize

LIMIT = 2_000_000


def page_of(trainings: list[TrainingEvidence]) -> str:
    return build([(training, summarize(training)) for training in trainings], [], make_bill([]), top_operators=20)


class Balance(HTMLParser):
    """Checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)
        self.references += [
            value or "" for name, value in attributes if name in ("href", "src", "xlink:href", "action")
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass


@pytest.fixture
def trainings(evidence: Path) -> list[TrainingEvidence]:
    return list(read_evidence(evidence).trainings)


def test_the_page_holds_every_part(trainings: list[TrainingEvidence]) -> None:
    page = page_of(trainings)
    for wanted in (
        "Masked autoencoder",
        "Distillation",
        "Where a step&#x27;s time goes",
        "backward pass",
        "forward/attention",
        "How long steps take",
        "CPU cores",
        "Loss",
        "Memory",
        "aten::addmm",
        "matrix product",
        "The processes side by side",
        "rank 1",
        "the training runs on cpu",
    ):
        assert wanted in page, wanted


def test_the_page_is_well_formed_and_refers_to_nothing_outside(trainings: list[TrainingEvidence]) -> None:
    page = page_of(trainings)
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert balance.references == []
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script", page)
    assert "nan" not in re.findall(r'd="([^"]*)"', page)
    assert not re.search(r'[=" ](nan|inf|None)[" ]', page)


def test_the_sentence_names_what_dominates(trainings: list[TrainingEvidence]) -> None:
    summary = summarize(trainings[1])
    shares = dict.fromkeys(summary.recorded_shares, 0.0) | {"backward": 0.625, "data": 0.375}
    sentence = facts([replace(summary, recorded_shares=shares, recorded_s=90.0)])
    assert sentence.startswith("Distillation took 90 s; its largest part was “backward pass” with 62 %.")
    assert "waiting for data" in sentence


def test_names_are_escaped(record: Callable[..., Recorder], tmp_path: Path) -> None:
    with artifacts.create(tmp_path, "evidence", settings={}) as draft:
        record(steps=8, named_range='<script>alert("x")<&').write(draft.path)
    training = read_evidence(tmp_path).trainings[0]
    page = page_of([replace(training, name="<b>distill")])
    assert "<script" not in page
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;&amp;" in page
    assert "&lt;b&gt;distill" in page


def test_a_page_on_long_series_and_many_cores_stays_small(trainings: list[TrainingEvidence]) -> None:
    random = np.random.default_rng(0)
    first = trainings[1].ranks[0]
    steps, samples, points = 16384, 8192, 4096
    seconds = random.random(steps)
    start = np.cumsum(seconds) - seconds
    split = random.dirichlet(np.ones(len(first.ranges)), steps) * seconds[:, None]
    table = {
        "step": np.arange(steps, dtype=float),
        "start_s": start,
        "seconds": seconds,
        "images": np.full(steps, 64.0),
        "profiled": np.zeros(steps),
        "host_seconds": seconds,
        "host_data_seconds": seconds,
        **{name: split[:, index] for index, name in enumerate(first.ranges)},
    }
    ended = float(seconds.sum())
    system = {"end_s": np.linspace(ended / samples, ended, samples)}
    system |= {f"cpu{core}_percent": 100 * random.random(samples) for core in range(192)}
    system |= {name: 1e9 * random.random(samples) for name in first.system if name not in system}
    record = first.record.model_copy(update={"ended_s": ended})
    times = np.linspace(0, ended, points)
    loss = Curve(steps=np.arange(points, dtype=float), seconds=times, values=random.random(points))
    long = replace(
        trainings[1], ranks=[replace(first, record=record, steps=table, system=system)] * 64, metrics={"loss": loss}
    )
    page = page_of([replace(long, name=name) for name in ("mae", "finetune", "distill")])
    assert len(page.encode()) < LIMIT
    assert "4 cores a row" in page


def test_a_training_without_steps_has_a_page(record: Callable[..., Recorder], tmp_path: Path) -> None:
    with artifacts.create(tmp_path, "evidence", settings={}) as draft:
        record(steps=0).write(draft.path)
    page = page_of(list(read_evidence(tmp_path).trainings))
    assert "it had no steps to measure" in page
    assert "Not recorded: the training took 0 steps" in page


def test_nothing_trained_is_said() -> None:
    assert "Nothing was trained" in build([], [], make_bill([]), top_operators=5)
