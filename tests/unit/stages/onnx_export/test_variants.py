"""Which way to serve a student is chosen, and that other logits than the student's own are an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.evaluation.metrics import Latency
from trainer.io.errors import ModelError
from trainer.stages.onnx_export import variants
from trainer.stages.onnx_export.variants import FinalFigures, ServingCandidate


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


def test_fastest_that_passes():
    refused, fast, slow = candidate("int8", 1.0, "accuracy: low"), candidate("mixed", 2.0), candidate("fp32", 3.0)
    assert variants.fastest([slow, refused, fast]) is fast
    assert variants.fastest([refused, slow, replace(fast, reasons=("latency: long",))]) is slow
    assert variants.fastest([refused]) is None
    nearly = candidate("int8", 2.0 / 1.06), replace(candidate("mixed", 2.0 / 1.04), shift=0.01)
    assert variants.fastest([slow, fast, nearly[1]]) is fast, "a difference within noise is none"
    assert variants.fastest([slow, fast, *nearly]) is nearly[0]
    tested = replace(fast, test=FinalFigures(score=0.8765, same=1.0, shift=0.0))
    lines = variants.table([candidate("torch", 9.0, "itself"), refused, tested, slow], "mixed")
    assert [line.split()[-1] == "chosen" for line in lines] == [False, False, False, True, False, False]
    assert lines[-1] == "  - int8: accuracy: low"
    assert lines[3].split()[-4:] == ["2.00,", "4.00", "87.65%", "chosen"]
    assert lines[4].split()[-2:] == ["3.00,", "6.00"], "what was not chosen was not tested"
    # Figures tell validation from test.
    assert "test" not in variants.record(candidate("fp32", 1.0))
    tested = replace(candidate("int8", 1.0), test=FinalFigures(score=0.8, same=0.7, shift=0.1))
    for known, name in ((variants.figures(tested), "top1"), (variants.record(tested), "val_top1")):
        assert (known[name], known["test"]) == (0.9, {"top1": 0.8, "same": 0.7, "shift": 0.1})
        assert not known.keys() & ({"top1", "val_top1", "score", "measure"} - {name})


def test_students_own_logits():
    names = [f"photo {number}" for number in range(300)]
    own = np.random.default_rng(0).normal(0, 5, (300, 10)).astype(np.float32)
    variants.check_float(own, own + 0.0009, names)
    far = own.copy()
    far[7, 3] += 0.01 + 0.002 * abs(own[7, 3])
    with pytest.raises(ModelError, match=r"logits of 1 of 300 images differ by more than 0\.001, .* image photo 7;"):
        variants.check_float(own, far, names)

    first, second = own.argmax(axis=1), (own.argmax(axis=1) + 1) % 10
    rows = np.arange(300)
    own[rows, second] = own[rows, first] - 1e-6
    exported = own.copy()
    exported[rows, second] += 3e-6
    assert (exported.argmax(axis=1) != own.argmax(axis=1)).mean() > 0.9
    variants.check_float(own, exported, names)
    exported[11, second[11]] += 2 * (variants.TOLERANCE + variants.TOLERANCE * abs(own[11, second[11]]))
    with pytest.raises(ModelError, match=r"logits of 1 of 300 images differ .* most for image photo 11;"):
        variants.check_float(own, exported, names)
