"""The infill stage, rule by rule."""

from __future__ import annotations

import math

import numpy as np

from kvs_core.sampling.candidates import Candidates
from kvs_core.sampling.infill import infill

TEXTS = [b"<end>", b"ret", b"return", b"r", b"x", b"y", b"z", b"w", b"v"]
END = 0


def keep(probs: dict[int, float], ends: tuple[int, ...] = (END,)) -> list[int]:
    """Ids left of tokens with these probabilities."""
    logits = np.array([math.log(p) if p else -math.inf for p in probs.values()], np.float32)
    got = infill(Candidates(np.array(list(probs), np.int32), logits), TEXTS.__getitem__, ends)
    assert got.is_sorted
    return got.ids.tolist()


def test_a_likely_end_ends() -> None:
    """If 3 P_end n exceeds P_text only ends stay."""
    assert keep({4: 0.7, END: 0.3}) == [END]


def test_common_beginnings_pool_their_probability() -> None:
    """Three spellings of one beginning are sure together, and the likeliest of them stands for all."""
    assert keep({2: 0.15, 1: 0.12, 3: 0.13, 4: 0.3, 5: 0.3 - 1e-6, END: 1e-6}) == [4, 5, 2, END]


def test_sure_tokens_must_also_hold_their_share() -> None:
    """Of m sure tokens those below 1 / (m + 1) of the rest go."""
    assert keep({4: 0.75, 5: 0.249999, END: 1e-6}) == [4, END]


def test_nothing_sure_means_the_end() -> None:
    """With no sure token one end stays, even if it was no candidate; without ends the best candidate does."""
    flat = {4: 0.17, 5: 0.166, 6: 0.166, 7: 0.166, 8: 0.166, 1: 0.166}
    assert keep({**flat, END: 1e-6}) == [END]
    assert keep(flat) == [END]
    assert keep(flat, ends=()) == [4]


def test_a_banned_end_is_no_end() -> None:
    """An end with probability 0 neither ends the text nor stays."""
    assert keep({4: 0.6, 5: 0.4, END: 0.0}) == [4, 5]
