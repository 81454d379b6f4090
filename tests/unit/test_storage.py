import os

import pytest

from tests.stand_ins.object_store import ObjectStore
from trainer import storage
from trainer.errors import ObjectNotFoundError, StorageError
from trainer.storage import retries


@pytest.fixture(scope="module")
def server():
    with ObjectStore() as running:
        yield running


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    """The server without faults, what the environment must say, and an empty cache."""
    server.reset()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.01)
    return server


def test_an_object_is_written_read_listed_and_removed(store):
    uri = store.uri("one", "a b", "ä?c.bin")
    assert not storage.exists(uri)
    storage.write_bytes(uri, b"content")
    assert storage.exists(uri)
    assert store.get("one/a b/ä?c.bin") == b"content"
    assert storage.read_bytes(uri) == b"content"
    assert storage.read_bytes(uri, 1, 3) == b"on"
    assert storage.files(store.uri("one")) == {"a b/ä?c.bin": 7}
    assert storage.children(store.uri("one")) == ["a b"]
    storage.remove(store.uri("one"))
    assert store.keys("one") == []
    assert storage.children(store.uri("one")) == []


def test_minio_is_the_same_store_at_the_address_that_must_be_given(store, monkeypatch):
    storage.write_bytes(store.uri("two"), b"2")
    assert storage.read_bytes(f"minio://{store.bucket}/two") == b"2"
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    with pytest.raises(StorageError, match="set AWS_ENDPOINT_URL_S3"):
        storage.read_bytes(f"minio://{store.bucket}/two")


def test_a_store_that_fails_for_a_while_is_waited_for(store, caplog):
    store.put("here", b"1")
    store.answer(503, times=2)
    store.answer(500, times=1)
    store.cut(times=1)
    assert storage.read_bytes(store.uri("here")) == b"1"
    assert "the store answered 503" in caplog.text
    assert "attempt 2 of 9" in caplog.text


def test_what_is_not_there_and_what_is_refused_is_asked_for_once(store):
    with pytest.raises(ObjectNotFoundError, match=r"s3://artifacts/nothing: there is no such object"):
        storage.read_bytes(store.uri("nothing"))
    store.reset()
    store.answer(403)
    with pytest.raises(StorageError, match=r"answered 403 AccessDenied.*AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        storage.write_bytes(store.uri("refused"), b"")
    assert len(store.requests) == 1
