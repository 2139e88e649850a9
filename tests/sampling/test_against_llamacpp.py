"""The stages against llama.cpp's samplers: the same candidates, the same logits, and with one seed the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvs_core.sampling import stages
from kvs_core.sampling.candidates import Candidates
from kvs_core.sampling.chain import Sampler
from kvs_core.sampling.infill import infill
from kvs_core.sampling.params import SamplingParams
from tests.sampling.vocabs import LetterVocab

llamacpp = pytest.importorskip("tests.support.llamacpp", reason="xllamacpp is not installed")
native = pytest.importorskip("tests.sampling.llamacpp_samplers", reason="xllamacpp is not installed")

# llama.cpp works in float32, the stages in float64; logits stay below 40 here
LOGIT_TOLERANCE = 2e-5

CASES = [(seed, count, width) for seed, count in enumerate((1, 2, 7, 50, 300, 3000)) for width in (0.5, 3.0, 8.0)]


def random_logits(seed: int, count: int, width: float) -> np.ndarray:
    """[count] float32, a normal of the given width, distinct."""
    return np.random.default_rng(seed).normal(0.0, width, count).astype(np.float32)


def full(logits: np.ndarray) -> Candidates:
    return Candidates(np.arange(logits.size, dtype=np.int32), logits, is_full=True)


def assert_same(ours: Candidates, theirs: native.Applied, *, in_order: bool = True) -> None:
    if in_order:
        assert ours.ids.tolist() == theirs.ids.tolist()
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=LOGIT_TOLERANCE)
    else:
        assert sorted(zip(ours.ids.tolist(), ours.logits.tolist(), strict=True)) == sorted(
            zip(theirs.ids.tolist(), theirs.logits.tolist(), strict=True)
        )


@pytest.mark.parametrize(("seed", "count", "width"), CASES)
def test_filters_keep_what_llamacpp_keeps(seed: int, count: int, width: float) -> None:
    """top_k, top_p, min_p, typ_p and top_n_sigma leave llama.cpp's candidates in its order."""
    logits = random_logits(seed, count, width)
    ids = range(count)
    for k in (1, 3, 40, 5000):
        assert_same(stages.top_k(full(logits), k), native.NativeSampler("top_k", k).apply(ids, logits))
    for keep in (0, 1, 5):
        for p in (0.0, 0.1, 0.5, 0.95):
            theirs = native.NativeSampler("top_p", p, keep).apply(ids, logits)
            assert_same(stages.top_p(full(logits), p, min_keep=keep), theirs)
            theirs = native.NativeSampler("typical", p, keep).apply(ids, logits)
            # near-ties of |-ln p - H| sort differently in float32
            assert_same(stages.typ_p(full(logits), p, min_keep=keep), theirs, in_order=count < 1000)
        for p in (0.01, 0.05, 0.5, 1.0):
            theirs = native.NativeSampler("min_p", p, keep).apply(ids, logits)
            assert_same(stages.min_p(full(logits), p, min_keep=keep), theirs)
    for n in (0.5, 1.0, 2.0):
        assert_same(stages.top_n_sigma(full(logits), n), native.NativeSampler("top_n_sigma", n).apply(ids, logits))


@pytest.mark.parametrize(("seed", "count", "width"), CASES)
def test_xtc_removes_what_llamacpp_removes(seed: int, count: int, width: float) -> None:
    """XTC with probability 1 leaves llama.cpp's candidates."""
    logits = random_logits(seed, count, width)
    for threshold in (0.0, 0.01, 0.1, 0.3):
        for keep in (0, 1, 4):
            theirs = native.NativeSampler("xtc", 1.0, threshold, keep, 7).apply(range(count), logits)
            ours = stages.xtc(full(logits), threshold, min_keep=keep) if count > 1 else full(logits)
            assert_same(ours, theirs)


@pytest.mark.parametrize(("seed", "count", "width"), CASES)
def test_temperatures_scale_as_llamacpp(seed: int, count: int, width: float) -> None:
    """Plain and dynamic temperature give llama.cpp's logits; at 0 its one finite candidate is the one that stays."""
    logits = random_logits(seed, count, width)
    settings = ((0.8, 0.0, 1.0), (2.0, 0.0, 1.0), (0.8, 0.5, 1.0), (1.0, 0.9, 2.0), (1.5, 1.2, 0.5))
    for t, half_range, exponent in settings:
        theirs = native.NativeSampler("temp_ext", t, half_range, exponent).apply(range(count), logits)
        ours = stages.dynamic_temperature(full(logits), t, half_range=half_range, exponent=exponent)
        assert ours.ids.tolist() == theirs.ids.tolist()
        np.testing.assert_allclose(ours.logits, theirs.logits, rtol=3e-5, atol=LOGIT_TOLERANCE)
    theirs = native.NativeSampler("temp_ext", 0.0, 0.0, 1.0).apply(range(count), logits)
    assert stages.temperature(full(logits), 0.0).ids.tolist() == theirs.ids[np.isfinite(theirs.logits)].tolist()


def test_penalties_and_bias_change_logits_as_llamacpp() -> None:
    """Penalties over a moving window and duplicate biases give llama.cpp's logits."""
    rng = np.random.default_rng(3)
    count = 50
    for last_n, repeat, frequency, presence in ((64, 1.3, 0.0, 0.0), (8, 1.0, 0.4, 0.2), (20, 0.7, -0.1, 0.5)):
        theirs = native.NativeSampler("penalties", count, last_n, repeat, frequency, presence)
        params = SamplingParams(
            samplers=("penalties",), repeat_last_n=last_n, repeat_penalty=repeat, frequency_penalty=frequency,
            presence_penalty=presence,
        )
        ours = Sampler(params, n_vocab=count, vocab=LetterVocab(count), eog_ids=())
        for step in range(100):
            logits = random_logits(step, count, 4.0)
            assert_same(ours.distribution(logits), theirs.apply(range(count), logits))
            token = int(rng.integers(count))
            ours.accept(token)
            theirs.accept(token)
    pairs = [(3, 1.5), (7, float("-inf")), (3, -0.25)]
    logits = random_logits(0, count, 4.0)
    biased = Sampler(
        SamplingParams(samplers=(), logit_bias=tuple(pairs)), n_vocab=count, vocab=LetterVocab(count), eog_ids=()
    )
    assert_same(biased.distribution(logits), native.logit_bias(count, pairs).apply(range(count), logits))


def test_one_seed_draws_llamacpps_tokens() -> None:
    """dist draws llama.cpp's tokens, also with a lone candidate in between; XTC's own dice fall alike too."""
    for seed in (0, 1, 42, 0xFFFFFFFE):
        dice = native.NativeSampler("dist", seed)
        xtc = native.NativeSampler("xtc", 0.5, 0.05, 0, seed)
        params = SamplingParams(seed=seed, samplers=("xtc",), xtc_probability=0.5, xtc_threshold=0.05)
        ours = Sampler(params, n_vocab=80, vocab=LetterVocab(80), eog_ids=())
        for step in range(200):
            logits = random_logits(step, 80, 2.0)
            if step % 3 == 0:
                assert dice.apply([5], logits[:1]).token == 5
                ours.draw(Candidates(np.array([5], np.int32), logits[:1]))
            cut = xtc.apply(range(80), logits)
            assert ours.pick(logits).token == dice.apply(cut.ids.tolist(), cut.logits).token


@pytest.mark.parametrize("extra", [{}, {"dynatemp_range": 0.5}, {"typical_p": 0.8}, {"top_n_sigma": 1.2}])
def test_the_default_chain_draws_llamacpps_tokens(extra: dict[str, float]) -> None:
    """The default samplers, and each with one more switched on, draw the tokens of llama.cpp's chain."""
    params = SamplingParams(seed=11, repeat_penalty=1.1, **extra)
    ours = Sampler(params, n_vocab=500, vocab=LetterVocab(500), eog_ids=())
    chain = [native.NativeSampler("penalties", 500, 64, 1.1, 0.0, 0.0)]
    if "top_n_sigma" in extra:
        chain.append(native.NativeSampler("top_n_sigma", 1.2))
    chain.append(native.NativeSampler("top_k", 40))
    if "typical_p" in extra:
        chain.append(native.NativeSampler("typical", 0.8, 0))
    chain += [native.NativeSampler("top_p", 0.95, 0), native.NativeSampler("min_p", 0.05, 0)]
    chain += [native.NativeSampler("temp_ext", 0.8, extra.get("dynatemp_range", 0.0), 1.0)]
    chain += [native.NativeSampler("dist", 11)]
    for step in range(300):
        logits = random_logits(step, 500, 3.0)
        pick = ours.pick(logits)
        ids, left = list(range(500)), logits
        for sampler in chain:
            applied = sampler.apply(ids, left)
            ids, left = applied.ids.tolist(), applied.logits
        assert pick.token == applied.token
        ours.accept(pick.token)
        for sampler in chain:
            sampler.accept(pick.token)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_follows_llamacpp(version: int) -> None:
    """Mirostat 1 and 2 draw llama.cpp's tokens over a long run, so their mu moves alike.

    The targets are low: for a flat distribution and a high mu version 1's k passes 2^31, where llama.cpp's conversion
    to an integer gives 1 and the formula means every candidate.
    """
    count = 400
    for seed, tau, eta in ((1, 1.5, 0.1), (2, 2.0, 0.3)):
        params = SamplingParams(seed=seed, temperature=1.0, mirostat=version, mirostat_tau=tau, mirostat_eta=eta)
        ours = Sampler(params, n_vocab=count, vocab=LetterVocab(count), eog_ids=())
        if version == 1:
            theirs = native.NativeSampler("mirostat", count, seed, tau, eta, 100)
        else:
            theirs = native.NativeSampler("mirostat_v2", seed, tau, eta)
        for step in range(300):
            logits = random_logits(step, count, 3.0)
            pick = ours.pick(logits)
            applied = theirs.apply(range(count), logits)
            assert pick.candidates.ids.tolist() == applied.ids.tolist()
            assert pick.token == applied.token
            ours.accept(pick.token)
            theirs.accept(pick.token)


@pytest.mark.parametrize("target", [-1.0, 0.0, 0.3, 1.0])
def test_adaptive_p_follows_llamacpp(target: float) -> None:
    """adaptive_p gives llama.cpp's logits and tokens over a long run."""
    count = 30
    params = SamplingParams(
        seed=9, samplers=("adaptive_p", "top_k"), top_k=count, adaptive_target=target, adaptive_decay=0.8
    )
    ours = Sampler(params, n_vocab=count, vocab=LetterVocab(count), eog_ids=())
    theirs = native.NativeSampler("adaptive_p", target, 0.8, 9)
    for step in range(300):
        logits = random_logits(step, count, 2.0)
        logits[3] = -np.inf
        pick = ours.pick(logits)
        top = native.NativeSampler("top_k", count).apply(range(count), logits)
        applied = theirs.apply(top.ids.tolist(), top.logits, is_sorted=True)
        assert pick.token == applied.token
        ours.accept(pick.token)
        theirs.accept(pick.token)


class NativeVocab:
    """The VocabView of a model in llama.cpp."""

    def __init__(self, model: llamacpp.Model) -> None:
        self.model = model
        self.n_vocab = model.n_vocab
        self.pointer = model._vocab

    def token_bytes(self, token: int, /, *, special: bool = False) -> bytes:
        return self.model.detokenize([token])

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        return self.model.tokenize(text, add_special=add_special, parse_special=parse_special)


@pytest.fixture(scope="module")
def vocab(smollm2_path: Path) -> Iterator[NativeVocab]:
    with llamacpp.Model(smollm2_path) as model:
        yield NativeVocab(model)


@pytest.mark.parametrize("breakers", [[], ["\n", ":", '"', "*"], ["he said", "你好。", "\n\n"]])
def test_dry_penalises_as_llamacpp(vocab: NativeVocab, breakers: list[str]) -> None:
    """DRY gives llama.cpp's logits on repetitive text, with one-token, many-token and Unicode breakers."""
    text = 'the cat sat: "the cat sat" he said the cat sat\n\nand he said 你好。 the cat sat on the cat sat on the cat'
    tokens = vocab.encode(text) * 2
    logits = np.zeros(vocab.n_vocab, np.float32)
    some = sorted(set(tokens))
    for multiplier, base, allowed, last_n in ((0.8, 1.75, 2, 64), (1.0, 1.1, 0, 40), (0.5, 1.0, 1, 1000)):
        theirs = native.dry(vocab.pointer, multiplier, base, allowed, last_n, breakers)
        params = SamplingParams(
            samplers=("dry",), dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed,
            dry_penalty_last_n=last_n, dry_sequence_breakers=tuple(breakers),
        )
        ours = Sampler(params, n_vocab=vocab.n_vocab, vocab=vocab, eog_ids=())
        penalised = 0
        for token in tokens:
            ours.accept(token)
            theirs.accept(token)
            expected = theirs.apply(some, logits[: len(some)])
            got = ours.distribution(logits).logits
            np.testing.assert_allclose(got[expected.ids], expected.logits, rtol=1e-5)
            assert np.count_nonzero(got) == np.count_nonzero(expected.logits)
            penalised += np.count_nonzero(got)
        assert penalised > 20


def test_infill_keeps_what_llamacpp_keeps(vocab: NativeVocab) -> None:
    """infill leaves llama.cpp's candidates: ends alone, sure tokens among common beginnings, or one end if unsure."""
    rng = np.random.default_rng(1)
    akin = [vocab.encode(word)[0] for word in ("th", "the", "there", "them", " t", " the", " a", " an", "x")]
    strange = [vocab.encode(word)[0] for word in ("q", "w", "e", "r", "t", "z", "u", "p", "1", "2", "3")]
    ends = [token for token in range(vocab.n_vocab) if vocab.model.is_end(token)]
    sampler = native.NativeSampler("infill", vocab.pointer)
    only_ends = one_end = some = 0
    for case in range(300):
        tokens = [*(strange if case % 4 == 0 else akin), *ends]
        logits = rng.normal(0.0, (0.1, 2.0, 4.0)[case % 3], len(tokens)).astype(np.float32)
        logits[-len(ends) :] -= (0.0, 8.0, 20.0)[case // 3 % 3]
        theirs = sampler.apply(tokens, logits).ids.tolist()
        ours = infill(Candidates(np.array(tokens, np.int32), logits), vocab.token_bytes, ends).ids.tolist()
        if len(theirs) == 1 and theirs[0] in ends:
            assert len(ours) == 1   # any end does: llama.cpp takes its end of turn, whatever the probabilities
            assert ours[0] in ends
            one_end += 1
        else:
            assert ours == theirs
            only_ends += set(theirs) <= set(ends)
            some += not set(theirs) <= set(ends)
    assert min(only_ends, one_end, some) > 10
