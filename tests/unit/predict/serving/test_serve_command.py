"""`vit-distill serve` as a process: from its start to its end, and what it refuses to start with."""

import importlib.util
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from tests.trained_digits import png
from trainer import cli
from trainer.io import artifacts
from trainer.io.errors import EXIT_CODE


def rest_of(process):
    """What a server says to its end, which is now."""
    process.kill()
    return process.stderr.read()


@contextmanager
def served(exported, *arguments):
    """A server on a free port; yields the process and its address once it answers."""
    command = [sys.executable, "-m", "trainer", "serve", str(exported), "--port", "0", "--threads", "1", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            answering, line = process.stderr.readline(), process.stderr.readline()
            assert " answers: made " in answering, answering + line + rest_of(process)
            found = re.search(r"(http://127\.0\.0\.1:\d+) serves student, version [0-9a-f]{12} \(vit_tiny", line)
            assert found, line + rest_of(process)
            end = time.monotonic() + 20
            while time.monotonic() < end:
                try:
                    httpx.get(f"{found[1]}/v2/health/ready").raise_for_status()
                    break
                except httpx.HTTPError:
                    time.sleep(0.05)
            yield process, found[1]
        finally:
            process.kill()


def test_asked_to_end_it_drains_in_order(exported, trained_digits, tmp_path):
    log = tmp_path / "logs" / "predictions.jsonl"
    photo, statuses = png(trained_digits.images[0]), []
    with served(exported, "--drain", "1", "--log", str(log)) as (process, address):
        asked = threading.Event()

        def ask():
            with httpx.Client() as client:
                while not asked.is_set():
                    statuses.append(client.post(f"{address}/predict", content=photo).status_code)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 0.8
        while httpx.get(f"{address}/v2/health/ready").status_code != 503:
            assert time.monotonic() < end
        assert httpx.get(f"{address}/v2/health/live").status_code == 200
        before = len(statuses)
        while len(statuses) < before + 10:
            assert time.monotonic() < end
        asked.set()
        for thread in threads:
            thread.join(5)
        lines = process.stderr.read()
        assert process.wait(10) == 0
    assert set(statuses) == {200}
    assert len(log.read_text().splitlines()) == len(statuses) == lines.count("POST /predict 200")
    assert json.loads(log.read_text().splitlines()[0])["label"] in "0123456789"
    assert "asked to end by SIGTERM: not ready from now on, ends in 1 s" in lines
    assert "Traceback" not in lines


def test_without_a_drain_it_ends_at_once(exported):
    for request in (signal.SIGTERM, signal.SIGINT):
        with served(exported) as (process, _):
            start = time.monotonic()
            process.send_signal(request)
            assert process.wait(10) == 0
            assert time.monotonic() - start < 5
            assert "Traceback" not in process.stderr.read()


def changed(exported, folder, **card):
    """The export with another card, as a whole artifact."""
    export = artifacts.read(exported, "export")
    with artifacts.create(folder, "export", settings=export.settings, parents=export.parents) as draft:
        shutil.copytree(export.path, draft.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
        content = json.loads((draft.path / "card.json").read_text())
        (draft.path / "card.json").write_text(json.dumps(content | card))
        if card.get("failed"):
            content["measured"]["reasons"] = ["accuracy: too low"]
            (draft.path / "card.json").write_text(json.dumps(content))
    return str(folder)


def test_what_cannot_be_served_is_one_message(exported, trained_digits, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, message in (
            ([exported, "--port", port], f"--port {port}: cannot be used ("),
            ([exported, "--port", "70000"], "--port 70000: cannot be used ("),
            ([exported, "--host", "no.such.host.invalid"], "--host no.such.host.invalid --port 8000: cannot be used ("),
            ([tmp_path / "none"], "none: no exported at "),
            ([trained_digits.student], "is a model, but an export is needed here"),
            ([changed(exported, tmp_path / "card", square={"fit": "none"})], "card: cannot be loaded ("),
            ([changed(exported, tmp_path / "file", file="card.json")], "file: cannot be loaded ("),
            ([changed(exported, tmp_path / "failed", failed=True)], "did not pass its gate (accuracy: too low)"),
            ([exported, "--beside", tmp_path / "none"], "none: no student at "),
            ([exported, "--log", "/proc/none/log"], "cannot write to /proc/none"),
            ([exported, "--log-photos", "/tmp"], "--log-photos: goes with the predictions of --log FILE"),
            ([exported, "--log", "-", "--log-photos", "/proc/none"], "cannot write to /proc/none"),
        ):  # fmt: skip
            assert cli.main(["serve", *map(str, arguments)]) == EXIT_CODE
            printed = capsys.readouterr().err
            assert message in printed
            assert printed.count("error: ") == 1
    for arguments in (["--batch-size", "0"], ["--wait-ms", "-1"], ["--drain", "100000"], ["--log-share", "2"]):
        with pytest.raises(SystemExit):
            cli.main(["serve", str(exported), *arguments])
        assert arguments[0] in capsys.readouterr().err


def test_without_the_extra_the_message_names_it(exported, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "prometheus_client" else found(name))
    assert cli.main(["serve", str(exported)]) == EXIT_CODE
    assert (
        "serve: needs the package prometheus_client; pip install 'vit-distillation-pipeline[serve]'"
        in capsys.readouterr().err
    )


def test_neither_torch_nor_timm_is_loaded(exported):
    code = (
        "import sys; from trainer.predict.serving import server; from trainer import load_model; "
        f"load_model({str(exported)!r}); print({{'torch', 'timm', 'mlflow', 'sklearn'}} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"
