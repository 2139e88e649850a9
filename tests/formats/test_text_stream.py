"""Streamed text is the whole text, however it was cut, and shows nothing of a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvs_core.formats.text_stream import StopMatcher, Utf8Stream

CUTS = st.lists(st.integers(1, 5), min_size=1)
BROKEN = st.lists(st.sampled_from([b"a", "é".encode(), "🙂".encode(), b"\xf0\x9f", b"\xff", b"\xc3", b"\xed\xa0\x80"]))


def sizes(length: int, cuts: list[int]) -> list[slice]:
    """Slices that cover [0, length), as long as ``cuts`` says, over and over."""
    out: list[slice] = []
    start = 0
    while start < length:
        out.append(slice(start, start + cuts[len(out) % len(cuts)]))
        start = out[-1].stop
    return out


@given(whole=st.binary(max_size=30) | BROKEN.map(b"".join), cuts=CUTS)
def test_streamed_bytes_decode_as_the_whole(whole: bytes, cuts: list[int]) -> None:
    """However bytes are cut, the text is that of decoding them at once, invalid ones included."""
    stream = Utf8Stream()
    text = "".join(stream.push(whole[cut]) for cut in sizes(len(whole), cuts))
    assert text + stream.flush() == whole.decode("utf-8", errors="replace")
    assert stream.push(b"a") == "a"


@given(text=st.text(st.characters(codec="utf-8")))
def test_only_whole_characters_come_out(text: str) -> None:
    """A character comes with its last byte, never before and never later."""
    stream = Utf8Stream()
    for char in text:
        encoded = char.encode()
        assert [stream.push(encoded[i : i + 1]) for i in range(len(encoded))] == [""] * (len(encoded) - 1) + [char]
    assert stream.flush() == ""


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What ``StopMatcher`` promises, found slowly: the text before the stop that is complete first, and that stop."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(text=st.text("ab\nc", max_size=30), stops=st.lists(st.text("ab\n", max_size=5), max_size=4), cuts=CUTS)
def test_stops_are_found_across_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    """However text is cut, the first complete stop string ends it, and neither it nor a part of it was shown."""
    matcher = StopMatcher(stops)
    shown = ""
    found = None
    for cut in sizes(len(text), cuts):
        shown_now, found = matcher.push(text[cut])
        shown += shown_now
        if found is None:
            so_far = text[: cut.stop]
            begins = {stop[:size] for stop in stops for size in range(len(stop))}
            assert shown == next(so_far[:at] for at in range(len(so_far) + 1) if so_far[at:] in {"", *begins})
    shown += matcher.flush()
    assert (shown, found) == first_stop(text, stops)


def test_text_that_can_be_no_stop_is_not_held_back() -> None:
    """Text comes out as soon as it cannot begin a stop string any more."""
    matcher = StopMatcher(["</end>"])
    assert matcher.push("x <") == ("x ", None)
    assert matcher.push("/en") == ("", None)
    assert matcher.push("try") == ("</entry", None)
    assert matcher.push("</end> y") == ("", "</end>")
    assert matcher.flush() == ""


def test_without_stops_everything_passes() -> None:
    """No stop strings, or empty ones, hold nothing back and match nothing."""
    for stops in ([], [""]):
        assert StopMatcher(stops).push("abc") == ("abc", None)
