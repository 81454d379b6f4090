"""What time on machines costs: the price of a node pool, with its date, region and source."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PLACE_VARIABLE = "TRAINER_PLACE"
"""Environment variable with the `Place` of this process, as JSON; whoever launches it sets it."""


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Price(_Group):
    """What a node costs."""

    dollars_an_hour: Annotated[float, Field(gt=0)]
    date: Annotated[str, Field(min_length=4)]
    region: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]


class Place(_Group):
    """Machines of one kind on which something runs."""

    pool: str
    """Name of the node pool; `this machine` without one."""
    instance: str = ""
    nodes: Annotated[int, Field(ge=1)] = 1
    processes_per_node: Annotated[int, Field(ge=1)] = 1
    price: Price | None = None
    """Of one node; none where it is not known."""

    def dollars(self, seconds: float) -> float | None:
        """What all the nodes cost in that time; none where the price is not known."""
        return None if self.price is None else self.price.dollars_an_hour * self.nodes * seconds / 3600


def place_here() -> Place | None:
    """The place that the launcher of this process told; none without one."""
    told = os.environ.get(PLACE_VARIABLE)
    return Place.model_validate_json(told) if told else None
