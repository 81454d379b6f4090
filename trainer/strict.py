"""The base of what is written as JSON and read again."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Checks its fields when it is made, refuses others, and does not change then. The text below a field is its meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
