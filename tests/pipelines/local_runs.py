"""`python -m pipelines.local` as a user runs it: a process of its own, in a folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from trainer.stages import STAGES

ROOT = Path(__file__).parent.parent.parent
TASKS = {name.replace("_", "-") for name in STAGES}
"""As KFP names them."""
ALL = {"configure", *TASKS, "finish"}
"""The tasks of a run that needs every stage."""
PLAIN = ALL - {"warm-up", "tune", "reinforce"}
"""The tasks of a run with the recipe's own settings."""
SMALL = "pretrain.mae.epochs=1 pretrain.finetune.epochs=1 distill.epochs=1 evaluate.latency_runs=10"


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TRAINER_"))}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"} | variables


def command(*arguments):
    return [sys.executable, "-m", "pipelines.local", "--processes", "1", *arguments]


def start(folder, *arguments, **variables):
    return run(command(*arguments), folder, **variables)


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


def happened(output, what):
    """Which tasks `started`, are `done`, or came `cached`."""
    return set(re.findall(rf"^\[ *[\d.]+ s\] ([\w-]+): {what}", output, flags=re.MULTILINE))
