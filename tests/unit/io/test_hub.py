"""What is known of a model's or a data set's revision: from a Hub that answers over HTTP, from the cache, from nowhere."""

import logging
from pathlib import Path

import pytest
from huggingface_hub import constants

from trainer.io import hub

WEIGHTS = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def offline(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_revision_of_weights_is_the_repositorys_commit(model_hub):
    model_hub.revisions[f"models/timm/{WEIGHTS}"] = "a" * 40
    assert hub.weights_revision(WEIGHTS) == "a" * 40
    assert hub.weights_revision("vit_tiny_patch16_224") == "a" * 40, "timm takes these weights where no tag is given"
    model_hub.revisions[f"models/timm/{WEIGHTS}"] = "b" * 40
    assert hub.weights_revision(WEIGHTS) == "b" * 40
    about_models = [path for path in model_hub.asked if "models" in path]
    assert about_models == [f"/api/models/timm/{WEIGHTS}"] * 3, "one question each, and nothing is downloaded"


def test_revision_of_data_set_is_its_commit(model_hub):
    model_hub.revisions["datasets/some/photos"] = "c" * 40
    assert hub.dataset_revision("some/photos") == "c" * 40


def test_a_transformers_model_has_revision_and_license(model_hub, caplog):
    model_hub.revisions |= {"models/some/vit": "e" * 40, "models/other/vit": "f" * 40}
    model_hub.licenses["models/some/vit"] = "cc-by-nc-4.0"
    assert (hub.model_revision("some/vit"), hub.model_license("some/vit")) == ("e" * 40, "cc-by-nc-4.0")
    assert hub.model_license("other/vit") == ""
    assert caplog.messages == []
    assert hub.model_license("nobodys/vit") == ""
    assert hub.model_license("no/such/name") == ""
    for line, name in zip(caplog.messages, ("nobodys/vit", "no/such/name"), strict=True):
        assert f"{name}: the Hub does not say its license" in line


def test_without_hub_revision_is_what_cache_holds(offline, caplog):
    caplog.set_level(logging.WARNING)
    references = offline / f"models--timm--{WEIGHTS}" / "refs"
    references.mkdir(parents=True)
    (references / "main").write_text("d" * 40)
    assert hub.weights_revision(WEIGHTS) == "d" * 40
    assert f"cached here: {'d' * 40}" in caplog.text


def test_hub_that_does_not_answer_is_as_good_as_none(model_hub, caplog, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.weights_revision(WEIGHTS) is None
    assert len(caplog.messages) == 1
    assert f"timm:{WEIGHTS}" in caplog.text
    assert "none is cached" in caplog.text


@pytest.mark.parametrize("name", ["some/photos", "photos", "no/such/name"])
def test_what_is_not_known_is_said_in_one_line(offline, caplog, name):
    assert hub.dataset_revision(name) is None
    (line,) = caplog.messages
    assert f"hub:{name}" in line


def test_weights_that_are_not_on_hub_have_no_revision(offline, caplog):
    assert hub.weights_revision("legacy_seresnet18.in1k") is None
    assert "https://github.com/" in caplog.text
    assert hub.weights_revision("vit_of_nobody") is None
