"""Every n-gram drafter gives the drafts of its slow, literal twin, over requests whose texts grow, shrink, differ."""

from __future__ import annotations

from pathlib import Path
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.settings.drafters import NgramCacheSettings, NgramMapSettings, NgramModSettings, NgramSimpleSettings
from kvs_core.speculative.lookup_file import write_lookup
from kvs_core.speculative.ngram import NgramSimple
from kvs_core.speculative.ngram_cache import NgramCache
from kvs_core.speculative.ngram_map import NgramMap
from kvs_core.speculative.ngram_mod import NextTokens, NgramMod
from tests.speculative import oracles
from tests.speculative.play import Oracle, play

seeds = st.integers(0, 1 << 32).map(Random)


def nothing(*_: object) -> None:
    return None


@settings(max_examples=100)
@given(seeds, st.integers(1, 6), st.integers(1, 12), st.sampled_from([2, 4, 50]))
def test_simple(random: Random, n: int, m: int, alphabet: int) -> None:
    """ngram-simple finds what a scan from the end finds."""
    oracle = Oracle(nothing, lambda h, t: oracles.simple(h, t, n, m), nothing)
    play(random, NgramSimple(NgramSimpleSettings(n, m)), oracle, alphabet=alphabet)


@settings(max_examples=100)
@given(seeds, st.integers(1, 5), st.integers(1, 8), st.integers(1, 3), st.booleans(), st.sampled_from([2, 4, 50]),
       st.sampled_from([7, 64, 1 << 18]))
def test_maps(random: Random, n: int, m: int, hits: int, values: bool, alphabet: int, slots: int) -> None:
    """Both map types keep their table, keys and counts as the rules say, with collisions of slots and without."""
    twin = oracles.Map(n, m, hits, values=values, slots=slots)
    with mock.patch("kvs_core.speculative.ngram_map.TABLE_SLOTS", slots):
        drafter = NgramMap(NgramMapSettings(n, m, hits), counts_values=values)
        play(random, drafter, Oracle(twin.begin, twin.draft, twin.accept), alphabet=alphabet, requests=6)


@settings(max_examples=100)
@given(seeds, st.integers(1, 5), st.integers(0, 6), st.integers(1, 12), st.sampled_from([2, 4, 50]),
       st.sampled_from([11, 256, 1 << 16]))
def test_mod(random: Random, n: int, n_min: int, n_max: int, alphabet: int, slots: int) -> None:
    """ngram-mod learns, overwrites and clears as the rules say, with collisions of slots and without."""
    twin = oracles.Mod(n, n_min, n_max, slots)
    with mock.patch("kvs_core.speculative.ngram_mod.TABLE_SLOTS", slots):
        drafter = NgramMod(NgramModSettings(n, n_min, n_max), NextTokens())
        play(random, drafter, Oracle(twin.begin, twin.draft, twin.accept), alphabet=alphabet)


@settings(max_examples=100)
@given(seeds, st.sampled_from([2, 4, 50]), st.booleans())
def test_cache(tmp_path_factory: pytest.TempPathFactory, random: Random, alphabet: int, with_files: bool) -> None:
    """ngram-cache counts followers as maps that grow would, and weighs both files as the rules say."""
    maps: list[oracles.Counts] = [{}, {}]
    files: list[Path | None] = [None, None]
    for index, sizes in enumerate(((1, 2, 3, 4), (2,))) if with_files else ():
        for _ in range(30):
            gram = tuple(random.randrange(alphabet) for _ in range(random.choice(sizes)))
            maps[index][gram] = {token: random.randint(1, 5) for token in random.sample(range(alphabet), 2)}
        path = tmp_path_factory.mktemp("lookup") / "cache"
        write_lookup(path, maps[index])
        files[index] = path
    twin = oracles.Cache(*maps)
    drafter = NgramCache(NgramCacheSettings(static=files[1], dynamic=files[0]), n_vocab=alphabet)
    play(random, drafter, Oracle(nothing, twin.draft, nothing), alphabet=alphabet)


@pytest.mark.parametrize("kind", ["simple", "map-k", "map-k4v", "mod", "cache"])
def test_the_texts_make_all_of_them_draft(kind: str) -> None:
    """The comparison above compares drafts, not their absence."""
    drafter, twin = {
        "simple": lambda: (NgramSimple(NgramSimpleSettings(3, 6)),
                           Oracle(nothing, lambda h, t: oracles.simple(h, t, 3, 6), nothing)),
        "map-k": lambda: _map_pair(values=False),
        "map-k4v": lambda: _map_pair(values=True),
        "mod": lambda: _mod_pair(),
        "cache": lambda: (NgramCache(NgramCacheSettings(), n_vocab=4),
                          Oracle(nothing, oracles.Cache({}, {}).draft, nothing)),
    }[kind]()
    drafted = play(Random(3), drafter, twin, alphabet=4, requests=24)
    assert drafted > 50


def _map_pair(*, values: bool) -> tuple[NgramMap, Oracle]:
    twin = oracles.Map(3, 6, 1, values=values, slots=1 << 18)
    return NgramMap(NgramMapSettings(3, 6), counts_values=values), Oracle(twin.begin, twin.draft, twin.accept)


def _mod_pair() -> tuple[NgramMod, Oracle]:
    twin = oracles.Mod(3, 2, 8, 4 << 20)
    return NgramMod(NgramModSettings(3, 2, 8), NextTokens()), Oracle(twin.begin, twin.draft, twin.accept)
