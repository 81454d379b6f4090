"""What is known of a model's or a data set's revision: from a Hub that answers over HTTP, from the cache, from nowhere."""

import json
import logging
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from trainer import hub

WEIGHTS = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


class Hub(ThreadingHTTPServer):
    """Answers as huggingface.co does when it is asked about a repository."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.revisions: dict[str, str] = {}
        """Path of the repository -> its commit."""
        self.asked: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        sha = self.server.revisions.get(path.removeprefix("/api/"))
        body = json.dumps({"_id": "1", "id": path.removeprefix("/api/models/"), "sha": sha} if sha else {}).encode()
        self.send_response(200 if sha else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing on the terminal."""


@pytest.fixture
def answering(monkeypatch, tmp_path):
    with Hub() as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        yield server
        server.shutdown()


@pytest.fixture
def offline(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_the_revision_of_weights_is_the_commit_of_the_repository_that_timm_reads(answering):
    answering.revisions[f"models/timm/{WEIGHTS}"] = "a" * 40
    assert hub.weights_revision(WEIGHTS) == "a" * 40
    assert hub.weights_revision("vit_tiny_patch16_224") == "a" * 40, "timm takes these weights where no tag is given"
    answering.revisions[f"models/timm/{WEIGHTS}"] = "b" * 40
    assert hub.weights_revision(WEIGHTS) == "b" * 40
    about_models = [path for path in answering.asked if "models" in path]
    assert about_models == [f"/api/models/timm/{WEIGHTS}"] * 3, "one question each, and nothing is downloaded"


def test_the_revision_of_a_data_set_is_its_commit(answering):
    answering.revisions["datasets/some/photos"] = "c" * 40
    assert hub.dataset_revision("some/photos") == "c" * 40


def test_without_the_hub_the_revision_is_what_the_cache_holds(offline, caplog):
    caplog.set_level(logging.WARNING)
    references = offline / f"models--timm--{WEIGHTS}" / "refs"
    references.mkdir(parents=True)
    (references / "main").write_text("d" * 40)
    assert hub.weights_revision(WEIGHTS) == "d" * 40
    assert f"cached here: {'d' * 40}" in caplog.text


def test_a_hub_that_does_not_answer_is_as_good_as_none(answering, caplog):
    answering.shutdown()
    answering.server_close()
    assert hub.weights_revision(WEIGHTS) is None
    assert len(caplog.messages) == 1
    assert f"timm:{WEIGHTS}" in caplog.text
    assert "none is cached" in caplog.text


@pytest.mark.parametrize("name", ["some/photos", "photos", "no/such/name"])
def test_what_is_not_known_is_said_in_one_line(offline, caplog, name):
    assert hub.dataset_revision(name) is None
    (line,) = caplog.messages
    assert f"hub:{name}" in line


def test_weights_that_are_not_on_the_hub_have_no_revision(offline, caplog):
    assert hub.weights_revision("legacy_seresnet18.in1k") is None
    assert "https://github.com/" in caplog.text
    assert hub.weights_revision("vit_of_nobody") is None
