from __future__ import annotations

import pytest
import timm
import torch
from torch import nn

from tests.clocks import Clock
from trainer.evaluation import latency


class Sleeper(nn.Module):
    """Takes a known time for a batch and remembers who was called when."""

    def __init__(self, clock: Clock, seconds: float, calls: list[tuple[str, int, bool]], name: str) -> None:
        super().__init__()
        self.clock, self.seconds, self.calls, self.name = clock, seconds, calls, name

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls.append((self.name, len(images), torch.is_inference_mode_enabled()))
        self.clock.pass_by(self.seconds)
        return images


@pytest.fixture
def measure(monkeypatch):
    """Measures two models by a clock of its own."""
    clock = Clock()
    monkeypatch.setattr(latency, "time", clock)

    def run(runs: int = 10, batch_sizes: tuple[int, ...] = (1, 4)):
        calls: list[tuple[str, int, bool]] = []
        models = {
            "teacher": Sleeper(clock, 0.004, calls, "teacher"),
            "student": Sleeper(clock, 0.001, calls, "student"),
        }
        images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
        return latency.measure(models, images, batch_sizes=batch_sizes, runs=runs), calls

    return run


def test_known_times_are_found(measure):
    latencies, _ = measure()
    for name, takes_ms in (("teacher", 4), ("student", 1)):
        for measured in latencies[name]:
            assert (measured.p50_ms, measured.p95_ms) == pytest.approx((takes_ms, takes_ms))
            assert measured.images_per_second == pytest.approx(measured.batch_size / (takes_ms / 1e3))


def test_a_real_model_takes_a_time():
    (measured,) = latency.measure({"model": nn.Flatten()}, torch.zeros(1, 3, 8, 8), batch_sizes=[2], runs=10)["model"]
    assert 0 < measured.p50_ms <= measured.p95_ms


def test_models_take_turns_in_inference_mode_with_whole_batches(measure):
    latencies, calls = measure(runs=12, batch_sizes=(2, 5))
    names = [name for name, _, _ in calls]
    assert set(names[::2]) == {"teacher"}
    assert set(names[1::2]) == {"student"}
    assert {size for _, size, _ in calls} == {2, 5}
    assert all(inference for _, _, inference in calls)
    assert [measured.batch_size for measured in latencies["student"]] == [2, 5]
    assert len(calls) > 2 * 2 * 12, "no warm-up"


@pytest.mark.parametrize(("size", "patch", "dim", "depth"), [(32, 8, 48, 2), (64, 16, 96, 3)])
def test_multiply_accumulates_of_a_vit_by_its_formula(size, patch, dim, depth):
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=size, patch_size=patch, embed_dim=dim, depth=depth, num_heads=2, num_classes=10
    )
    patches = (size // patch) ** 2
    tokens = patches + 1
    block = tokens * dim * 3 * dim + 2 * tokens**2 * dim + tokens * dim * dim + 2 * tokens * dim * 4 * dim
    expected = patches * 3 * patch**2 * dim + depth * block + dim * 10
    assert latency.multiply_accumulates(model, torch.zeros(1, 3, size, size)) == expected


def test_machine_tells_the_threads():
    assert latency.machine().threads == torch.get_num_threads()
    assert latency.machine().processor
