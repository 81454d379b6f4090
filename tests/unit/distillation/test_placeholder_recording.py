"""Recorded outputs before there are any."""

from __future__ import annotations

import numpy as np
import torch

from trainer.distillation.losses import recorded_kl
from trainer.distillation.recording import RecordingDescription, placeholder_recording

DESCRIPTION = RecordingDescription(
    samples=50_000,
    views=30,
    block=12_500,
    classes=1000,
    top_k=10,
    features=4,
    seed=3,
    view_size=224,
    augmentation={},
    decoder="any",
    teacher="none",
    precision="fp32",
    dataset={},
)


def test_any_sample_is_there_in_the_shape_of_real_records_and_a_loss_can_be_computed(tmp_path):
    recording = placeholder_recording(tmp_path, DESCRIPTION)
    read = recording.read(np.array([0, 12_499, 12_500, 49_999]), np.zeros(4, dtype=np.int64))
    assert read.logits.shape == read.indices.shape == (4, 10)
    assert read.features.shape == (4, 4)
    assert torch.isfinite(recorded_kl(torch.randn(4, 1000), read, 2.0))


def test_the_shards_take_the_room_of_one(tmp_path):
    placeholder_recording(tmp_path, DESCRIPTION)
    files = list((tmp_path / "records").iterdir())
    assert len(files) == 4
    assert len({file.stat().st_ino for file in files}) == 1
