"""Random numbers as llama.cpp draws them, so that a seed means the same thing in both.

The generator is mt19937 seeded by its one-number initialiser (Matsumoto and Nishimura's ``init_genrand``; C++
``std::mt19937(seed)``). Uniform numbers follow the standard library of GCC (``generate_canonical``).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_TWO_32 = 4294967296.0


class MersenneTwister:
    """One mt19937 stream."""

    __slots__ = ("_bits",)

    def __init__(self, seed: int) -> None:
        """``seed`` is an unsigned 32-bit number."""
        self._bits = np.random.MT19937()
        state: Any = np.random.RandomState(seed).get_state(legacy=False)   # RandomState(int) is init_genrand
        self._bits.state = state

    def uniform(self) -> float:
        """A double in [0, 1) from two draws a, b: (a + b 2^32) / 2^64 (``uniform_real_distribution<double>``)."""
        low, high = (float(value) for value in self._bits.random_raw(2))
        return min((low + high * _TWO_32) / (_TWO_32 * _TWO_32), math.nextafter(1.0, 0.0))

    def uniform_single(self) -> float:
        """A float32 in [0, 1) from one draw a: a / 2^32 (``uniform_real_distribution<float>``)."""
        value = np.float32(self._bits.random_raw()) / np.float32(_TWO_32)
        return float(min(value, np.nextafter(np.float32(1), np.float32(0))))
