"""The number by which a classifier is chosen and judged: top-1 accuracy, or mAP (mean average precision) of images with several labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TITLES: Mapping[str, str] = {"top1": "top-1", "map": "mAP"}
"""Name of each among the figures of a split -> what people call it; figures have one of them."""
VAL_TITLES: Mapping[str, str] = {f"val_{name}": text for name, text in TITLES.items()}
"""The same of what a training measures on the validation split."""


def name(figures: Mapping[str, Any]) -> str:
    """Return the name of the score among the figures of a split; a `ValueError` where there is none."""
    found = next((name for name in TITLES if name in figures), None)
    if found is None:
        raise ValueError(f"there is no score among its figures, {' or '.join(TITLES)}")
    return found


def title(figures: Mapping[str, Any]) -> str:
    """Return the title of the score of these figures."""
    return TITLES[name(figures)]


def score(figures: Mapping[str, Any]) -> float:
    """Return the score of the figures of a split."""
    return float(figures[name(figures)])


def val_name(figures: Mapping[str, Any]) -> str | None:
    """Return the name of the score on the validation split, such as `val_top1`; None where it was not measured."""
    return next((name for name in VAL_TITLES if name in figures), None)
