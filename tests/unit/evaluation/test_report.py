from __future__ import annotations

import io
import re

import numpy as np
import pytest
from PIL import Image

from trainer.evaluation import metrics, report
from trainer.evaluation.metrics import Confusion, Latency, Machine
from trainer.evaluation.report import Measured


def measured(name: str, classes: int, seed: int, **test) -> Measured:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, 400)
    logits = generator.normal(size=(400, classes)) + 3 * np.eye(classes)[labels]
    figures = {
        "architecture": name,
        "title": f"{name}, 224 px",
        "parameters": 1000 * seed,
        "macs": 5000 * seed,
        "size_bytes": 4000 * seed,
        "temperature": 1.25,
        "test": {"top1": metrics.top_k(logits, labels, 1), "top5": 1.0, "ece": 0.1, "ece_uncalibrated": 0.2, **test},
    }
    return Measured(
        figures=figures,
        matrix=metrics.confusion_matrix(logits.argmax(axis=1), labels, classes),
        calibration=metrics.calibration(logits, labels, 15),
        latencies=[Latency(batch_size=1, p50_ms=1.5, p95_ms=2.5, images_per_second=600.0)],
    )


def page(classes: list[str], reasons: list[str]) -> str:
    images = np.zeros((5, 3, 256, 256), dtype=np.uint8)
    return report.render(
        classes=classes,
        teacher=measured("vit_base", len(classes), seed=2),
        student=measured("vit_tiny", len(classes), seed=1, agreement=0.5),
        machine=Machine(processor="a processor", threads=2, torch="2.15", device="cuda"),
        verdict={"passed": not reasons, "reasons": reasons},
        examples=[(Confusion(truth=0, predicted=1, count=5), images)],
    )


@pytest.mark.parametrize("reasons", [[], ["latency: 3 ms is over 2"]])
def test_the_verdict_comes_first(reasons):
    text = page(["a", "b", "c"], reasons)
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings[:2] == ["Verdict", "Teacher against student"]
    assert ("did not pass" in text) == bool(reasons)
    assert all(reason in text for reason in reasons)
    assert "2.0x smaller" in text
    assert "Accuracy was measured in fp32 on cuda." in text


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
