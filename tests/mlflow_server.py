"""`mlflow models serve` in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(
    program: str | Path, model: str, *, manager: str, log: Path, folder: Path, environment: Mapping[str, str]
) -> Iterator[str]:
    """Serve a model of the registry until the block ends; yields the server's address once it listens.

    Args:
        program: MLflow's.
        manager: who makes the environment that the model runs in: `local` or `uv`.
        log: where the server writes.
        folder: where it is started.
        environment: its variables.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "models", "serve", "--model-uri", model, "--env-manager", manager, "--port", str(port)]
    with (
        log.open("w", encoding="utf-8") as stream,
        # In a session of its own, so that the server, a child of MLflow's, ends with it.
        subprocess.Popen(
            command, stdout=stream, stderr=stream, cwd=folder, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            while True:
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert process.poll() is None, log.read_text(encoding="utf-8")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
