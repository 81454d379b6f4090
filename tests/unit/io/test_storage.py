import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer.io import limits, storage
from trainer.io.errors import (
    ObjectDamagedError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    OutputError,
    StorageAwayError,
    StorageError,
)
from trainer.io.storage import cache, transfers

PART = 100_000


def records(contents):
    """What a manifest says of these files."""
    return {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# Objects


@pytest.mark.parametrize("base", ["s3://artifacts/one", "memory://one", "{tmp_path}/one"])
def test_a_file_is_written_read_listed_and_removed(object_store, tmp_path, base):
    base = base.format(tmp_path=tmp_path)
    uri = storage.join(base, "a b", "ä?c.bin")
    assert not storage.exists(uri)
    storage.write_bytes(uri, b"content")
    storage.write_bytes(storage.join(base, "d"), b"")
    assert storage.exists(uri)
    assert not storage.exists(storage.parent(uri))
    assert storage.read_bytes(uri) == b"content"
    assert storage.read_bytes(uri, 1, 3) == b"on"
    assert storage.read_bytes(storage.join(base, "d")) == b""
    assert storage.files(base) == {"a b/ä?c.bin": 7, "d": 0}
    assert storage.children(base) == ["a b", "d"]
    storage.remove(base)
    assert storage.files(base) == {}
    assert storage.children(base) == []
    storage.remove(base)
    with pytest.raises(ObjectNotFoundError, match=re.escape(uri)):
        storage.read_bytes(uri)


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_made_anew_takes_no_others_place(object_store, tmp_path, remote):
    uri = storage.join(object_store.uri() if remote else tmp_path, "a", "claim")
    assert storage.create_bytes(uri, b"mine")
    assert not storage.create_bytes(uri, b"another's")
    assert storage.read_bytes(uri) == b"mine"


def test_making_anew_waits_for_one_that_is_under_way(object_store):
    object_store.answer(503, times=2, method="PUT")
    assert storage.create_bytes(object_store.uri("claim"), b"mine")


@pytest.mark.parametrize("remote", [False, True])
def test_json_is_read_up_to_its_limits(object_store, tmp_path, monkeypatch, remote):
    file = "s3://artifacts/card.json" if remote else str(tmp_path / "card.json")
    monkeypatch.setattr(limits, "JSON_BYTES", 20)
    storage.write_bytes(file, b'{"square": [1, 2.5]}')
    assert storage.read_json(file) == {"square": [1, 2.5]}
    for content, message in ((b"{", "Expecting property name"), (b"NaN", "NaN is not a JSON number")):
        storage.write_bytes(file, content)
        with pytest.raises(ValueError, match=message):
            storage.read_json(file)
    storage.write_bytes(file, b'{"square": [1, 2.55]}')
    with pytest.raises(ObjectTooLargeError, match=r"card\.json: has more than 20 bytes"):
        storage.read_json(file)


def test_a_name_that_starts_alike_is_another(object_store):
    storage.write_bytes(object_store.uri("model-2", "weights"), b"2")
    assert storage.files(object_store.uri("model")) == {}
    storage.remove(object_store.uri("model"))
    assert object_store.keys() == ["model-2/weights"]


def test_minio_is_the_same_store(object_store, monkeypatch):
    storage.write_bytes(object_store.uri("two"), b"2")
    assert storage.read_bytes(f"minio://{object_store.bucket}/two") == b"2"
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    with pytest.raises(StorageError, match="set AWS_ENDPOINT_URL_S3"):
        storage.read_bytes(f"minio://{object_store.bucket}/two")
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_store.endpoint)
    assert storage.read_bytes(f"minio://{object_store.bucket}/two") == b"2"


@pytest.mark.parametrize(
    ("uri", "parent", "remote"),
    [
        ("s3://bucket/a/b", "s3://bucket/a", True),
        ("s3://bucket/a/", "s3://bucket", True),
        ("/a/b", "/a", False),
        ("file:///a/b", "/a", False),
        ("a", ".", False),
    ],
)
def test_uris_are_taken_apart(uri, parent, remote):
    assert storage.parent(uri) == parent
    assert storage.is_remote(uri) is remote


def test_a_remote_uri_is_no_path():
    with pytest.raises(StorageError, match="s3://a/b: a path on this machine is needed"):
        storage.local_path("s3://a/b")


# ---------------------------------------------------------------------------------------------------------------------
# Faults


def test_store_that_fails_for_while_is_waited_for(object_store, caplog):
    object_store.put("here", b"1")
    object_store.answer(503, times=2)
    object_store.answer(500, times=1)
    object_store.answer(400, times=1)  # RequestTimeout
    object_store.cut(times=1)
    assert storage.read_bytes(object_store.uri("here")) == b"1"
    assert len(object_store.requests) == 6
    away, back = caplog.messages
    assert away.startswith("s3://artifacts/here: the store answered 503 SlowDown")
    asked_again = "is away or busy, so requests are tried again, each up to 9 times"
    assert away.endswith(f"the store at {object_store.endpoint} {asked_again}")
    assert re.fullmatch(rf"the store at {object_store.endpoint} answers again after \d s", back)


def test_an_absent_store_is_logged_once(object_store, monkeypatch, caplog):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    uris = [object_store.uri(str(number)) for number in range(4)]
    object_store.answer(503)
    with ThreadPoolExecutor(4) as threads:
        reads = [threads.submit(storage.read_bytes, uri) for uri in uris * 2]
    assert {type(read.exception()) for read in reads} == {StorageAwayError}
    assert storage.is_away()
    object_store.clear()
    assert not any(map(storage.exists, uris)), "that there is no such object is an answer too"
    assert not storage.is_away()
    assert [("is away" in line, "answers again" in line) for line in caplog.messages] == [(True, False), (False, True)]


def test_a_store_is_back_when_all_requests_succeed(object_store, caplog):
    object_store.put("here", b"1")
    answers = iter([ConnectionResetError(), None])

    def ask():
        if failure := next(answers):
            raise failure
        assert storage.read_bytes(object_store.uri("here")) == b"1"
        assert storage.is_away(), "else each of many requests would say that it is back, and the next that it is away"

    storage.call("there", ask)
    assert not storage.is_away()
    assert len(caplog.messages) == 2


def test_waits_grow_and_differ(monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "12")

    def fail():
        raise ConnectionResetError

    with pytest.raises(StorageError, match=r"x: gave up after 12 attempts in 0 s; the last time: ConnectionResetError"):
        storage.call("x", fail)
    longest = [min(storage.RETRY.first_s * 2**count, storage.RETRY.longest_s) for count in range(11)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, longest, strict=True))
    assert len({wait / most for wait, most in zip(waits, longest, strict=True)}) == 11


def test_the_attempts_have_a_limit(object_store, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    object_store.answer(503)
    with pytest.raises(StorageError, match=r"gave up after 3 attempts.*503 SlowDown.*See to the store at http"):
        storage.write_bytes(object_store.uri("a"), b"1")
    assert len(object_store.requests) == 3
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "many")
    with pytest.raises(StorageError, match="AWS_MAX_ATTEMPTS=many: must be a number"):
        storage.read_bytes(object_store.uri("a"))


def test_a_store_that_says_nothing_is_asked_again(object_store, monkeypatch, caplog):
    monkeypatch.setattr(storage, "READ_TIMEOUT_S", 0.2)
    storage._s3.cache_clear()
    object_store.put("here", b"1")
    object_store.delay(1.0, times=1)
    try:
        assert storage.read_bytes(object_store.uri("here")) == b"1"
    finally:
        storage._s3.cache_clear()
    assert "Timeout" in caplog.text


def test_where_no_store_is(object_store, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match=r"gave up after 2 attempts.*Could not connect.*http://127.0.0.1:1"):
        storage.exists(object_store.uri("a"))


def test_store_cannot_be_used(object_store, monkeypatch, tmp_path):
    object_store.answer(403)
    with pytest.raises(
        StorageError, match=r"refuses \(the store answered 403 AccessDenied.*check AWS_ACCESS_KEY_ID and"
    ):
        storage.write_bytes(object_store.uri("refused"), b"")
    assert len(object_store.requests) == 1
    object_store.clear()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody-else")
    with pytest.raises(StorageError, match="InvalidAccessKeyId"):
        storage.read_bytes(object_store.uri("refused"))
    assert len(object_store.requests) == 1
    # Without credentials.
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match=r"no credentials for the store at http.*set AWS_ACCESS_KEY_ID"):
        storage.files(object_store.uri())


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://nowhere/a", "the store at http.* has no such bucket; make it, or correct the URI"),
        ("s3:///a", "names no bucket; write s3://BUCKET/NAME"),
        ("s3://No!Bucket/a", "'No!Bucket' cannot be a bucket; write s3://BUCKET/NAME"),
        ("s3://key:secret@evil.com:9000/a", r"^s3://evil.com:9000/...: 'evil.com:9000' cannot be a bucket"),
        ("s3://artifacts/../other/a", "has . or .. for a folder, by which it could lead to another bucket"),
        ("memory://a::s3://artifacts/a", "Protocol not known: memory"),
        ("zip://a.zip::s3://artifacts/a.zip", "Protocol not known: zip"),
        ("gopher://a/b", "Protocol not known: gopher; give a local path, or a URI of s3://"),
    ],
)
def test_uris_that_name_nothing(object_store, uri, message):
    with pytest.raises(StorageError, match=message):
        storage.write_bytes(uri, b"")


# ---------------------------------------------------------------------------------------------------------------------
# Fetching


@pytest.fixture
def in_parts(monkeypatch):
    monkeypatch.setattr(transfers, "PART_BYTES", PART)


CONTENTS = {"large": os.urandom(10 * PART + 1), "below/small": b"1", "empty": b""}


@pytest.fixture
def remote(object_store):
    for name, content in CONTENTS.items():
        object_store.put(f"fetched/{name}", content)
    return object_store.uri("fetched")


def read_back(directory):
    return {name: (directory / name).read_bytes() for name in storage.files(directory)}


def test_after_cut_only_what_is_missing_is_fetched(object_store, in_parts, remote, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(transfers, "CONNECTIONS", 1)
    for _ in range(6):
        object_store.delay(0, times=1, path="large")
    object_store.cut(PART // 2, path="large")
    with pytest.raises(StorageError, match=r"fetched/large: gave up after 1 attempts.*what arrived whole is kept"):
        transfers.download_directory(remote, tmp_path / "to", records(CONTENTS))
    arrived = object_store.sent("large") - PART // 2
    assert arrived >= 6 * PART
    object_store.clear()
    transfers.download_directory(remote, tmp_path / "to", records(CONTENTS))
    assert object_store.sent("large") == len(CONTENTS["large"]) - arrived
    assert read_back(tmp_path / "to") == CONTENTS


def test_what_did_not_arrive_as_sent_is_fetched_again(object_store, in_parts, remote, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    object_store.answer(503, times=1, path="large")
    with pytest.raises(StorageError):
        transfers.download_directory(remote, tmp_path / "to", records(CONTENTS))
    with (tmp_path / "to" / "large").open("r+b") as file:
        file.write(b"spoilt" * PART)
    transfers.download_directory(remote, tmp_path / "to", records(CONTENTS))
    assert "large did not arrive as sent; fetching again" in caplog.text
    assert read_back(tmp_path / "to") == CONTENTS


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (bytes(len(CONTENTS["large"])), ObjectDamagedError, r"large is damaged \(checksum\)"),
        (CONTENTS["large"][:-1], ObjectDamagedError, "large is shorter than it was"),
        (None, ObjectNotFoundError, "fetched/large is missing"),
    ],
)
def test_what_the_store_has_lost_is_named(object_store, in_parts, remote, tmp_path, content, error, message):
    if content is None:
        object_store.delete("fetched/large")
    else:
        object_store.put("fetched/large", content)
    with pytest.raises(error, match=message):
        transfers.download_directory(remote, tmp_path / "to", records(CONTENTS))


def test_long_transfers_say_how_far_they_are(object_store, in_parts, remote, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(transfers, "LOG_INTERVAL_S", 0.0)
    with caplog.at_level("INFO"):
        transfers.download_directory(remote, tmp_path / "to", records(CONTENTS))
    assert "fetching s3://artifacts/fetched: 1.0 of 1.0 MiB" in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# Sending

LARGE = {"large": os.urandom(11 * 2**20), "small": b"1"}


@pytest.fixture
def files(tmp_path):
    """A folder with a file that is sent in parts, and a small one."""
    directory = tmp_path / "from"
    directory.mkdir()
    for name, content in LARGE.items():
        (directory / name).write_bytes(content)
    return directory


def test_large_files_are_sent_in_retried_parts(object_store, files, monkeypatch):
    monkeypatch.setattr(transfers, "PART_BYTES", 5 * 2**20)
    object_store.answer(503, times=1, method="PUT", path="partNumber=2")
    object_store.cut(1_000_000, method="PUT", path="partNumber=3")
    transfers.upload_directory(files, object_store.uri("sent"), records(LARGE))
    assert {name: object_store.get(f"sent/{name}") for name in LARGE} == LARGE
    parts = [re.search(r"partNumber=(\d)", one.query)[1] for one in object_store.requests if "partNumber" in one.query]
    assert sorted(parts) == ["1", "2", "2", "3", "3"]


def test_a_failed_upload_leaves_no_parts_behind(object_store, files, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(transfers, "PART_BYTES", 5 * 2**20)
    object_store.answer(500, method="PUT", path="partNumber=2")
    with pytest.raises(StorageError, match="large: gave up"):
        transfers.upload_directory(files, object_store.uri("sent"), records(LARGE))
    assert object_store.unfinished_uploads() == 0
    assert "sent/large" not in object_store.keys()  # noqa: SIM118  # no dict


def test_a_completion_whose_answer_was_lost_counts(object_store, files, monkeypatch):
    monkeypatch.setattr(transfers, "PART_BYTES", 5 * 2**20)
    object_store.lose_answer(method="POST", path="uploadId=")
    transfers.upload_directory(files, object_store.uri("sent"), records(LARGE))
    assert object_store.get("sent/large") == LARGE["large"]


# ---------------------------------------------------------------------------------------------------------------------
# The cache


def fill(path):
    (path / "file").write_bytes(b"x" * 1000)


def keep(key, fetch=fill):
    return cache.keep(key, key, fetch, is_whole=lambda path: (path / "file").is_file())


def refuse(_path):
    raise AssertionError("it is there and need not be fetched")


def test_cache(object_store, caplog):
    place = keep("a")
    assert keep("a", refuse) == place
    assert (place / "file").read_bytes() == b"x" * 1000
    # A folder that was tampered with is fetched again.
    (keep("a") / "file").unlink()
    assert (keep("a") / "file").is_file()
    assert "is not whole any more" in caplog.text


def test_the_least_recently_used_is_evicted(object_store, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_CACHE_GIB", str(2500 / 2**30))
    keep("in use, oldest")
    for key in ("older", "newer"):  # as processes left them that have ended
        (tmp_path / "cache" / key).mkdir()
        fill(tmp_path / "cache" / key)
        os.utime(tmp_path / "cache" / key, (1, 1 if key == "older" else 2))
    os.utime(tmp_path / "cache" / "in use, oldest", (0, 0))
    cache.evict()
    assert {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()} == {"in use, oldest", "newer"}


def test_a_folder_that_comes_back_is_measured_again(object_store, tmp_path, monkeypatch):
    """Another process measures it while it is being removed."""
    place, remove = tmp_path / "cache" / "again", shutil.rmtree

    def slowly(folder):
        monkeypatch.setattr(shutil, "rmtree", remove)
        (folder / "file").unlink()
        monkeypatch.setenv("TRAINER_CACHE_GIB", "1")
        cache.evict()
        remove(folder)

    for removing in (slowly, remove):
        place.mkdir(parents=True)
        fill(place)
        monkeypatch.setattr(shutil, "rmtree", removing)
        monkeypatch.setenv("TRAINER_CACHE_GIB", str(500 / 2**30))
        cache.evict()
        assert not place.exists()
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


ADOPT = """
from trainer.io.storage import cache
with cache.draft() as folder:
    (folder / "file").write_bytes(b"x" * 1000)
    cache.adopt(folder, "adopted")
assert (cache.root() / "adopted" / "file").is_file()
"""


def test_what_process_has_adopted_is_in_use_until_it_ends(object_store, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_CACHE_GIB", str(500 / 2**30))
    with cache.draft() as folder:
        fill(folder)
        cache.adopt(folder, "mine")
    cache.evict()
    assert keep("mine", refuse) == tmp_path / "cache" / "mine"
    subprocess.run([sys.executable, "-c", ADOPT], check=True)
    cache.evict()
    assert not (tmp_path / "cache" / "adopted").exists()
    assert (tmp_path / "cache" / "mine").exists()


def test_a_written_draft_is_not_evicted(object_store, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_CACHE_GIB", "0")
    left = tmp_path / "cache" / "draft-left"
    left.mkdir(parents=True)
    fill(left)
    with cache.draft() as folder:
        fill(folder)
        cache.evict()
        assert (folder / "file").is_file()
    assert not left.exists()
    assert not folder.exists()


@pytest.mark.parametrize("limit", ["lots", "nan", "-1"])
def test_limit_that_is_none_is_named_before_anything_is_fetched(limit, object_store, monkeypatch):
    monkeypatch.setenv("TRAINER_CACHE_GIB", limit)
    with pytest.raises(StorageError, match=f"TRAINER_CACHE_GIB={limit}: must be a number of GiB"):
        keep("a", refuse)


def test_a_cache_that_cannot_be_written_is_named(object_store, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match=r"cannot write to .*/file.*TRAINER_CACHE names"):
        keep("a")


def test_user_without_home_is_asked_for_folder(monkeypatch):
    for name in ("TRAINER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    with pytest.raises(StorageError, match="set TRAINER_CACHE"):
        cache.root()


def test_what_is_there_is_not_sent_again(object_store, files):
    uri, changed = object_store.uri("sent"), {**LARGE, "small": b"2"}
    transfers.upload_directory(files, uri, records(LARGE))
    object_store.clear()
    transfers.upload_directory(files, uri, records(LARGE))
    (files / "small").write_bytes(b"2")
    transfers.upload_directory(files, uri, records(changed))
    assert [(one.path, one.received) for one in object_store.requests if one.method in ("PUT", "POST")] == [
        ("/artifacts/sent/small", 1)
    ]


def test_machines_that_share_a_folder_write_beside_each_other(tmp_path, monkeypatch):
    """In containers, where each process may be number 1."""
    names = set()
    for machine in ("first", "second"):
        monkeypatch.setattr("platform.node", lambda machine=machine: machine)
        names.add(storage.unfinished_file(tmp_path / "summary.json"))
    assert len(names) == 2
    assert {name.suffix for name in names} == {".partial"}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: storage.write_bytes(tmp_path / "summary.json", b"x" * 1000), range(100)))
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
