"""The terms of the distillation's loss, by which settings, losses and rules name them."""

from __future__ import annotations

TAUGHT = ("logit", "feature", "token", "block", "similarity")
"""What the teacher is compared in, each with a loss and the setting `NAME_weight`."""
TERMS = (*TAUGHT, "label")
RECORDED_BY = {"feature": "features", "token": "tokens", "similarity": "features"}
"""Of the terms -> the setting of `reinforce` with which that is recorded."""
RECORDED_VIEWS = 30
"""Views of each image whose teacher outputs are recorded, by default."""
