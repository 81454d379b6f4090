"""Which way to serve a student is chosen, and that another answer than the student's own is an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.data.dataset import open_dataset
from trainer.errors import ModelError
from trainer.evaluation.metrics import Latency
from trainer.export import variants
from trainer.export.variants import ServingCandidate


def candidate(name, p50_ms, *reasons):
    latency = Latency(batch_size=1, p50_ms=p50_ms, p95_ms=2 * p50_ms, images_per_second=1000 / p50_ms)
    return ServingCandidate(
        name=name,
        size_bytes=1_500_000,
        top1=0.9,
        same=1.0,
        difference=0.0,
        shift=0.0,
        latencies=[latency],
        reasons=reasons,
    )


def test_the_fastest_that_passes_is_chosen():
    refused, fast, slow = candidate("int8", 1.0, "accuracy: low"), candidate("mixed", 2.0), candidate("fp32", 3.0)
    assert variants.fastest([slow, refused, fast]) is fast
    assert variants.fastest([refused, slow, replace(fast, reasons=("latency: long",))]) is slow
    assert variants.fastest([refused]) is None
    lines = variants.table([candidate("torch", 9.0, "itself"), refused, fast, slow], "mixed")
    assert [line.split()[-1] == "chosen" for line in lines] == [False, False, False, True, False, False]
    assert lines[-1] == "  - int8: accuracy: low"
    assert "2.00, 4.00" in lines[3]


@pytest.fixture(scope="module")
def split(trained_digits):
    return open_dataset(trained_digits.dataset).split("test")


def test_another_answer_than_the_students_own_is_named(split):
    own = np.random.default_rng(0).normal(0, 5, (len(split), 10)).astype(np.float32)
    variants.check_float(own, own + 0.0009, split)
    far = own.copy()
    far[7, 3] += 0.01 + 0.002 * abs(own[7, 3])
    with pytest.raises(
        ModelError, match=rf"0 of 300 test photos get another class, .* most for image {split.names[7]};"
    ):
        variants.check_float(own, far, split)
    # A draw that falls the other way is another answer, however near the logits are.
    draw = own.copy()
    best = draw[11].argmax()
    draw[11, (best + 1) % 10] = draw[11, best] + 0.0001
    own[11, (best + 1) % 10] = own[11, best] - 0.0001
    with pytest.raises(
        ModelError, match=rf"1 of 300 test photos get another class, .* most for image {split.names[11]};"
    ):
        variants.check_float(own, draw, split)
