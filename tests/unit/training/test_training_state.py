import json

import pytest
import safetensors.torch
import torch
from torch import nn

from tests.checkpoints import PARTS, everything, learner, snapshot_of
from tests.forks import on_two_processes
from trainer.io.errors import ArtifactError
from trainer.training.training_state import DESCRIPTION, Snapshot, TrainingState, read_state, restore


def test_a_state_goes_back_to_where_it_came_from_bit_by_bit():
    saved = snapshot_of(7, learner(seed=1), pending=("validation",))
    other = learner(seed=2)
    restore(saved, *other)
    assert everything(snapshot_of(7, other, pending=("validation",))) == everything(saved)


def test_the_next_step_is_the_same_after_it():
    first, second = learner(seed=1), learner(seed=2, steps=0)
    restore(snapshot_of(2, first), *second)
    batch = torch.randn(5, 3)
    for model, optimizer, _ in (first, second):
        model(batch).square().sum().backward()
        optimizer.step()
    assert everything(snapshot_of(3, first)) == everything(snapshot_of(3, second))


def test_it_goes_by_names_not_by_the_order_of_groups():
    saved, other = snapshot_of(2, learner(seed=1)), learner(seed=2, order=(1, 0))
    restore(saved, *other)
    assert everything(snapshot_of(2, other)) == everything(saved)


def test_a_restored_optimizer_shares_no_memory_with_the_state():
    saved, (model, optimizer, average) = snapshot_of(2, learner(seed=1)), learner(seed=2)
    before = everything(saved)
    restore(saved, model, optimizer, average)
    saved = everything(snapshot_of(2, learner(seed=1)))
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    assert saved == before


def test_a_state_before_the_first_step_has_nothing_of_the_optimizer():
    saved, (model, optimizer, average) = snapshot_of(0, learner(seed=1, steps=0)), learner(seed=2, steps=0)
    assert saved.optimizer == {}
    restore(saved, model, optimizer, average)
    assert not optimizer.state


def misfit(seed=1, **changes):
    """What is reported of a state that was changed before it is put back."""
    saved, other = snapshot_of(2, learner(seed=seed)), learner(seed=3)
    before = everything(snapshot_of(2, other))
    fields = {name: dict(getattr(saved, name)) for name in ("model", "optimizer", "average")}
    for name, change in changes.items():
        change(fields[name])
    altered = type(saved)(**{**vars(saved), **fields, "uri": "s3://b/c"})
    with pytest.raises(ArtifactError) as caught:
        restore(altered, *other)
    assert everything(snapshot_of(2, other)) == before, "nothing is changed"
    return str(caught.value)


def test_what_does_not_fit_is_named():
    reported = misfit(model=lambda tensors: tensors.pop("0.bias"))
    assert reported.startswith(
        "checkpoint s3://b/c does not fit this training in its weights: it lacks 0.bias; continue with"
    )
    reported = misfit(average=lambda tensors: tensors.update({"3.bias": torch.zeros(2)}))
    assert "does not fit this training in its average: it has 3.bias, which the model has not;" in reported
    reported = misfit(model=lambda tensors: tensors.update({"0.weight": torch.zeros(4, 4)}))
    assert "0.weight is [4, 4] float32 instead of [4, 3] float32;" in reported
    reported = misfit(model=lambda tensors: tensors.update({"0.weight": tensors["0.weight"].bfloat16()}))
    assert "0.weight is [4, 3] bfloat16 instead of [4, 3] float32;" in reported
    reported = misfit(optimizer=lambda tensors: tensors.update({"exp_avg/0.weight": torch.zeros(3, 4)}))
    assert (
        "does not fit this training in its optimizer: exp_avg/0.weight is [3, 4] float32 instead of [4, 3] float32;"
        in reported
    )
    reported = misfit(optimizer=lambda tensors: tensors.update({"exp_avg/9.weight": torch.zeros(3, 4)}))
    assert "it has exp_avg/9.weight, which the model has not;" in reported
    reported = misfit(model=lambda tensors: [tensors.pop(name) for name in list(tensors)])
    assert "it lacks 0.weight; it lacks 0.bias; it lacks 1.weight; and 6 more;" in reported


def test_other_options_of_a_weight_are_named():
    saved, (model, optimizer, average) = snapshot_of(2, learner(seed=1)), learner(seed=3)
    optimizer.param_groups[1]["weight_decay"] = 0.1
    with pytest.raises(ArtifactError, match=r"weight_decay of 1\.weight was 0\.0, is 0\.1"):
        restore(saved, model, optimizer, average)


def test_a_state_without_an_average_does_not_fit_a_training_with_one():
    model, optimizer, average = learner()
    with pytest.raises(ArtifactError, match=r"does not fit this training in its average: it lacks 0\.weight"):
        restore(snapshot_of(2, (model, optimizer, None)), model, optimizer, average)


def test_weights_that_two_modules_share_are_kept_once_in_the_optimizer():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    state = snapshot_of(1, (model, optimizer, None))
    assert set(state.groups[0]["params"]) == {"0.weight", "0.bias", "1.bias"}
    restore(state, model, optimizer, None)


# ---------------------------------------------------------------------------------------------------------------------
# In files


def written(state, folder, snapshot=None):
    snapshot = snapshot or Snapshot()
    snapshot.take(state)
    folder.mkdir()
    snapshot.write(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_written_is_read_bit_by_bit(tmp_path, dtype):
    state = snapshot_of(7, learner(dtype=dtype), pending=("validation",))
    assert everything(read_state(written(state, tmp_path / "one"), "one")) == everything(state)


def test_every_type_and_shape_is_kept(tmp_path):
    tensors = {
        "bits": torch.tensor([True, False, True]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "signed": torch.arange(3, dtype=torch.int8),
        "short": torch.arange(5, dtype=torch.int16),
        "half": torch.randn(3).half(),
        "brain": torch.randn(3).bfloat16(),
        "int": torch.tensor(3, dtype=torch.int32),
        "long": torch.tensor(2**60),
        "double": torch.randn(2, 0, 3, dtype=torch.float64),
        "turned": torch.randn(3, 5).t(),
        "odd": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }
    state = TrainingState(step=1, model=tensors, optimizer={}, groups=[], average=None)
    folder = written(state, tmp_path / "one")
    read = read_state(folder, "one")
    assert everything(read) == everything(state)
    assert set(safetensors.torch.load_file(folder / "model.safetensors")) == set(tensors)


def test_its_memory_is_used_again_and_made_anew_where_it_no_longer_fits(tmp_path):
    snapshot = Snapshot()
    states = [
        snapshot_of(1, learner(seed=1, steps=0)),
        snapshot_of(3, learner(seed=2)),
        snapshot_of(4, learner(seed=3)),
    ]
    for number, state in enumerate(states):
        read = read_state(written(state, tmp_path / str(number), snapshot), "one")
        assert everything(read) == everything(state)
    no_average = TrainingState(**{**vars(states[2]), "average": None})
    assert read_state(written(no_average, tmp_path / "last", snapshot), "one").average is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (DESCRIPTION, b"{"),
        (DESCRIPTION, json.dumps({"step": "many", "pending": [], "groups": []}).encode()),
        (DESCRIPTION, json.dumps({"step": 1, "pending": [], "groups": [], "code": "import os"}).encode()),
        (DESCRIPTION, json.dumps({"step": -1, "pending": [], "groups": []}).encode()),
        (DESCRIPTION, json.dumps({"step": 1, "pending": [], "groups": [{"params": 3}]}).encode()),
        (DESCRIPTION, None),
        ("model.safetensors", b""),
        ("model.safetensors", (2**60).to_bytes(8, "little") + b"{}"),
        ("optimizer.safetensors", b"\x80\x04\x95"),
        ("optimizer.safetensors", None),
    ],
)
def test_a_file_that_is_no_checkpoints_is_refused(tmp_path, file, content):
    folder = written(snapshot_of(1, learner()), tmp_path / "one")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(ArtifactError, match="checkpoint s3://b/one: cannot be read"):
        read_state(folder, "s3://b/one")


@pytest.mark.gpu
def test_a_state_on_a_gpu_is_copied_whole_while_the_device_goes_on(tmp_path):
    model = {str(number): torch.randn(1000, 1000, device="cuda") for number in range(20)}
    model["small"] = torch.randn(3, device="cuda").bfloat16()
    state = TrainingState(step=1, model=model, optimizer={"step/0": torch.tensor(1.0)}, groups=[], average=None)
    before, snapshot = (
        everything(TrainingState(**{**vars(state), "model": {n: t.cpu() for n, t in model.items()}})),
        Snapshot(),
    )
    for tensor in model.values():
        tensor.add_(1)  # still under way when the copy is asked for
        tensor.sub_(1)
    exact = {name: tensor.cpu() for name, tensor in model.items()}
    snapshot.take(state)
    for tensor in model.values():
        tensor.zero_()
    (tmp_path / "one").mkdir()
    snapshot.write(tmp_path / "one")
    read = read_state(tmp_path / "one", "one")
    assert all(torch.equal(read.model[name], tensor) for name, tensor in exact.items())
    assert everything(read)[0] == before[0]


# ---------------------------------------------------------------------------------------------------------------------
# Sharded

SHARDED = """
import sys
from pathlib import Path
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from tests.checkpoints import Rows, learner
from trainer.training.training_state import Snapshot, capture, read_state, restore
from trainer.devices.process_group import join_processes

def sharded(model, whole):
    groups = [{name: group[name] for name in ("params", "weight_decay", "lr_scale")} for group in whole.param_groups]
    if sys.argv[1] == "rows":
        return Rows(groups, lr=0.1, fused=True)
    return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, lr=0.1, fused=True)

def step(model, optimizer):
    model(torch.arange(15.0).view(5, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

with join_processes() as processes:
    model, whole, average = learner(seed=9, steps=0)
    optimizer = sharded(model, whole)
    restore(read_state(Path("whole"), "whole"), model, optimizer, average)
    step(model, optimizer)
    state = capture(3, model, optimizer, average, processes=processes)
    if processes.is_first:
        snapshot = Snapshot()
        snapshot.take(state)
        Path("sharded").mkdir()
        snapshot.write(Path("sharded"))
    processes.barrier("the writing")
    model, whole, average = learner(seed=8, steps=0)
    optimizer = sharded(model, whole)
    restore(read_state(Path("sharded"), "sharded"), model, optimizer, average)
    step(model, optimizer)
    state = capture(4, model, optimizer, average, processes=processes)
    if processes.is_first:
        snapshot.take(state)
        Path("sharded again").mkdir()
        snapshot.write(Path("sharded again"))
"""


@pytest.mark.parametrize("dealt", ["weights", "rows"])
def test_a_state_goes_from_one_process_to_two_sharded_ones_and_back(tmp_path, dealt):
    model, optimizer, average = learner(seed=1)
    (tmp_path / "whole").mkdir()
    snapshot = Snapshot()
    snapshot.take(snapshot_of(2, (model, optimizer, average)))
    snapshot.write(tmp_path / "whole")
    on_two_processes(SHARDED, tmp_path, dealt)
    for name, steps in (("sharded", 3), ("sharded again", 4)):
        model(torch.arange(15.0).view(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        read = read_state(tmp_path / name, name)
        expected = snapshot_of(steps, (model, optimizer, average))
        if dealt == "weights":
            assert everything(read) == everything(expected)
        else:  # a processor's wide instructions round the last elements of a tensor otherwise
            assert everything(read)[:3] == everything(expected)[:3]
            for part in PARTS:
                torch.testing.assert_close(
                    dict(getattr(read, part)), dict(getattr(expected, part)), rtol=1e-5, atol=1e-7
                )
    others = learner(seed=7)
    restore(read, *others)
    assert everything(snapshot_of(4, others)) == everything(read)
