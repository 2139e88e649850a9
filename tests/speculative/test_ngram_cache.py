"""ngram-cache on texts made by hand, and its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.errors import SettingsError
from kvs_core.settings.drafters import NgramCacheSettings
from kvs_core.speculative.lookup_file import Lookup, read_lookup, write_lookup
from kvs_core.speculative.ngram_cache import NgramCache
from tests.speculative.play import proposed

N_VOCAB = 100
token = st.integers(0, N_VOCAB - 1)
grams = st.lists(token, min_size=1, max_size=4).map(tuple)
lookups = st.dictionaries(grams, st.dictionaries(token, st.integers(1, (1 << 31) - 1), max_size=4), max_size=6)


def int32s(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)


def drafter_with(tmp_path: Path, *, static: Lookup | None = None, dynamic: Lookup | None = None) -> NgramCache:
    paths: list[Path | None] = [None, None]
    for index, lookup in enumerate((static, dynamic)):
        if lookup is not None:
            path = paths[index] = tmp_path / str(index)
            write_lookup(path, lookup)
    return NgramCache(NgramCacheSettings(static=paths[0], dynamic=paths[1]), n_vocab=N_VOCAB)


@pytest.mark.parametrize(
    ("history", "draft"),
    [
        ([7, 1, 2, 3, 4, 7, 1, 2], [3, 4, 7, 1, 2, 3, 4, 7]),   # eight tokens, following its own
        ([1, 2, 3, 4], []),
        ([5], []),
        ([8, 1, 2, 9, 1, 2], []),                                # two tokens need two times,
        ([8, 1, 2, 9, 4, 1, 2, 9, 5, 1, 2], [9]),
        ([8, 1, 2, 9, 3, 8, 1, 2], [9, 3, 8, 1, 2, 9, 3, 8]),    # three tokens one
        ([8, 1, 9, 1], []),                                      # one token needs two times
        ([1, 6, 1, 6, 1], [6, 1, 6, 1, 6, 1, 6, 1]),
        ([2, 1, 5, 3, 1, 6, 4, 1], []),                          # and two of three
        ([2, 1, 5, 3, 1, 5, 8, 1, 6, 4, 1], [5]),
    ],
)
def test_rounds_without_files(tmp_path: Path, history: list[int], draft: list[int]) -> None:
    """The largest n-gram that was seen often and clearly enough decides, token by token."""
    assert proposed(drafter_with(tmp_path), history)[: max(len(draft), 1)] == draft


def test_nothing_is_learnt_from_rounds_of_one_token(tmp_path: Path) -> None:
    """The text is learnt in the parts in which it came, and no n-gram reaches from one part into the next."""
    one_by_one, at_once = drafter_with(tmp_path), drafter_with(tmp_path)
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
    for size in range(1, len(text) + 1):
        assert proposed(one_by_one, text[:size]) == []
    assert proposed(at_once, text) == [3, 4, 5, 1, 2, 3, 4, 5]


def test_a_later_shorter_text_teaches_nothing(tmp_path: Path) -> None:
    """What was learnt stays; the next text is learnt from the length of the longest before."""
    drafter = drafter_with(tmp_path)
    proposed(drafter, [1, 2, 3, 4, 5, 6])
    assert proposed(drafter, [7, 8, 9, 7, 8]) == []
    assert proposed(drafter, [9, 1, 2, 3]) == [4, 5, 6]


def test_equal_counts_go_to_the_token_first_seen_last(tmp_path: Path) -> None:
    """Two followers seen once each: half is enough for three tokens."""
    assert proposed(drafter_with(tmp_path), [1, 2, 3, 5, 1, 2, 3, 6, 1, 2, 3])[0] == 6
    assert proposed(drafter_with(tmp_path), [1, 2, 3, 6, 1, 2, 3, 5, 1, 2, 3])[0] == 5


@pytest.mark.parametrize(
    ("dynamic", "static", "draft"),
    [
        ({(2,): {50: 4}}, None, [50]),
        ({(2,): {50: 3}}, None, []),                                      # the file is asked for more than the text
        ({(1, 2): {50: 2, 51: 1}}, None, [50]),
        ({(1, 2): {50: 65, 51: 35}}, None, []),
        ({(1, 2): {50: 65, 51: 35}, (2,): {51: 9}}, None, [51]),          # a smaller n-gram that is clear
        (None, {(1, 2): {60: 1, 61: 1}}, [61]),
        (None, {(1, 2): {60: 1}}, []),
        (None, {(2,): {60: 9}}, []),                                      # of the static file only two tokens count
        ({(2,): {50: 4}}, {(1, 2): {60: 9}}, [50]),                       # it comes last
        ({(2,): {50: 9, 51: 3}}, {(1, 2): {51: 1}}, []),                  # but weighs: 51 scores 300, 3 of 12 fail
        ({(2,): {50: 3, 51: 9}}, {(1, 2): {51: 1}}, [51]),
    ],
)
def test_files(tmp_path: Path, dynamic: Lookup | None, static: Lookup | None, draft: list[int]) -> None:
    """First the text, then the dynamic file, then the static one; the static one also weighs the others' tokens."""
    assert proposed(drafter_with(tmp_path, static=static, dynamic=dynamic), [1, 2]) == draft


@given(lookups)
def test_a_file_reads_back(tmp_path_factory: pytest.TempPathFactory, lookup: Lookup) -> None:
    """What is written is read, in the same order."""
    path = tmp_path_factory.mktemp("lookup") / "cache"
    write_lookup(path, lookup)
    read = read_lookup(path, N_VOCAB)
    assert read == lookup
    assert [list(followers) for followers in read.values()] == [list(followers) for followers in lookup.values()]


def test_the_bytes_of_a_file(tmp_path: Path) -> None:
    """Four tokens, unused ones -1, the number of followers, and pairs: int32, little-endian."""
    path = tmp_path / "cache"
    write_lookup(path, {(1, 2): {3: 4}})
    assert path.read_bytes() == int32s(1, 2, -1, -1, 1, 3, 4)


@given(st.one_of(st.binary(max_size=80),
                 st.lists(st.sampled_from([-1, 0, 1, 2, 200, -7, 1 << 30]), max_size=20).map(
                     lambda numbers: int32s(*numbers))))
def test_any_other_file_is_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """No foreign error, no large allocation; and what is read holds only tokens of the model."""
    path = tmp_path_factory.mktemp("lookup") / "cache"
    path.write_bytes(data)
    lookup, complaint = {}, ""
    try:
        lookup = read_lookup(path, N_VOCAB)
    except SettingsError as error:
        complaint = str(error)
    assert "\n" not in complaint
    for gram, followers in lookup.items():
        assert 1 <= len(gram) <= 4
        assert all(0 <= each < N_VOCAB for each in (*gram, *followers))
        assert all(count > 0 for count in followers.values())


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((1, 2, -1), "it ends inside an n-gram"),
        ((-1, -1, -1, -1, 0), "is no n-gram"),
        ((1, -1, 2, -1, 0), "is no n-gram"),
        ((1, 2, -1, -1, 2, 3, 4), "2 followers do not fit"),
        ((1, 2, -1, -1, -1), "-1 followers do not fit"),
        ((1, 2, -1, -1, 1, 3, 0), "a count below 1"),
        ((1, 2, -1, -1, 1, 100, 1), "it counts token 100, this model's tokens are 0 to 99"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, numbers: tuple[int, ...], words: str) -> None:
    """The message says what, and where."""
    path = tmp_path / "cache"
    path.write_bytes(int32s(*numbers))
    with pytest.raises(SettingsError, match=words):
        read_lookup(path, N_VOCAB)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """An unreadable file stops the start, as in llama-server."""
    with pytest.raises(SettingsError, match=r"nowhere: No such file"):
        NgramCache(NgramCacheSettings(static=tmp_path / "nowhere"), n_vocab=N_VOCAB)
