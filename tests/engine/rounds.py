"""Rounds of drafts and rejections, and all that a run leaves behind, for tests that compare the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from kvs_core.engine.checkpoints import Checkpoint
from kvs_core.engine.engine import Engine
from kvs_core.engine.step import Step
from kvs_core.memory.phases import Phase
from tests.engine.tiny import text

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


@dataclass(frozen=True)
class Round:
    """One step: drafts, then rows of which some are kept; or a prefill, or a step that is left before it ran.

    kind   "", "next" or "resident": who drafts. A step of more than 8 rows has no drafts; it becomes several steps
           where there is no room for it, and is shorter where the context ends
    place  "mark": a checkpoint is made before it; "back": the last one is gone back to
    """

    kind: str
    drafts: int
    rows: int
    keep: int
    left_open: bool = False
    prefill: bool = False
    place: str = ""


@dataclass
class Played:
    """What a run of rounds shows on its way: logits of the kept rows, in order, and rows of the wide steps."""

    logits: list[bytes] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def see(self, step: Step, keep: int) -> None:
        """A step has run, of which the first ``keep`` rows count."""
        logits, best = step.logits(0), step.best(1, 0)
        assert best is None or [int(row.ids[0]) for row in best] == logits.argmax(axis=1).tolist()
        self.logits += [row.tobytes() for row in logits[:keep]]
        if step.rows > 8:
            self.widths.append(step.rows)


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

WIDE_ROUNDS = st.lists(
    st.builds(
        lambda kind, drafts, rows, keep, end, place: Round(
            kind if rows <= 8 else "", drafts, rows, min(keep, rows), end == "left open", end == "prefill", place
        ),
        st.sampled_from(["", "next", "resident"]), st.integers(1, 8), st.integers(9, 65) | st.integers(1, 8),
        st.integers(0, 65) | st.integers(0, 8), st.sampled_from(["", "", "", "", "", "left open", "prefill"]),
        st.sampled_from(["", "", "", "mark", "back"]),
    ),
    min_size=1, max_size=8,
)


def play_rounds(
    built: Engine, prompt: int, rounds: Sequence[Round], seed: int, *, drafting: bool, played: Played | None = None
) -> int:
    """Play them, or just the rows that are kept. The token that would come next."""
    played = Played() if played is None else played
    vocab, dice = built.spec.n_vocab, np.random.default_rng(seed)
    right = text(vocab, sum(each.rows for each in rounds) + 1, seed)   # by position behind the prompt
    ubatch = built.context.ubatch_tokens
    for at in range(0, prompt, ubatch):
        with built.step(text(vocab, min(ubatch, prompt - at), at), PREFILL) as step:
            step.settle()
    start = built.committed
    marked: Checkpoint | None = None
    for each in rounds:
        if each.place == "mark":
            marked = built.checkpoint()
            built.keep([marked.position])
        elif each.place == "back" and marked is not None:
            built.go_back(marked)
        at = built.committed - start
        rows = min(each.rows, built.context.context_tokens - built.committed - 8)   # ``Left.by`` takes 8 more
        kept = right[at : at + min(rows, each.keep)]
        if rows <= 0:
            continue
        if each.prefill:
            with built.step(right[at : at + rows], PREFILL) as step:
                step.settle()
        elif not drafting:
            _run_rows(built, kept, [], 1, played)
        elif rows > 8:
            wrong = text(vocab, rows - len(kept), seed + at)
            if each.left_open:
                with built.open(built.widest(rows)) as step:
                    if not kept:
                        step.run(wrong[: built.widest(rows)])
                _run_rows(built, kept, [], 8, played)
            else:
                _run_rows(built, kept, wrong, rows, played)
        else:
            _draft_and_run(built, each, kept, rows, dice, played)
    return right[built.committed - start]


def _draft_and_run(
    built: Engine, each: Round, kept: Sequence[int], rows: int, dice: np.random.Generator, played: Played
) -> None:
    """A round of one usual step."""
    vocab = built.spec.n_vocab
    with built.open(8) as step:
        if each.kind:
            draft = step.draft_next if each.kind == "next" else step.draft_resident
            for token in dice.integers(0, vocab, each.drafts):
                draft(int(token))
        if not each.left_open or not kept:
            wrong = dice.integers(0, vocab, rows - len(kept))
            step.run([*kept, *(int(token) for token in wrong)])
        if not each.left_open:
            played.see(step, len(kept))
            step.settle(len(kept))
    if each.left_open:
        _run_rows(built, kept, [], 8, played)


def _run_rows(built: Engine, kept: Sequence[int], wrong: Sequence[int], most: int, played: Played) -> None:
    """Steps of up to ``most`` rows, of fewer where there is no room, until one of them is not kept whole."""
    tokens, keep = [*kept, *wrong], len(kept)
    while tokens:
        rows = built.widest(min(most, len(tokens)))
        with built.open(rows) as step:
            step.run(tokens[:rows])
            now = min(rows, keep)
            played.see(step, now)
            step.settle(now)
        if now < rows:
            return
        tokens, keep = tokens[rows:], keep - now


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
        committed = built.committed
        rows, drafts = [], []
        for layer, geometry in enumerate(kv.geometries):
            for page in kv.needed_pages(layer, committed):   # what windows have passed may be gone
                filled = min(geometry.page_tokens, committed - page * geometry.page_tokens)
                data = kv.history_page(layer, page)
                for head in range(geometry.kv_heads):
                    k, v = geometry.k_offset(head), geometry.v_offset(head)
                    rows.append(data[k : k + filled * geometry.k_row_bytes].tobytes())
                    rows.append(data[v : v + filled * geometry.v_row_bytes].tobytes())
        with built.open(8) as step:
            for _ in range(3 if built.drafting.nextn and kv._placement.state.cuts[-1] == 0 else 0):
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
