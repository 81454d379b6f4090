"""S3 Inventory: the list of a bucket's objects that S3 writes each day or week, read in place of listing the bucket.

An inventory is addressed by its `manifest.json`, and a folder of its bucket as if it lay below that:
`s3://REPORTS/BUCKET/CONFIG/2026-11-28T01-00Z/manifest.json/photos` is `s3://BUCKET/photos`. The format is that of
https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-inventory-location.html
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote_plus

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv, orc

from trainer.io import storage
from trainer.io.errors import DataError
from trainer.io.formatting import listed

_MANIFEST = re.compile(r"(s3a?://.+?/manifest\.json)(?:/(.*))?")
_DATED = re.compile(r"(s3a?://.+?)/\d{4}-\d{2}-\d{2}T\d{2}-\d{2}Z(/manifest\.json)")
_ROWS = 65_536  # that are read at a time
_MANIFEST_TYPES = {
    "sourceBucket": str,
    "destinationBucket": str,
    "fileFormat": str,
    "fileSchema": str,
    "files": list,
}
_COLUMNS = {
    "Key": "key",
    "Size": "size",
    "ETag": "e_tag",
    "IsLatest": "is_latest",  # this and the next only where an inventory has all versions
    "IsDeleteMarker": "is_delete_marker",
}  # what is read: its name in a CSV file -> in the others


def objects(uri: str) -> tuple[str, Iterator[storage.Listed]]:
    """Return the folder that a URI of a store names, and the objects below it: by an inventory, or else by listing them.

    A `DataError` if an inventory is not one, is damaged, or lacks sizes and ETags.
    """
    found = _MANIFEST.fullmatch(uri)
    if found is None:
        return uri, storage.listing(uri)
    manifest = _read(found[1])
    prefix = f"{found[2].strip('/')}/" if found[2] and found[2].strip("/") else ""
    return storage.join(f"s3://{manifest['sourceBucket']}", prefix.rstrip("/")), _below(found[1], manifest, prefix)


def undated(source: str) -> str:
    """Return a source without the date of an inventory in it, which each later one of the same photos has too."""
    return _DATED.sub(r"\1\2", source)


def _read(uri: str) -> dict[str, Any]:
    try:
        manifest = storage.read_json(uri)
    except ValueError as error:
        raise DataError(
            f"{uri}: is no JSON ({error}); name the manifest.json that lies beside the manifest.checksum of an S3 Inventory"
        ) from error
    if not isinstance(manifest, dict):
        manifest = {}
    wrong = [name for name, kind in _MANIFEST_TYPES.items() if not isinstance(manifest.get(name), kind)]
    if wrong:
        raise DataError(
            f"{uri}: is no manifest of an S3 Inventory, which has {', '.join(_MANIFEST_TYPES)} as S3 writes them; look at "
            f"{', '.join(wrong)}, or name another manifest"
        )
    if manifest["fileFormat"] not in ("CSV", "ORC", "Parquet"):
        raise DataError(f"{uri}: fileFormat {manifest['fileFormat']!r} is not known; give CSV, ORC or Parquet")
    if not all(isinstance(file, dict) and {"key", "MD5checksum"} <= file.keys() for file in manifest["files"]):
        raise DataError(f"{uri}: is no manifest of an S3 Inventory, whose files have a key and an MD5checksum each")
    schema = re.findall(r"\w+", manifest["fileSchema"])
    if lacking := [name for name in ("Key", "Size", "ETag") if {name, _COLUMNS[name]}.isdisjoint(schema)]:
        raise DataError(
            f"{uri}: the inventory has no {listed(lacking, 3)}, by which photos and their changes are known; add the field to its "
            "configuration"
        )
    made: dict[str, Any] = manifest
    return made


def _below(uri: str, manifest: dict[str, Any], prefix: str) -> Iterator[storage.Listed]:
    reports = str(manifest["destinationBucket"]).rpartition(":")[2]
    for file in manifest["files"]:
        place = f"s3://{reports}/{file['key']}"
        content = storage.read_bytes(place)
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != file["MD5checksum"]:
            raise DataError(f"{place}: is not what {uri} lists, by its MD5; take an inventory whose files are complete")
        try:
            for batch in _batches(manifest, content):
                yield from _rows(batch, prefix, encoded=manifest["fileFormat"] == "CSV")
        except (pa.ArrowException, OSError, EOFError, zlib.error, KeyError, ValueError) as error:
            raise DataError(
                f"{place}: cannot be read as {manifest['fileFormat']} with the columns of {uri}: {type(error).__name__} {error}; take "
                "another day's inventory"
            ) from error


def _batches(manifest: dict[str, Any], content: bytes) -> Iterator[pa.RecordBatch]:
    """Yield the columns of a file that are read, by their names in Parquet; those of a CSV file are texts."""
    if manifest["fileFormat"] == "Parquet":
        file = pq.ParquetFile(io.BytesIO(content))
        yield from file.iter_batches(_ROWS, columns=_named(file.schema_arrow.names))
    elif manifest["fileFormat"] == "ORC":
        stripes = orc.ORCFile(io.BytesIO(content))
        for number in range(stripes.nstripes):
            yield stripes.read_stripe(number, _named(stripes.schema.names))
    else:
        if not gzip.GzipFile(fileobj=io.BytesIO(content)).read(1):  # no row, which Arrow refuses
            return
        names = [_COLUMNS.get(name.strip(), name.strip()) for name in manifest["fileSchema"].split(",")]
        options = csv.ReadOptions(column_names=names)
        texts = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), include_columns=_named(names))
        with pa.CompressedInputStream(pa.py_buffer(content), "gzip") as text:
            yield from csv.open_csv(text, read_options=options, convert_options=texts)


def _named(there: Sequence[str]) -> list[str]:
    return [name for name in _COLUMNS.values() if name in there]


def _rows(batch: pa.RecordBatch, prefix: str, *, encoded: bool) -> Iterator[storage.Listed]:
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    count = len(batch)
    latest, deleted = (columns.get(name) or [None] * count for name in ("is_latest", "is_delete_marker"))
    for key, size, tag, is_latest, is_deleted in zip(
        columns["key"], columns["size"], columns["e_tag"], latest, deleted, strict=True
    ):
        if str(is_latest).lower() == "false" or str(is_deleted).lower() == "true":
            continue
        name = unquote_plus(key) if encoded else key
        if name.startswith(prefix) and not name.endswith("/"):  # that is a placeholder for a folder
            # S3's own listing has the tag between quotes.
            yield storage.Listed(name[len(prefix) :], int(size or 0), f'"{tag}"' if tag else "")
