"""A recording that is killed goes on where it stopped, on another number of processes, to the same records."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trainer import artifacts, config, tracking
from trainer.launch import JobSpec, LocalLauncher
from trainer.stages import reinforce

SETTINGS = config.ReinforceSettings(
    views=12,
    top_k=3,
    batch_size=100,
    seed=2,
    workers=0,
    augmentation=config.ViewSettings(min_scale=0.5, mixup=0.2),
)


def shards_of(path):
    return {file.name: file.read_bytes() for file in sorted((Path(path) / "records").iterdir())}


@pytest.mark.slow
def test_a_killed_recording_goes_on_with_another_number_of_processes_to_the_same_bits(
    digits, teacher, tmp_path, monkeypatch, capfd
):
    monkeypatch.delenv("TRAINER_CHECKPOINTS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    inputs, output = {"dataset": digits, "teacher": teacher}, str(tmp_path / "job" / "outputs")
    section = SETTINGS.model_dump(mode="json")
    command = [
        *(sys.executable, "-m", "trainer", "stage", "reinforce", "--processes", "1", "--settings", json.dumps(section)),
        *("--dataset", digits, "--teacher", teacher, "--teacher-outputs", output),
    ]
    job = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        shelf = tmp_path / "job" / "checkpoints"
        deadline = time.monotonic() + 60
        while len(list(shelf.glob("*/records/view-*.bin"))) < 2:
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        family = [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]
        for process in family:  # workers have sessions of their own
            process.kill()
        job.wait()
        psutil.wait_procs(family, timeout=10)
    kept = len(list(shelf.glob("*/records/view-*.bin")))
    assert 2 <= kept < SETTINGS.views
    assert not artifacts.exists(output)

    capfd.readouterr()
    outputs = {"teacher_outputs": output}
    spec = JobSpec(stage="reinforce", settings=section, inputs=inputs, outputs=outputs, processes_per_node=2)
    LocalLauncher().run(spec)
    assert f"resuming: {kept} of 12 shards are there" in capfd.readouterr().err
    assert not list(shelf.iterdir())
    reinforce.run(SETTINGS, **inputs, teacher_outputs=tmp_path / "whole")
    assert shards_of(output) == shards_of(tmp_path / "whole")
    killed, whole = (artifacts.manifest(place, "teacher_outputs").figures for place in (output, tmp_path / "whole"))
    assert tracking.numbers(killed["mass"]) == pytest.approx(tracking.numbers(whole["mass"]))
