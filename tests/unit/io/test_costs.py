from __future__ import annotations

import datetime
import json

import pytest
from pydantic import ValidationError

from trainer.io import costs
from trainer.io.costs import Machines, Price
from trainer.io.errors import SettingsError
from trainer.io.formatting import duration

TODAY = datetime.date(2026, 11, 21)


def price(**changes):
    return Price(**{"dollars_an_hour": 21.5, "date": "2026-11", "region": "us-east-1", "source": "list", **changes})


def test_dollars_are_of_all_nodes_and_unknown_without_price():
    assert Machines(pool="trn1", nodes=4, price=price()).dollars(1800) == pytest.approx(43)
    assert Machines(pool="trn1", nodes=4).dollars(1800) is None


@pytest.mark.parametrize(
    ("date", "doubt"),
    [
        ("2026-11", ""),
        ("2026-11-21", ""),
        ("2026-06-01", ""),
        ("2026-05-25", ""),
        ("2026-05", "is of 2026-05, 204 days old; look it up again"),
        ("2026-05-24", "is of 2026-05-24, 181 days old; look it up again"),
        ("2026-12", "is of 2026-12, which is in the future; correct its date"),
    ],
)
def test_old_and_future_prices_are_doubted(date, doubt):
    text = price(date=date).doubt(TODAY)
    assert text.endswith(doubt)
    assert bool(text) == bool(doubt)
    if doubt:
        assert text.startswith("the price of 21.50 $/h (us-east-1; list)")


@pytest.mark.parametrize("date", ["late 2026", "2026", "2026-13", "2026-02-30", "", "21.11.2026"])
def test_a_date_is_a_month_or_a_day(date):
    with pytest.raises(ValidationError, match="must be a month or a day, such as 2026-11 or 2026-11-21"):
        price(date=date)


def test_tomls_own_date_is_one_too():
    assert price(date=TODAY).date == "2026-11-21"


def test_a_place_goes_through_the_environment(monkeypatch):
    monkeypatch.delenv(costs.PLACE_VARIABLE, raising=False)
    assert costs.place_here() is None
    place = Machines(pool="gpu-a100", instance="p4d.24xlarge", nodes=4, processes_per_node=8, price=price())
    monkeypatch.setenv(costs.PLACE_VARIABLE, place.environment()[costs.PLACE_VARIABLE])
    assert costs.place_here() == place
    assert str(place) == "4 nodes of gpu-a100 (p4d.24xlarge)"


def test_a_user_prices_this_machine(monkeypatch):
    monkeypatch.delenv(costs.PLACE_VARIABLE, raising=False)
    assert costs.local_place(2) == Machines(pool="this machine", processes_per_node=2)
    monkeypatch.setenv(costs.PLACE_VARIABLE, json.dumps({"pool": "workstation", "price": price().model_dump()}))
    assert costs.local_place(2) == Machines(pool="workstation", processes_per_node=2, price=price())


def test_the_example_of_the_docstring_is_a_place(monkeypatch):
    assert costs.__doc__
    example = costs.__doc__.split("TRAINER_PLACE='")[1].split("'")[0]
    monkeypatch.setenv(costs.PLACE_VARIABLE, example)
    assert costs.local_place(1).dollars(7200) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        ("workstation", r"TRAINER_PLACE='workstation': Invalid JSON"),
        ("{}", r"TRAINER_PLACE='{}': pool is missing; leave it unset, or give such as {\"pool\": \"workstation\""),
        ('{"pool": "a", "price": {"dollars_an_hour": 0}}', r"price.dollars_an_hour must be > 0"),
        ('{"pool": "a", "node": 2}', r"unknown field node"),
    ],
)
def test_place_that_is_none_is_refused_with_example(monkeypatch, reported, message):
    monkeypatch.setenv(costs.PLACE_VARIABLE, reported)
    with pytest.raises(SettingsError, match=message):
        costs.place_here()


@pytest.mark.parametrize(
    ("seconds", "text"), [(48.24, "48.2 s"), (750, "12.5 min"), (11520, "3.2 h"), (300 * 3.2 * 3600, "40 days")]
)
def test_durations_in_words(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("dollars", "text"),
    [(None, ""), (0.0, "$0.00"), (0.00461, "$0.0046"), (41.434, "$41.43"), (1234567.8, "$1,234,567.80")],
)
def test_dollars_in_words(dollars, text):
    assert costs.dollars_text(dollars) == text
