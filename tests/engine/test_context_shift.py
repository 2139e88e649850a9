"""Context shift on the whole engine: the same bits wherever pages are, right positions, and texts without an end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.device.host.device import HostDebug, HostDevice
from kvs_core.device.host.ops import HostOps
from kvs_core.engine.budget import NO_DRAFTING, Drafting
from kvs_core.engine.context_shift import ContextShift
from kvs_core.engine.engine import Engine
from kvs_core.engine.round import Token, accept_prompt, generate
from kvs_core.engine.session import Session
from kvs_core.engine.session_file import load_session, save_session
from kvs_core.engine.speculation import make_speculation
from kvs_core.errors import CapabilityError
from kvs_core.formats.gguf import GgufFile
from kvs_core.models.registry import read_spec
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.params import SamplingParams
from kvs_core.settings.drafters import SpeculativeSettings
from kvs_core.settings.rooms import ContextSettings, KvSettings, LayerWindow, RopeSettings
from kvs_core.streaming import shift
from tests.engine.compare import session
from tests.engine.test_exact import hostile
from tests.engine.test_speculation import NONE, speculative
from tests.engine.tiny import engine, kv_settings, text
from tests.engine.written import FOR_LONG, LONG
from tests.sampling.vocabs import LetterVocab
from tests.streaming.apart import ApartDevice
from tests.support import llamacpp
from tests.support.compare import log_probs
from tests.support.tiny_gguf import (
    Gemma4,
    write_tiny_gemma3,
    write_tiny_gemma4,
    write_tiny_llama,
    write_tiny_qwen2,
    write_tiny_qwen3,
)

ATTENTION_ONLY = ["gemma3", "gemma4", "llama", "qwen2", "qwen3", "qwen3moe"]
KV_PAIRS = [("q8_0", "q4_0"), ("f16", "f16"), ("f32", "f32"), ("iq4_nl", "q5_1"), ("bf16", "q8_0"), ("q4_1", "q5_0")]


@dataclass(frozen=True)
class Cut:
    """A shift after some tokens have been decoded."""

    decoded: int
    keep: int
    discard: int


def play(built: Engine, cuts: Sequence[Cut]) -> list[bytes]:
    """A prompt of 300 tokens, shifts between decoded tokens, and a second prompt: logits, then the history."""
    session, vocab = Session(built), built.spec.n_vocab
    out = [session.prefill(text(vocab, 300)).tobytes()]
    for number, cut in enumerate(cuts):
        out += [np.asarray(session.decode(token)).tobytes() for token in text(vocab, cut.decoded, number)]
        keep = min(cut.keep, len(session.tokens))
        discard = min(cut.discard, len(session.tokens) - keep)
        wanted = session.tokens[:keep] + session.tokens[keep + discard :]
        session.shift(keep, discard)
        assert session.tokens == wanted
        assert built.committed == len(wanted)
        out += [np.asarray(session.decode(token)).tobytes() for token in text(vocab, 3, 50 + number)]
    out.append(session.prefill(text(vocab, 70, 9)).tobytes())
    return out + rows(built)


def rows(built: Engine) -> list[bytes]:
    """Stored keys and values of every committed token, by layer, page by page."""
    geometries, found = [built.shapes.geometry(layer) for layer in built.spec.kv_layers], []
    for layer, page, data in built.pages():
        geometry = geometries[layer]
        count = min(geometry.page_tokens, built.committed - page * geometry.page_tokens)
        for head in range(geometry.kv_heads):
            for at, size in ((geometry.k_offset(head), geometry.k_row_bytes),
                             (geometry.v_offset(head), geometry.v_row_bytes)):
                found.append(data[at : at + count * size].tobytes())
    return found


cuts = st.lists(st.builds(Cut, st.integers(0, 40), st.integers(0, 350), st.integers(0, 350)), min_size=1, max_size=3)


@settings(max_examples=16 if LONG else 5)
@given(
    model=st.sampled_from(ATTENTION_ONLY), types=st.sampled_from(KV_PAIRS), cuts=cuts, pool=st.floats(0.0, 0.3),
    fixed=st.booleans(), ring=st.integers(0, 12), run_pages=st.integers(0, 9), windows=st.booleans(),
    apart=st.booleans(), seed=st.integers(0, 1000),
)
def test_streamed_and_resident_stay_the_same(
    tiny_models: dict[str, Path], model: str, types: tuple[str, str], cuts: list[Cut], pool: float, fixed: bool,
    ring: int, run_pages: int, windows: bool, apart: bool, seed: int,
) -> None:
    """After shifts anywhere and of any size, logits and the history have the bits of a run that holds every page; where
    a device has memory of its own too."""
    path = tiny_models[model]
    with engine(path, kv=kv_settings(*types, residency_mode="resident"), shift=True) as built:
        wanted = play(built, cuts)
    others: dict[str, Any] = {"ring_slots": ring, "run_pages": run_pages}
    if windows:
        layers = [layer.index for layer in read_spec(GgufFile.open(path)).kv_layers]
        told = tuple(LayerWindow(layer, layer, 33 * layer) for layer in layers)
        others = {"residency_mode": "window", "window_tokens": 64, "window_layers": told}
    device = partial(ApartDevice if apart else HostDevice, 1, debug=hostile(seed))
    with engine(
        path, kv=kv_settings(*types, **others), pool=pool, fixed=fixed, lower=True, device=device,
        shift=True,
    ) as built, patch.object(shift, "_BATCH_BYTES", 1 + run_pages * built.geometry.page_bytes):
        assert play(built, cuts) == wanted


@pytest.mark.parametrize("model", ["gemma4", "llama"])
@pytest.mark.parametrize("pool", [0.0, None])
def test_a_device_with_memory_of_its_own_gives_the_same(
    tiny_models: dict[str, Path], model: str, pool: float | None
) -> None:
    """Bits, with layers that slide in a pool of their own too, and positions of pages that are true at once."""
    script = [Cut(5, 40, 70), Cut(3, 0, 33), Cut(0, 64, 32), Cut(2, 7, 400)]
    made = []
    for device in (HostDevice, ApartDevice):
        with engine(
            tiny_models[model], kv=kv_settings(), pool=pool, fixed=True, shift=True,
            device=partial(device, 1, debug=HostDebug(poison=True)),
        ) as built, patch.object(shift, "_BATCH_BYTES", 1):
            assert (built.shapes.sliding is not None) == (model == "gemma4")
            made.append(play(built, script))
    assert made[0] == made[1]


def one_layer(folder: Path, arch: str) -> Path:
    """A model whose keys and values depend on a token and its position alone, not on what stands before it."""
    path = folder / f"{arch}.gguf"
    match arch:
        case "llama":
            return write_tiny_llama(path, seed=3, n_layer=1, rope_freqs=True)
        case "qwen2":
            return write_tiny_qwen2(path, seed=3, n_layer=1)
        case "qwen3":
            return write_tiny_qwen3(path, seed=3, n_layer=1)
        case "gemma4, all":
            return write_tiny_gemma4(path, seed=3, pattern=[False], more=Gemma4(values=False))
        case "gemma4, window":
            return write_tiny_gemma4(path, seed=3, pattern=[True])
        case "gemma3, all":
            return write_tiny_gemma3(path, seed=3, n_layer=1, pattern=[False], rope_scale=4.0)
        case _:
            return write_tiny_gemma3(path, seed=3, n_layer=1, pattern=[True])


@pytest.mark.parametrize("rope", [RopeSettings(), RopeSettings(scaling="yarn", scale=4.0, yarn_orig_ctx=128)],
                         ids=["plain", "yarn"])
@pytest.mark.parametrize(
    "arch", ["llama", "qwen2", "qwen3", "gemma3, all", "gemma3, window", "gemma4, all", "gemma4, window"]
)
def test_keys_get_the_positions_of_the_shorter_text(tmp_path: Path, arch: str, rope: RopeSettings) -> None:
    """Where keys and values know nothing of earlier tokens, a shifted text has the logits of one that is read anew:
    for the tables of every arch, for windows and for scaled positions. Float32 apart, of whose rounding this is."""
    told = text(256, 400)
    built = Engine(
        GgufFile.open(one_layer(tmp_path, arch)), HostDevice(1), context=ContextSettings(ctx_size=512, shift=True),
        kv=KvSettings("f32", "f32", 32), rope=rope,
    )
    try:
        session = Session(built)
        for keep, discard in ((60, 151), (0, 211), (390, 10), (399, 1)):
            session.rewind(0)
            session.prefill(told)
            session.shift(keep, discard)
            shifted = log_probs(np.asarray(session.decode(5)))
            session.rewind(0)
            session.prefill(told[:keep] + told[keep + discard :])
            anew = log_probs(np.asarray(session.decode(5)))
            assert np.abs(shifted - anew).max() < 1e-4
    finally:
        built.close()


LIMITS = {"gemma3": (2e-2, 5e-2), "gemma4": (5e-2, 2e-1)}
"""Of differences to llama.cpp with float32 and with q8_0. Its table of GELU (see ``test_against_llamacpp``) makes as
many before a shift; keys that are not turned differ by 4 and more."""


@pytest.mark.parametrize("types", [("f32", "f32"), ("q8_0", "q8_0")], ids=str)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3", "gemma4"])
def test_shifts_are_those_of_llamacpp(tiny_models: dict[str, Path], arch: str, types: tuple[str, str]) -> None:
    """Two shifts, and texts behind them: the same log-probabilities, but for the order of sums, of which q8_0 makes
    more."""
    path = tiny_models[arch]
    told, cuts = text(256, 420), ((30, 100), (4, 60))
    made = []
    with session(path, type_k=types[0], type_v=types[1], round_q=True, context=512, shift=True) as ours:
        made.append(ours.prefill(told[:300], all_logits=True))
        for (keep, discard), more in zip(cuts, (told[300:350], told[350:]), strict=True):
            ours.shift(keep, discard)
            made.append(ours.prefill(more, all_logits=True))
    with llamacpp.Model(path) as model, model.context(
        n_ctx=512, type_k=types[0], type_v=types[1], flash_attn=types[1] != "f32", n_threads=1
    ) as theirs:
        wanted = [theirs.decode(told[:300])]
        for (keep, discard), more in zip(cuts, (told[300:350], told[350:]), strict=True):
            theirs.shift(keep, discard)
            wanted.append(theirs.decode(more))
    limit = LIMITS.get(arch, (1e-4, 2e-2))[types[0] == "q8_0"]
    for mine, yours in zip(made, wanted, strict=True):
        assert np.abs(log_probs(mine) - log_probs(yours)).max() < limit


@pytest.mark.parametrize(
    ("keep", "prompt", "bos", "discard", "tokens", "wanted"),
    [
        (0, 100, False, 0, 511, (0, 255)),
        (0, 100, True, 0, 511, (1, 255)),
        (8, 100, True, 0, 511, (9, 251)),
        (-1, 100, False, 0, 511, (100, 205)),
        (-1, 100, True, 0, 511, (101, 205)),
        (9999, 100, False, 0, 511, (508, 1)),
        (-1, 511, True, 0, 511, (508, 1)),
        (20, 100, False, 7, 511, (20, 7)),
        (20, 100, False, 1 << 30, 511, (20, 491)),
    ],
)
def test_what_is_kept_and_what_goes(
    tiny_llama: Path, keep: int, prompt: int, bos: bool, discard: int, tokens: int, wanted: tuple[int, int]
) -> None:
    """llama-server's rule: n_keep = min(keep + BOS, n_ctx - 4), and half of the others goes, or what a request says."""
    with engine(tiny_llama, kv=kv_settings()) as built:
        session = Session(built)
        told = text(built.spec.n_vocab, tokens)
        session.prefill(told)
        shift = ContextShift(keep, prompt_tokens=prompt, bos=bos, discard=discard)
        shift.make_room(session)
        kept, gone = wanted
        assert session.tokens == told[:kept] + told[kept + gone :]
        assert shift.dropped == gone


GREEDY: dict[str, Any] = {"temperature": 0.0}
FEW: dict[str, Any] = {**GREEDY, "logit_bias": tuple((token, 60.0) for token in (20, 40, 60, 80))}


@dataclass(frozen=True)
class Written:
    """A text: its tokens, those that the session holds in the end, how many it has forgotten, how many were drafted.

    moved  bytes copied to the device
    """

    tokens: list[Token]
    held: list[int]
    dropped: int
    accepted: int
    moved: int


def write(
    path: Path, prompt: Sequence[int], count: int, told: SpeculativeSettings = NONE, *,
    keep: int = 5, pool: float | None = None, shifts: bool = True, params: dict[str, Any] = GREEDY,
    context: int = 256,
) -> Written:
    """``count`` tokens, in a context that holds few."""
    with engine(
        path, kv=kv_settings(), pool=pool, fixed=True, context=context, debug=HostDebug(poison=True), shift=shifts,
        drafting=Drafting.of(told.types) if told.types else NO_DRAFTING,
    ) as built:
        session = Session(built)
        logits = session.prefill(prompt)[0]
        sampler = Sampler(
            SamplingParams(**params), n_vocab=built.spec.n_vocab, vocab=LetterVocab(256),
            eog_ids=(),
        )
        accept_prompt(sampler, prompt)
        speculation = make_speculation(built, told, sampler, ())
        shift = ContextShift(keep, prompt_tokens=len(prompt), bos=False) if shifts else None
        tokens = list(generate(
            session, sampler, logits, n_predict=count, eog_ids=frozenset(), speculation=speculation, shift=shift
        ))
        stats = {} if speculation is None else speculation.stats
        assert built.committed == len(session.tokens)
        return Written(
            tokens, session.tokens, 0 if shift is None else shift.dropped,
            sum(each.accepted_tokens for each in stats.values()), built.report().h2d_bytes,
        )


@pytest.mark.parametrize(
    "model", ["llama", *(pytest.param(model, marks=FOR_LONG) for model in ("gemma3", "gemma4", "qwen3"))]
)
def test_a_text_of_three_contexts(tiny_models: dict[str, Path], model: str) -> None:
    """It goes on without an end, streamed as resident; the session has what was kept and the newest of the text."""
    prompt = text(256, 40)
    written = write(tiny_models[model], prompt, 768)
    ids = [token.id for token in written.tokens]
    assert [token.stop for token in written.tokens] == [None] * 767 + ["length"]
    assert written.held == prompt[:5] + [*prompt, *ids[:-1]][5 + written.dropped :]
    expected, total = 0, 40
    for _ in ids[:-1]:
        if total == 255:
            total -= (gone := (255 - 5) // 2)
            expected += gone
        total += 1
    assert (written.dropped, len(written.held)) == (expected, total)
    streamed = write(tiny_models[model], prompt, 768, pool=0.0)
    assert streamed.tokens == written.tokens
    assert streamed.moved > 10 * written.moved
    ended = write(tiny_models[model], prompt, 768, shifts=False).tokens
    assert [token.id for token in ended] == ids[:216]
    assert ended[-1].stop == "context"


@cache
def plain(path: Path, count: int, context: int, *, repeats: bool) -> Written:
    """A text without drafts, all resident.   repeats: it says few things again and again"""
    return write(path, text(256, 60), count, params=FEW if repeats else GREEDY, context=context)


@pytest.mark.parametrize("pool", [pytest.param(None, marks=FOR_LONG), 0.1])
@pytest.mark.parametrize(
    ("types", "count", "context"),
    [
        (("ngram-simple",), 600, 256), (("ngram-cache",), 600, 256),
        # Of which a group of pages more stays on the device.
        pytest.param(("ngram-mod", "draft-resident"), 900, 512, marks=FOR_LONG), (("draft-resident",), 900, 512),
    ],
)
def test_drafts_change_nothing_across_shifts(
    tiny_llama: Path, types: tuple[str, ...], count: int, context: int, pool: float | None
) -> None:
    """A drafted text is shifted where the plain one is, and is the same; drafts are accepted, pages are streamed. No
    drafter is paused, for when that is depends on the clock."""
    repeats = types != ("draft-resident",)
    wanted = plain(tiny_llama, count, context, repeats=repeats)
    drafted = write(
        tiny_llama, text(256, 60), count, speculative(types, adaptive=False), pool=pool,
        params=FEW if repeats else GREEDY, context=context,
    )
    assert wanted.dropped > 256
    assert (drafted.tokens, drafted.held, drafted.dropped) == (wanted.tokens, wanted.held, wanted.dropped)
    assert drafted.accepted > 50
    assert pool is None or drafted.moved > 2 * wanted.moved


def test_a_saved_session_goes_on_behind_a_shift(tiny_llama: Path, tmp_path: Path) -> None:
    """With the same bits, whatever the arena."""
    with engine(tiny_llama, kv=kv_settings(), pool=0.0, fixed=True) as built:
        session = Session(built)
        session.prefill(text(256, 330))
        session.shift(30, 101)
        save_session(session, tmp_path / "talk", "key")
        wanted = [np.asarray(session.decode(token)).tobytes() for token in range(20, 30)]
        held = session.tokens[:-10]
    with engine(tiny_llama, kv=kv_settings()) as built:
        session = Session(built)
        assert load_session(session, tmp_path / "talk", "key").tokens == 229
        assert session.tokens == held
        assert [np.asarray(session.decode(token)).tobytes() for token in range(20, 30)] == wanted


def test_a_shifted_conversation_is_set_aside_and_taken_up(tiny_llama: Path) -> None:
    """Parked or copied, it is the same as one that stayed, and the engine is free for another meanwhile."""
    made = []
    for way in ("stays", "parked", "copied"):
        with engine(tiny_llama, kv=kv_settings(), pool=0.0, fixed=True) as built:
            session = Session(built)
            session.prefill(text(256, 330))
            session.shift(30, 101)
            if way != "stays":
                parked = session.park()
                session.prefill(text(256, 90, 8))
                if way == "parked":
                    session.rewind(0)
                    session.unpark(parked)
                else:
                    session.fork(parked, 229)
            made.append([np.asarray(session.decode(token)).tobytes() for token in range(20, 26)])
    assert made[0] == made[1] == made[2]


def test_recurrent_layers_are_refused(tiny_qwen35: Path) -> None:
    """At start, before any weight, with the reason and what to do."""
    device = HostDevice(1)
    with pytest.raises(CapabilityError, match=r"--context-shift: .* 6 recurrent layers.*larger --ctx-size"):
        Engine(
            GgufFile.open(tiny_qwen35), device, context=ContextSettings(ctx_size=256, shift=True), kv=KvSettings(),
            rope=RopeSettings(),
        )
    device.close()


@pytest.mark.parametrize("device", [HostDevice, ApartDevice])
def test_a_shift_that_fails_leaves_an_empty_session(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, device: type[HostDevice]
) -> None:
    """And one that can be used: its next text is that of a fresh one."""
    def fail(*_args: object, **_told: object) -> None:
        raise MemoryError

    with engine(tiny_llama, kv=kv_settings(), device=lambda: device(1)) as built:
        session = Session(built)
        wanted = session.prefill(text(256, 50)).tobytes()
        session.prefill(text(256, 200))
        with monkeypatch.context() as patch:
            patch.setattr(HostOps, "shift_rows", fail)
            with pytest.raises(MemoryError):
                session.shift(10, 20)
        assert (session.tokens, built.committed) == ([], 0)
        assert session.prefill(text(256, 50)).tobytes() == wanted
