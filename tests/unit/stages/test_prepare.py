"""The stage: an artifact that can be read, and none where the preparation failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from trainer import stages
from trainer.config import DataSettings
from trainer.data import preparation
from trainer.data.dataset import open_dataset
from trainer.io import artifacts
from trainer.io.artifacts import Artifact
from trainer.io.errors import ArtifactError, DataError, OutputError
from trainer.stages.prepare import run


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for number in range(24):
        path = root / f"class {number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (number, 0, 0)).save(path)
    return root


def test_artifact_has_figures_and_fingerprint_that_repeats(photos: Path, tmp_path: Path) -> None:
    settings = DataSettings(source=f"imagefolder:{photos}", image_size=16)
    first = run(settings, dataset=tmp_path / "one")
    assert first.kind == "dataset"
    assert set(first.figures) == {
        *("train", "val", "test", "unlabeled"),
        *("classes", "quarantined", "duplicates", "leakage", "near_duplicates"),
    }
    assert first.figures["train"] + first.figures["val"] + first.figures["test"] == 24
    again = run(settings, dataset=f"file://{tmp_path}/two")
    assert again.fingerprint == first.fingerprint
    assert artifacts.read(tmp_path / "two", "dataset").figures == first.figures


def test_photos_are_never_in_the_way(photos: Path, tmp_path: Path) -> None:
    """An output among the photos, or a folder of splits that is none of ours, is refused before anything is removed."""
    photos = photos.rename(tmp_path / "dataset")
    (photos / "train").mkdir()
    for folder in sorted(photos.glob("class *")):
        folder.rename(photos / "train" / folder.name)
    before = sorted(photos.rglob("*"))
    section = {"source": f"imagefolder:{photos}", "image_size": 16}
    for output, message in (
        (photos, "lies in the folder of the images"),
        (photos / "train", "lies in the folder of the images"),
        (photos / "out", "lies in the folder of the images"),
    ):
        with pytest.raises(OutputError, match=message):
            run(DataSettings.model_validate(section), dataset=output)
    other = {"source": f"imagefolder:{tmp_path / 'dataset' / 'train'}", "image_size": 16}
    with pytest.raises(OutputError, match="dataset: holds files of something else"):
        stages.call("prepare", json.dumps(other), {"dataset": str(photos)})
    with pytest.raises(OutputError, match="dataset: holds files of something else"):
        run(DataSettings.model_validate(other), dataset=photos)
    with pytest.raises(OutputError, match=r"data.keep_decoded .*lies in the folder of the images"):
        run(DataSettings.model_validate(section | {"keep_decoded": str(photos / "cache")}), dataset=tmp_path / "out")
    assert sorted(photos.rglob("*")) == before


def test_images_that_are_in_no_folder_are_in_the_way_of_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(DataSettings(source="digits", image_size=8), dataset="prepared").figures["classes"] == 10


def test_a_wrong_source_or_table_leaves_the_data_set_that_is_there(photos: Path, tmp_path: Path) -> None:
    section = {"source": f"imagefolder:{photos}", "image_size": 16}
    first = run(DataSettings.model_validate(section), dataset=tmp_path / "out")
    for wrong in ({"source": f"imagefolder:{photos}x"}, {"hierarchy": str(tmp_path / "none.csv")}):
        with pytest.raises(DataError):
            run(DataSettings.model_validate(section | wrong), dataset=tmp_path / "out")
        assert artifacts.read(tmp_path / "out", "dataset").fingerprint == first.fingerprint


def test_decoded_images_are_kept_under_one_name(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {
        preparation.decode_cache_uri(DataSettings(source=f"imagefolder:{one}"), "kept")
        for one in (photos, "photos", "./photos/")
    }
    assert len(names) == 1


def test_loader_processes_do_not_change_the_data_set(photos: Path, tmp_path: Path) -> None:
    def fingerprint(**values: object) -> str:
        settings = DataSettings.model_validate({"source": f"imagefolder:{photos}", "image_size": 16, **values})
        return run(settings, dataset=tmp_path / "out").fingerprint

    assert fingerprint(workers=0) == fingerprint(workers=5)
    assert (
        len({fingerprint(), fingerprint(jpeg_quality=60), fingerprint(split_seed=1), fingerprint(fit="stretch")}) == 4
    )


def test_class_tables_belong_to_the_fingerprint(photos: Path, tmp_path: Path) -> None:
    table, groups = tmp_path / "table.csv", tmp_path / "groups.csv"
    groups.write_text("class,parent\nclass 0,all\nclass 1,all\n")

    def prepared(energy: int) -> Artifact:
        table.write_text(f"class,energy\nclass 1,{energy}\nclass 0,5\n")
        given = {
            "source": f"imagefolder:{photos}",
            "image_size": 16,
            "attributes": str(table),
            "hierarchy": str(groups),
        }
        return run(DataSettings.model_validate(given), dataset=tmp_path / "out")

    first = prepared(61)
    tags = open_dataset(tmp_path / "out").tags
    assert tags is not None
    assert tags.attributes == {"energy": (5.0, 61.0)}
    assert tags.paths == (("all", "class 0"), ("all", "class 1"))
    card = (tmp_path / "out" / "card.html").read_text()
    assert "What is known of the classes" in card
    assert prepared(61).fingerprint == first.fingerprint != prepared(62).fingerprint

    plain = run(DataSettings(source=f"imagefolder:{photos}", image_size=16), dataset=tmp_path / "out")
    assert open_dataset(tmp_path / "out").tags is None
    assert "tags.json" not in plain.files
    assert not (tmp_path / "out" / "tags.json").exists(), "the earlier one is gone"
    assert not {"attributes", "hierarchy"} & set(plain.settings), "older data sets stay what they are"
    assert "What is known of the classes" not in (tmp_path / "out" / "card.html").read_text()


def test_table_of_other_classes_ends_before_image_is_decoded(photos: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(preparation, "_decode_all", lambda *_: pytest.fail("decodes"))
    (tmp_path / "table.csv").write_text("class,energy\nclass 0,5\n")
    settings = DataSettings(source=f"imagefolder:{photos}", attributes=str(tmp_path / "table.csv"))
    with pytest.raises(DataError, match="has no line for the class 'class 1'"):
        run(settings, dataset=tmp_path / "out")


def test_failures_leave_no_artifact(photos: Path, tmp_path: Path) -> None:
    run(DataSettings(source=f"imagefolder:{photos}", image_size=16), dataset=tmp_path / "out")
    with pytest.raises(DataError):
        run(DataSettings(source=f"imagefolder:{photos}", min_images_per_class=1000), dataset=tmp_path / "out")
    with pytest.raises(ArtifactError, match="never completed"):
        artifacts.read(tmp_path / "out", "dataset")
    # An output that cannot be written.
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        run(DataSettings(source=f"imagefolder:{photos}"), dataset=tmp_path / "file" / "out")
