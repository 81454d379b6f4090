"""Where a page comes from: the run, its recipe and what differs from it, code, data and machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from trainer import config
from trainer.io import artifacts
from trainer.io.base_models import flatten
from trainer.io.errors import SettingsError
from trainer.io.host import processor_name, usable_cores
from trainer.report import tracking

_ROOT = Path(__file__).parents[2]


def here() -> dict[str, str]:
    """Return what this process knows of a page that it makes."""
    run = os.environ.get(tracking.RUN)
    return {
        **({"run": run} if run else {}),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "version": sys.modules[
            "trainer"
        ].__version__,  # an import would close a circle: the package offers names of modules above
        "commit": commit(),
        "code": artifacts.code_version(),
        "machine": f"{processor_name()}, {usable_cores()} cores",
    }


@cache
def commit() -> str:
    """Return the commit of the working tree that this package lies in, `-dirty` where files differ; `not known` outside of one."""
    if not (_ROOT / ".git").exists():
        return "not known"
    try:
        command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:  # no git, or a tree of another user
        return f"not known ({type(error).__name__})"


def differences(recipe: str, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the recipe's, by full name; from the defaults where the recipe is not on this machine."""
    try:
        base = config.resolve(recipe)
    except SettingsError:
        base = config.resolve()
    known, flat = (flatten(one, keep=lambda group: not group) for one in (base.model_dump(mode="json"), resolved))
    given = {name: value for name, value in flat.items() if not config.copied_from(name)}
    changed = {name: value for name, value in given.items() if name not in known or known[name] != value}
    seed = changed.get("run.seed")  # the default of the other seeds
    return {
        name: value
        for name, value in changed.items()
        if name == "run.seed" or not name.endswith(".seed") or value != seed
    }
