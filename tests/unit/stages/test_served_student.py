"""The student that is served answers about a photo's file what was measured on its stored square."""

from __future__ import annotations

import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.stages.photos import KINDS, measure, write_photos
from trainer.evaluation import metrics
from trainer.models.served_student.preprocessing import BadImageError, decode
from trainer.models.served_student.student import BadParameterError, Predictor, to_probabilities


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Photos, below `test/CLASS/`."""
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "top1"), [({"fit": "crop", "image_size": 64}, 0.6), ({"fit": "stretch", "image_size": 16}, 0.3)]
)
def test_photos_file_gets_answer_that_was_measured(trained_digits, files, tmp_path, settings, top1):
    known = measure(trained_digits.student, files, tmp_path, **settings)
    assert len(known.files) == 300
    assert {file.name.partition("-")[0] for file in known.files} == {kind.__name__.strip("_") for kind in KINDS}
    served = Predictor(known.student).table(known.files).to_numpy()
    np.testing.assert_allclose(served, to_probabilities(known.logits), atol=1e-5)
    assert metrics.top_k(served, known.labels, 1) == metrics.top_k(known.logits, known.labels, 1) > top1


def test_jpeg_squares_change_only_draws(trained_digits, files, tmp_path):
    known = measure(trained_digits.student, files, tmp_path, image_size=64, encoding="jpeg")
    served = Predictor(known.student).table(known.files).to_numpy()
    probabilities = to_probabilities(known.logits)
    assert 1e-4 < np.abs(served - probabilities).max() < 0.05
    best = np.sort(probabilities, axis=1)
    clear = best[:, -1] - best[:, -2] > 0.02
    assert clear.mean() > 0.95
    np.testing.assert_array_equal(served.argmax(1)[clear], probabilities.argmax(1)[clear])


@pytest.fixture(scope="module")
def student(trained_digits):
    return Predictor(trained_digits.student)


def one(files, kind):
    return min((files / "test").glob(f"*/{kind}-*"))


@pytest.mark.parametrize("kind", ["wide", "transparent", "gray", "deep"])
def test_array_gets_answer_of_file_with_its_pixels(student, files, kind):
    path = one(files, kind)
    array = np.asarray(Image.open(path))
    expected = student.table([path])
    assert student.table(array).equals(expected), "one image without a batch axis"
    assert student.table(array[..., None] if array.ndim == 2 else array[None])[:1].equals(expected)
    assert student.table(path).equals(expected)
    assert student.table(path.read_bytes()).equals(expected)
    assert array.dtype == (np.uint16 if kind == "deep" else np.uint8)


def test_the_most_probable_labels_alone(student, files):
    paths = [one(files, kind) for kind in ("wide", "tall", "gray")]
    every, best = student.table(paths), student.table(paths, top_k=3)
    assert list(best.columns) == ["top_labels", "top_probabilities"]
    for (_, row), (_, few) in zip(every.iterrows(), best.iterrows(), strict=True):
        expected = row.sort_values(ascending=False)[:3]
        assert dict(zip(few.top_labels, few.top_probabilities, strict=True)) == expected.to_dict()
        assert few.top_labels == list(expected.index)
    assert student.table(paths, top_k=0).equals(every)
    assert [len(few) for few in student.table(paths, top_k=99).top_labels] == [10] * 3
    assert student.table([], top_k=3).shape == (0, 2)
    with pytest.raises(
        BadParameterError, match="top_k: -1; give how many labels are wanted, or 0 for a column of each"
    ):
        student.table(paths, top_k=-1)


def test_photos_of_different_shapes_and_kinds_in_one_call(student, files):
    paths = [one(files, kind) for kind in ("wide", "tall", "turned", "transparent", "gray", "deep", "printed")]
    mixed = [
        path
        if index % 3 == 0
        else path.read_bytes()
        if index % 3 == 1 or path.suffix == ".jpg"
        else np.asarray(Image.open(path))
        for index, path in enumerate(paths)
    ]
    alone = np.concatenate([student.table(path).to_numpy() for path in paths])
    assert len({tuple(row) for row in alone.round(4)}) > 4
    for given in (mixed, tuple(mixed), as_objects(mixed)):
        np.testing.assert_allclose(student.table(given).to_numpy(), alone, atol=1e-6)


def as_objects(items):
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item
    return array


def test_whole_numbers_of_json_are_pixels(student, trained_digits):
    image = trained_digits.images[0].permute(1, 2, 0).numpy()
    expected = student.table(image)
    for given in (
        image.astype(np.int64),
        np.array(image.tolist(), dtype=object),
        np.array([image.tolist()], dtype=object),
    ):
        assert student.table(given).equals(expected)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), "image 0: floating-point pixels: their range is not known"),
        (np.full((2, 4, 4, 3), 256), "image 0: int64 pixels outside of 0..255: give uint8, or uint16 for 16-bit pixels"),
        (np.full((4, 4), -1), "image 0: int64 pixels outside of 0..255"),
        (np.zeros((2, 3, 9, 9), np.uint8), r"image 0: no image: an array of the shape \(3, 9, 9\) is neither"),
        (np.zeros((0, 4, 3), np.uint8), "image 0: no image: an array of the shape"),
        (np.zeros((2, 2, 4, 4, 3), np.uint8), "holds no images: give one image as"),
        (np.array(["a.jpg", "b.jpg"]), "image 0: no image: text must be an image file in base64"),
        ([np.zeros((4, 4), np.uint8), "/etc/hosts"], "image 1: no image: text must be .*give the name of a file as a pa"),
        ([np.zeros((4, 4), np.uint8), "/etc/passwdx"], "image 1: no image that can be read"),
        ([7], "image 0: no image: .* or a pathlib.Path, not int"),
        (np.array([[[1, 2]], [[1]]], dtype=object), "images of different shapes in one array: give a list"),
        ([Path("/nowhere/a.jpg")], r"image 0 \(/nowhere/a.jpg\): .*No such file"),
        ([b"", b"x"], "image 0: empty file"),
        ([b"no image"], "image 0: no image that can be read"),
        (None, "image 0: no image: give an array"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_named(student, images, message):
    with pytest.raises(BadImageError, match=message):
        student.table(images)


def test_file_with_more_pixels_than_were_prepared_is_not_decoded(student):
    buffer = io.BytesIO()
    Image.new("L", (400, 300)).save(buffer, "PNG")
    with pytest.raises(BadImageError, match=r"image 0: too many pixels: 120000, more than data\.max_pixels=100000"):
        student.table(buffer.getvalue())


def test_pillows_limit_is_of_one_thread_at_time(files, monkeypatch):
    """It is the whole process's, and a server answers in several threads."""
    content = one(files, "wide").read_bytes()
    opened, first_is_there, first_may_go_on = [], threading.Event(), threading.Event()
    plain = Image.open

    def slow(*arguments, **keywords):
        opened.append(Image.MAX_IMAGE_PIXELS)
        first_is_there.set()
        first_may_go_on.wait(30)
        return plain(*arguments, **keywords)

    monkeypatch.setattr(Image, "open", slow)
    before = Image.MAX_IMAGE_PIXELS
    with ThreadPoolExecutor(2) as pool:
        decoded = [pool.submit(decode, content, max_pixels=limit) for limit in (10_000, 20_000)]
        assert first_is_there.wait(30)
        time.sleep(0.2)  # the second one would come, too
        assert len(opened) == 1
        first_may_go_on.set()
        assert all(future.result(timeout=30).size == (64, 48) for future in decoded)
    assert sorted(opened) == [10_000, 20_000]
    assert before == Image.MAX_IMAGE_PIXELS
