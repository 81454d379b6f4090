"""`vit-distill predict FOLDER --output DIR`: what the files hold, how a stopped one goes on, and what is refused."""

import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trainer import cli, load_model
from trainer.graph import Share
from trainer.io import storage
from trainer.io.errors import EXIT_CODE, SettingsError
from trainer.predict import batch_prediction

SIZES = [(16, 16), (40, 25), (25, 40), (16, 17), (90, 90)]


@pytest.fixture
def folder(tmp_path):
    """Five photos in two folders, a file that is no photo, and a photo that cannot be read."""
    path = tmp_path / "photos"
    for seed, size in enumerate(SIZES):
        file = path / ("a" if seed < 2 else "b") / f"{seed}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    (path / "b" / "2 broken.jpg").write_bytes(b"no image")
    (path / "notes.txt").write_text("not looked at")
    return path


def rows(output):
    return [row for file in sorted(output.glob("part-*.parquet")) for row in pq.read_table(file).to_pylist()]


def test_each_photo_gets_what_predict_says_of_it_alone(judged_run, folder, tmp_path, capsys):
    output = tmp_path / "out"
    assert cli.main(["predict", str(folder), "--model", str(judged_run), "--output", str(output), "--top", "3"]) == 0
    assert capsys.readouterr().out == f"6 photos, 1 of them unreadable: {output}\n"
    found = rows(output)
    assert len(pd.read_parquet(output)) == len(found), "the folder is read as one table"
    assert [row["photo"] for row in found] == ["a/0.png", "a/1.png", "b/2 broken.jpg", "b/2.png", "b/3.png", "b/4.png"]
    broken = found.pop(2)
    assert broken.pop("error") == "no image that can be read: a text file"
    assert broken.pop("photo")
    assert set(broken.values()) == {None}
    model = load_model(judged_run)
    for row in found:
        (alone,) = model.predictions([str(folder / row["photo"])], top=3)
        assert row["labels"] == list(alone.labels)
        assert row["probabilities"] == pytest.approx(list(alone.labels.values()), abs=1e-6)
        assert (row["label"], row["probability"]) == (row["labels"][0], row["probabilities"][0])
        assert row["answer"] == alone.answer
        assert row["confidence"] == pytest.approx(alone.confidence, abs=1e-6)
        assert row["attributes"] == pytest.approx(alone.attributes)
        assert row["error"] is None


def test_stopped_prediction_goes_on_with_files_that_are_missing(judged_run, folder, tmp_path):
    model, output = load_model(judged_run), tmp_path / "out"
    made = batch_prediction.predict_folder(model, str(folder), str(output), photos_per_file=2)
    whole = rows(output)
    first, second, third = (output / name for name in made["files"])
    kept = {file: file.stat().st_mtime_ns for file in (first, third)}
    second.unlink()
    (output / "_predictions.json").unlink()
    (output / f".{second.name}.17.partial").write_bytes(b"half of it")  # of a process that was killed
    again = batch_prediction.predict_folder(model, str(folder), str(output), photos_per_file=2)
    assert again == made
    assert made["unreadable"] == 1
    assert rows(output) == whole
    assert {file: file.stat().st_mtime_ns for file in kept} == kept


def test_machines_share_the_files_and_end_when_all_are_there(judged_run, folder, tmp_path, monkeypatch):
    model, output = load_model(judged_run), tmp_path / "out"
    alone = batch_prediction.predict_folder(model, str(folder), str(tmp_path / "alone"), photos_per_file=1)
    begun, classify = [], batch_prediction._rows

    def counted(model, photos, top):
        begun.append(photos[0].name)
        if len(begun) == 2:  # meanwhile another machine does its share, and what it finds missing
            made.append(predict(1))
        return classify(model, photos, top)

    def predict(number):
        return batch_prediction.predict_folder(
            model, str(folder), str(output), photos_per_file=1, share=Share(number, 3)
        )

    made = []
    monkeypatch.setattr(batch_prediction, "_rows", counted)
    made.append(predict(0))
    names = ["a/0.png", "a/1.png", "b/2 broken.jpg", "b/2.png", "b/3.png", "b/4.png"]
    # Files 0 and 3 are of the first share; the second takes 1 and 4, then from the end on 5 and 2, and 3, which is not written yet.
    assert begun == [names[0], names[3], names[1], names[4], names[5], names[2], names[3]]
    assert made == [alone, alone]
    assert rows(output) == rows(tmp_path / "alone")
    begun.clear()
    assert predict(2) == alone
    for content in (b"{", b"[]"):
        (output / "_predictions.json").write_bytes(content)
        assert predict(2) == alone
    assert begun == []


def test_machines_that_listed_other_photos_do_not_both_end_well(judged_run, folder, tmp_path, monkeypatch):
    """A photo comes after the first has listed the folder, and before it has written a file."""
    model, output, classify = load_model(judged_run), tmp_path / "out", batch_prediction._rows

    def predict(number):
        return batch_prediction.predict_folder(
            model, str(folder), str(output), photos_per_file=4, share=Share(number, 2)
        )

    def late(model, photos, top):
        monkeypatch.setattr(batch_prediction, "_rows", classify)
        shutil.copy(folder / "a" / "0.png", folder / "a" / "late.png")
        predict(1)
        return classify(model, photos, top)

    monkeypatch.setattr(batch_prediction, "_rows", late)
    with pytest.raises(
        SettingsError, match=r"holds part-00000-\w+.parquet of another model, of other or changed photos"
    ):
        predict(0)


def test_a_bucket_is_read_and_written(judged_run, folder, tmp_path, object_store):
    for file in folder.rglob("*.*"):
        storage.write_bytes(f"s3://artifacts/photos/{file.relative_to(folder)}", file.read_bytes())
    batch_prediction.predict_folder(load_model(judged_run), str(folder), str(tmp_path / "out"))
    made = batch_prediction.predict_folder(load_model(judged_run), "s3://artifacts/photos", "s3://artifacts/out")
    (name,) = made["files"]
    (tmp_path / "fetched").mkdir()
    (tmp_path / "fetched" / name).write_bytes(storage.read_bytes(f"s3://artifacts/out/{name}"))
    assert rows(tmp_path / "fetched") == rows(tmp_path / "out")


def test_output_of_other_photos_or_another_model_is_refused(judged_run, trained_digits, folder, tmp_path):
    output = str(tmp_path / "out")
    made = batch_prediction.predict_folder(load_model(judged_run), str(folder), output)
    alone = load_model(judged_run / "student")  # of another temperature, which only the run knows
    for model, top in ((load_model(judged_run), 4), (load_model(trained_digits.teacher), 5), (alone, 5)):
        with pytest.raises(SettingsError, match=r"holds part-00000-.* of another model"):
            batch_prediction.predict_folder(model, str(folder), output, top=top)
    again = batch_prediction.predict_folder(load_model(judged_run), f"{folder}/../{folder.name}/", output)
    assert again["photos"] == made["photos"], "the folder has several names"
    photo = folder / "a" / "0.png"
    photo.write_bytes((folder / "a" / "1.png").read_bytes())
    for _ in range(2):
        with pytest.raises(SettingsError, match="of other or changed photos"):
            batch_prediction.predict_folder(load_model(judged_run), str(folder), output)
        photo.unlink(missing_ok=True)


def test_what_cannot_be_predicted_is_one_message(judged_run, folder, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    output = str(tmp_path / "out")
    for arguments, message in (
        ([str(empty), "--output", output], f"folder {empty}: holds no photo; give a folder with image files"),
        ([str(tmp_path / "none"), "--output", output], "none: does not exist"),
        ([str(folder), str(empty), "--output", output], "--output takes one folder or URI of photos"),
        ([str(folder), "--output", output, "--json"], "and no --json"),
        ([str(folder), "--share", "0/2"], "predict --share: serves a whole folder; give --output DIR"),
        ([str(folder)], f"predict {folder}: is a folder; give --output DIR"),
        ([str(folder), "--output", str(folder / "notes.txt" / "x")], "notes.txt"),
    ):
        assert cli.main(["predict", *arguments, "--model", str(judged_run)]) == EXIT_CODE
        printed = capsys.readouterr()
        *answering, error = printed.err.splitlines()
        assert message in error
        assert all(" answers: made " in line for line in answering)
        assert printed.out == ""
