"""Rows for the tests of K/V encoders: easy ones, and those on the edges of some format's rounding."""

from __future__ import annotations

import numpy as np

BLOCKS = 3000


def _row_kinds() -> dict[str, np.ndarray]:
    """float32 [BLOCKS, 32] each: easy rows, and those on the edges of some format's rounding."""
    rng = np.random.default_rng(3)
    normal, one = rng.standard_normal((BLOCKS, 32)), rng.standard_normal((BLOCKS, 1))
    table = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
    between = rng.choice((table[1:] + table[:-1]) / 2, (BLOCKS, 32))
    between[:, 0] = -127
    kinds = {
        "random": normal,
        "of many sizes": normal * np.exp(rng.uniform(-20, 20, (BLOCKS, 1))),
        "constant": np.repeat(one, 32, axis=1),
        "zero": np.zeros((BLOCKS, 32)),
        "minus zero": -np.zeros((BLOCKS, 32)),
        "zeros of both signs": rng.choice([0.0, -0.0], (BLOCKS, 32)),
        "one value": one * np.eye(32)[rng.integers(0, 32, BLOCKS)],
        "equal sizes": one * rng.choice([-1.0, 1.0], (BLOCKS, 32)),
        "halves of steps": rng.integers(-254, 255, (BLOCKS, 32)) / 2,
        "halves of nibble steps": rng.integers(-16, 17, (BLOCKS, 32)) / 2,
        "between entries of iq4_nl": between,
        "about the zero of iq4_nl": normal * 4e-16,
        "too large for f16": normal * 1e7,
        "huge": normal * 1e37,
        "tiny": normal * 1e-38,
        "subnormal": normal * 1e-42,
    }
    return {kind: rows.astype(np.float32) for kind, rows in kinds.items()}


ROWS = _row_kinds()
