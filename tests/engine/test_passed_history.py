"""What sliding windows have passed leaves the history, and nothing that is read later tells: whatever turns a
conversation takes, its bits are those of a fresh run, and host memory is that of windows and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.engine.budget import DECODE_ROWS
from kvs_core.engine.checkpoints import Checkpoints
from kvs_core.engine.engine import Engine
from kvs_core.engine.session import Session, common_prefix, ubatches
from kvs_core.engine.session_file import _read_pages, load_session, save_session
from kvs_core.errors import SessionFileError
from kvs_core.memory.phases import Phase
from kvs_core.paging.residency import most_sliding_groups
from tests.engine.test_exact import hostile
from tests.engine.tiny import engine, kv_settings, text
from tests.support.examples import examples
from tests.support.tiny_gguf import Gemma4, write_tiny_gemma3, write_tiny_gemma4

CONTEXT, PAGE, UBATCH, WINDOW = 1024, 32, 64, 40
BEFORE = 2   # pages that a window reaches back from its row's own
WAYS = ("stay", "park", "fork", "save")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Layers that slide: in the pool of all, or in their own, where others read their pages too."""
    folder = tmp_path_factory.mktemp("passed")
    small: dict[str, Any] = {"embd": 32, "heads": 2, "ffn": 32}
    return {
        "gemma3": write_tiny_gemma3(
            folder / "3.gguf", seed=2, n_layer=3, window=WINDOW, pattern=[True, False, True], kv_heads=2, head_dim=64,
            **small,
        ),
        "gemma4": write_tiny_gemma4(
            folder / "4.gguf", seed=2, window=WINDOW, pattern=[True, False, True, False], kv_heads=(1, 2),
            head_dims=(32, 64), more=Gemma4(shared=2), **small,
        ),
    }


def open_engine(path: Path, *, swa_full: bool, pool: float | None = None, **others: Any) -> Any:
    return engine(
        path, kv=kv_settings(swa_full=swa_full), context=CONTEXT, ubatch=UBATCH, pool=pool, fixed=pool is not None,
        **others,
    )


@dataclass(frozen=True)
class Turn:
    """A prompt that shares ``share`` of the conversation, and then has tokens of its own; what is written behind it.

    border  from its end
    way     what happens to the conversation before the next one
    """

    share: float
    own: int
    border: int
    decoded: int
    way: str


@dataclass(frozen=True)
class Ran:
    """A step of a conversation: the rows that it ran, and how many of them still count."""

    rows: tuple[int, ...]
    keep: int
    phase: Phase


def cut(ran: Sequence[Ran], tokens: int) -> list[Ran]:
    """The steps that led to the first ``tokens`` tokens."""
    left = []
    for each in ran:
        if tokens > 0:
            left.append(replace(each, keep=min(each.keep, tokens)))
        tokens -= each.keep
    return left


def fresh(built: Engine, ran: Sequence[Ran], last: int) -> list[bytes]:
    """Logits of the last steps, where all of them follow each other from the beginning."""
    built.rewind(0)
    logits = []
    for each in ran:
        with built.step(each.rows, each.phase) as step:
            logits.append(step.logits().tobytes())
            step.settle()
        if each.keep < len(each.rows):
            built.rewind(built.committed - len(each.rows) + each.keep)
    return logits[len(logits) - last :]


def check_memory(built: Engine, places: Sequence[int]) -> None:
    """A layer that slides holds the groups of its window, of the last step and of the checkpoints; if there are none,
    no more than was planned for. What waits to be used again is little: of a layer that sees everything a first
    slab."""
    history = built._kv._history
    rows = max(UBATCH, DECODE_ROWS)
    end = -(-built.committed // PAGE) - 1
    for layer, spec in enumerate(built.spec.kv_layers):
        held = set(history._slabs[layer])
        if not spec.window:
            assert [part.nbytes for part in history._spare[layer]] in ([], [history._slab_bytes(layer, 0)])
            continue
        window = range(max(0, (built.committed - rows) // PAGE - BEFORE) // 4, end // 4 + 2)
        wanted = {group for place in places for group in history.slides.groups(layer, place)}
        assert held <= wanted | set(window), (held, wanted, window)
        spare = len(history._spare[layer])
        assert spare <= 2
        if not places:
            assert len(held) + spare <= most_sliding_groups(CONTEXT, PAGE, rows, BEFORE)


def away(session: Session, way: str, folder: Path) -> Session:
    """The same conversation, after it was set aside, copied, or saved and loaded."""
    if way == "park":
        parked = session.park()
        session.prefill(text(200, 90, 5))
        session.rewind(0)
        session.unpark(parked)
    elif way == "fork":
        tokens = list(session.tokens)
        parked = session.park()
        assert parked.reusable([*tokens, 1]) == len(tokens)
        session.fork(parked, len(tokens))
    elif way == "save":
        save_session(session, folder / "saved", "key")
        session.prefill(text(200, 40, 6))
        load_session(session, folder / "saved", "key")
    return session


turns = st.lists(
    st.builds(
        Turn, st.sampled_from((0.0, 0.5, 0.9, 0.97, 1.0)) | st.floats(0.3, 1),
        st.integers(1, 40) | st.integers(150, 330), st.integers(-3, 40),
        st.integers(0, 20), st.sampled_from(WAYS),
    ),
    min_size=3, max_size=5,
)


@settings(max_examples=examples(24))
@given(
    model=st.sampled_from(("gemma3", "gemma4")), swa_full=st.booleans(), turns=turns, most=st.integers(0, 5),
    apart=st.sampled_from((0, 64, 200)), pool=st.sampled_from((None, 0.0, 0.4)), seed=st.integers(0, 99),
)
def test_turns_have_the_bits_of_a_fresh_run(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, model: str, swa_full: bool, turns: list[Turn],
    most: int, apart: int, pool: float | None, seed: int,
) -> None:
    """Whatever is kept, dropped, gone back to, set aside, copied and saved."""
    folder = tmp_path_factory.mktemp("saved")
    with (
        open_engine(models[model], swa_full=swa_full, pool=pool, debug=hostile(seed)) as built,
        open_engine(models[model], swa_full=True) as oracle,
    ):
        session = Session(built, Checkpoints(most, 1 << 30) if most else None, checkpoint_tokens=apart)
        ran: list[Ran] = []
        for number, turn in enumerate(turns):
            own = text(200, turn.own, 10 * seed + number)
            prompt = [*session.tokens[: round(turn.share * len(session.tokens))], *own][: CONTEXT - 25]
            common = common_prefix(session.tokens, prompt[:-1])
            places = [held.position for held in session.checkpoints if held.position <= common]
            kept = session.keep_common(prompt)
            anywhere = swa_full or common == len(session.tokens)
            assert common >= kept >= (common if anywhere else max(places, default=0))
            ran, rest = cut(ran, kept), prompt[kept:]
            made = [session.prefill(rest, border=len(rest) - turn.border).tobytes()]
            for rows in ubatches(len(rest), built.context.batch_tokens, UBATCH):
                ran.append(Ran(tuple(rest[:rows]), rows, Phase.PREFILL))
                rest = rest[rows:]
            for token in text(200, turn.decoded, number):
                made.append(np.asarray(session.decode(token)).tobytes())
                ran.append(Ran((token,), 1, Phase.DECODE))
            assert made == fresh(oracle, ran, len(made))
            if not swa_full:
                check_memory(built, [held.position for held in session.checkpoints])
            session = away(session, turn.way, folder)


LONG = text(200, 900, 1)


@pytest.fixture
def gemma3(models: dict[str, Path]) -> Path:
    """The model with one pool."""
    return models["gemma3"]


@pytest.mark.parametrize(
    ("common", "kept"), [(880, 880), (832, 832), (831, 512), (505, 505), (448, 448), (447, 0)]
)
def test_a_prompt_goes_back_as_far_as_there_is_what_windows_saw(
    gemma3: Path, caplog: pytest.LogCaptureFixture, common: int, kept: int
) -> None:
    """The last step's first row, 896, lies in page 28 and sees page 26, in the group of page 24: back to page 26 all is
    there. A checkpoint at 500, in page 15, has the group of pages 12 to 15: rows of pages 14 and 15 need no other, and
    neither does the one behind them. What is read again is said. With --swa-full nothing is."""
    caplog.set_level(logging.INFO)
    for swa_full, expected in ((False, kept), (True, common)):
        caplog.clear()
        with open_engine(gemma3, swa_full=swa_full) as built:
            session = Session(built, Checkpoints(8, 1 << 30))
            session.prefill(LONG, border=500)
            assert [held.position for held in session.checkpoints] == ([] if swa_full else [500, 900])
            assert session.keep_common([*LONG[:common], 255, 255]) == expected == built.committed
            assert session.tokens == LONG[:expected]
        said = [record.message for record in caplog.records if "again" in record.message]
        assert said == [] if expected == common else said[0].startswith(
            f"a prompt has {common} tokens in common with a conversation, and reads those behind {kept} again: "
            "sliding windows have passed them, and --swa-full was not given"
        )


def test_checkpoints_that_go_give_back_what_they_held(gemma3: Path) -> None:
    """A conversation that is thinned takes less to set aside, as little as was said before."""
    with open_engine(gemma3, swa_full=False) as built:
        session = Session(built, Checkpoints(8, 1 << 30), checkpoint_tokens=192)
        session.prefill(LONG)
        assert [held.position for held in session.checkpoints] == [192, 384, 576, 768, 900]
        whole, least = session.parked_bytes, session.least_parked_bytes
        while session.thin():
            pass
        assert [held.position for held in session.checkpoints] == [384, 900]
        # Behind pages 5, 17 and 23 there were the others, each with the group that a window saw there.
        assert whole - least == 3 * 2 * 4 * built.page_bytes[0]
        assert session.parked_bytes == least == sum(part.size_bytes for part in session.park().parts)


def test_what_the_history_keeps_for_checkpoints_is_bounded(gemma3: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two layers that slide, a group of each for every checkpoint, and two for the one at 900, whose window spans
    them. Room for three groups holds two checkpoints, no room for one ends them, and says how much it takes."""
    with open_engine(gemma3, swa_full=False) as built:
        group = 2 * 4 * built.page_bytes[0]
        held = built.make_checkpoints(8, 3 * group)
        session = Session(built, held, checkpoint_tokens=192)
        session.prefill(LONG)
        assert (list(held.positions), held.size_bytes) == ([384, 900], 3 * group)
        check_memory(built, held.positions)
        assert session.keep_common([*LONG[:500], 1]) == 384
        session.rewind(0)
        session = Session(built, built.make_checkpoints(8, group - 1), checkpoint_tokens=192)
        session.prefill(LONG)
        assert (len(session.checkpoints), session.keep_common([*LONG[:500], 1])) == (0, 0)
        assert f"a checkpoint is not kept: it takes {group / (1 << 20):.0f} MiB, more than all may" in caplog.text
    with open_engine(gemma3, swa_full=True) as built:
        assert built.kept_bytes([384, 900]) == 0


def test_a_checkpoint_that_is_too_large_is_no_loss_for_others(gemma3: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Room for one group of each layer: the one at 900 takes two. Later ones that fit are kept again; the border of a
    prompt, within a ubatch, may be too large too."""
    with open_engine(gemma3, swa_full=False) as built:
        group = 2 * 4 * built.page_bytes[0]
        session = Session(built, built.make_checkpoints(8, group), checkpoint_tokens=0)
        session.prefill(LONG[:500])
        session.prefill(LONG[500:900])
        assert [held.position for held in session.checkpoints] == [500]
        session.rewind(0)
        session.prefill(LONG[:500])
        assert session.keep_common([*LONG[:500], 1]) == 500
        assert len(caplog.records) == 1
        session = Session(built, built.make_checkpoints(8, 1000), checkpoint_tokens=192)
        session.rewind(0)
        session.prefill(LONG[:900], border=890)
        assert (len(session.tokens), len(session.checkpoints)) == (900, 0)


def test_a_file_without_what_windows_have_passed(gemma3: Path, tmp_path: Path) -> None:
    """It is so much smaller, and taken up with the same bits by whoever shifts no context; who does says what to do."""
    sizes, logits = [], []
    for swa_full in (True, False):
        path = tmp_path / f"{swa_full}"
        with open_engine(gemma3, swa_full=swa_full) as built:
            session = Session(built)
            session.prefill(LONG)
            sizes.append(save_session(session, path, "key").size_bytes)
            logits.append(np.asarray(session.decode(7)).tobytes())
            page_bytes = built.page_bytes[0]
    assert logits[0] == logits[1]
    assert sizes[0] - sizes[1] - 24 * 2 * page_bytes in range(-64, 64)   # headers differ
    for swa_full in (True, False):
        for other in (True, False):
            with open_engine(gemma3, swa_full=other) as built:
                session = Session(built)
                load_session(session, tmp_path / f"{swa_full}", "key")
                assert session.reusable([*LONG[:500], 1]) == (500 if swa_full else 0)
                assert np.asarray(session.decode(7)).tobytes() == logits[0]
                assert session.reusable([*LONG[:500], 1]) == (500 if swa_full and other else 0)
    with open_engine(gemma3, swa_full=False, shift=True) as built:
        session = Session(built)
        with pytest.raises(SessionFileError, match=r"has 5 of 29 pages of a layer, .* --swa-full, or leave out"):
            load_session(session, tmp_path / "False", "key")
        load_session(session, tmp_path / "True", "key")
        session.shift(4, 400)
        assert len(session.tokens) == 500


def test_a_file_over_a_conversation_that_is_whole_goes_back_to_nothing_of_it(
    gemma3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With --swa-full the history keeps what another conversation had where the file has nothing: nobody goes back to
    that. What is read again has the bits of a fresh run, and the log says why it is."""
    with open_engine(gemma3, swa_full=False) as built:
        session = Session(built)
        session.prefill(LONG)
        save_session(session, tmp_path / "thin", "key")
    prompt = [*LONG[:500], *text(200, 60, 8)]
    with open_engine(gemma3, swa_full=True) as built:
        session = Session(built)
        wanted = session.prefill(prompt).tobytes()
        session.rewind(0)
        session.prefill(text(200, 900, 7))
        load_session(session, tmp_path / "thin", "key")
        session = away(session, "fork", tmp_path)
        assert [len(list(built.pages_of(layer))) for layer in range(3)] == [5, 29, 5]
        caplog.set_level(logging.INFO)
        kept = session.keep_common(prompt)
        assert (kept, session.prefill(prompt[kept:]).tobytes()) == (0, wanted)
        assert [record.message for record in caplog.records if "again" in record.message] == [
            "a prompt has 500 tokens in common with a conversation, and reads those behind 0 again: sliding windows "
            "have passed them, and the file it came from was saved without --swa-full"
        ]


@pytest.mark.parametrize(
    "pages", [[[[0, 29]]], [[[0, 29]]] * 2 + [[[0, 30]]], [[[0, 29]], [[1, 29]], [[0, 29]]], [[[0, 29]], [[8, 4]], [0]],
              [[[0, 29]], [["a", 29]], [[0, 29]]], 7, [[[0, 29]], [[-4, 29]], [[0, 29]]]],
)
def test_a_file_whose_pages_make_no_sense(gemma3: Path, tmp_path: Path, pages: Any) -> None:
    """One error, whatever is wrong with them."""
    with open_engine(gemma3, swa_full=False) as built:
        with pytest.raises(SessionFileError, match="its header cannot be read; save it again"):
            _read_pages({"tokens": 900, "pages": pages}, built, tmp_path)
        assert [len(held) for held in _read_pages({"tokens": 900}, built, tmp_path)] == [29] * 3
