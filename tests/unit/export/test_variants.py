"""Which way to serve a student is chosen, and that another answer than the student's own is an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.errors import ModelError
from trainer.evaluation.metrics import Latency
from trainer.export import variants
from trainer.export.variants import ServingCandidate


def candidate(name, p50_ms, *reasons):
    latency = Latency(batch_size=1, p50_ms=p50_ms, p95_ms=2 * p50_ms, images_per_second=1000 / p50_ms)
    return ServingCandidate(
        name=name,
        size_bytes=1_500_000,
        measure="top1",
        score=0.9,
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
    nearly = candidate("int8", 2.0 / 1.06), replace(candidate("mixed", 2.0 / 1.04), shift=0.01)
    assert variants.fastest([slow, fast, nearly[1]]) is fast, "a difference within noise is none"
    assert variants.fastest([slow, fast, *nearly]) is nearly[0]
    lines = variants.table([candidate("torch", 9.0, "itself"), refused, fast, slow], "mixed")
    assert [line.split()[-1] == "chosen" for line in lines] == [False, False, False, True, False, False]
    assert lines[-1] == "  - int8: accuracy: low"
    assert "2.00, 4.00" in lines[3]


def test_another_answer_than_the_students_own_is_named():
    names = [f"photo {number}" for number in range(300)]
    own = np.random.default_rng(0).normal(0, 5, (300, 10)).astype(np.float32)
    variants.check_float(own, own + 0.0009, names)
    far = own.copy()
    far[7, 3] += 0.01 + 0.002 * abs(own[7, 3])
    with pytest.raises(ModelError, match=r"0 of 300 test photos get another class, .* most for image photo 7;"):
        variants.check_float(own, far, names)
    # A draw that falls the other way is another answer, however near the logits are.
    draw = own.copy()
    best = draw[11].argmax()
    draw[11, (best + 1) % 10] = draw[11, best] + 0.0001
    own[11, (best + 1) % 10] = own[11, best] - 0.0001
    with pytest.raises(ModelError, match=r"1 of 300 test photos get another class, .* most for image photo 11;"):
        variants.check_float(own, draw, names)
