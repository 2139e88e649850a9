"""The Mersenne Twister, against published outputs and the C++ standard's."""

from __future__ import annotations

import numpy as np

from kvs_core.sampling.rng import MersenneTwister


def test_the_stream_is_that_of_the_reference_implementation() -> None:
    """Seed 5489: the first numbers, and the 10,000th that the C++ standard fixes for std::mt19937."""
    first, second = 3499211612, 581869302
    assert MersenneTwister(5489).uniform() == (first + second * 2.0**32) / 2.0**64
    assert MersenneTwister(5489).uniform_single() == float(np.float32(first) / np.float32(2.0**32))
    dice = MersenneTwister(5489)
    for _ in range(9999):
        dice.uniform_single()
    assert dice.uniform_single() == float(np.float32(4123659995) / np.float32(2.0**32))


def test_uniform_numbers_stay_below_one_and_fill_the_interval() -> None:
    """[0, 1) is never left, halves are equally likely, and streams with one seed are one stream."""
    dice, twin = MersenneTwister(1), MersenneTwister(1)
    numbers = np.array([dice.uniform() for _ in range(4000)])
    assert numbers.tolist() == [twin.uniform() for _ in range(4000)]
    assert 0.0 <= numbers.min() <= numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.02
