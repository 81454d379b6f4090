"""A recording that is killed goes on where it stopped, on another number of processes, to the same records."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import groups
from trainer import config
from trainer.io import artifacts
from trainer.report import tracking
from trainer.stages import reinforce

SETTINGS = config.ReinforceSettings(
    views=12, top_k=3, batch_size=100, seed=2, workers=0, augmentation=config.ViewSettings(min_scale=0.5, mixup=0.2)
)


def shards_of(path):
    return {file.name: file.read_bytes() for file in sorted((Path(path) / "records").iterdir())}


@pytest.mark.slow
def test_a_killed_recording_resumes_to_the_same_bits(digits, teacher, tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)
    inputs, output = {"dataset": digits, "teacher": teacher}, str(tmp_path / "job" / "outputs")
    settings = SETTINGS.model_dump(mode="json")
    job = SimpleNamespace(settings=settings, inputs=inputs, outputs={"teacher_outputs": output})
    shelf = tmp_path / "job" / "checkpoints"
    (process,) = groups.start(job, stage="reinforce")
    try:
        deadline = time.monotonic() + 60
        while len(list(shelf.glob("*/records/view-*.bin"))) < 2:
            assert process.exitcode is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.kill()
        process.join()
    kept = len(list(shelf.glob("*/records/view-*.bin")))
    assert 2 <= kept < SETTINGS.views
    assert not artifacts.exists(output)

    ended = groups.run(job, processes=2, stage="reinforce")
    assert ended.codes == [0, 0], ended
    assert f"resuming: {kept} of 12 shards are there" in ended.said[0]
    assert not list(shelf.iterdir())
    reinforce.run(SETTINGS, **inputs, teacher_outputs=tmp_path / "whole")
    assert shards_of(output) == shards_of(tmp_path / "whole")
    killed, whole = (artifacts.manifest(place, "teacher_outputs").figures for place in (output, tmp_path / "whole"))
    assert tracking.numbers(killed["mass"]) == pytest.approx(tracking.numbers(whole["mass"]))
