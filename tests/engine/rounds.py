"""Rounds of drafts and rejections, and all that a run leaves behind, for tests that compare the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from kvs_core.engine.engine import Engine
from kvs_core.memory.phases import Phase
from tests.engine.tiny import text

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


@dataclass(frozen=True)
class Round:
    """One step: drafts, then rows of which some are kept; or a prefill, or a step that is left before it ran.

    kind   "", "next" or "resident": who drafts
    """

    kind: str
    drafts: int
    rows: int
    keep: int
    left_open: bool = False
    prefill: bool = False


ROUNDS = st.lists(
    st.builds(
        lambda kind, drafts, rows, keep, end: Round(
            kind, min(drafts, 8), rows, min(keep, rows), left_open=end == "left open", prefill=end == "prefill"
        ),
        st.sampled_from(["", "next", "resident"]), st.integers(1, 8), st.integers(1, 8), st.integers(0, 8),
        st.sampled_from(["", "", "", "", "left open", "prefill"]),
    ),
    min_size=1, max_size=12,
)

def play_rounds(built: Engine, prompt: int, rounds: Sequence[Round], seed: int, *, drafting: bool) -> int:
    """Play them, or just the rows that are kept. The token that would come next."""
    vocab, dice = built.spec.n_vocab, np.random.default_rng(seed)
    right = text(vocab, 8 * len(rounds) + 1, seed)   # by position behind the prompt
    ubatch = built.context.ubatch_tokens
    for at in range(0, prompt, ubatch):
        with built.step(text(vocab, min(ubatch, prompt - at), at), PREFILL) as step:
            step.settle()
    start = built.committed
    for each in rounds:
        at = built.committed - start
        if each.prefill:
            with built.step(right[at : at + each.rows], PREFILL) as step:
                step.settle()
            continue
        kept = right[at : at + each.keep]
        if not drafting:
            for token in kept:
                with built.step([token], DECODE) as step:
                    step.settle()
            continue
        with built.open(8) as step:
            if each.kind:
                draft = step.draft_next if each.kind == "next" else step.draft_resident
                for token in dice.integers(0, vocab, each.drafts):
                    draft(int(token))
            if not each.left_open or each.keep == 0:
                wrong = dice.integers(0, vocab, each.rows - each.keep)
                step.run([*kept, *(int(token) for token in wrong)])
            if not each.left_open:
                step.settle(each.keep)
        if each.left_open and kept:
            with built.step(kept, DECODE) as step:
                step.settle()
    return right[built.committed - start]


@dataclass(frozen=True)
class Left:
    """What a run leaves behind: committed keys and values, states, and what it says next.

    drafts  logits of drafts of the MTP block, if it saw all of its keys and values, as where every page is held
    """

    committed: int
    rows: list[bytes]
    states: list[bytes]
    logits: bytes
    drafts: list[bytes]

    @classmethod
    def by(cls, built: Engine, token: int) -> Left:
        """By a run that ``token`` follows."""
        kv = built._kv
        kv.drain()
        geometry, committed = built.geometry, built.committed
        rows, drafts = [], []
        for layer in range(kv.layers):
            for page in range(geometry.pages_of(committed)):
                filled = min(geometry.page_tokens, committed - page * geometry.page_tokens)
                data = kv.history_page(layer, page)
                for head in range(geometry.kv_heads):
                    k, v = geometry.k_offset(head), geometry.v_offset(head)
                    rows.append(data[k : k + filled * geometry.k_row_bytes].tobytes())
                    rows.append(data[v : v + filled * geometry.v_row_bytes].tobytes())
        with built.open(8) as step:
            for _ in range(3 if built.drafting.nextn and kv._state.cuts[-1] == 0 else 0):
                step.draft_next(token)
                drafts.append(step.logits().tobytes())
            step.run([token, token])
            logits = step.logits(0).tobytes()
        built._state.flush()
        states = [np.asarray(built._device.download(state.state)).tobytes() for state in built._state._states.values()]
        return cls(committed, rows, states, logits, drafts)

    def check(self, other: Left) -> None:
        """``other`` is of a run that holds every page."""
        assert self.committed == other.committed
        assert self.rows == other.rows
        assert self.states == other.states
        assert self.logits == other.logits
        assert self.drafts in ([], other.drafts)
