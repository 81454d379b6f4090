from __future__ import annotations

import itertools

import pytest

from trainer.config import DistillSettings, EvidenceSettings, step_schedule
from trainer.io.costs import Machines, Price
from trainer.io.errors import BudgetError
from trainer.report.forecast import (
    Forecast,
    Measurement,
    WorkCount,
    check_budget,
    epochs_that_fit,
    forecast,
    on_nodes,
    refuse_over_budget,
    work_of,
)

PRICE = Price(dollars_an_hour=10.0, date="2026-11", region="us-east-1", source="list")
SAMPLES = 1000
SETTINGS = DistillSettings(epochs=100, batch_size=100, validate_every_epochs=10, checkpoint_every=300)


def measured(nodes=1, step_s=3.6, price=PRICE, **changes):
    values = {
        "place": Machines(pool="gpu", nodes=nodes, price=price),
        "settings": {},
        "batch_size": 100,
        "step_s": step_s,
        "steps": 50,
        "startup_s": 36.0,
        "validation_s": 7.2,
        "checkpoint_s": 1.8,
    }
    return Measurement(**{**values, **changes})


# ---------------------------------------------------------------------------------------------------------------------
# The work, and what it takes


@pytest.mark.parametrize(("samples", "size"), [(100, 32), (100, 100), (40, 96)])
def test_work_is_counted_as_the_loop_does_it(samples, size):
    for epochs, every, checkpoints in itertools.product((0, 1, 7, 30), (0, 1, 3), (0, 4, 1000)):
        settings = DistillSettings(
            epochs=epochs, batch_size=size, validate_every_epochs=every, checkpoint_every=checkpoints
        )
        total = step_schedule.step_count(settings, samples)
        validations, saves = 0, 0
        for step in range(total):  # said otherwise than in the schedules: by what is complete before and after the step
            before, after = (seen * size // (every * samples) if every else 0 for seen in (step, step + 1))
            validations += step + 1 == total or after > before
            saves += bool(checkpoints) and ((step + 1) % checkpoints == 0 or step + 1 == total)
        expected = WorkCount(steps=total, validations=validations, checkpoints=saves, windows=int(total > 20))
        assert work_of(settings, samples) == expected


def test_forecast_parts():
    work = work_of(SETTINGS, SAMPLES)
    assert work == WorkCount(steps=1000, validations=10, checkpoints=4, windows=1)
    expected = forecast(measured(), work)
    assert expected.hours == pytest.approx((36 + 1000 * 3.6 + 10 * 7.2 + 4 * 1.8) / 3600)
    assert expected.dollars == pytest.approx(10 * expected.hours)
    assert expected.stages == ("distill",)
    assert expected.assumptions == ()
    assert str(expected) == "61.9 min, $10.32, by 50 steps of 3.6 s"

    # Windows of the profiler are counted where they open.
    def windows(**evidence):
        return work_of(SETTINGS.model_copy(update={"evidence": EvidenceSettings(**evidence)}), SAMPLES).windows

    assert windows(operators_at=(20, 400, 5000)) == 2
    assert windows(operators_at=()) == windows(operators_at=(20,), operators_steps=0) == 0
    work = work_of(SETTINGS, SAMPLES)
    slower = forecast(measured(window_s=36.0), work)
    assert slower.hours == pytest.approx(forecast(measured(), work).hours + 0.01)

    expected = forecast(measured(startup_s=336.0, compile_s=300.0), work)
    assert expected.hours == pytest.approx(forecast(measured(), work).hours + 300 / 3600)
    assert expected.compile_hours == pytest.approx(300 / 3600)
    assert str(expected).startswith("66.9 min (5 min of it compiling), $")
    recorded = forecast(measured(recording_s=3600.0), work)
    assert recorded.hours == pytest.approx(forecast(measured(), work).hours + 1)
    assert recorded.stages == ("reinforce", "distill")


def test_prices_of_a_forecast():
    expected = forecast(measured(price=None), WorkCount(steps=10, validations=0, checkpoints=0))
    assert expected.dollars is None
    assert "$" not in str(expected)
    # An old price is among the assumptions.
    old = PRICE.model_copy(update={"date": "2020-01"})
    (said,) = forecast(measured(price=old), WorkCount(steps=10, validations=0, checkpoints=0)).assumptions
    assert "is of 2020-01" in said
    # What the last version wrote is read.
    intervals = {"hours_low": 1.0, "hours_high": 3.0, "dollars_low": None, "dollars_high": None}
    former = {"place": {"pool": "gpu"}, "hours": 2.0, "dollars": None, **intervals}
    assert str(Forecast.model_validate(former)) == "2 h"
    written = measured().model_dump(mode="json")
    assert Measurement.model_validate(written | {"step_low_s": 3.0, "step_high_s": 4.0}) == measured()


# ---------------------------------------------------------------------------------------------------------------------
# More nodes

STEPS_ALONE = WorkCount(steps=1000, validations=0, checkpoints=0)


def step_s(expected):
    return (3600 * expected.hours - 36) / 1000


def test_more_nodes():
    expected = on_nodes([measured()], STEPS_ALONE, 4, assumed_efficiency=0.9)
    assert step_s(expected) == pytest.approx(3.6 / 1.8**2)
    assert expected.place.nodes == 4
    assert expected.basis == "50 steps of 3.6 s on 1 node"
    assert expected.dollars == pytest.approx(4 * 10 * expected.hours)
    said = " ".join(expected.assumptions)
    assert "twice as many nodes are assumed to be 1.8 times as fast; only 1 node measured" in said
    assert "start-up, validation and checkpoints as on 1 node" in said
    # More nodes scale as measured.
    tried = [measured(1, 4.0), measured(2, 2.5), measured(4, 1.6)]
    assert on_nodes(tried, STEPS_ALONE, 2) == forecast(tried[1], STEPS_ALONE)
    expected = on_nodes(tried, STEPS_ALONE, 16, assumed_efficiency=1.0)
    assert step_s(expected) == pytest.approx(1.6 / (2.5 / 1.6) ** 2)  # as from 2 to 4, twice
    assert "1.56 times as fast, as measured from 2 to 4 nodes, taken to hold for 16 nodes" in expected.assumptions[0]
    between = on_nodes([measured(1, 4.0), measured(4, 2.0)], STEPS_ALONE, 2)
    assert step_s(between) == pytest.approx(4.0 / 2**0.5)
    assert "taken to hold" not in between.assumptions[0]
    # A speed up beyond the nodes share is not believed.
    expected = on_nodes([measured(1, 4.0), measured(2, 1.0)], STEPS_ALONE, 4)
    assert step_s(expected) == pytest.approx(0.5)
    # Measurements of other machines are not mixed.
    other = measured().model_copy(update={"place": Machines(pool="cpu")})
    with pytest.raises(ValueError, match="one pool and one batch size"):
        on_nodes([measured(), other], STEPS_ALONE, 2)


# ---------------------------------------------------------------------------------------------------------------------
# The budget


def test_budget():
    work = work_of(SETTINGS, SAMPLES)
    alternatives = {
        "distill.teacher=recorded": forecast(measured(step_s=1.0), work),
        "pool gpu-h100": forecast(measured(step_s=3.5), work),
        "pool gpu-h100-spot": forecast(measured(step_s=0.1, price=None), work),
    }
    with pytest.raises(BudgetError) as refused:
        refuse_over_budget(forecast(measured(), work), alternatives, budget_usd=9, budget_hours=1)
    assert str(refused.value) == (
        "the distillation would take 61.9 min, $10.32, by 50 steps of 3.6 s on gpu, but run.budget_usd=9 and "
        "run.budget_hours=1; it was not started. What would fit: distill.teacher=recorded (18.6 min, $3.10). "
        "Not within it: pool gpu-h100 (60.3 min, $10.04); pool gpu-h100-spot (3.6 min, price not known). "
        "Choose one of these, or raise the budget"
    )
    # Dollars are not limited where no price is known.
    for place in (None, Machines(pool="cpu")):
        check_budget(place, None)
        check_budget(place, 0)
        with pytest.raises(BudgetError, match=r"run.budget_usd=50 cannot be kept, since the price of .* TRAINER_PLACE"):
            check_budget(place, 50)
    with pytest.raises(BudgetError, match=r"run\.budget_usd=50 cannot be kept"):
        refuse_over_budget(forecast(measured(price=None), STEPS_ALONE), {}, budget_usd=50, budget_hours=None)
    # No budget takes all epochs.
    assert epochs_that_fit(measured(), SETTINGS, SAMPLES, budget_usd=None, budget_hours=0.0) == SETTINGS.epochs


@pytest.mark.parametrize(("limits", "epochs"), [((9, None), 87), ((None, 0.5), 47), ((9, 0.5), 47), ((0.1, None), 0)])
def test_as_many_epochs_as_fit(limits, epochs):
    usd, hours = limits

    def taken(count):
        return forecast(measured(), work_of(SETTINGS.model_copy(update={"epochs": count}), SAMPLES))

    assert epochs_that_fit(measured(), SETTINGS, SAMPLES, budget_usd=usd, budget_hours=hours) == epochs
    if epochs:
        refuse_over_budget(taken(epochs), {}, budget_usd=usd, budget_hours=hours)
    with pytest.raises(BudgetError):
        refuse_over_budget(taken(epochs + 1), {}, budget_usd=usd, budget_hours=hours)
