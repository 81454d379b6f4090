"""Listing a bucket by several requests at a time gives what listing it by one after the other gives."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.io import storage
from trainer.io.errors import StorageError
from trainer.io.storage import s3_listing

NAMES = st.lists(st.sampled_from(["a", "b", "a.", "a-", "é", "z0", "\U0001f34e"]), min_size=1, max_size=4)


class Bucket:
    """S3's answers to `list_objects_v2`, by its documentation, in pages of a few entries."""

    def __init__(self, keys: Any, page: int = 3, seconds: float = 0.0) -> None:
        self.keys, self.page, self.seconds = sorted(keys, key=str.encode), page, seconds
        self.asked: Counter[str] = Counter()
        self.running, self.most, self.lock = 0, 0, threading.Lock()

    def __call__(self, **where: str) -> dict[str, Any]:
        prefix, folds = where["Prefix"], where.get("Delimiter")
        start, token = (where.get(name, "").encode() for name in ("StartAfter", "ContinuationToken"))
        with self.lock:
            self.asked[prefix] += 1
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(self.seconds)
        entries: dict[str, str] = {}
        for key in self.keys:
            if key.startswith(prefix) and key.encode() > start:
                head, slash, _ = key[len(prefix) :].partition("/")
                entries.setdefault(prefix + head + slash if folds and slash else key, key)
        left = [entry for entry in entries if entry.encode() > token]
        shown = left[: self.page]
        with self.lock:
            self.running -= 1
        return {
            "Contents": [{"Key": key} for key in shown if entries[key] == key],
            "CommonPrefixes": [{"Prefix": key} for key in shown if entries[key] != key],
            "IsTruncated": len(left) > len(shown),
            "NextContinuationToken": shown[-1] if shown else "",
        }


def keys_of(bucket: Bucket, prefix: str = "") -> list[str]:
    return [one["Key"] for one in s3_listing.objects(bucket, prefix)]


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_listing, "FIRST_PAGES", 2)
    monkeypatch.setattr(s3_listing, "LARGE", 1)


@given(
    names=st.lists(NAMES, max_size=60),
    page=st.integers(1, 5),
    first=st.integers(1, 4),
    few=st.integers(0, 3),
    ahead=st.integers(1, 3),
    large=st.integers(0, 3),
    together=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_all_keys_come_once_and_in_order(
    names: list[list[str]], page: int, first: int, few: int, ahead: int, large: int, together: int
) -> None:
    bucket = Bucket({"photos/" + "/".join(parts) for parts in names} | {"other/x", "photos2"}, page)
    with pytest.MonkeyPatch.context() as patch:
        chosen = {"FIRST_PAGES": first, "LARGE": large, "FEW": few, "AHEAD": ahead, "AT_ONCE": 2, "TOGETHER": together}
        for name, value in chosen.items():
            patch.setattr(s3_listing, name, value)
        found = keys_of(bucket, "photos/")
    assert found == [key for key in bucket.keys if key.startswith("photos/")]


def test_folders_are_asked_for_at_once(side_by_side: None) -> None:
    bucket = Bucket({f"train/{label:02}/{number:03}" for label in range(20) for number in range(30)}, 10, 0.002)
    assert len(keys_of(bucket)) == 600
    assert bucket.most > 4


def test_small_folders_are_not_asked_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_listing, "FIRST_PAGES", 2)
    monkeypatch.setattr(s3_listing, "LARGE", 5)
    bucket = Bucket({f"{label:03}/{number}" for label in range(100) for number in range(4)}, 10)
    assert len(keys_of(bucket)) == 400
    assert bucket.asked == {"": 40}


def test_small_folders_after_a_large_one_are_listed_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FIRST_PAGES": 2, "LARGE": 5, "TOGETHER": 4}.items():
        monkeypatch.setattr(s3_listing, name, value)
    large, small = {f"a/{number:03}" for number in range(60)}, {f"b{label:03}/0" for label in range(300)}
    bucket = Bucket(large | small, 10)
    assert keys_of(bucket) == bucket.keys
    assert sum(bucket.asked.values()) < 60, "36 where each is asked for after the other"
    # And where large ones come again, several are asked for at once.
    bucket = Bucket(
        large | small | {f"c{label:02}/{number:03}" for label in range(20) for number in range(60)}, 10, 0.002
    )
    assert keys_of(bucket) == bucket.keys
    assert bucket.most == 4


def test_folders_that_are_emptied_meanwhile_let_no_key_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FIRST_PAGES": 2, "LARGE": 5, "TOGETHER": 4, "AT_ONCE": 2}.items():
        monkeypatch.setattr(s3_listing, name, value)
    bucket = Bucket({f"{folder:02}/{number:03}" for folder in range(12) for number in range(60)}, 10)

    def emptying(**where: Any) -> s3_listing.Page:
        page = bucket(**where)
        # They are there as the level's folders are named, and not when they are asked for.
        if where["Prefix"] and "04/" <= where["Prefix"] < "08/":
            page = {**page, "Contents": [], "IsTruncated": False}
        return page

    keys = [one["Key"] for one in s3_listing.objects(emptying, "")]
    assert keys == sorted(set(keys))
    assert set(bucket.keys) - set(keys) <= {key for key in bucket.keys if "04/" <= key < "08/"}


def test_who_takes_no_more_asks_no_more(side_by_side: None) -> None:
    bucket = Bucket({f"{label:02}/{number:03}" for label in range(50) for number in range(100)}, 10, 0.001)
    objects = s3_listing.objects(bucket, "")
    assert [next(objects)["Key"] for _ in range(30)][-1] == "00/029"
    objects.close()
    before = sum(bucket.asked.values())
    time.sleep(0.05)
    assert sum(bucket.asked.values()) == before < 300
    assert not [one for one in threading.enumerate() if one.name.startswith("listing")]


def test_what_fails_is_raised_in_its_turn(side_by_side: None) -> None:
    bucket = Bucket({f"{label:02}/{number:03}" for label in range(20) for number in range(30)}, 10)

    def request(**where: Any) -> dict[str, Any]:
        if where["Prefix"] == "07/":
            raise StorageError("s3://bucket refuses")
        return bucket(**where)

    objects = s3_listing.objects(request, "")
    assert [next(objects)["Key"] for _ in range(7 * 30)][-1] == "06/029"
    with pytest.raises(StorageError, match="refuses"):
        next(objects)


def test_a_real_server_lists_the_same(side_by_side: None, object_store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_listing, "FEW", 2)
    names = [f"train/{label}/{number:02}.jpg" for label in ("a", "a.b", "é x", "z") for number in range(12)]
    names += ["readme.txt", "val/a/1.jpg", "train/top.jpg"]
    for name in names:
        object_store.put(f"photos/{name}", name.encode())
    object_store.page = 5
    found = [*storage.listing(object_store.uri("photos"))]
    assert [one.name for one in found] == sorted(names)
    assert all(one.size == len(one.name.encode()) and one.tag for one in found)
