"""Names that settings had in the last version. They are still read: in recipes, overrides, and settings that earlier runs recorded."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

logger = logging.getLogger(__name__)

_ALL, _SOFTENED = ("kl", "hard", "dkd", "dist"), ("kl", "dkd", "dist")

FORMER_NAMES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "data.grey_bits": ("data.gray_bits", _ALL),
    "profile.rules.poor_initialisation": ("profile.rules.poor_initialization", _ALL),
    "distill.logit_loss": ("distill.logit.loss", _ALL),  # before those that depend on it
    "distill.temperature": ("distill.logit.temperature", _SOFTENED),
    "distill.standardize_logits": ("distill.logit.standardize", _SOFTENED),
    "distill.dkd_alpha": ("distill.logit.alpha", ("dkd",)),
    "distill.dkd_beta": ("distill.logit.beta", ("dkd",)),
    "distill.dist_beta": ("distill.logit.beta", ("dist",)),
    "distill.dist_gamma": ("distill.logit.gamma", ("dist",)),
}
"""Full name in the last version -> name now, in the same section; and the logit losses with which it has an effect, and is kept."""


def with_present_names(values: Any, section: str = "") -> Any:
    """Rename the settings of `section`, such as `distill`, and of all sections within it; of all settings without one."""
    if not isinstance(values, Mapping):
        return values
    found = {name: with_present_names(value, name) for name, value in values.items()}
    for former, (now, losses) in FORMER_NAMES.items():
        *sections, own = former.split(".")
        if own not in found or sections[-1] != section:
            continue
        *groups, name = now.split(".")[len(sections) :]
        group = functools.reduce(lambda above, one: above.setdefault(one, {}), groups, found)
        if isinstance(group, dict):  # what else it may be is refused
            _warn(former, now)
            value = found.pop(own)
            if group.get("loss", "kl") in losses:
                group[name] = value
    return found


@functools.cache  # once for each name
def _warn(former: str, now: str) -> None:
    logger.warning("the setting %s is now %s; the next version will refuse the old name", former, now)


def accepting_former_names(section: str) -> Any:
    """Make the validator by which a model takes the settings of `section` under their former names, too."""
    return model_validator(mode="before")(lambda values: with_present_names(values, section))
