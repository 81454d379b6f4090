import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from trainer.errors import OutputError, StorageError
from trainer.training.checkpoints import KEPT, STATE, Checkpoints, State, checkpoint_root


def checkpoints(root, *, settings=None, parents=None):
    return Checkpoints(root, "distill", settings=settings or {"epochs": 3}, parents=parents or {"dataset": "abc"})


def directory(root):
    return Path(checkpoints(root).uri)


def state(step):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return State(step=step, model=model.state_dict(), optimizer=optimizer.state_dict(), average=None)


def test_the_newest_comes_back_whole(tmp_path):
    saved = [state(step) for step in (10, 20)]
    for one in saved:
        checkpoints(tmp_path).save(one)
    latest = checkpoints(tmp_path).latest()
    assert latest.step == 20
    assert torch.equal(latest.model["weight"], saved[1].model["weight"])
    assert torch.equal(latest.optimizer["state"][0]["exp_avg"], saved[1].optimizer["state"][0]["exp_avg"])


def test_only_the_newest_are_kept(tmp_path):
    for step in range(10, 60, 10):
        checkpoints(tmp_path).save(state(step))
    kept = sorted(path.name for path in directory(tmp_path).iterdir())
    assert kept == ["step-00000040", "step-00000050"]
    assert len(kept) == KEPT


@pytest.mark.parametrize("damage", ["truncate", "flip", "no manifest"])
def test_a_damaged_one_is_named_and_passed_over(tmp_path, caplog, damage):
    for step in (10, 20):
        checkpoints(tmp_path).save(state(step))
    newest = directory(tmp_path) / "step-00000020"
    content = (newest / STATE).read_bytes()
    if damage == "truncate":
        (newest / STATE).write_bytes(content[:-7])
    elif damage == "flip":
        (newest / STATE).write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
    else:
        (newest / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoints(tmp_path).latest().step == 10
    assert "step-00000020" in caplog.text


@pytest.mark.parametrize("other", [{"settings": {"epochs": 4}}, {"parents": {"dataset": "abd"}}])
def test_another_training_does_not_find_them(tmp_path, other):
    checkpoints(tmp_path).save(state(10))
    assert checkpoints(tmp_path, **other).latest() is None


def test_they_are_removed_when_the_training_is_done(tmp_path):
    checkpoints(tmp_path).save(state(10))
    checkpoints(tmp_path).remove()
    assert checkpoints(tmp_path).latest() is None
    assert not directory(tmp_path).exists()


def test_a_file_in_the_way_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can not write to"):
        checkpoints(tmp_path / "file").save(state(10))


def test_the_root_is_beside_the_output_unless_the_environment_names_one(tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)
    assert checkpoint_root(tmp_path / "student") == str(tmp_path / "checkpoints")
    monkeypatch.setenv("TRAINER_CHECKPOINTS", str(tmp_path / "elsewhere"))
    assert checkpoint_root(tmp_path / "student") == str(tmp_path / "elsewhere")


# ---------------------------------------------------------------------------------------------------------------------
# In an object store


def empty_cache():
    shutil.rmtree(os.environ["TRAINER_CACHE"])


def test_the_newest_comes_back_from_a_store(object_store):
    saved = [state(step) for step in (10, 20, 30)]
    for one in saved:
        checkpoints(object_store.uri("c")).save(one)
    assert {key.split("/")[2] for key in object_store.keys("c/")} == {"step-00000020", "step-00000030"}
    empty_cache()
    object_store.clear()
    for _ in range(2):
        latest = checkpoints(object_store.uri("c")).latest()
        assert latest.step == 30
        assert torch.equal(latest.model["weight"], saved[2].model["weight"])
    assert sum("state.pt" in one.path for one in object_store.requests) == 1
    checkpoints(object_store.uri("c")).remove()
    assert object_store.keys() == []


@pytest.mark.parametrize("damage", ["truncate", "flip", "lost", "no manifest"])
def test_a_damaged_one_in_a_store_is_named_and_passed_over(object_store, caplog, damage):
    for step in (10, 20):
        checkpoints(object_store.uri("c")).save(state(step))
    (key,) = [key for key in object_store.keys("c/") if key.endswith("20/state.pt")]
    content = object_store.get(key)
    if damage == "truncate":
        object_store.put(key, content[:-7])
    elif damage == "flip":
        object_store.put(key, content[:99] + bytes([content[99] ^ 1]) + content[100:])
    elif damage == "lost":
        object_store.delete(key)
    else:
        object_store.delete(key.replace(STATE, "manifest.json"))
    with caplog.at_level(logging.WARNING):
        assert checkpoints(object_store.uri("c")).latest().step == 10
    assert "passing over a checkpoint: checkpoint s3://artifacts/c/distill-" in caplog.text
    assert "step-00000020" in caplog.text


def test_a_store_that_refuses_is_no_reason_to_begin_anew(object_store):
    checkpoints(object_store.uri("c")).save(state(10))
    object_store.answer(403, path="state.pt")
    empty_cache()
    with pytest.raises(StorageError, match="refuses"):
        checkpoints(object_store.uri("c")).latest()


def test_the_root_is_beside_a_remote_output(monkeypatch):
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)
    assert checkpoint_root("s3://bucket/run/student") == "s3://bucket/run/checkpoints"
