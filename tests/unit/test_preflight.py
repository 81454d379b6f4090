"""What a run finds out before its first stage."""

import huggingface_hub.constants
import pytest

from trainer import config, preflight
from trainer.errors import ModelError

WEIGHTS = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


@pytest.fixture
def commit(tmp_path, monkeypatch):
    """The commit that the cache of the hub's client holds, while the hub does not answer."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    reference = tmp_path / f"models--timm--{WEIGHTS}" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("a" * 40)
    return "a" * 40


def pinned(*overrides):
    return preflight.pinned(config.resolve("digits", overrides))


def test_the_revision_of_weights_is_fixed_before_they_are_loaded(commit):
    settings = pinned(f"pretrain.weights=timm:{WEIGHTS}", "warm_up.enabled=true")
    assert settings.pretrain.weights == f"timm:{WEIGHTS}@{commit}"
    assert settings.warm_up.pretrain == settings.pretrain
    assert settings == config.resolve("digits", [f"pretrain.weights=timm:{WEIGHTS}@{commit}", "warm_up.enabled=true"])


@pytest.mark.parametrize("weights", ["", "/models/teacher", f"timm:{WEIGHTS}@{'b' * 40}"])
@pytest.mark.usefixtures("commit")
def test_other_weights_stay_as_they_are(weights):
    assert pinned(f"pretrain.weights={weights}").pretrain.weights == weights


@pytest.mark.usefixtures("commit")
def test_weights_without_a_tag_are_of_timms_default_one():
    assert (
        pinned("pretrain.weights=timm:vit_tiny_patch16_224").pretrain.weights == f"timm:vit_tiny_patch16_224@{'a' * 40}"
    )


def test_weights_that_timm_does_not_have_are_refused_before_anything_starts():
    with pytest.raises(
        ModelError, match=r"timm:vit_tiny_patch16_224\.nobody: timm has no such weights; similar: vit_tiny"
    ):
        pinned("pretrain.weights=timm:vit_tiny_patch16_224.nobody")
