"""Watching the objects of a selector: every change of them, once, however often the connection breaks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from components.launch.api_errors import ApiUnavailableError, ExpiredError, ForbiddenError, Resource
from components.launch.client import Cluster, watch_events
from components.launch.readers import Readers

logger = logging.getLogger(__name__)

POLL_S = 5.0
SHORT_S = 1.0
"""A watch that ends sooner than this, with nothing in it, is of no use."""
USELESS_WATCHES = 5
"""So many of them one after the other, and we poll."""


@dataclass(frozen=True)
class Change:
    """An object was made, changed or deleted."""

    resource: Resource
    object: dict[str, Any]
    deleted: bool = False


class Watcher:
    """Lists, then watches from there; lists again when the watch breaks; polls where watching is not possible."""

    def __init__(
        self,
        cluster: Cluster,
        resource: Resource,
        readers: Readers,
        publish: Callable[[Change], None],
        *,
        labels: str = "",
        fields: str = "",
    ) -> None:
        self._cluster, self._resource, self._readers, self._publish = cluster, resource, readers, publish
        self._selectors = {"labels": labels, "fields": fields}
        self._known: dict[str, dict[str, Any]] = {}
        """The objects that were there last, by uid."""
        self._useless, self._polling = 0, False

    def run(self) -> None:
        """Publish changes until stopped.

        Raises:
            ClusterError: the objects cannot be listed, or not for longer than retry allows.
        """
        while True:
            version = self._list()
            while version and not self._polling:
                version = self._watch(version)
            if self._polling:
                self._readers.retry.wait(POLL_S)

    def _list(self) -> str:
        """Publish what has changed since the last look; gives the resource version to watch from."""
        listing = self._readers.retry(lambda: self._cluster.list(self._resource, **self._selectors))
        found = {item["metadata"]["uid"]: item for item in listing.items}
        for uid, gone in self._known.items():
            if uid not in found:
                self._publish(Change(self._resource, gone, deleted=True))
        for uid, item in found.items():
            if _version(item) != _version(self._known.get(uid)):
                self._publish(Change(self._resource, item))
        self._known = found
        return listing.version

    def _watch(self, version: str) -> str:
        """Publish changes from a version on; gives the version to go on from, or nothing: list again."""
        start, before = time.monotonic(), version
        try:
            stream = self._cluster.watch(self._resource, version, **self._selectors)
            with self._readers.reading(stream):
                for kind, item in watch_events(stream):
                    version = item["metadata"]["resourceVersion"]
                    self._take(kind, item)
        except ForbiddenError:
            self._poll("watching them is not allowed")
        except ExpiredError:
            version = ""
        except ApiUnavailableError:
            self._readers.retry.wait(0)  # stopped: the stream did not break, it was ended
            version = ""
        self._count_useless(time.monotonic() - start < SHORT_S and version in {"", before})
        return version

    def _take(self, kind: str, item: dict[str, Any]) -> None:
        if kind == "BOOKMARK":
            return
        uid = item["metadata"]["uid"]
        if kind == "DELETED":
            self._known.pop(uid, None)
        else:
            self._known[uid] = item
        self._publish(Change(self._resource, item, deleted=kind == "DELETED"))

    def _count_useless(self, useless: bool) -> None:
        self._useless = self._useless + 1 if useless else 0
        if useless:
            self._readers.retry.wait(0.1 * self._useless)
        if self._useless >= USELESS_WATCHES:
            self._poll("watches break at once")

    def _poll(self, why: str) -> None:
        self._polling = True
        logger.warning("%s: %s, so they are asked for every %g s", self._resource, why, POLL_S)


def _version(item: dict[str, Any] | None) -> str:
    return str(item["metadata"]["resourceVersion"]) if item else ""
