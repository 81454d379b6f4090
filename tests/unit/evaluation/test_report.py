from __future__ import annotations

import io
import re
from argparse import Namespace
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from trainer.evaluation import metrics, report
from trainer.evaluation.metrics import Latency, Machine
from trainer.evaluation.report import Measured
from trainer.evaluation.slices import SliceGroup, Slicing
from trainer.report import pages


class Images:
    """A split's images, all black."""

    name, sources = "test", [f"{index}.png" for index in range(400)]
    labels = np.random.default_rng(0).integers(0, 3, 400)

    def __len__(self) -> int:
        return 400

    def read(self, indices: list[int]) -> torch.Tensor:
        return torch.zeros((len(indices), 3, 16, 16), dtype=torch.uint8)


def measured(name: str, classes: int, seed: int, labels: np.ndarray, **test) -> Measured:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(400, classes)) + 1.5 * np.eye(classes)[labels]
    quality = {"top1": metrics.top_k(logits, labels, 1), "top5": 1.0, "nll": 0.5}
    figures = {
        "architecture": name,
        "title": f"{name}, 224 px",
        "parameters": 1000 * seed,
        "macs": 5000 * seed,
        "size_bytes": 4000 * seed,
        "latency_ms": {"p50": 1.5, "p95": 2.5},
        "temperature": 1.25,
        "test": {**quality, "ece": 0.1, "ece_equal_mass": 0.12, "ece_uncalibrated": 0.2, **test},
    }
    return Measured(
        figures=figures,
        answers=metrics.answers(logits, labels),
        matrix=metrics.confusion_matrix(logits.argmax(axis=1), labels, classes),
        calibration=metrics.calibration(logits, labels, 15),
        latencies=[Latency(batch_size=1, p50_ms=1.5, p95_ms=2.5, images_per_second=600.0)],
    )


def page(classes: list[str], reasons: list[str], earlier: Sequence[str] = (), parent: str = "a") -> str:
    labels = np.random.default_rng(0).integers(0, len(classes), 400)
    teacher = measured("vit_base", len(classes), 2, labels)
    student = measured("vit_tiny", len(classes), 1, labels, agreement=0.5)
    condition = {
        "name": "latency",
        "measured": "3 ms",
        "limit": "at most 2 ms",
        "setting": "evaluate.gate.max_latency_ms",
    }
    group = SliceGroup(name=parent, images=100, teacher=90, student=50)
    return report.render(
        classes=classes,
        teacher=teacher,
        student=student,
        machine=Machine(processor="a processor", threads=2, torch="2.15", device="cuda"),
        verdict={
            "passed": not reasons,
            "reasons": reasons,
            "conditions": [{**condition, "reason": reason} for reason in reasons or [""]],
        },
        split=Images(),
        shown=1,
        bins=15,
        slicings=[Slicing(title=f"folder {parent}", groups=[group], p_value=0.001)],
        earlier=[report.EarlierRun(name=name, teacher=teacher.figures, student=student.figures) for name in earlier],
    )


@pytest.mark.parametrize("reasons", [[], ["latency: 3 ms is over 2"]])
def test_the_verdict_comes_first(reasons):
    text = page(["a", "b", "c"], reasons)
    headings = re.findall("<h2.*?>(.*?)</h2>", text)
    assert headings[:3] == ["Verdict", "Teacher against student", "Latency on the CPU"]
    assert ("did not pass" in text) == bool(reasons)
    assert ('<td class="short bad">failed</td>' if reasons else '<td class="short good">holds</td>') in text
    assert '<td class="short">at most 2 ms</td>' in text
    assert "2.0x smaller" in text
    assert "Accuracy was measured in fp32 on cuda." in text


def test_page_compares_pairs_of_answers_classes_and_earlier_runs():
    text = page(["a", "b", "c"], [], earlier=["last week"])
    assert "McNemar&#39;s exact test, p = " in text
    assert "test top-5" not in text, "with three classes it is 100 % for all"
    assert "test top-5" in page([f"class {index}" for index in range(30)], [])
    assert "Earlier runs of the same data" in text
    assert "last week, student vit_tiny, 224 px" in text
    # Both models' answers are below each image, the right ones in the color of good.
    found = re.findall(
        r'<dt>teacher</dt><dd class="(\w+)">(\w)  \d+%</dd><dt>student</dt><dd class="bad">\w  \d+%</dd>', text
    )
    assert len(found) == report._OF_A_PAIR + report._SUREST
    assert {style for style, _ in found} == {"good", "bad"}
    assert "50.0% (40.4% to 59.6%)" in text, "the group of images with its interval"


@pytest.mark.parametrize(("score", "shown"), [("top1", "50.00% (46.9% to 53.1%)"), ("map", "50.00%")])
def test_earlier_runs_have_the_interval_of_a_share_where_the_score_is_one(score, shown):
    figures = {"test": {score: 0.5}, "title": "vit", "parameters": 1_000_000, "latency_ms": {"p50": 1.0}}
    both = {name: Namespace(figures=figures) for name in ("teacher", "student")}
    section = report._earlier(both, [report.EarlierRun(name="last week", teacher=figures, student=figures)], 1000)
    text = pages.render("a page", "", [section])
    assert text.count(shown) == 2
    assert (" to " in text) == (score == "top1")
    assert text.count("<circle") == 8


def test_page_is_safe_and_small():
    text = page(["<script>alert(1)</script>", "b & c"], [])
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "b &amp; c" in text
    # Many classes stay below two megabytes.
    assert len(page([f"class {index}" for index in range(300)], [])) < 2_000_000


def test_strip_keeps_order_and_pixels():
    images = np.zeros((2, 3, 4, 4), dtype=np.uint8)
    images[0, 0], images[1, 2] = 200, 100
    picture = Image.open(io.BytesIO(report.strip(images, edge=40)))
    assert picture.size == (84, 40)
    assert picture.getpixel((20, 20)) == (200, 0, 0, 255)
    assert picture.getpixel((64, 20)) == (0, 0, 100, 255)
    assert picture.getpixel((42, 20)) == (255, 255, 255, 0), "the gap lets the page through"
