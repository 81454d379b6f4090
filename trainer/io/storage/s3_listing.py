"""The objects of an S3 bucket in the order of their keys: large ones by a request for each of several folders at a time.

S3 lists a thousand objects a request, and the next page only after the last one. So what is below different folders is asked for at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import count
from typing import Any, TypeAlias

Page: TypeAlias = Mapping[str, Any]
Request: TypeAlias = Callable[..., Page]
"""`list_objects_v2` of a bucket, with its keywords; what it raises is passed on."""

FIRST_PAGES = 20
"""Pages that are listed one after the other: fewer are not worth more requests, and they tell how large folders are."""
LARGE = 500  # objects of a folder from which on a request for each folder is no waste
AT_ONCE = 16  # folders
TOGETHER = 64  # folders after which their size is looked at again
AHEAD = 64  # pages of a folder that wait for their turn
FEW, DEEPEST = 8, 4
"""A level with fewer folders is descended into, as far as so many levels."""


def objects(request: Request, prefix: str) -> Iterator[Page]:
    """Yield the `Contents` of all pages below a prefix."""
    after, are_large, is_end = "", False, False
    while not is_end:
        found = _level(request, prefix, after, depth=0) if are_large else _by_pages(request, prefix, after)
        with closing(found):
            while True:
                try:
                    one = next(found)
                except StopIteration as ended:
                    is_end = ended.value
                    break
                yield one
                after = one["Key"]
        are_large = not are_large


def _by_pages(request: Request, prefix: str, after: str) -> Generator[Page, None, bool]:
    """Yield the objects that come after a key page by page; returns whether these are all, else folders are large from here on."""
    seen, folders = 0, set[str]()
    for number, page in enumerate(_pages(request, Prefix=prefix, **_start(after)), start=1):
        contents = page.get("Contents", ())
        yield from contents
        seen += len(contents)
        folders.update(one["Key"].rpartition("/")[0] for one in contents)
        if number % FIRST_PAGES == 0 and page["IsTruncated"]:
            if seen >= LARGE * len(folders):
                return False
            seen, folders = 0, set()
    return True


def _start(after: str) -> Mapping[str, str]:
    return {"StartAfter": after} if after else {}


def _pages(request: Request, **where: Any) -> Iterator[Page]:
    while True:
        page = request(**where)
        yield page
        if not page["IsTruncated"]:
            return
        where["ContinuationToken"] = page["NextContinuationToken"]


def _level(request: Request, prefix: str, after: str, *, depth: int) -> Generator[Page, None, bool]:
    """Yield the objects below a prefix whose keys come after a key; returns whether these are all, else folders are small from here on."""
    for page in _pages(request, Prefix=prefix, Delimiter="/"):
        found = [(one["Key"], one) for one in page.get("Contents", ()) if one["Key"] > after]
        folders = [one["Prefix"] for one in page.get("CommonPrefixes", ())]
        folders = [folder for folder in folders if folder > after or after.startswith(folder)]
        entries = sorted([*found, *((folder, None) for folder in folders)], key=lambda entry: entry[0])
        if len(folders) < FEW and depth < DEEPEST and not page["IsTruncated"]:
            for key, one in entries:
                if one is not None:
                    yield one
                elif not (yield from _level(request, key, after, depth=depth + 1)):
                    return False
            continue
        for group in _groups(entries):
            names, count = [key for key, one in group if one is None], 0
            with closing(_side_by_side(request, names, after)) as below:
                for _, one in group:
                    for item in next(below) if one is None else (one,):
                        yield item
                        count += 1
            if len(names) == TOGETHER and count < LARGE * len(names):
                return False
    return True


def _groups(entries: Sequence[tuple[str, Page | None]]) -> Iterator[Sequence[tuple[str, Page | None]]]:
    """Cut the objects and folders of a level after each `TOGETHER` folders."""
    group: list[tuple[str, Page | None]] = []
    for entry in entries:
        group.append(entry)
        if sum(one is None for _, one in group) == TOGETHER:
            yield group
            group = []
    if group:
        yield group


def _side_by_side(request: Request, folders: Sequence[str], after: str) -> Generator[Iterator[Page], None, None]:
    """Yield the objects of each folder in turn, while those of the next ones are asked for."""
    stopping = threading.Event()
    waiting: list[queue.Queue[Sequence[Page] | None]] = [queue.Queue(AHEAD) for _ in folders]

    def put(number: int, item: Sequence[Page] | None) -> None:
        while not stopping.is_set():
            with suppress(queue.Full):
                waiting[number].put(item, timeout=0.1)
                return

    def ask(number: int) -> None:
        folder = folders[number]
        start = {"StartAfter": after} if after.startswith(folder) else {}
        try:
            for page in _pages(request, Prefix=folder, **start):
                if stopping.is_set():
                    return
                put(number, page.get("Contents", ()))
        finally:
            put(number, None)

    def taken(number: int, asked: Future[None]) -> Iterator[Page]:
        while (contents := waiting[number].get()) is not None:
            yield from contents
        asked.result()  # raises what the requests raised

    # Folders are begun in their order, so the one that is taken is always among those that are asked for.
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="listing") as threads:
        try:
            asked = [threads.submit(ask, number) for number in range(len(folders))]
            yield from map(taken, count(), asked)
        finally:
            stopping.set()
            threads.shutdown(wait=False, cancel_futures=True)
