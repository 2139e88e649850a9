"""What a sweep is to run, from the texts of its flags."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_cli.bench.grid import MOST_POINTS, Variant, parse_contexts, parse_variants, points, pretend
from kvs_core.errors import SettingsError
from kvs_core.settings.drafters import ModelDraftSettings, SpeculativeSettings


def test_contexts_are_lists_and_ranges() -> None:
    """Numbers, ranges with their last one, and both together; ascending and each once."""
    assert parse_contexts("8192") == (8192,)
    assert parse_contexts("8192:32768:8192") == (8192, 16384, 24576, 32768)
    assert parse_contexts("65536, 1024:3000:1024,1024") == (1024, 2048, 65536)


@pytest.mark.parametrize("text", [
    "", "8192,", "1:2", "0", "255", "8192:4096:1024", "1024:2048:0", "x", "-8192", "1e5", "99999999999",
    "1024:2048:1:1", "256:1073741824:1", "²",
])
def test_other_contexts_are_refused(text: str) -> None:
    """One line that names the flag, quickly, for what is no list of contexts or too long a one."""
    with pytest.raises(SettingsError, match="--contexts"):
        parse_contexts(text)


def test_variants_come_once_and_in_order() -> None:
    """Lengths of draft-mtp, then types; 0 and none are plain decoding."""
    made = parse_variants("0,1,3", "none,draft-resident,ngram-mod+draft-mtp:5,draft-mtp:3", default_n_max=4)
    assert [variant.name for variant in made] == ["plain", "mtp 1", "mtp 3", "resident 4", "ngram-mod + mtp 5"]
    assert made[4].arguments == ["--spec-type", "ngram-mod,draft-mtp", "--spec-draft-n-max", "5"]
    assert parse_variants(None, None, default_n_max=3) == (Variant(),)


@pytest.mark.parametrize(("lengths", "types"), [
    ("8", None), ("", None), ("1,x", None), (None, "mtp"), (None, "ngram-mod:3"), (None, "draft-mtp:0"),
    (None, "draft-mtp:8"), (None, "draft-mtp:1+draft-resident:2"), (None, ""), (None, "draft-mtp+"),
])
def test_other_variants_are_refused(lengths: str | None, types: str | None) -> None:
    """One line for a length or a drafter that there is not."""
    with pytest.raises(SettingsError):
        parse_variants(lengths, types, default_n_max=3)


@given(st.floats(1.0, 4.0))
def test_one_pretended_length_is_one_probability(length: float) -> None:
    """The longest draft gives the length that was asked for; in a shorter one each position is accepted as often, and
    the engine takes what comes out."""
    made = pretend(parse_variants("0,1,2,3", None, default_n_max=3), f"{length:.4f}")
    assert made[0] == Variant()
    assert made[3].synth_len == pytest.approx(length, abs=1e-3)
    for variant in made[1:]:
        assert variant.rates == made[3].rates[: variant.n_max]
        rates = tuple(float(rate) for rate in variant.arguments[-1].split(","))
        SpeculativeSettings(variant.types, draft=ModelDraftSettings(n_max=variant.n_max), synth_rates=rates)


def test_each_variant_may_have_its_pretended_length() -> None:
    """As many numbers as variants that draft."""
    made = pretend(parse_variants("0,1,3", None, default_n_max=3), "1.8,2.5")
    assert [variant.synth_len for variant in made] == [None, 1.8, 2.5]


@pytest.mark.parametrize(("lengths", "types", "synth"), [
    ("0", None, "2"), ("0,1", None, "2.5"), ("1,2,3", None, "1.5,2"), ("1", None, "x"), ("1", None, "0.5"),
    (None, "ngram-mod", "2"), ("1", None, ""),
])
def test_lengths_that_cannot_be_are_refused(lengths: str | None, types: str | None, synth: str) -> None:
    """One line that names the flag: nothing drafts, out of range, too many, or drafts as long as the text has it."""
    with pytest.raises(SettingsError, match="--spec-synth-len"):
        pretend(parse_variants(lengths, types, default_n_max=3), synth)


def test_repeats_come_round_by_round() -> None:
    """All points once, then all of them again, so that no variant is measured only while the machine is cool."""
    made = points((512, 1024), (Variant(), Variant(("draft-mtp",), 2)), 2)
    assert [point.name for point in made[:4]] == [
        "c512-plain-r1", "c512-mtp-2-r1", "c1024-plain-r1", "c1024-mtp-2-r1"]
    assert [point.repeat for point in made] == [1] * 4 + [2] * 4
    with pytest.raises(SettingsError, match=str(MOST_POINTS)):
        points(range(MOST_POINTS), (Variant(),), 2)
