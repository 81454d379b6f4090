import json

import pytest
import safetensors.torch
import torch

from tests.checkpoints import everything, learner, snapshot_of
from trainer.errors import ArtifactError
from trainer.training.checkpoints import snapshots
from trainer.training.checkpoints.snapshots import DESCRIPTION, Snapshot
from trainer.training.checkpoints.training_state import TrainingState


def written(state, folder, snapshot=None):
    snapshot = snapshot or Snapshot()
    snapshot.take(state)
    folder.mkdir()
    snapshot.write(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_written_is_read_bit_by_bit(tmp_path, dtype):
    state = snapshot_of(7, learner(dtype=dtype), pending=("validation",))
    assert everything(snapshots.read(written(state, tmp_path / "one"), "one")) == everything(state)


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
    read = snapshots.read(folder, "one")
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
        read = snapshots.read(written(state, tmp_path / str(number), snapshot), "one")
        assert everything(read) == everything(state)
    no_average = TrainingState(**{**vars(states[2]), "average": None})
    assert snapshots.read(written(no_average, tmp_path / "last", snapshot), "one").average is None


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
        snapshots.read(folder, "s3://b/one")


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
    read = snapshots.read(tmp_path / "one", "one")
    assert all(torch.equal(read.model[name], tensor) for name, tensor in exact.items())
    assert everything(read)[0] == before[0]
