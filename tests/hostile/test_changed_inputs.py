"""Changed inputs of every kind: the same ones each time, a few of what `make fuzz` tries (tests/hostile/fuzz.py)."""

import random

import pytest

from tests.hostile.mutation import mutate
from tests.hostile.targets import TARGETS, try_out

INPUTS = {"model's config": 15, "weights": 10, "image": 150, "recipe": 40, "overrides": 40}
"""Target -> changed inputs, where it is not `USUAL`."""
USUAL = 60

SEEDS_ARE_ATTACKS = {"list of images", "URI"}


@pytest.mark.filterwarnings("ignore:.*(Corrupt|Truncated|Metadata|Animated|Palette):UserWarning")
@pytest.mark.parametrize("name", TARGETS)
def test_what_is_not_read_is_refused_with_message(name, tmp_path):
    target, dice = TARGETS[name], random.Random(0)
    seeds = target.seeds()
    accepted = [try_out(target, seed, tmp_path) == "" for seed in seeds]
    assert all(accepted) or (name in SEEDS_ARE_ATTACKS and any(accepted))
    outcomes = [
        try_out(target, mutate(dice, dice.choice(seeds), seeds), tmp_path) for _ in range(INPUTS.get(name, USUAL))
    ]
    assert any(outcomes), "nothing was refused, so nothing was tried"
