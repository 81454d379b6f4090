"""S3 Inventory as a source: each of its formats gives the data set that listing the bucket gives."""

import gzip
import hashlib
import io
import json
from urllib.parse import quote_plus

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import orc

from trainer.data.sources import list_source, source_state
from trainer.data.sources.folder_files import list_files
from trainer.io import storage
from trainer.io.errors import DataError

BUCKET = "s3://artifacts"
# The schemas of an inventory of all versions, as https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-inventory-location.html
# writes them.
SCHEMAS = {
    "CSV": "Bucket, Key, VersionId, IsLatest, IsDeleteMarker, Size, LastModifiedDate, ETag, StorageClass",
    "ORC": "struct<bucket:string,key:string,version_id:string,is_latest:boolean,is_delete_marker:boolean,size:bigint,"
    "last_modified_date:timestamp,e_tag:string,storage_class:string>",
    "Parquet": "message s3.inventory { required binary bucket (UTF8); required binary key (UTF8); optional binary version_id (UTF8); "
    "optional boolean is_latest; optional boolean is_delete_marker; optional int64 size; optional int64 last_modified_date "
    "(TIMESTAMP_MILLIS); optional binary e_tag (UTF8); optional binary storage_class (UTF8); }",
}
FOLDER = f"{BUCKET}/reports/artifacts/all/2026-11-28T01-00Z"


@pytest.fixture
def photos(object_store):
    """Six photos of two kinds, one of them named as files seldom are, and what else lies in a bucket."""
    for number in range(6):
        image, file = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8), io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        name = f"{number} a+b%20ü" if number == 3 else number
        storage.write_bytes(f"{BUCKET}/photos/{'apple' if number < 3 else 'pear'}/{name}.png", file.getvalue())
    storage.write_bytes(f"{BUCKET}/photos/notes.txt", b"no photo")
    storage.write_bytes(f"{BUCKET}/photographs.csv", b"beside the folder")


def inventory(kind="Parquet", *, files=2, columns=None):
    """Write an inventory of the bucket, in several files without any order, with a version and a photo that are gone; return its URI."""
    rows = [
        {"key": one.name, "size": one.size, "e_tag": one.tag.strip('"'), "is_latest": True, "is_delete_marker": False}
        for one in storage.listing(BUCKET)
    ]
    before = rows[0] | {"size": 7, "e_tag": "0" * 32, "is_latest": False}
    gone = rows[0] | {"key": "photos/pear/gone.png", "size": None, "e_tag": None, "is_delete_marker": True}
    rows = [*reversed(rows), before, gone]
    listed = []
    for number in range(files):
        content = FORMATS[kind](rows[number::files])
        key = f"reports/artifacts/all/data/{number}.{kind.lower()}"
        storage.write_bytes(f"{BUCKET}/{key}", content)
        checksum = hashlib.md5(content, usedforsecurity=False).hexdigest()
        listed.append({"key": key, "size": len(content), "MD5checksum": checksum})
    manifest = {
        "sourceBucket": "artifacts",
        "destinationBucket": "arn:aws:s3:::artifacts",
        "version": "2016-11-30",
        "creationTimestamp": "1795827600000",
        "fileFormat": kind,
        "fileSchema": columns or SCHEMAS[kind],
        "files": listed,
    }
    storage.write_bytes(f"{FOLDER}/manifest.json", json.dumps(manifest).encode())
    return f"{FOLDER}/manifest.json"


def as_csv(rows):
    def cell(value):
        return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    def line(row):
        state = (cell(row[name]) for name in ("is_latest", "is_delete_marker", "size"))
        key = quote_plus(row["key"], safe="/")
        return ["artifacts", key, "", *state, "2026-11-27T10:00:00.000Z", cell(row["e_tag"]), "STANDARD"]

    return gzip.compress("".join(",".join(f'"{one}"' for one in line(row)) + "\n" for row in rows).encode())


def as_table(rows):
    return pa.Table.from_pylist([{"bucket": "artifacts", **row, "storage_class": "STANDARD"} for row in rows])


def as_orc(rows):
    sink = io.BytesIO()
    orc.write_table(as_table(rows), sink, compression="zlib")
    return sink.getvalue()


def as_parquet(rows):
    sink = io.BytesIO()
    pq.write_table(as_table(rows), sink, compression="snappy")
    return sink.getvalue()


FORMATS = {"CSV": as_csv, "ORC": as_orc, "Parquet": as_parquet}


@pytest.mark.usefixtures("photos")
def test_a_file_without_a_row_is_no_error():
    assert len(list_source(f"imagefolder:{inventory('CSV', files=40)}/photos").items) == 6


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.usefixtures("photos")
def test_inventory_gives_what_listing_the_bucket_gives(kind):
    expected = list_source(f"imagefolder:{BUCKET}/photos")
    state = source_state(f"imagefolder:{BUCKET}/photos")
    source = f"imagefolder:{inventory(kind)}/photos"
    found = list_source(source)
    assert [*found.items] == [*expected.items]
    assert found.items[0].location == f"{BUCKET}/photos/apple/0.png"
    assert found.read(found.items[3].location) == expected.read(expected.items[3].location)
    assert (found.classes, found.notes) == (expected.classes, expected.notes)
    assert source_state(source) == state
    # Another order of the same rows is the same source.
    assert source_state(f"imagefolder:{inventory(kind, files=3)}/photos") == state


@pytest.mark.usefixtures("photos")
def test_inventory_without_a_folder_is_of_the_bucket():
    listed = [file.name for file in list_files(BUCKET, "refuse").files]
    assert [file.name for file in list_files(inventory(), "refuse").files] == listed
    assert [file.name for file in list_files(f"{inventory()}/photos/pear/", "refuse").files] == [
        "3 a+b%20ü.png",
        "4.png",
        "5.png",
    ]


@pytest.mark.usefixtures("photos")
def test_what_is_no_inventory_is_one_message():
    def message(uri):
        with pytest.raises(DataError) as caught:
            list_files(f"{uri}/photos", "refuse")
        return str(caught.value)

    schema = SCHEMAS["Parquet"].replace("optional binary e_tag (UTF8); ", "")
    assert "the inventory has no ETag, by which photos and their changes are known" in message(
        inventory(columns=schema)
    )
    schema = SCHEMAS["CSV"].replace("Size, ", "").replace("ETag, ", "")
    assert "the inventory has no Size, ETag, by" in message(inventory("CSV", columns=schema))
    assert message(f"{inventory()}/none").startswith(f"folder {FOLDER}/manifest.json/none/photos: does not exist")
    uri = inventory()
    storage.write_bytes(f"{BUCKET}/reports/artifacts/all/data/1.parquet", b"half of it")
    assert f"{BUCKET}/reports/artifacts/all/data/1.parquet: is not what {uri} lists, by its MD5" in message(uri)
    manifest = json.loads(storage.read_bytes(inventory()))
    for name, value, expected in (
        ("fileFormat", "Avro", "fileFormat 'Avro' is not known; give CSV, ORC or Parquet"),
        ("fileFormat", "ORC", "cannot be read as ORC"),
        ("files", [{"key": "data"}], "whose files have a key and an MD5checksum each"),
        (
            "files",
            None,
            "is no manifest of an S3 Inventory, which has sourceBucket, destinationBucket, fileFormat, fileSchema, files",
        ),
        ("files", 5, "look at files, or name another manifest"),
        ("fileSchema", ["Key"], "look at fileSchema, or"),
        ("destinationBucket", 7, "look at destinationBucket, or"),
        ("fileSchema", SCHEMAS["Parquet"].replace("binary key (UTF8)", ""), "the inventory has no Key"),
    ):
        changed = {key: one for key, one in (manifest | {name: value}).items() if one is not None}
        storage.write_bytes(f"{FOLDER}/manifest.json", json.dumps(changed).encode())
        assert expected in message(f"{FOLDER}/manifest.json")
    uri = inventory("CSV", columns=SCHEMAS["CSV"].replace("Size, LastModifiedDate", "LastModifiedDate, Size"))
    assert "0.csv: cannot be read as CSV with the columns of" in message(uri)
    for content in (b"{", b"[]"):
        storage.write_bytes(f"{FOLDER}/manifest.json", content)
        assert message(f"{FOLDER}/manifest.json").startswith(f"{FOLDER}/manifest.json: ")
