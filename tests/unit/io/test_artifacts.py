import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import trainer
from trainer.io import artifacts, storage
from trainer.io.costs import PLACE_VARIABLE, Machines, Price
from trainer.io.errors import ArtifactError, OutputError, StorageError, TrainerError, writing_to

SETTINGS = {"temperature": 2.0, "name": "ä"}


def make(path, *, settings=SETTINGS, parents=None, content=b"weights", figures=None):
    with artifacts.create(path, "model", settings=settings, parents=parents) as draft:
        (draft.path / "sub").mkdir(exist_ok=True)
        (draft.path / "sub" / "weights.bin").write_bytes(content)
        draft.figures.update(figures or {})
    return path


def test_written_is_read_back(tmp_path):
    artifact = artifacts.read(make(tmp_path / "a", parents={"dataset": "f00"}, figures={"parameters": 3}), "model")
    assert (artifact.settings, artifact.parents, artifact.figures) == (SETTINGS, {"dataset": "f00"}, {"parameters": 3})
    assert artifact.seconds >= 0
    assert artifacts.read(f"file://{tmp_path / 'a'}", "model") == artifact
    # Beginning again unmakes the old one.
    make(tmp_path / "a")
    with pytest.raises(ZeroDivisionError), artifacts.create(tmp_path / "a", "model", settings={}):
        raise ZeroDivisionError
    assert not artifacts.exists(tmp_path / "a")
    # A missing directory and a foreign scheme are named.
    with pytest.raises(ArtifactError, match="no such directory"):
        artifacts.read(tmp_path / "nowhere", "model")
    with pytest.raises(StorageError, match=r"gopher://a/manifest.json: Protocol not known"):
        artifacts.read("gopher://a", "model")


def test_fingerprint(tmp_path, monkeypatch):
    def fingerprint(name, **changes):
        return artifacts.read(make(tmp_path / name, **changes), "model").fingerprint

    base = fingerprint("base")
    assert fingerprint("same", figures={"seconds": 9}) == base
    others = {
        fingerprint("content", content=b"weightz"),
        fingerprint("settings", settings={}),
        fingerprint("parents", parents={"a": "b"}),
    }
    assert len(others | {base}) == 4
    # It says when and on which machines it was made outside of the fingerprint.
    monkeypatch.delenv(PLACE_VARIABLE, raising=False)
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    base = artifacts.read(make(tmp_path / "base"), "model")
    assert before <= base.created <= datetime.now(UTC)
    assert (base.place, base.startup_seconds) == (None, None)
    price = Price(dollars_an_hour=1.0, date="2026-11", region="here", source="bill")
    place = Machines(pool="gpu", nodes=2, price=price)
    monkeypatch.setenv(PLACE_VARIABLE, place.model_dump_json())
    priced = artifacts.read(make(tmp_path / "priced"), "model")
    assert priced.place == place
    assert priced.fingerprint == base.fingerprint


@pytest.mark.parametrize("changes", [{"created": 3}, {"created": "yesterday"}, {"place": {"pool": ""}}])
def test_manifest_whose_time_or_place_is_none_is_named(tmp_path, changes):
    manifest = make(tmp_path / "a") / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))
    with pytest.raises(ArtifactError, match=r"model .*a: manifest.json is not readable"):
        artifacts.read(tmp_path / "a", "model")


def test_what_was_not_completed_does_not_exist(tmp_path):
    def break_off():
        with artifacts.create(tmp_path / "a", "model", settings={}) as draft:
            (draft.path / "weights").write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert not artifacts.exists(tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"never completed, .* run the stage that makes it again$"):
        artifacts.read(tmp_path / "a", "model")


def alter_manifest(path, **changes):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


DAMAGES = {
    "missing": (lambda path: (path / "sub" / "weights.bin").unlink(), r"sub/weights.bin is missing"),
    "truncated": (lambda path: (path / "sub" / "weights.bin").write_bytes(b"weigh"), r"5 bytes instead of 7"),
    "flipped": (lambda path: (path / "sub" / "weights.bin").write_bytes(b"weightz"), r"damaged \(checksum\)"),
    "no JSON": (lambda path: (path / "manifest.json").write_text("{"), r"not readable"),
    "other JSON": (lambda path: (path / "manifest.json").write_text("[]"), r"not the manifest"),
    "settings altered": (lambda path: alter_manifest(path, settings={"temperature": 3}), r"was altered"),
    "other schema": (lambda path: alter_manifest(path, schema_version=99), r"schema version 99.*reads 1"),
    "other kind": (lambda path: alter_manifest(path, kind="dataset"), r"is a dataset, but a model is needed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(tmp_path, damage):
    act, message = DAMAGES[damage]
    act(make(tmp_path / "a"))
    with pytest.raises(ArtifactError, match=message) as caught:
        artifacts.read(tmp_path / "a", "model")
    assert str(tmp_path / "a") in str(caught.value)


def test_manifest_that_names_file_outside_is_refused(tmp_path):
    make(tmp_path / "a")
    (tmp_path / "secret").write_bytes(b"x")
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    manifest["files"]["../secret"] = {"size": 1, "sha256": storage.file_digest(tmp_path / "secret")}
    content = {key: manifest[key] for key in ("kind", "schema_version", "settings", "parents", "files")}
    alter_manifest(tmp_path / "a", files=manifest["files"], fingerprint=artifacts.digest(content))
    with pytest.raises(ArtifactError, match=r"'../secret' outside"):
        artifacts.read(tmp_path / "a", "model")


def test_a_write_is_whole_or_not_at_all(tmp_path, monkeypatch):
    storage.write_bytes(tmp_path / "file", b"old")

    def refuse(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OutputError, match="the disk is full"):
        storage.write_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "no permission")],
)
def test_the_systems_refusal_to_write_becomes_a_message(number, advice):
    with pytest.raises(OutputError, match=advice), writing_to("out"):
        raise OSError(number, os.strerror(number), "out/file")


def test_a_really_full_disk_is_reported():
    with (
        pytest.raises(OutputError, match=r"/dev/full: the disk is full"),
        writing_to("/dev/full"),
        Path("/dev/full").open("wb") as file,
    ):
        file.write(b"x" * 100_000)


# ---------------------------------------------------------------------------------------------------------------------
# In an object store


@pytest.fixture
def remote(object_store):
    """An artifact in the store, and nothing in the cache."""
    uri = make(object_store.uri("a"), parents={"dataset": "f00"}, figures={"parameters": 3})
    empty_cache()
    object_store.clear()
    return uri


def empty_cache():
    shutil.rmtree(os.environ["TRAINER_CACHE"])


def data_requests(object_store, method="GET"):
    """Paths of the requests for anything but manifests and listings."""
    found = [one.path for one in object_store.requests if one.method == method and not one.query]
    return [path for path in found if not path.endswith(artifacts.MANIFEST)]


def test_remote_one_is_what_local_one_would_be(object_store, remote, tmp_path):
    local = artifacts.read(make(tmp_path / "a", parents={"dataset": "f00"}), "model")
    artifact = artifacts.read(remote, "model")
    assert artifact.fingerprint == local.fingerprint
    assert artifact.figures == {"parameters": 3}
    assert (artifact.path / "sub" / "weights.bin").read_bytes() == b"weights"
    assert artifact.path.is_relative_to(tmp_path / "cache")
    assert artifacts.exists(remote)
    assert artifacts.manifest(remote, "model").fingerprint == local.fingerprint


def test_the_maker_and_a_second_reader_fetch_nothing(object_store):
    uri = make(object_store.uri("a"))
    artifacts.read(uri, "model")
    assert data_requests(object_store) == []
    empty_cache()
    artifacts.read(uri, "model")
    artifacts.read(uri, "model")
    assert len(data_requests(object_store)) == 1


def test_a_stores_artifact_is_cached_here(object_store):
    uri = make(object_store.uri("a"))
    made = artifacts.read(uri, "model").path
    assert artifacts.read(made, "model").fingerprint == artifacts.manifest(uri, "model").fingerprint
    empty_cache()
    fetched = artifacts.read(uri, "model").path
    assert (fetched / artifacts.MANIFEST).read_bytes() == object_store.get("a/manifest.json")
    (fetched / artifacts.MANIFEST).unlink()
    again = artifacts.read(uri, "model").path
    assert artifacts.exists(again), "a folder of an older version, without one, is fetched again"


def test_a_maker_does_not_fetch_what_it_made(object_store, monkeypatch):
    monkeypatch.setenv("TRAINER_CACHE_GIB", "0")
    uri = make(object_store.uri("a"))
    assert (artifacts.read(uri, "model").path / "sub" / "weights.bin").read_bytes() == b"weights"
    make(object_store.uri("b"), content=b"other")
    artifacts.read(uri, "model")
    assert data_requests(object_store) == []


def test_its_manifest_goes_first_and_comes_last(object_store, remote):
    object_store.answer(403, method="PUT", path="weights")
    with pytest.raises(StorageError, match="refuses"):
        make(remote, content=b"other")
    assert not artifacts.exists(remote)
    with pytest.raises(
        ArtifactError, match=r"s3://artifacts/a: no manifest.json, so it was never completed, or .* FRESH=1"
    ):
        artifacts.read(remote, "model")
    object_store.clear()
    make(remote, content=b"other")
    assert [one.path for one in object_store.requests if one.method == "PUT"][-1] == "/artifacts/a/manifest.json"


def test_a_lost_artifact_names_the_way_past_caches(object_store, remote):
    object_store.delete("a/sub/weights.bin")
    with pytest.raises(ArtifactError, match=r"sub/weights.bin is missing.*FRESH=1"):
        artifacts.read(remote, "model")
    for key in object_store.keys("a/"):
        object_store.delete(key)
    object_store.put("ab/manifest.json", b"another's")
    with pytest.raises(
        ArtifactError,
        match=r"model s3://artifacts/a: nothing is there: it was removed, .*make deploy-pipeline FRESH=1$",
    ):
        artifacts.read(remote, "model")


REMOTE_DAMAGES = {
    "missing": (lambda store: store.delete("a/sub/weights.bin"), "sub/weights.bin is missing"),
    "truncated": (lambda store: store.put("a/sub/weights.bin", b"weigh"), "sub/weights.bin is shorter"),
    "flipped": (lambda store: store.put("a/sub/weights.bin", b"weightz"), r"sub/weights.bin is damaged \(checksum\)"),
    "no JSON": (lambda store: store.put("a/manifest.json", b"{"), "not readable"),
}


@pytest.mark.parametrize("damage", REMOTE_DAMAGES)
def test_remote_damage_is_named_and_stays_out_of_cache(object_store, remote, damage):
    act, message = REMOTE_DAMAGES[damage]
    before = {key: object_store.get(key) for key in (*object_store.keys(),)}
    act(object_store)
    with pytest.raises(ArtifactError, match=message) as caught:
        artifacts.read(remote, "model")
    assert "model s3://artifacts/a: " in str(caught.value)
    for key, content in before.items():
        object_store.put(key, content)
    assert (artifacts.read(remote, "model").path / "sub" / "weights.bin").read_bytes() == b"weights"


def test_a_store_that_refuses_is_no_missing_artifact(object_store, remote):
    object_store.answer(403)
    with pytest.raises(StorageError, match="refuses"):
        artifacts.exists(remote)
    with pytest.raises(StorageError, match="refuses"):
        artifacts.read(remote, "model")


def test_copy_is_same_artifact_and_second_one_is_free(object_store, tmp_path):
    local = make(tmp_path / "a", figures={"parameters": 3})
    uri, back = object_store.uri("copy"), tmp_path / "back"
    artifacts.copy(local, uri, "model")
    artifacts.copy(uri, back, "model")
    assert artifacts.read(back, "model").figures == {"parameters": 3}
    assert artifacts.manifest(local, "model") == artifacts.manifest(uri, "model") == artifacts.manifest(back, "model")
    object_store.clear()
    artifacts.copy(local, uri, "model")
    artifacts.copy(uri, back, "model")
    assert data_requests(object_store) == data_requests(object_store, "PUT") == []
    make(local, content=b"other")
    artifacts.copy(local, uri, "model")
    assert object_store.get("copy/sub/weights.bin") == b"other"


def test_a_damaged_source_is_not_copied(object_store, tmp_path):
    local = make(tmp_path / "a")
    (local / "sub" / "weights.bin").write_bytes(b"weightz")
    with pytest.raises(ArtifactError, match="damaged"):
        artifacts.copy(local, object_store.uri("copy"), "model")
    assert object_store.keys() == []


READER = "import sys; from trainer.io import artifacts; print(artifacts.read(sys.argv[1], 'model').path)"
MAKER = (
    "import sys; from pathlib import Path; from trainer.io import artifacts\n"
    "with artifacts.create(sys.argv[1], 'model', settings={}) as draft:\n"
    "    for name in 'abc': (draft.path / name).write_text(name)\n"
)


@pytest.fixture
def start():
    """Starts a process that runs a piece of code on a URI."""
    with ExitStack() as stack:

        def start(code, uri):
            environment = os.environ | {"PYTHONPATH": str(Path(trainer.__file__).parents[1])}
            command = [sys.executable, "-c", code, uri]
            process = stack.enter_context(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        yield start


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_of_many_processes_fetches(object_store, remote, start):
    object_store.delay(60, times=1, path="weights")
    fetcher = start(READER, remote)
    wait_for(lambda: object_store.held)
    others = [start(READER, remote) for _ in range(2)]
    wait_for(lambda: len(object_store.requests) == 3)  # each has read the manifest
    assert data_requests(object_store) == []
    fetcher.kill()
    paths = {process.communicate(timeout=300)[0] for process in others}
    assert len(paths) == 1
    assert len(data_requests(object_store)) == 1


def test_a_killed_upload_is_resumed(object_store, start):
    uri = object_store.uri("b")
    object_store.delay(60, method="PUT", path="/c")
    maker = start(MAKER, uri)
    wait_for(lambda: object_store.held and len(data_requests(object_store, "PUT")) == 2)
    maker.kill()
    maker.wait()
    assert not artifacts.exists(uri)
    object_store.clear()
    assert start(MAKER, uri).wait(60) == 0
    assert artifacts.exists(uri)
    assert data_requests(object_store, "PUT") == ["/artifacts/b/c"]


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    left = tmp_path / "a" / "sub" / ".weights.bin.4711.partial"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    make(tmp_path / "a")
    assert not left.exists()
    assert set(artifacts.read(tmp_path / "a", "model").files) == {"sub/weights.bin"}


def test_all_files_are_on_disk_before_manifest_is(tmp_path, monkeypatch):
    done = []
    flush, write = storage.flush, storage.write_bytes
    monkeypatch.setattr(storage, "flush", lambda path: (done.append(path), flush(path)))
    monkeypatch.setattr(storage, "write_bytes", lambda uri, content: (done.append(Path(uri)), write(uri, content)))
    path = make(tmp_path / "a")
    assert set(done[:2]) == {path / "sub" / "weights.bin", path / "sub"}
    assert done[2:] == [path / artifacts.MANIFEST, path]


@pytest.mark.parametrize("weights", ["", "timm:vit_base_patch16_224.mae", "package:tf_efficientnet_lite0", "/nowhere"])
def test_weights_that_their_name_tells_apart_have_no_version(weights):
    assert artifacts.weights_version(weights) == ""


def test_version_of_given_weights_is_that_of_their_content(tmp_path):
    with artifacts.create(tmp_path / "model", "model", settings={"seed": 1}) as draft:
        (draft.path / "config.json").write_text("{}")
    assert (
        artifacts.weights_version(str(tmp_path / "model"))
        == artifacts.manifest(tmp_path / "model", "model").fingerprint
    )
    file = tmp_path / "weights.safetensors"
    file.write_bytes(b"one")
    first = artifacts.weights_version("timm:vit_base_patch16_224.mae", str(file))
    assert first == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"another")
    assert artifacts.weights_version("timm:vit_base_patch16_224.mae", str(file)) != first
    assert artifacts.weights_version("timm:vit_base_patch16_224.mae", "/nowhere/weights.safetensors") == ""


def test_code_version_changes_with_every_part_of_package(tmp_path):
    """On it depends what a run takes from an earlier one."""
    shutil.copytree(Path(trainer.__file__).parent, tmp_path / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", "from trainer.io import artifacts; print(artifacts.code_version())"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def version():
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    versions = [artifacts.code_version(), version()]
    assert versions[0] == versions[1]
    for name in ("training/loop.py", "config/recipes/digits.toml", "report/pages/templates/page.html.jinja", "cli.py"):
        with (tmp_path / "trainer" / name).open("a") as file:
            file.write("\n")
        versions.append(version())
    assert len(set(versions)) == 5


def test_other_failures_of_the_system_pass_unchanged():
    with pytest.raises(OSError, match="Input/output") as caught, writing_to("out"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert not isinstance(caught.value, TrainerError)


def test_an_artifact_of_another_kind_is_not_replaced(tmp_path):
    make(tmp_path / "a")
    message = "a: holds an artifact of kind model, which one of kind dataset would replace; name another folder"
    with pytest.raises(ArtifactError, match=message), artifacts.create(tmp_path / "a", "dataset", settings={}):
        pass
    assert artifacts.exists(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").write_text("{")  # a damaged one may be made again
    make(tmp_path / "a")


def test_a_stage_writes_over_nothing_but_its_own_kind_of_folder(tmp_path):
    other = make(tmp_path / "other")
    artifacts.check_outputs({"student": make(tmp_path / "a"), "evidence": tmp_path / "new"}, {"dataset": other})
    with pytest.raises(OutputError, match=r"student .*other: is also the dataset that is read; name another folder"):
        artifacts.check_outputs({"student": tmp_path / "x" / ".." / "other"}, {"dataset": other})
    (tmp_path / "photos" / "train").mkdir(parents=True)
    with pytest.raises(
        OutputError, match=r"photos: holds files of something else \(train\), which would be replaced; name a"
    ):
        artifacts.check_outputs({"dataset": tmp_path / "photos"}, {})


def test_what_an_interrupted_stage_has_left_is_its_own(tmp_path):
    @contextmanager
    def ending():
        with artifacts.create(tmp_path / "a", "dataset", settings={}) as draft:
            (draft.path / "train").mkdir()
            yield

    with pytest.raises(ZeroDivisionError), ending():
        raise ZeroDivisionError
    artifacts.check_outputs({"dataset": tmp_path / "a"}, {})
    assert [*artifacts.manifest(make(tmp_path / "a"), "model").files] == ["sub/weights.bin"]
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["manifest.json", "sub", "train"]
