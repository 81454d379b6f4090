"""What time on machines costs: the price of a node, with its date, region and source, and the place where something runs.

Whoever launches a process tells it its place in `TRAINER_PLACE`: the launcher for clusters the node pool with its price, the local one
`this machine`, which has none. A user's own `TRAINER_PLACE` prices this machine, or the pods of a pipeline's other tasks:

    TRAINER_PLACE='{"pool": "workstation", "price": {"dollars_an_hour": 0.35, "date": "2026-11", "region": "our office",
                    "source": "power and a three-year write-off"}}'
"""

from __future__ import annotations

import datetime
import os
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError

from trainer.io.base_models import StrictModel, what_is_wrong
from trainer.io.errors import SettingsError

PLACE_VARIABLE = "TRAINER_PLACE"
"""Environment variable with the `Machines` of this process, as JSON; whoever launches it sets it."""
THIS_MACHINE = "this machine"
OLD_DAYS = 180  # a price is doubtful when it is older


def _month_or_day(text: str) -> str:
    try:
        _first_day(text)
    except ValueError:
        raise ValueError(f"must be a month or a day, such as 2026-11 or 2026-11-21, got {text!r}") from None
    return text


def _first_day(text: str) -> datetime.date:
    return datetime.date.fromisoformat(f"{text}-01" if text.count("-") == 1 else text)


class _Group(StrictModel):
    model_config = ConfigDict(allow_inf_nan=False)


class Price(_Group):
    """The price of a node."""

    dollars_an_hour: Annotated[float, Field(gt=0)]
    date: Annotated[
        str,
        BeforeValidator(lambda given: given.isoformat() if isinstance(given, datetime.date) else given),  # TOML's
        AfterValidator(_month_or_day),
    ]  # the month or the day when it was so, such as 2026-11
    region: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]

    def age_days(self, today: datetime.date | None = None) -> int:
        """Return the days since its date, or since the first day of its month; negative for a date in the future."""
        return ((today or datetime.datetime.now(datetime.UTC).date()) - _first_day(self.date)).days

    def doubt(self, today: datetime.date | None = None) -> str:
        """Return why the price may be wrong; empty where nothing speaks against it."""
        age = self.age_days(today)
        named = f"the price of {self.dollars_an_hour:,.2f} $/h ({self.region}; {self.source})"
        if age > OLD_DAYS:
            return f"{named} is of {self.date}, {age} days old; look it up again"
        if age < -1:  # another time zone is no doubt
            return f"{named} is of {self.date}, which is in the future; correct its date"
        return ""


class Machines(_Group):
    """Machines of one kind on which something runs."""

    pool: Annotated[str, Field(min_length=1)]  # name of the node pool; `this machine` without one
    instance: str = ""
    nodes: Annotated[int, Field(ge=1)] = 1  # how many were asked for
    processes_per_node: Annotated[int, Field(ge=1)] = 1
    price: Price | None = None  # of one node; none where it is not known, or varies as that of a spot pool

    def __str__(self) -> str:
        """Name them, as `4 nodes of gpu-a100 (p4d.24xlarge)`."""
        machine = f"{self.pool} ({self.instance})" if self.instance else self.pool
        return machine if self.nodes == 1 else f"{self.nodes} nodes of {machine}"

    def dollars(self, seconds: float) -> float | None:
        """Return the price of all nodes for that time; None if the price is not known."""
        return None if self.price is None else self.price.dollars_an_hour * self.nodes * seconds / 3600

    def environment(self) -> dict[str, str]:
        return {PLACE_VARIABLE: self.model_dump_json(exclude_none=True)}


def place_here() -> Machines | None:
    """Return the place that the environment gives this process; none where it gives none."""
    given = os.environ.get(PLACE_VARIABLE)
    if not given:
        return None
    try:
        return Machines.model_validate_json(given)
    except ValidationError as error:
        example = '{"pool": "workstation", "price": {"dollars_an_hour": 0.35, "date": "2026-11", "region": "here", "source": "power bill"}}'
        raise SettingsError(
            f"{PLACE_VARIABLE}={given!r}: {what_is_wrong(error)}; leave it unset, or give such as {example}"
        ) from error


def local_place(processes: int) -> Machines:
    """Return this machine with so many processes, and with the name and the price that its user's `TRAINER_PLACE` gives it."""
    given = place_here() or Machines(pool=THIS_MACHINE)
    return given.model_copy(update={"nodes": 1, "processes_per_node": processes})


def dollars_text(dollars: float | None) -> str:
    """Format dollars: `$41.43`, `$0.0046`; empty where they are not known."""
    if dollars is None:
        return ""
    return f"${dollars:,.2f}" if dollars >= 0.1 or not dollars else f"${dollars:.4f}"
