"""An artifact that all training processes of a job write together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from trainer import artifacts, host, storage
from trainer.artifacts import Draft
from trainer.errors import OutputError
from trainer.graph import Kind
from trainer.training.process_group import Processes


@contextmanager
def shared_artifact(
    processes: Processes, uri: str | Path, kind: Kind, *, settings: Mapping[str, Any], parents: Mapping[str, str]
) -> Iterator[Draft]:
    """Like `artifacts.create`, on every process of every machine.

    The first process makes the artifact, and notes how long after the launch and on what kind of device; all write into one directory.
    In a store there is no such directory: the processes of a machine write into a folder of theirs, which the first of them sends when
    all have written. Then the first process of all writes the manifest.

    Args:
        processes: this process among the others.
        uri: where the artifact is made.
        kind: of what kind it is.
        settings: that make it.
        parents: name of each parent -> its fingerprint.

    Raises:
        OutputError: the directory cannot be written, or not all machines see it.
        StorageError: the store does not answer or refuses.
    """
    leader = processes.first_of_node if storage.is_remote(uri) else 0
    with ExitStack() as stack:
        own: Draft | None = None
        if processes.is_first:
            own = stack.enter_context(artifacts.create(uri, kind, settings=settings, parents=parents))
            own.startup_seconds = round(host.seconds_since_launch(), 3)
            own.device = processes.device.kind
        elif processes.rank == leader:
            own = Draft(path=stack.enter_context(artifacts.folder_for(uri)))
        paths = processes.gather(own.path if own else Path(), f"the beginning of {kind} {uri}")
        draft = own or Draft(path=paths[leader])
        if not draft.path.is_dir():
            raise OutputError(
                f"{kind} {uri}: lies on the disk of the first machine, which this one does not see; give an output that all machines "
                "reach, such as s3://BUCKET/NAME"
            )
        yield draft
        processes.barrier(f"the end of {kind} {uri}")
        sent = artifacts.contribute(uri, draft.path) if own and not processes.is_first else {}
        for records in processes.gather(sent, f"the files of {kind} {uri}"):
            draft.contributed.update(records)
