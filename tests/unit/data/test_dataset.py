"""The prepared data set as trainings read it, checked against images decoded with Pillow."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import simplejpeg
import torch
from PIL import Image

from trainer.data import dataset as reading
from trainer.data import split_rows
from trainer.data.dataset import decode_square, open_dataset
from trainer.data.dataset_schema import SPLITS, DatasetDescription, features
from trainer.data.preparation import encode_square
from trainer.io import artifacts
from trainer.io.errors import ArtifactError, DataError
from trainer.models.served_student.class_tags import ClassTags
from trainer.models.served_student.preprocessing import BadImageError, Square

SIZE = 12
COUNTS = {"train": 7, "val": 3, "test": 2, "unlabeled": 0}


def encoded(number: int) -> bytes:
    """A PNG file with noise."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def rows(split: str, count: int) -> dict[str, list[object]]:
    files = [encoded(1000 * SPLITS.index(split) + number) for number in range(count)]
    return {
        "image": [{"bytes": file, "path": None} for file in files],
        "label": [number % 3 - 1 for number in range(count)],
        "key": [hashlib.sha256(file).hexdigest() for file in files],
        "source": [f"{split}/{number}.png" for number in range(count)],
    }


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    path = tmp_path / "dataset"
    with artifacts.create(path, "dataset", settings={}) as draft:
        for split, count in COUNTS.items():
            table = datasets.Dataset.from_dict(rows(split, count), features=features())
            table.save_to_disk(str(draft.path / split), num_shards=1)
        DatasetDescription(classes=("a", "b"), image_size=SIZE, images=COUNTS).write(draft.path)
    return path


def pillow(file: bytes) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(file))).copy()).permute(2, 0, 1)


@pytest.mark.parametrize("limit", [10**9, 0], ids=["in memory", "from disk"])
def test_reads_pixels_that_were_written_in_order_asked_for(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(reading, "IN_MEMORY_BYTES", limit)
    split = open_dataset(prepared).split("train")
    assert split.in_memory == (limit > 0)
    files = [image["bytes"] for image in rows("train", 7)["image"]]
    indices = [5, 0, 5, 3]
    images = split.read(indices)
    assert images.dtype == torch.uint8
    torch.testing.assert_close(images, torch.stack([pillow(files[index]) for index in indices]), rtol=0, atol=0)
    assert split.read([]).shape == (0, 3, SIZE, SIZE)


@pytest.mark.parametrize("limit", [10**9, 0], ids=["in memory", "from disk"])
def test_one_picture_and_its_file(prepared: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(reading, "IN_MEMORY_BYTES", limit)
    split = open_dataset(prepared).split("train")
    files = [image["bytes"] for image in rows("train", 7)["image"]]
    for index in (6, 0):
        assert bytes(split.encoded(index)) == files[index]
        torch.testing.assert_close(split.picture(index), pillow(files[index]), rtol=0, atol=0)


def test_the_decoder_is_that_of_the_stored_images(prepared: Path, tmp_path: Path) -> None:
    assert open_dataset(prepared).decoder_name().startswith("pillow ")
    photo = simplejpeg.encode_jpeg(np.zeros((SIZE, SIZE, 3), dtype=np.uint8))
    table = {"image": [{"bytes": photo, "path": None}], "label": [0], "key": ["0" * 64], "source": ["a"]}
    with artifacts.create(tmp_path / "photos", "dataset", settings={}) as draft:
        for split in SPLITS:
            datasets.Dataset.from_dict(table, features=features()).save_to_disk(str(draft.path / split))
        DatasetDescription(classes=("a",), image_size=SIZE, images=dict.fromkeys(SPLITS, 1)).write(draft.path)
    assert open_dataset(tmp_path / "photos").decoder_name() == f"simplejpeg {simplejpeg.__version__}"


@pytest.mark.parametrize("limit", [10**9, 0], ids=["small", "large"])
def test_stored_pixels_are_read_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(reading, "IN_MEMORY_BYTES", limit)
    pixels = np.random.default_rng(0).integers(0, 256, (5, SIZE, SIZE, 3), dtype=np.uint8)
    pixels[0, 0, 0] = 255, 216, 255  # as a JPEG begins
    table = {
        "image": [{"bytes": one.tobytes(), "path": None} for one in pixels],
        "label": [0] * 5,
        "key": ["0" * 64] * 5,
        "source": ["a"] * 5,
    }
    table["image"].append({"bytes": bytes(7), "path": None})
    with artifacts.create(tmp_path, "dataset", settings={}) as draft:
        for split, count in (("train", 5), ("val", 6)):
            part = {name: (column * 2)[:count] if name != "image" else column[:count] for name, column in table.items()}
            datasets.Dataset.from_dict(part, features=features()).save_to_disk(str(draft.path / split))
        DatasetDescription(classes=("a",), image_size=SIZE, images={"train": 5, "val": 6}, raw=True).write(draft.path)
    data = open_dataset(tmp_path)
    split, expected = data.split("train"), torch.from_numpy(pixels).permute(0, 3, 1, 2)
    assert split.decoded
    assert split.in_memory == (limit > 0)
    for one in (split, split.first(4), pickle.loads(pickle.dumps(split))):
        assert torch.equal(one.read([3, 0, 3]), expected[[3, 0, 3]])
        assert torch.equal(one.picture(2, shrink=2), expected[2])
    assert data.decoder_name() == "stored pixels"
    with pytest.raises(DataError, match=f"7 bytes instead of {SIZE} x {SIZE} pixels; prepare the data set again"):
        data.split("val").read([5])


def test_more_than_a_small_split_is_kept_decoded_on_demand(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(reading, "_ALONE", 2)  # by several threads
    split = open_dataset(prepared).split("train")
    expected, size = split.read(range(7)), 7 * 3 * SIZE**2
    split.load(size - 1)
    assert split._decoded is None
    split.load(size)
    assert split._decoded is not None
    assert torch.equal(split.read(range(7)), expected)
    assert not split.decoded, "what it is decoded by is still named, and a GPU may do it"
    monkeypatch.setattr(reading, "usable_memory", lambda: 8000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert reading.memory_share() == 250


def test_splits_are_read(prepared: Path) -> None:
    split = open_dataset(prepared).split("unlabeled")
    assert len(split) == 0
    assert split.labels.shape == (0,)
    assert split.keys.shape == (0,)
    assert split.read([]).shape == (0, 3, SIZE, SIZE)
    # A split is cheap to send to a loader process.
    split = open_dataset(prepared).split("train")
    expected = split.read([1, 2])
    sent = pickle.dumps(split)
    assert len(sent) < 20_000
    torch.testing.assert_close(pickle.loads(sent).read([1, 2]), expected)
    # Labels keys and names.
    data = open_dataset(prepared)
    assert data.classes == ("a", "b")
    assert data.image_size == SIZE
    assert data.fingerprint == artifacts.read(prepared, "dataset").fingerprint
    split, expected = data.split("train"), rows("train", 7)
    assert len(split) == 7
    assert split.labels.dtype == np.int64
    assert split.labels.tolist() == expected["label"]
    assert split.keys.dtype == np.uint64
    assert [int(key).to_bytes(8, "big").hex() for key in split.keys] == [str(key)[:16] for key in expected["key"]]
    assert list(split.names) == expected["key"]
    assert split.names[2] == expected["key"][2]
    assert list(split.sources) == expected["source"]


@pytest.mark.parametrize(
    ("count", "kept"), [(5, 5), (100, COUNTS["train"])], ids=["over a chunk", "more than there are"]
)
def test_first_images_are_data_set_of_their_own(prepared: Path, count: int, kept: int) -> None:
    whole = open_dataset(prepared)
    part = whole.first(count)
    split, all_of_it = part.split("train"), whole.split("train")
    assert len(split) == len(split.labels) == len(split.keys) == len(split.names) == kept
    assert torch.equal(split.read(range(kept)), all_of_it.read(range(kept)))
    assert split.names == all_of_it.names[:kept]
    assert torch.equal(pickle.loads(pickle.dumps(split)).read([kept - 1]), all_of_it.read([kept - 1]))
    assert (part.fingerprint, part.classes) == (whole.fingerprint, whole.classes)
    assert len(whole.split("train")) == COUNTS["train"], "the whole stays whole"


def rewrite_manifest(path: Path) -> None:
    """Give a directory that was tampered with a manifest that fits it."""
    with artifacts.create(path, "dataset", settings={}):
        pass


def test_how_images_became_squares_is_known_from_its_settings(prepared: Path) -> None:
    def made_with(settings: dict[str, object]) -> Square:
        with artifacts.create(prepared, "dataset", settings=settings):
            pass
        return open_dataset(prepared).square

    settings = {"fit": "stretch", "max_pixels": 99}
    assert made_with(settings) == Square(fit="stretch", size=SIZE, max_pixels=99)
    for wrong in ({}, {"fit": "stretch"}, settings | {"fit": "pad"}, settings | {"max_pixels": "many"}):
        with pytest.raises(
            ArtifactError, match=r"its manifest does not say how images became squares .*prepare it again"
        ):
            made_with(wrong)


def test_a_damaged_data_set_is_refused_by_name(prepared: Path) -> None:
    (arrow,) = (prepared / "train").glob("*.arrow")
    content = bytearray(arrow.read_bytes())
    content[len(content) // 2] ^= 0xFF
    arrow.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"train/data-00000-of-00001\.arrow is damaged"):
        open_dataset(prepared, ["train"])
    with pytest.raises(ArtifactError, match=r"train/data-00000-of-00001\.arrow is damaged"):
        open_dataset(prepared).split("train")
    assert len(open_dataset(prepared).split("val")) == COUNTS["val"]


def test_only_what_is_read_is_fetched(object_store, prepared, tmp_path, monkeypatch) -> None:
    uri = object_store.uri("d")
    (prepared / "card.html").write_text("<p>large</p>")
    (prepared / "example.png").write_bytes(encoded(1000 * SPLITS.index("test")))
    rewrite_manifest(prepared)
    artifacts.copy(prepared, uri, "dataset")

    def fetched() -> set[str]:
        paths = {
            one.path.removeprefix("/artifacts/d/")
            for one in object_store.requests
            if one.method == "GET" and not one.query
        }
        object_store.requests.clear()
        return {path.partition("/")[0] for path in paths} - {artifacts.MANIFEST}

    fetched()
    data = open_dataset(uri)
    assert fetched() == {"dataset.json"}
    assert data.example().equal(open_dataset(prepared).split("test").read([0]))
    assert fetched() == {"example.png"}
    assert data.split("test").read([0]).equal(data.example())
    assert fetched() == {"test"}
    assert len(open_dataset(uri, ["train", "val", "test"]).split("val")) == COUNTS["val"]
    assert fetched() == {"train", "val"}, "what is in the cache is not fetched again"
    object_store.put("d/unlabeled/state.json", b"other")
    with pytest.raises(ArtifactError, match=r"unlabeled/state.json"):
        data.split("unlabeled")
    # A whole one that is in the cache has every part.
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "another cache"))
    object_store.put("d/unlabeled/state.json", (prepared / "unlabeled" / "state.json").read_bytes())
    artifacts.read(uri, "dataset")
    assert fetched() >= {"train", "val", "test", "unlabeled", "card.html"}
    assert len(open_dataset(uri, ["test"]).split("train")) == COUNTS["train"]
    assert fetched() == set()


def test_the_example_of_an_older_data_set(prepared: Path) -> None:
    data = open_dataset(prepared)
    assert data.example().equal(data.split("test").read([0]))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"classes": 3, "image_size": "x", "images": {}}'])
def test_a_description_that_is_none_is_refused(prepared: Path, content: str) -> None:
    (prepared / "dataset.json").write_text(content)
    rewrite_manifest(prepared)
    with pytest.raises(ArtifactError, match=r"dataset\.json does not describe a data set"):
        open_dataset(prepared)


def test_split_of_another_length_than_described_is_refused(prepared: Path) -> None:
    description = json.loads((prepared / "dataset.json").read_text())
    description["images"]["val"] = 4
    (prepared / "dataset.json").write_text(json.dumps(description))
    rewrite_manifest(prepared)
    with pytest.raises(ArtifactError, match=r"split val has 3 images, but dataset\.json says 4"):
        open_dataset(prepared).split("val")


def test_a_missing_split_is_refused(prepared: Path) -> None:
    for file in (prepared / "test").iterdir():
        file.unlink()
    rewrite_manifest(prepared)
    with pytest.raises(ArtifactError, match="split test cannot be opened"):
        open_dataset(prepared).split("test")


def test_an_image_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    path, broken = tmp_path / "dataset", rows("train", 2)
    broken["image"][1] = {"bytes": b"no image", "path": None}
    with artifacts.create(path, "dataset", settings={}) as draft:
        datasets.Dataset.from_dict(broken, features=features()).save_to_disk(str(draft.path / "train"))
        DatasetDescription(classes=("a", "b"), image_size=SIZE, images={"train": 2}).write(draft.path)
    with pytest.raises(DataError, match=str(broken["key"][1])):
        open_dataset(path).split("train").read([0])


def test_an_index_beyond_the_split_is_refused(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IndexError):
        open_dataset(prepared).split("val").read([3])
    monkeypatch.setattr(reading, "IN_MEMORY_BYTES", 0)
    with pytest.raises(IndexError):
        open_dataset(prepared).split("val").read([3])


# ---------------------------------------------------------------------------------------------------------------------
# Stored squares


def square(encoding: str, size: int = 40) -> bytes:
    """A picture that is smooth in one corner and noisy in another."""
    smooth = np.asarray(Image.radial_gradient("L").resize((size, size)).convert("RGB")).astype(np.int64)
    noise = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    pixels = np.clip(smooth + noise * np.linspace(0, 0.5, size)[:, None], 0, 255).astype(np.uint8)
    return encode_square(Image.fromarray(pixels), encoding, 95)


@pytest.mark.parametrize("encoding", ["jpeg", "png"])
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_stored_square_is_decoded_to_bit_as_pillow_does(encoding: str, kind: type) -> None:
    content = square(encoding)
    expected = np.asarray(Image.open(io.BytesIO(content)))
    np.testing.assert_array_equal(decode_square(kind(content), 40), expected)
    room = np.zeros((2, 40, 40, 3), dtype=np.uint8)
    assert np.shares_memory(decode_square(kind(content), 40, out=room[1]), room)
    np.testing.assert_array_equal(room[1], expected)
    assert not room[0].any()


def test_color_at_half_the_resolution_is_decoded_fast() -> None:
    content = square("fast-jpeg")
    fast = simplejpeg.decode_jpeg(content, fastdct=True, fastupsample=True)
    np.testing.assert_array_equal(decode_square(content, 40), fast)
    assert not np.array_equal(simplejpeg.decode_jpeg(content), fast)
    assert len(content) < 0.75 * len(square("jpeg"))


@pytest.mark.parametrize(("shrink", "edge"), [(1, 40), (2, 20), (4, 10), (8, 5)])
def test_a_jpeg_is_shrunk_while_it_is_decoded(shrink: int, edge: int) -> None:
    content = square("jpeg")
    pixels = decode_square(content, 40, shrink=shrink)
    assert pixels.shape == (edge, edge, 3)
    means = decode_square(content, 40).reshape(edge, shrink, edge, shrink, 3).astype(float).mean((1, 3))
    assert np.abs(pixels - means).mean() < 2


def test_other_formats_are_not_shrunk() -> None:
    assert decode_square(square("png"), 40, shrink=2).shape == (40, 40, 3)


@pytest.mark.parametrize("encoding", ["jpeg", "png"])
@pytest.mark.parametrize("size", [39, 41])
def test_a_square_of_another_size_is_refused(encoding: str, size: int) -> None:
    with pytest.raises(BadImageError, match=f"40 x 40 pixels instead of {size} x {size}|buffer is too small"):
        decode_square(square(encoding), size, out=np.empty((size, size, 3), dtype=np.uint8))


@pytest.mark.parametrize("encoding", ["jpeg", "png"])
@pytest.mark.parametrize("part", [0.01, 0.3, 0.9])
def test_a_damaged_square_is_refused(encoding: str, part: float) -> None:
    content = square(encoding)
    with pytest.raises(BadImageError, match=r"damaged|truncated"):
        decode_square(content[: int(len(content) * part)], 40)


@pytest.mark.parametrize("name", ["top_labels", "top_probabilities", "answer", "confidence", "named"])
def test_an_attribute_named_as_a_column_is_refused(tmp_path: Path, name: str) -> None:
    """As prepare refuses it; a data set of an earlier version may have it."""

    def prepared_with(folder: str, label_sets: tuple[tuple[int, ...], ...] | None) -> Path:
        with artifacts.create(tmp_path / folder, "dataset", settings={}) as draft:
            DatasetDescription(classes=("a", "b"), image_size=SIZE, images=COUNTS, label_sets=label_sets).write(
                draft.path
            )
            ClassTags(labels=("a", "b"), attributes={"energy": (1.0, 2.0), name: (1.0, 2.0)}).write(draft.path)
        return tmp_path / folder

    message = f"tags.json does not describe its classes \\(an attribute is named '{name}', as another column of the predictions is\\)"
    with pytest.raises(ArtifactError, match=message):
        open_dataset(prepared_with("several", ((0,), (0, 1))))
    one = prepared_with("one", None)
    if name == "named":  # a column where an image may have several labels only
        assert open_dataset(one).tags is not None
    else:
        with pytest.raises(ArtifactError, match=message):
            open_dataset(one)


def test_first_bytes_of_keys():
    keys = [hashlib.sha256(bytes([number])).hexdigest() for number in range(7)]
    column = pa.chunked_array([keys[:3], [], keys[3:]], type=pa.string())
    assert split_rows._first_bytes(column).tolist() == [int(key[:16], 16) for key in keys]
    for wrong in ("0123", "x" * 64):
        with pytest.raises(ValueError, match=r"shorter than 16 digits|non-hexadecimal"):
            split_rows._first_bytes(pa.chunked_array([[keys[0], wrong]]))
