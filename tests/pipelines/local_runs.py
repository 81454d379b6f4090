"""Commands as a user gives them: each in a process of its own, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SMALL = "pretrain.mae.epochs=1 pretrain.finetune.epochs=1 distill.epochs=1 evaluate.latency_runs=10"


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TRAINER_"))}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"} | variables


def run(words, folder, **variables):
    """Give a command there and wait for its end."""
    return subprocess.run(
        words,
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        start_new_session=True,
    )
