"""How far a training is, in the status of its TrainJob (`status.trainerStatus` of Kubeflow Trainer, feature gate TrainJobStatus).

Trainer 2.2 and later gives the pods of a TrainJob an address and a token for it (proposal 2779). The status has the progress of the
training under way and the newest value of each loss and score, for `kubectl describe`, Kubeflow's SDK, and an OptimizationJob to choose by.
"""

from __future__ import annotations

import json
import logging
import math
import os
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

URL, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
INTERVAL_S = 5.0
"""Least time between two updates, as Trainer's guide has it."""
_TIMEOUT_S = 5.0
_MOST_METRICS, _LONGEST = 256, 64  # of the CRD: metrics, and letters of a name or a value


class StepsDone(NamedTuple):
    """How far a training is."""

    steps: int  # done
    total_steps: int
    seconds_left: float | None  # None where the speed is not known


def body(progress: StepsDone | None, values: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of TrainerStatus but the time; what is not finite is left out."""
    status: dict[str, Any] = {}
    if progress is not None and progress.total_steps:
        status["progressPercentage"] = min(100, 100 * progress.steps // progress.total_steps)
    if progress is not None and progress.seconds_left is not None:
        status["estimatedRemainingSeconds"] = max(0, round(progress.seconds_left))
    finite = [(name, value) for name, value in values.items() if math.isfinite(value) and len(name) <= _LONGEST]
    status["metrics"] = [{"name": name, "value": f"{value:.6g}"} for name, value in finite[:_MOST_METRICS]]
    return status


@contextmanager
def reported(newest: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Send what `newest` returns (`body`) while the block runs, and once more at its end; a failure is logged once and ends no training."""
    ended, sender = threading.Event(), _Sender()

    def run() -> None:
        while not ended.wait(INTERVAL_S):
            sender.send(newest())

    thread = threading.Thread(target=run, name="train-job-status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * _TIMEOUT_S)
        sender.send(newest())


class _Sender:
    """Sends what has changed since the last time."""

    def __init__(self) -> None:
        self._sent: Mapping[str, Any] = {}
        self._failed = False

    def send(self, status: Mapping[str, Any]) -> None:
        if status == self._sent:
            return
        content = {"trainerStatus": {**status, "lastUpdatedTime": datetime.now(UTC).isoformat()}}
        try:
            # Read each time: it is replaced before it expires.
            token = Path(os.environ[TOKEN]).read_text(encoding="utf-8").strip()
            request = urllib.request.Request(
                os.environ[URL],
                json.dumps(content).encode(),
                {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )
            trusted = ssl.create_default_context(cafile=os.environ[CERTIFICATE])
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=trusted):
                pass
        except (OSError, HTTPException, KeyError, ValueError) as error:
            if not self._failed:
                why = f"{URL} without {error}" if isinstance(error, KeyError) else str(error)
                logger.warning("the TrainJob's status cannot be updated (%s); the training goes on without", why)
            self._failed = True
            return
        self._sent = status
