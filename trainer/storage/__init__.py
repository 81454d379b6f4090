"""Files here and in an object store, by URI.

    a path, file://...      this machine
    s3://BUCKET/KEY         Amazon S3 or whatever speaks its protocol
    minio://BUCKET/KEY      how Kubeflow Pipelines writes the same

Endpoint and credentials come from the environment, as every S3 tool reads them: AWS_ENDPOINT_URL_S3 (or AWS_ENDPOINT_URL),
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_DEFAULT_REGION. Other schemes that fsspec knows can be read and written
too, with its own settings.

`objects` handles one object or name, and makes the requests; `transfers` moves many files at once; `cache` keeps what was fetched, once
per node. Whatever goes wrong in the store ends in a `StorageError`.
"""

from __future__ import annotations

from trainer.storage.objects import (
    Listed,
    children,
    create_bytes,
    exists,
    files,
    flush,
    is_away,
    is_remote,
    join,
    listing,
    local_path,
    parent,
    read_bytes,
    read_checksummed,
    read_limited,
    remove,
    remove_file,
    write_bytes,
    write_checksummed,
)
from trainer.storage.transfers import FileRecord, download_directory, file_digest, upload_directory

__all__ = [
    "FileRecord",
    "Listed",
    "children",
    "create_bytes",
    "download_directory",
    "exists",
    "file_digest",
    "files",
    "flush",
    "is_away",
    "is_remote",
    "join",
    "listing",
    "local_path",
    "parent",
    "read_bytes",
    "read_checksummed",
    "read_limited",
    "remove",
    "remove_file",
    "upload_directory",
    "write_bytes",
    "write_checksummed",
]
