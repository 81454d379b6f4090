"""Recorded outputs that someone has made who wants to be believed: manifest and checksums fit."""

import json

import numpy as np
import pytest

from tests.hostile.targets import _make_recording, sign
from trainer.io.errors import ArtifactError
from trainer.objectives.distillation import recording, shards
from trainer.objectives.distillation.recording import describe, open_recording


@pytest.fixture
def directory(tmp_path):
    """Recorded outputs: 5 samples of 12 classes in 2 views, 3 samples a shard."""
    _make_recording(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block": 0}, "block: Input should be greater than or equal to 1"),
        ({"samples": "5"}, "samples: Input should be a valid integer"),
        ({"samples": -1}, "samples: "),
        ({"views": 10**13}, "views: "),
        ({"classes": 10**9}, "classes: "),
        ({"top_k": 13}, "top_k is 13 of 12 classes"),
        ({"features": -1}, "features: "),
        ({"augmentation": []}, "augmentation: "),
        ({"tokens": [0, 2, 3]}, "tokens.0: Input should be greater than or equal to 1"),
        ({"tokens": [2, 2]}, "tokens.2: Field required"),
        ({"tokens": [10**6, 10**6, 10**6]}, "invalid shape in fixed-type tuple"),
        ({"tokens": [2, 2, 3], "token_format": "fp4"}, "token_format: "),
    ],
)
def test_a_description_out_of_its_ranges_is_refused(directory, changes, reason):
    change(directory, **changes)
    for read in (describe, open_recording):
        with pytest.raises(ArtifactError, match=rf"recording.json does not describe recorded outputs \({reason}"):
            read(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": 6},
        {"views": 3},
        {"views": 10**12},
        {"block": 2},
        {"top_k": 5},
        {"features": 2},
        {"tokens": [1, 1, 1]},
    ],
)
def test_files_that_are_not_as_described_are_refused(directory, changes):
    change(directory, **changes)
    for read in (describe, open_recording):
        with pytest.raises(ArtifactError, match=r"is missing or not as long as recording.json says; record them again"):
            read(directory)


def change(directory, **changes):
    """Change the description, and sign it."""
    file = directory / recording.DESCRIPTION
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    sign(directory, "teacher_outputs")


def test_a_record_that_names_no_class_is_refused_when_it_is_read(directory):
    description = describe(directory)
    unit = shards.units(2, samples=5, size=3)[0]
    records = np.zeros(unit.count, dtype=description.record)
    records["indices"][1, 2] = 12
    (directory / unit.name).write_bytes(shards.encode(unit, records, "0" * 64))
    sign(directory, "teacher_outputs")
    opened = open_recording(directory)
    opened.read(np.array([0, 2]), np.array([0, 0]))
    with pytest.raises(ArtifactError, match=r"records name the class 12, but there are 12; record them again"):
        opened.read(np.array([0, 1]), np.array([0, 0]))
