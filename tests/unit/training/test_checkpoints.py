import contextlib
import errno
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from tests.checkpoints import PARTS, everything, learner, snapshot_of
from tests.forks import on_two_processes
from trainer import config
from trainer.devices import choose_device
from trainer.devices.process_group import Processes
from trainer.io import artifacts, storage
from trainer.io.base_models import Section
from trainer.io.errors import OutputError, SettingsError, StorageAwayError, StorageError, SupersededError
from trainer.training import checkpoints as module
from trainer.training.checkpoints import (
    CHANGEABLE_ON_RESUME,
    CheckpointEntry,
    Checkpoints,
    compatible,
    differences,
    newest,
    root_is_shared,
)
from trainer.training.training_state import Snapshot, restore

ALONE = Processes(rank=0, world_size=1, local_rank=0, device=choose_device())


def checkpoints(root, *, settings=None, parents=None, **options):
    settings, parents = settings or {"epochs": 3, "workers": 2}, parents or {"dataset": "abc"}
    return Checkpoints(root, "distill", settings=settings, parents=parents, **options)


def save(held, *steps):
    """Checkpoints of these steps, each with weights of its own; gives them."""
    states = [snapshot_of(step, learner(seed=step)) for step in steps]
    for state in states:
        held.save(state)
    held.finish(needed=True)
    return states


def latest(root, **options):
    return newest(checkpoints(root, **options), ALONE)


def folder(root):
    return Path(checkpoints(root).uri)


def names(root):
    return sorted(path.name for path in folder(root).glob("step-*"))


def test_the_newest_comes_back_whole(tmp_path):
    _, saved = save(checkpoints(tmp_path), 10, 20)
    found = latest(tmp_path)
    assert found.step == 20
    model, optimizer, average = learner(seed=99)
    restore(found, model, optimizer, average)
    assert everything(snapshot_of(20, (model, optimizer, average))) == everything(saved)


def test_the_newest_are_kept(tmp_path):
    save(checkpoints(tmp_path, keep=2), 10, 20, 30)
    assert names(tmp_path) == ["step-00000020-g001", "step-00000030-g001"]
    again = checkpoints(tmp_path, keep=1)
    assert newest(again, ALONE).step == 30
    save(again, 40)
    assert names(tmp_path) == ["step-00000040-g002"]


@pytest.mark.parametrize("part", [*(f"{part}.safetensors" for part in PARTS), "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "lost"])
def test_a_damaged_one_is_named_and_passed_over(tmp_path, caplog, part, damage):
    save(checkpoints(tmp_path), 10, 20)
    file = folder(tmp_path) / "step-00000020-g001" / part
    content = file.read_bytes()
    if damage == "truncate":
        file.write_bytes(content[:-7])
    elif damage == "flip":
        file.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
    else:
        file.unlink()
    held = checkpoints(tmp_path)
    assert newest(held, ALONE).step == 10
    if (part, damage) == ("manifest.json", "lost"):
        assert names(tmp_path) == ["step-00000010-g001"], "without a manifest it was never there"
        return
    assert "passing over a checkpoint: checkpoint" in caplog.text
    assert "step-00000020" in caplog.text
    save(held, 20)
    assert names(tmp_path) == ["step-00000010-g001", "step-00000020-g002"], "the damaged one does not count as kept"


def test_what_was_left_half_written_is_removed_by_the_next_try(tmp_path):
    save(checkpoints(tmp_path), 10)
    for name in (".step-00000020-g001", "step-00000030-g001"):
        (folder(tmp_path) / name).mkdir()
        (folder(tmp_path) / name / "model.safetensors").write_bytes(b"half")
    assert latest(tmp_path).step == 10
    assert sorted(path.name for path in folder(tmp_path).iterdir()) == [
        "generation-001", "generation-002", "step-00000010-g001",
    ]  # fmt: skip


def test_they_are_removed_when_the_training_is_done(tmp_path):
    held = checkpoints(tmp_path)
    save(held, 10)
    held.remove()
    assert not folder(tmp_path).exists()
    assert latest(tmp_path) is None


def test_a_file_in_the_way_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write to"):
        save(checkpoints(tmp_path / "file"), 10)


def test_the_root_is_beside_the_output_unless_the_environment_names_one(tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)
    assert artifacts.unfinished(tmp_path / "student") == str(tmp_path / "checkpoints")
    assert artifacts.unfinished("s3://bucket/run/student") == "s3://bucket/run/checkpoints"
    assert not root_is_shared()
    monkeypatch.setenv("TRAINER_CHECKPOINTS", str(tmp_path / "elsewhere"))
    assert artifacts.unfinished(tmp_path / "student") == str(tmp_path / "elsewhere")
    assert root_is_shared()


# ---------------------------------------------------------------------------------------------------------------------
# Other settings and inputs


def test_a_training_goes_on_with_other_settings_where_they_do_not_decide_what_is_learned(tmp_path):
    save(checkpoints(tmp_path), 10)
    assert latest(tmp_path, settings={"epochs": 3, "workers": 8}, shared=False).step == 10


OTHERS = [
    ({"settings": {"epochs": 4, "workers": 2}}, "distill.epochs was 3, is 4;"),
    ({"settings": {"epochs": 3, "views": {"flip": True}}}, "distill.views.flip was not there, is True;"),
    ({"parents": {"dataset": "f" * 64}}, "input dataset was abc, is ffffffffffff;"),
    ({"parents": {"dataset": "abc", "teacher": "t"}}, "input teacher was not there, is t;"),
    ({"settings": {"epochs": 3, **{f"a{number}": 0 for number in range(12)}}}, "a9 was not there, is 0, and 2 more;"),
]


@pytest.mark.parametrize(("other", "reported"), OTHERS)
def test_another_training_is_refused_with_the_difference_where_only_this_one_should_be(tmp_path, other, reported):
    save(checkpoints(tmp_path), 10)
    with pytest.raises(SettingsError, match="unfinished training of other settings or inputs") as caught:
        latest(tmp_path, **other, section="distill", shared=False)
    assert reported in str(caught.value)
    assert f"{folder(tmp_path)} holds" in str(caught.value)
    assert "remove that folder" in str(caught.value)
    assert names(tmp_path) == ["step-00000010-g001"]


@pytest.mark.parametrize(("other", "reported"), OTHERS)
def test_another_training_begins_anew_beside_it_where_many_stand(tmp_path, caplog, other, reported):
    caplog.set_level(logging.INFO)
    save(checkpoints(tmp_path), 10)
    assert latest(tmp_path, **other) is None
    assert "distill  begins anew" in caplog.text


def test_one_that_was_moved_to_another_training_is_refused(tmp_path):
    save(checkpoints(tmp_path), 10)
    other = checkpoints(tmp_path, parents={"dataset": "def"})
    folder(tmp_path).rename(other.uri)
    with pytest.raises(SettingsError, match="input dataset was abc, is def"):
        newest(other, ALONE)


# ---------------------------------------------------------------------------------------------------------------------
# In the background


@pytest.fixture
def slow(monkeypatch):
    """Writing waits for this event."""
    released, write = threading.Event(), Snapshot.write

    def wait_and_write(snapshot, folder):
        assert released.wait(60)
        write(snapshot, folder)

    monkeypatch.setattr(Snapshot, "write", wait_and_write)
    yield released
    released.set()


def test_saving_returns_before_it_is_written_and_what_is_written_is_of_its_time(tmp_path, slow):
    held, (model, optimizer, average) = checkpoints(tmp_path), learner(seed=1)
    before = everything(snapshot_of(10, (model, optimizer, average)))
    held.save(snapshot_of(10, (model, optimizer, average)))
    assert names(tmp_path) == []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    slow.set()
    held.finish(needed=True)
    assert everything(latest(tmp_path)) == before


def test_a_write_that_does_not_end_ends_the_training(tmp_path, slow, monkeypatch):
    monkeypatch.setenv("TRAINER_WAIT_S", "0.1")
    held = checkpoints(tmp_path)
    held.save(snapshot_of(10, learner()))
    with pytest.raises(
        OutputError, match=r"distill: a checkpoint is still being written to .* after 0\.1 s of waiting"
    ):
        held.save(snapshot_of(20, learner()))


def test_a_training_that_fails_leaves_the_checkpoint_that_is_under_way(tmp_path, slow):
    held = checkpoints(tmp_path)
    threading.Timer(0.3, slow.set).start()
    with contextlib.suppress(KeyboardInterrupt), held:
        held.save(snapshot_of(10, learner()))
        raise KeyboardInterrupt
    assert names(tmp_path) == ["step-00000010-g001"]


@pytest.fixture
def full(monkeypatch):
    """The disk is full while there is something in this list."""
    reasons, write = [], Snapshot.write

    def fill_and_write(snapshot, folder):
        write(snapshot, folder)
        if reasons:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "optimizer.safetensors"))

    monkeypatch.setattr(Snapshot, "write", fill_and_write)
    return reasons


def test_a_write_that_fails_is_a_warning_and_the_next_one_may_succeed(tmp_path, full, caplog):
    held = checkpoints(tmp_path)
    save(held, 10)
    full.append("full")
    for step in (20, 30):
        held.save(snapshot_of(step, learner()))
        held.finish()
    assert "distill  a checkpoint could not be written: cannot write to" in caplog.text
    assert "the disk is full" in caplog.text
    assert [path.name for path in folder(tmp_path).iterdir() if "step" in path.name] == ["step-00000010-g001"]
    full.clear()
    save(held, 40)
    full.append("full")
    for step in (50, 60):
        held.save(snapshot_of(step, learner()))
    held.finish()
    assert names(tmp_path) == ["step-00000010-g001", "step-00000040-g001"]


def test_three_failures_in_a_row_end_the_training_and_the_message_says_what_is_left(tmp_path, full):
    held = checkpoints(tmp_path)
    save(held, 10)
    full.append("full")
    for step in (20, 30, 40):
        held.save(snapshot_of(step, learner()))
    with pytest.raises(
        OutputError, match=r"distill: 3 or more checkpoints in a row could not be written: cannot write to"
    ) as caught:
        held.finish()
    assert f"the same command resumes from {folder(tmp_path)}/step-00000010-g001, which is whole" in str(caught.value)
    with pytest.raises(OutputError, match="3 or more checkpoints in a row"):
        held.check_failures()


def test_a_store_that_is_away_ends_the_training_after_ten_minutes_only(object_store, monkeypatch, caplog):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    held = checkpoints(object_store.uri("c"))
    held.begin()
    object_store.answer(503)
    for step in (10, 20, 30, 40, 50):
        held.save(snapshot_of(step, learner()))
        held.finish()
    assert len(caplog.messages) == 2, "that the store is away, and that checkpoints are not written"
    monkeypatch.setenv("TRAINER_WAIT_S", "0.001")
    with pytest.raises(StorageAwayError, match="3 or more checkpoints in a row could not be written"):
        held.check_failures()


def test_one_that_is_needed_must_not_fail(tmp_path, full):
    held = checkpoints(tmp_path)
    full.append("full")
    held.save(snapshot_of(10, learner()))
    with pytest.raises(OutputError, match=r"the last checkpoint could not be written: .* there is no other one"):
        held.finish(needed=True)


def test_a_mistake_in_the_writing_is_not_taken_for_a_full_disk(tmp_path, monkeypatch):
    held = checkpoints(tmp_path)
    monkeypatch.setattr(Snapshot, "write", lambda snapshot, folder: 1 / 0)
    held.save(snapshot_of(10, learner()))
    with pytest.raises(ZeroDivisionError):
        held.finish()


# ---------------------------------------------------------------------------------------------------------------------
# Fencing


def test_a_try_that_comes_back_writes_nothing_more(tmp_path):
    stale, fresh = checkpoints(tmp_path), checkpoints(tmp_path)
    save(stale, 10)
    assert newest(fresh, ALONE).step == 10
    stale.save(snapshot_of(20, learner()))
    with pytest.raises(SupersededError, match="superseded: this is attempt 1 of this training"):
        stale.finish()
    with pytest.raises(SupersededError, match="superseded"):
        stale.check_ours()
    with pytest.raises(SupersededError, match="superseded"):
        stale.check_failures()
    fresh.check_ours()
    save(fresh, 20)
    assert names(tmp_path) == ["step-00000010-g001", "step-00000020-g002"]


def test_one_that_was_stopped_in_the_middle_of_a_write_does_not_complete_it(tmp_path, slow):
    stale = checkpoints(tmp_path)
    stale.save(snapshot_of(10, learner()))
    fresh = checkpoints(tmp_path)
    fresh.begin()
    slow.set()
    with pytest.raises(SupersededError, match="superseded"):
        stale.finish()
    assert names(tmp_path) == []
    assert not list(folder(tmp_path).glob(".step-*"))


def test_the_later_try_counts_even_where_the_earlier_one_came_further(tmp_path):
    first, second = checkpoints(tmp_path), checkpoints(tmp_path)
    save(first, 10, 500)
    second.begin()
    save(second, 20)
    assert checkpoints(tmp_path).entries() == [CheckpointEntry(2, 20), CheckpointEntry(1, 500)]
    assert latest(tmp_path).step == 20


def test_a_try_is_over_when_another_has_ended_and_a_new_training_has_taken_its_place(tmp_path):
    output = tmp_path / "student"
    stale, fresh = checkpoints(tmp_path, output=output), checkpoints(tmp_path, output=output)
    save(stale, 10)
    newest(fresh, ALONE)
    with artifacts.create(output, "model", settings={}):
        fresh.check_ours()
    fresh.remove()
    with pytest.raises(SupersededError, match="superseded"):
        stale.check_ours()
    checkpoints(tmp_path).begin()
    with pytest.raises(SupersededError, match="superseded"):
        stale.check_ours()


def test_a_store_that_has_lost_the_record_of_the_tries_supersedes_none(object_store, caplog):
    held = checkpoints(object_store.uri("c"), output=object_store.uri("student"))
    held.begin()
    save(held, 10)
    storage.remove(object_store.uri("c"))
    save(held, 20, 30)
    (warning,) = caplog.messages
    assert warning.startswith(f"distill  the record of attempt 1 is gone from {held.uri}, and was written again")
    assert held.entries() == [CheckpointEntry(1, 30), CheckpointEntry(1, 20)]
    fresh = checkpoints(object_store.uri("c"))
    assert newest(fresh, ALONE).step == 30
    with pytest.raises(SupersededError, match="this is attempt 1"):
        held.check_ours()


def test_a_checkpoint_that_is_due_while_the_store_holds_up_the_one_before_is_passed_over(
    object_store, monkeypatch, caplog
):
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    held = checkpoints(object_store.uri("c"))
    held.begin()
    object_store.delay(3600)
    for step in (10, 20, 30):
        held.save(snapshot_of(step, learner()))
    object_store.clear()
    held.save(snapshot_of(40, learner()), needed=True)
    held.finish(needed=True)
    assert held.entries() == [CheckpointEntry(1, 40), CheckpointEntry(1, 10)]
    (warning,) = caplog.messages
    assert f"no checkpoint after step 20: the one before is still on its way to {held.uri}" in warning


def test_what_has_to_be_there_before_a_checkpoint_is_written_in_the_background_too(tmp_path, slow):
    done = []
    held = checkpoints(tmp_path, before_write=lambda: done.append((threading.current_thread().name, names(tmp_path))))
    held.save(snapshot_of(10, learner()))
    slow.set()
    held.finish(needed=True)
    assert done == [("checkpoint", [])]
    assert names(tmp_path) == ["step-00000010-g001"]


# ---------------------------------------------------------------------------------------------------------------------
# Several processes

AGREE = """
import json, logging, sys
from pathlib import Path
from trainer.io.errors import TrainingError
from trainer.training.checkpoints import Checkpoints, newest
from trainer.devices.process_group import join_processes

logging.basicConfig(level=logging.INFO)
with join_processes() as processes:
    def find(name):
        root = Path(f"{name}-{processes.rank}")  # as on machines that see the same storage, each in its own way
        return newest(Checkpoints(root, "distill", settings={"epochs": 3, "workers": 2}, parents={"dataset": "abc"}), processes)
    assert find("damaged").step == 10
    assert find("lagging").step == 10
    try:
        find("unseen")
    except TrainingError as error:
        assert str(error).startswith("process 1 of 2 finds no checkpoints at unseen-"), error
    else:
        raise AssertionError("each process goes on from what it sees alone")
"""


def test_all_processes_go_on_from_the_newest_one_that_is_valid_on_all(tmp_path):
    save(checkpoints(tmp_path / "damaged-0"), 10, 20)
    for name in ("damaged-1", "lagging-0", "lagging-1", "unseen-0"):
        shutil.copytree(tmp_path / "damaged-0", tmp_path / name)
    (folder(tmp_path / "damaged-1") / "step-00000020-g001" / "state.json").write_text("{}")
    shutil.rmtree(folder(tmp_path / "lagging-1") / "step-00000020-g001")
    (tmp_path / "unseen-1").mkdir()
    _, (_, reported) = on_two_processes(AGREE, tmp_path)
    assert "passing over a checkpoint: checkpoint damaged-1/" in reported


# ---------------------------------------------------------------------------------------------------------------------
# In an object store


def empty_cache():
    shutil.rmtree(os.environ["TRAINER_CACHE"])


def test_the_newest_comes_back_from_a_store(object_store):
    root = object_store.uri("c")
    *_, saved = save(checkpoints(root), 10, 20, 30)
    kept = {"generation-001", "step-00000020-g001", "step-00000030-g001"}
    assert {key.split("/")[2] for key in object_store.keys("c/")} == kept
    empty_cache()
    object_store.clear()
    for _ in range(2):
        assert everything(latest(root)) == everything(saved)
    assert sum("model.safetensors" in one.path for one in object_store.requests) == 1
    checkpoints(root).remove()
    assert object_store.keys() == []


@pytest.mark.parametrize("damage", ["truncate", "flip", "lost", "no manifest"])
def test_a_damaged_one_in_a_store_is_named_and_passed_over(object_store, caplog, damage):
    root = object_store.uri("c")
    save(checkpoints(root), 10, 20)
    (key,) = [key for key in object_store.keys("c/") if key.endswith("20-g001/optimizer.safetensors")]
    content = object_store.get(key)
    if damage == "truncate":
        object_store.put(key, content[:-7])
    elif damage == "flip":
        object_store.put(key, content[:99] + bytes([content[99] ^ 1]) + content[100:])
    elif damage == "lost":
        object_store.delete(key)
    else:
        object_store.delete(key.replace("optimizer.safetensors", "manifest.json"))
    assert latest(root).step == 10
    if damage != "no manifest":
        assert "passing over a checkpoint: checkpoint s3://artifacts/c/distill-" in caplog.text
        assert "step-00000020" in caplog.text


def test_a_store_that_refuses_is_no_reason_to_begin_anew(object_store):
    root = object_store.uri("c")
    save(checkpoints(root), 10)
    object_store.answer(403, method="GET", path="model.safetensors")
    empty_cache()
    with pytest.raises(StorageError, match="refuses"):
        latest(root)


def test_a_try_that_comes_back_writes_nothing_more_into_a_store(object_store):
    root = object_store.uri("c")
    stale, fresh = checkpoints(root), checkpoints(root)
    save(stale, 10)
    newest(fresh, ALONE)
    before = object_store.keys()
    stale.save(snapshot_of(20, learner()))
    with pytest.raises(SupersededError, match="superseded"):
        stale.finish()
    assert object_store.keys() == before


def test_an_upload_that_is_cut_off_leaves_nothing_that_is_believed(object_store, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    root = object_store.uri("c")
    held = checkpoints(root)
    save(held, 10)
    object_store.answer(503, method="PUT", path="step-00000020-g001/optimizer")
    held.save(snapshot_of(20, learner()))
    held.finish()
    object_store.clear()
    empty_cache()
    assert latest(root).step == 10
    assert not [key for key in object_store.keys("c/") if "step-00000020" in key]


def setting_names(section):
    """Of all settings in a group of them, and in those within it."""
    for name, field in section.model_fields.items():
        yield name
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from setting_names(inner)


def test_every_free_setting_is_one():
    assert {*setting_names(config.PretrainSettings), *setting_names(config.DistillSettings)} >= CHANGEABLE_ON_RESUME


def test_what_decides_what_is_learned_stays_wherever_it_stands():
    settings = config.resolve("digits").for_stage("pretrain") | {"workers": 3}
    kept = compatible(settings)
    assert "workers" not in kept
    assert kept["mae"]["epochs"] == settings["mae"]["epochs"]
    assert kept["finetune"]["views"] == settings["finetune"]["views"]
    assert not CHANGEABLE_ON_RESUME & {*kept, *kept["mae"], *kept["finetune"]}


@pytest.mark.parametrize(
    "name", ["epochs", "batch_size", "seed", "precision", "gradient_compression", "ema_decay", "zero"]
)
def test_a_distillation_goes_on_with_another_value_only_where_that_is_free(name):
    settings = config.DistillSettings().model_dump(mode="json")
    other = settings | {name: "other"}
    assert (compatible(settings) == compatible(other)) == (name in CHANGEABLE_ON_RESUME)


def test_each_difference_is_reported_with_what_was_and_what_is():
    was = {"epochs": 3, "views": {"flip": True, "mixup": 0.1}, "workers": 1}, {"dataset": "a" * 64, "teacher": "t"}
    now = {"epochs": 4, "views": {"flip": True, "mixup": 0.2}, "workers": 2, "new": None}, {"dataset": "b" * 64}
    assert differences(was, now, section="distill") == [
        "distill.epochs was 3, is 4",
        "distill.views.mixup was 0.1, is 0.2",
        "distill.new was not there, is None",
        "input dataset was aaaaaaaaaaaa, is bbbbbbbbbbbb",
        "input teacher was t, is not there",
    ]
    assert differences(was, was, section="distill") == []
