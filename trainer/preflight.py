"""What a run finds out before its first stage, beyond the meaning of its settings."""

from __future__ import annotations

from trainer.config import Settings


def pinned(settings: Settings) -> Settings:
    """The settings with the revision that timm's weights have now, so that every process, retry and later run loads the same ones.

    Raises:
        ModelError: timm has no such weights.
    """
    weights = settings.pretrain.timm_weights
    if weights is None or weights.revision:
        return settings
    from trainer import pretrained  # here, because it brings in torch

    pretrain = settings.pretrain.model_copy(update={"weights": str(pretrained.pin(weights))})
    warm_up = settings.warm_up
    if warm_up.pretrain == settings.pretrain:
        warm_up = warm_up.model_copy(update={"pretrain": pretrain})
    return settings.model_copy(update={"pretrain": pretrain, "warm_up": warm_up})
