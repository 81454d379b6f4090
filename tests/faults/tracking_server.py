"""A real MLflow server that can be made to hang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class TrackingServer:
    """Starts when it is first needed, from `with` to its end; on a SQLite file in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.uri = ""

    def __enter__(self) -> TrackingServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            os.killpg(self.group, signal.SIGKILL)
            self._process.wait()

    @property
    def group(self) -> int:
        assert self._process is not None, "it has not been started"
        return self._process.pid

    @contextmanager
    def answering(self) -> Iterator[TrackingServer]:
        """Let it answer at the beginning of a block, and again after it."""
        if self._process is None:
            self._start()
        try:
            yield self
        finally:
            os.killpg(self.group, signal.SIGCONT)

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        store = f"sqlite:///{self._folder}/mlflow.db"
        arguments = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--backend-store-uri", store]
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mlflow",
                "server",
                *arguments,
                "--artifacts-destination",
                str(self._folder / "files"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.uri = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 90
        while not self._answers():
            assert self._process.poll() is None, "the MLflow server ended"
            assert time.monotonic() < deadline, "the MLflow server does not answer within 90 s"
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                return True
        except OSError:
            return False
