import numpy as np
from scipy import stats

from trainer.data.randomness import random_bits, uniform


def test_one_word_gives_the_published_first_output_of_splitmix64():
    assert int(random_bits(1234567)) == 6457827717110365317


def test_a_draw_does_not_depend_on_its_neighbours():
    keys = np.array([3, 2**63 + 5, 12], dtype=np.uint64)
    together = uniform(7, keys, 4)
    assert [float(uniform(7, key, 4)) for key in keys] == together.tolist()


def test_every_word_matters():
    base = (1, 2, 3, 4)
    draws = {int(random_bits(*base))}
    for place in range(4):
        for bit in (0, 17, 62):
            words = list(base)
            words[place] ^= 1 << bit
            draws.add(int(random_bits(*words)))
    assert len(draws) == 13


def test_numbers_are_uniform_and_uncorrelated():
    numbers = uniform(0, np.arange(200_000, dtype=np.uint64))
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01
    neighbours = uniform(1, np.arange(200_000, dtype=np.uint64))
    assert abs(np.corrcoef(numbers, neighbours)[0, 1]) < 0.01
