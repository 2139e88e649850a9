"""Sampler names and letters."""

from __future__ import annotations

import logging

import pytest

from kvs_core.sampling.names import DEFAULT_SAMPLERS, SAMPLER_NAMES, parse_sampler_letters, parse_samplers


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature", DEFAULT_SAMPLERS),
        ("TOP-K; topP ;min-p", ("top_k", "top_p", "min_p")),
        ("nucleus;temp;typ;typical;typical_p", ("top_p", "temperature", "typ_p", "typ_p", "typ_p")),
        ("infill;adaptive-p", ("infill", "adaptive_p")),
        ("", ()),
        (["Temperature", "top_k"], ("temperature", "top_k")),
    ],
)
def test_spellings(text: str | list[str], names: tuple[str, ...]) -> None:
    """Case, dashes and aliases all lead to one name, from a string or a list."""
    assert parse_samplers(text) == names


def test_letters() -> None:
    """The default letters are the default list, and every sampler has a letter."""
    assert parse_sampler_letters("edskypmxt") == DEFAULT_SAMPLERS
    assert parse_sampler_letters("TKia") == ("temperature", "top_k", "infill", "adaptive_p")
    assert set(DEFAULT_SAMPLERS) < set(SAMPLER_NAMES)


def test_unknown_names_are_warned_about_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """A name or letter that means nothing is left out, and the log says which and what there is."""
    with caplog.at_level(logging.WARNING):
        assert parse_samplers("top_k;tail_free;temp") == ("top_k", "temperature")
        assert parse_sampler_letters("kft") == ("top_k", "temperature")
    assert ["'tail_free'" in caplog.messages[0], "'f'" in caplog.messages[1]] == [True, True]
    assert "typ_p (y)" in caplog.messages[0]
