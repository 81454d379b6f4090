"""The stage: an artifact that can be read, and none where the preparation failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from trainer import artifacts
from trainer.config import DataSettings
from trainer.errors import ArtifactError, DataError, OutputError
from trainer.stages.prepare import run


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for number in range(24):
        path = root / f"class {number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (number, 0, 0)).save(path)
    return root


def test_the_artifact_has_figures_and_a_fingerprint_that_repeats(photos: Path, tmp_path: Path) -> None:
    settings = DataSettings(source=f"imagefolder:{photos}", image_size=16)
    first = run(settings, dataset=tmp_path / "one")
    assert first.kind == "dataset"
    assert set(first.figures) == {
        *("train", "val", "test", "unlabeled"),
        *("classes", "quarantined", "duplicates", "leakage"),
    }
    assert first.figures["train"] + first.figures["val"] + first.figures["test"] == 24
    again = run(settings, dataset=f"file://{tmp_path}/two")
    assert again.fingerprint == first.fingerprint
    assert artifacts.read(tmp_path / "two", "dataset").figures == first.figures


def test_loader_processes_are_no_matter_of_the_data_set_but_the_rest_is(photos: Path, tmp_path: Path) -> None:
    def fingerprint(**values: object) -> str:
        settings = DataSettings.model_validate({"source": f"imagefolder:{photos}", "image_size": 16, **values})
        return run(settings, dataset=tmp_path / "out").fingerprint

    assert fingerprint(workers=0) == fingerprint(workers=5)
    assert (
        len({fingerprint(), fingerprint(jpeg_quality=60), fingerprint(split_seed=1), fingerprint(fit="stretch")}) == 4
    )


def test_a_failure_leaves_no_artifact(photos: Path, tmp_path: Path) -> None:
    run(DataSettings(source=f"imagefolder:{photos}", image_size=16), dataset=tmp_path / "out")
    with pytest.raises(DataError):
        run(DataSettings(source=f"imagefolder:{tmp_path}/nowhere"), dataset=tmp_path / "out")
    with pytest.raises(ArtifactError, match="never completed"):
        artifacts.read(tmp_path / "out", "dataset")


def test_an_output_that_cannot_be_written(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        run(DataSettings(source=f"imagefolder:{photos}"), dataset=tmp_path / "file" / "out")
