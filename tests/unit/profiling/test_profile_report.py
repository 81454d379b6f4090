from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from trainer.io import artifacts
from trainer.profiling.evidence import TrainingEvidence
from trainer.profiling.evidence_files import read_evidence
from trainer.profiling.findings import Answer
from trainer.profiling.profile_report import build, facts
from trainer.profiling.recorder import Recorder
from trainer.profiling.rules.outcomes import NotJudged
from trainer.profiling.training_summary import summarize
from trainer.report.billing import Bill, StageBill, make_bill

LIMIT = 2_000_000


def page_of(trainings: list[TrainingEvidence], answers: Sequence[Answer] = (), bill: Bill | None = None) -> str:
    summaries = [(training, summarize(training)) for training in trainings]
    return build(summaries, answers, bill or make_bill([]), top_operators=20)


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


def test_the_page_holds_every_part(plain: list[TrainingEvidence]) -> None:
    page = page_of(plain)
    for wanted in (
        "Masked autoencoder",
        "Distillation",
        "Where a step&#39;s time goes",
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
        "Use of the machine",
        "memory of the process",
        "the training runs on cpu",
    ):
        assert wanted in page, wanted


@pytest.fixture(scope="module")
def large_page(large: TrainingEvidence, answers: list[Answer]) -> str:
    stage = StageBill(stage="distill", seconds=9000, parts={"training": 8000, "lost": 1000}, dollars=439.2)
    return page_of([large], answers, make_bill([stage]))


@pytest.mark.parametrize("which", ["plain", "large"])
def test_page_is_well_formed_and_refers_to_nothing_outside(
    which: str, plain: list[TrainingEvidence], large_page: str
) -> None:
    page = large_page if which == "large" else page_of(plain)
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    inside = [one for one in balance.references if one != "trace-distill.json.gz"]
    assert [one for one in inside if f'id="{one.removeprefix("#")}"' not in page] == []
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script", page)
    assert "nan" not in "".join(re.findall(r'd="([^"]*)"', page))
    assert not re.search(r'[=" ](nan|inf|None)[" ]', page)


def test_page_about_many_gpus_holds_what_only_they_have(large_page: str) -> None:
    for wanted in (
        "Distillation: “Exploding gradients”, so continuing it is of no use; 1 more finding.",
        "1. Exploding gradients",
        "2. Loader workers",
        "Saves about 66.7 min",
        "$195.20",
        "% busy, 4 a row",
        "GPU memory",
        "rank 63",
        "batches ready",
        "Cores busy",
        "node-7.cluster.example",
        "Exchanging gradients takes 120 ms a step, of which 100 ms",
        "Norm of the gradient",
        "Red: weights or gradients that are not finite.",
        "Entropy of the attention",
        "blocks.23",
        "network.blocks.23",
        "13 graphs were compiled in 55 s",
        "What recording cost",
        "Attempts",
        "gpu-a100 (p4d.24xlarge)",
        "The bill",
        "lost work",
        "$439.20",
    ):
        assert wanted in large_page, wanted


def test_slow_steps_are_listed_with_what_made_them_slow(large_page: str) -> None:
    table = large_page.partition("Slowest steps")[2]
    first = table.partition("<tbody>")[2].partition("</tr>")[0]
    assert re.search(r"\d+(\.\d)? x", first)
    assert re.search(r"\+[\d,.]+ m?s", first)
    assert re.search(r"no core for the training for [\d,]+ ms", first)


def test_the_page_counts_steps_from_1(large_page: str) -> None:
    assert "steps 41 to 4,001" in large_page
    slowest = large_page.partition("Slowest steps")[2].partition("<tbody>")[2]
    step = int(re.findall(r"<td[^>]*>([\d,]+)</td>", slowest)[0].replace(",", ""))
    assert (step - 41) % 124 == 0
    norms = large_page.partition("Norm of the gradient")[2].partition("</svg>")[0]
    columns = re.findall(r'class="soft mid"[^>]*>([\d,]+)<', norms)
    assert columns[0] == "1"
    attempts = large_page.partition("Done again later")[2].partition("</table>")[0]
    rows = [re.findall(r"<td[^>]*>([\d,]+)</td>", row) for row in attempts.split("</tr>")]
    assert [row[1] for row in rows if row] == ["1", "1,001"], "from which step on"


def test_page_says_what_happened(large_page: str, plain: list[TrainingEvidence]) -> None:
    assert "<td>vectorized_layer_norm_kernel&lt;float, float, false&gt;(int, float)</td>" in large_page
    assert "at::native" not in large_page
    # A finding without a window is not drawn over time.
    course = large_page.partition("The training and the machine over time")[2].partition("</svg>")[0]
    assert "1. Exploding gradients" in course
    assert "3. Step outliers" in course
    assert "2. Loader workers" not in course
    # The sentence names what dominates.
    summary = summarize(plain[1])
    shares = dict.fromkeys(summary.recorded_shares, 0.0) | {"backward": 0.625, "data": 0.375}
    sentence = facts([replace(summary, recorded_shares=shares, recorded_s=90.0)])
    assert sentence.startswith("Distillation took 90 s; its largest part was “backward pass” with 62 %.")
    assert "waiting for data" in sentence


def test_names_are_escaped(record: Callable[..., Recorder], answers: list[Answer], tmp_path: Path) -> None:
    with artifacts.create(tmp_path, "evidence", settings={}) as draft:
        record(steps=8, named_range='<script>alert("x")<&').write(draft.path)
    training = read_evidence(tmp_path).trainings[0]
    hostile = "</svg></style><img src=x onerror=alert(1)>"
    first = training.ranks[0]
    looks = replace(first.tensors, tensors=[hostile] * len(first.tensors.tensors))
    record = first.record.model_copy(update={"host": hostile, "device": hostile, "missing": {hostile: hostile}})
    metrics = training.metrics | {f"attention_entropy/{hostile}": training.metrics["loss"]}
    training = replace(
        training, name="<b>distill", ranks=[replace(first, record=record, tensors=looks)] * 2, metrics=metrics
    )
    outcome = NotJudged(reason=hostile)
    answer = Answer(rule="batch_size", title=hostile, kind="system", training="<b>distill", outcome=outcome)
    finding = replace(answers[0], training="<b>distill", title=hostile)
    page = page_of([training], [answer, finding])
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;&amp;" in page
    assert "&lt;b&gt;distill" in page


def test_a_page_on_large_trainings_stays_small(large: TrainingEvidence, answers: list[Answer]) -> None:
    first = large.ranks[0]
    named = {f"range {index} {'x' * 40}": 0.01 * first.steps["seconds"] for index in range(40)}
    ranks = [replace(rank, steps={**rank.steps, **named}) for rank in large.ranks]
    summary = summarize(replace(large, ranks=ranks))
    trainings = [
        (replace(large, name=name, ranks=ranks), replace(summary, name=name)) for name in ("mae", "finetune", "distill")
    ]
    page = build(trainings, answers, make_bill([]), top_operators=20)
    assert len(page.encode()) < LIMIT
    assert "named ranges" in page


def test_page_without_steps(plain: list[TrainingEvidence], record: Callable[..., Recorder], tmp_path: Path) -> None:
    first = plain[1].ranks[0]
    failed = first.record.model_copy(update={"failed": "the loss is <not> finite"})
    page = page_of([replace(plain[1], ranks=[replace(first, record=failed)])])
    assert page.count("ended with an error: the loss is &lt;not&gt; finite") == 2
    # A training without steps has a page.
    with artifacts.create(tmp_path, "evidence", settings={}) as draft:
        record(steps=0).write(draft.path)
    page = page_of(list(read_evidence(tmp_path).trainings))
    assert "it had no steps to measure" in page
    assert "Not recorded: the training ended after 0 steps" in page
    # Nothing trained is said.
    assert "Nothing was trained" in build([], [], make_bill([]), top_operators=5)
