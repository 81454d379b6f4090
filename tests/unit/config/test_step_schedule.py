import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainer.config import TrainingSettings
from trainer.config.step_schedule import (
    checkpoint_count,
    is_checkpoint_step,
    is_validation_step,
    learning_rate_at,
    low_resolution_steps,
    step_count,
    validation_count,
)


def test_warm_up_and_cosine_are_those_of_torch():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.4)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 10, total_iters=9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=89, eta_min=0.004)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[10])
    settings = TrainingSettings(
        epochs=10, batch_size=256, base_learning_rate=0.4, final_learning_rate=0.01, warmup_epochs=1
    )
    for step in range(100):
        ours = learning_rate_at(step, settings, samples=2560)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        schedule.step()


def test_the_last_step_has_the_final_rate():
    settings = TrainingSettings(epochs=10, batch_size=256, base_learning_rate=1.0, warmup_epochs=0)
    assert learning_rate_at(99, settings, samples=2560) == pytest.approx(0.01)


def test_the_peak_is_scaled_with_the_batch():
    settings = TrainingSettings(epochs=10, batch_size=512, base_learning_rate=1e-3, warmup_epochs=1)
    assert max(learning_rate_at(step, settings, samples=5120) for step in range(100)) == pytest.approx(2e-3)


@pytest.mark.parametrize(("epochs", "samples", "batch", "steps"), [(1, 100, 10, 10), (3, 101, 10, 31), (0, 100, 10, 0)])
def test_the_steps_see_every_sample_of_every_epoch(epochs, samples, batch, steps):
    assert step_count(TrainingSettings(epochs=epochs, batch_size=batch), samples) == steps


@pytest.mark.parametrize(("epochs", "samples", "steps"), [(0, 100, 0), (1, 100, 10), (2, 101, 20), (2, 109, 21)])
def test_the_first_epochs_have_the_smaller_input(epochs, samples, steps):
    smaller = {"epochs": epochs, "image_size": 8 if epochs else 0}
    settings = TrainingSettings(epochs=3, batch_size=10, low_resolution=smaller)
    assert low_resolution_steps(settings, samples) == steps


def test_a_short_training_warms_up_for_half_of_it_at_most():
    settings = TrainingSettings(epochs=2, batch_size=10, warmup_epochs=50)
    rates = [learning_rate_at(step, settings, samples=100) for step in range(20)]
    assert rates.index(max(rates)) in {9, 10}


@given(
    settings=st.builds(
        TrainingSettings,
        epochs=st.integers(0, 9),
        batch_size=st.integers(2, 40),
        validate_every_epochs=st.integers(0, 4),
        checkpoint_every=st.integers(0, 9),
    ),
    samples=st.integers(1, 100),
)
@example(settings=TrainingSettings(epochs=2, batch_size=10, validate_every_epochs=1, checkpoint_every=3), samples=25)
def test_what_is_due_after_a_step(settings, samples):
    """Once enough samples were seen or steps done since the last time, and after the last step."""
    total, seen_at, validated, kept = step_count(settings, samples), 0, [], []
    for step in range(total):
        last, seen = step == total - 1, (step + 1) * settings.batch_size
        every = settings.validate_every_epochs * samples
        if last or (every and seen >= seen_at + every):
            validated.append(step)
        while every and seen >= seen_at + every:
            seen_at += every
        if settings.checkpoint_every and (last or (step + 1) % settings.checkpoint_every == 0):
            kept.append(step)
    assert [step for step in range(total) if is_validation_step(step, settings, samples)] == validated
    assert [step for step in range(total) if is_checkpoint_step(step, settings, samples)] == kept
    assert (validation_count(settings, samples), checkpoint_count(settings, samples)) == (len(validated), len(kept))


def test_a_schedule_of_any_length_costs_the_same():
    """A trial of tune has a million epochs, of eleven million photos."""
    settings = TrainingSettings(epochs=1_000_000, batch_size=256, validate_every_epochs=1, checkpoint_every=5)
    assert not is_validation_step(0, settings, 11_000_000)
    assert validation_count(settings, 11_000_000) == 1_000_000
    assert checkpoint_count(settings, 11_000_000) == 8_593_750_000
