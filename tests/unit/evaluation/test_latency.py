from __future__ import annotations

import time

import pytest
import timm
import torch
from torch import nn

from trainer.evaluation import latency


class Sleeper(nn.Module):
    """Takes a known time for a batch and remembers who was called when."""

    def __init__(self, seconds: float, calls: list[tuple[str, int, bool]], name: str) -> None:
        super().__init__()
        self.seconds, self.calls, self.name = seconds, calls, name

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls.append((self.name, len(images), torch.is_inference_mode_enabled()))
        time.sleep(self.seconds)
        return images


def measure(runs: int = 10, batch_sizes: tuple[int, ...] = (1, 4)):
    calls: list[tuple[str, int, bool]] = []
    models = {"teacher": Sleeper(0.004, calls, "teacher"), "student": Sleeper(0.001, calls, "student")}
    images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    return latency.measure(models, images, batch_sizes=batch_sizes, runs=runs), calls


def test_known_times_are_found():
    latencies, _ = measure()
    for name, least_ms in (("teacher", 4), ("student", 1)):
        for measured in latencies[name]:
            assert least_ms <= measured.p50_ms <= measured.p95_ms
            assert 0 < measured.images_per_second <= measured.batch_size / (least_ms / 1e3)
    assert latencies["student"][0].p50_ms < latencies["teacher"][0].p50_ms


def test_models_take_turns_in_inference_mode_with_whole_batches():
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
