"""Revisions on the Hugging Face Hub: which commit of a model's weights, or of a data set, a download would give now."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0  # longest wait for the Hub's answer


def weights_revision(name: str) -> str | None:
    """Find the Hub's commit of a timm model's pretrained weights, or without an answer the cached one; nothing is downloaded.

    None where the commit cannot be known, which the log explains. `name` is timm's, with or without a tag.
    """
    import timm  # here, because it brings in torch

    weights = timm.get_pretrained_cfg(name)
    if weights is None or not weights.hf_hub_id:
        origin = weights.url if weights is not None else None
        logger.warning("timm:%s: no revision is known, since its weights come from %s", name, origin or "nowhere")
        return None
    repository, _, wanted = weights.hf_hub_id.partition("@")  # as timm reads it
    return _revision(f"timm:{name}", repository, "model", wanted)


def model_license(name: str) -> str:
    """Ask the Hub for the license of a model, as its page names it; empty without an answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    refusals: tuple[type[Exception], ...] = (HFValidationError, *_no_answer())
    try:
        card = HfApi().model_info(name, expand=["cardData"], timeout=_ANSWER_S).card_data
    except refusals as error:
        logger.warning("%s: the Hub does not say its license (%s)", name, " ".join(str(error).split()))
        return ""
    return str(card.get("license") or "") if card else ""


def model_revision(name: str) -> str | None:
    """Find the commit of a model on the Hub, or in this machine's cache where the Hub does not answer; nothing is downloaded."""
    return _revision(f"transformers:{name}", name, "model", "")


def dataset_revision(name: str) -> str | None:
    """Find the commit of a data set on the Hub, or in this machine's cache where the Hub does not answer; nothing is downloaded."""
    return _revision(f"hub:{name}", name, "dataset", "")


def _no_answer() -> tuple[type[Exception], ...]:
    """Return the errors of the Hub's client without an answer, or with a refusal."""
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled  # type: ignore[attr-defined]  # HTTPError is httpx's, or its double's

    return HTTPError, OfflineModeIsEnabled


def _revision(asked: str, repository: str, kind: str, wanted: str) -> str | None:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    api = HfApi()
    ask: Callable[..., Any] = api.model_info if kind == "model" else api.dataset_info
    try:
        answer: str | None = ask(repository, revision=wanted or None, expand=["sha"], timeout=_ANSWER_S).sha
    except HFValidationError as error:
        logger.warning("%s: the Hub has no such name (%s)", asked, error)
        return None
    except _no_answer() as error:
        # The commit that the Hub's client falls back to offline.
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type=kind)
        reference = folder / "refs" / (wanted or constants.DEFAULT_REVISION)
        cached = reference.read_text(encoding="utf-8").strip() if reference.is_file() else None
        found = f"cached here: {cached}" if cached else "none is cached"
        logger.warning("%s: the Hub does not say its revision (%s); %s", asked, " ".join(str(error).split()), found)
        return cached
    return answer
