"""Speculation on the command line: the same text, what is told of it, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import GREEDY, Kvs

RUN = ("-p", "hello wörld, hello wörld, hello", "-n", "24", "--ignore-eos", "-t", "1", "-c", "512")
SHORT_NGRAMS = ("--spec-ngram-simple-size-n", "1", "--spec-ngram-simple-size-m", "4")

TYPES = ["ngram-simple", "draft-mtp", "draft-resident", "draft-mtp,draft-resident", "ngram-simple,draft-mtp"]


@pytest.mark.parametrize("types", TYPES)
def test_the_text_is_that_without_drafts(kvs: Kvs, tiny_qwen35: Path, types: str) -> None:
    """At temperature 0 and with a seed; tokens, probabilities and text."""
    for sampling in (GREEDY, ("--seed", "5", "--temp", "0.8")):
        command = ("run", "-m", tiny_qwen35, *RUN, *sampling, "--json", "--n-probs", "3")
        plain = kvs(*command).json
        drafted = kvs(*command, "--spec-type", types, "--spec-adaptive", "off", *SHORT_NGRAMS).json
        assert plain["spec"] is None
        assert {"draft_n", "draft_n_accepted"}.isdisjoint(plain["timings"])
        for key in ("token_ids", "text", "probs", "stop_reason", "generated_tokens"):
            assert drafted[key] == plain[key], key


def test_what_is_told_of_drafts(kvs: Kvs, tiny_qwen35: Path) -> None:
    """JSON and summary count rounds and tokens, together and by drafter, and the counts agree."""
    command = ("run", "-m", tiny_qwen35, *RUN, *GREEDY, "--spec-adaptive", "off")
    told = kvs(*command, "--json", "--spec-type", "draft-resident,ngram-simple", *SHORT_NGRAMS)
    result = told.json
    spec, timings = result["spec"], result["timings"]
    assert set(spec) == {"types", "rounds", "drafted", "accepted", "mean_width", "synthetic", "by_type"}
    assert spec["types"] == ["ngram-simple", "draft-resident"]
    assert set(spec["by_type"]) == set(spec["types"])
    for key in ("drafted", "accepted"):
        assert spec[key] == sum(counts[key] for counts in spec["by_type"].values())
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (spec["drafted"], spec["accepted"])
    # The first token comes from the prompt; every round gives one, and those that are accepted.
    assert result["generated_tokens"] == 24 == 1 + spec["rounds"] + spec["accepted"]
    assert spec["mean_width"] == pytest.approx(1 + spec["drafted"] / spec["rounds"])
    assert spec["synthetic"] is False

    alone = kvs(*command, "--json", "--spec-type", "draft-resident", "--spec-draft-n-max", "5").json["spec"]
    assert alone["accepted"] == alone["drafted"] == 19   # all is resident: a draft is what the model says
    assert alone["rounds"] == 4
    lines = kvs(*command, "--spec-type", "draft-resident", "--spec-draft-n-max", "5").err.splitlines()
    assert "drafts: 4 rounds; 19 of 19 tokens accepted (100%): draft-resident 19 of 19" in lines


def test_drafts_that_do_not_pay_are_paused_unless_told_otherwise(kvs: Kvs, tiny_qwen35: Path) -> None:
    """``--spec-adaptive off`` drafts in every round with room for it; without it there are rounds without drafts."""
    command = ("run", "-m", tiny_qwen35, *RUN, "--json", "--spec-type", "draft-mtp", "-n", "60", "--seed", "3")
    always = kvs(*command, "--spec-adaptive", "off").json["spec"]
    adaptive = kvs(*command).json["spec"]
    assert always["by_type"]["draft-mtp"]["drafts"] >= always["rounds"] - 1   # no room behind the last token but one
    assert 0 < adaptive["by_type"]["draft-mtp"]["drafts"] < adaptive["rounds"] - 1


@pytest.mark.parametrize("flags", [("--spec-synth-len", "2"), ("--spec-synth-rates", "0.9,0.5,0.1")])
def test_pretended_acceptance_says_so(kvs: Kvs, tiny_qwen35: Path, flags: tuple[str, str]) -> None:
    """Its text is no text: JSON and summary say that."""
    command = ("run", "-m", tiny_qwen35, *RUN, "--spec-type", "draft-mtp", *flags, "--seed", "1")
    assert kvs(*command, "--json").json["spec"]["synthetic"] is True
    assert re.search(r"drafts: .*; acceptance is synthetic, the text means nothing", kvs(*command).err)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--spec-draft-n-max", "8"], "--spec-draft-n-max 8: draft-mtp drafts 1 to 7 tokens"),
        (["--spec-draft-n-max", "0"], "--spec-draft-n-max 0: draft-mtp drafts 1 to 7 tokens"),
        (["--spec-draft-n-min", "4"], "--spec-draft-n-min 4 with --spec-draft-n-max 3"),
        (["-ub", "3"], r"--spec-draft-n-max drafts 3 tokens: verifying them takes 4 rows.*--ubatch-size is 3"),
        (["-ctkd", "q8_0"], "--spec-draft-type-k q8_0: drafts share the type of the cache, f16"),
        (["-ctvd", "f32"], "--spec-draft-type-v f32: drafts share the type of the cache, f16"),
        (["-ctk", "q8_0", "-ctkd", "f16"], "drafts share the type of the cache, q8_0"),
        (["--kv-stream-auxiliary-layers", "2"], "--kv-stream-auxiliary-layers 2: the MTP layers of tiny qwen35 are 1"),
        (["--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", "65"], "verifying that takes 66 rows"),
        (["--spec-type", "ngram-simple", "-ub", "32"], "verifying them takes 49 rows, the size given by --ubatch-size"),
        (["--spec-type", "draft-simple"], "--spec-type draft-simple: separate draft models are not loaded; use "),
        (["--spec-type", "draft-nothing"], "draft-nothing"),
        (["-md", "draft.gguf"], "separate draft models are not loaded"),
    ],
)
def test_refusals(kvs: Kvs, tiny_qwen35: Path, argv: list[str], words: str) -> None:
    """One line with what is wrong, its numbers, and what to do."""
    assert re.search(words, kvs("run", "-m", tiny_qwen35, *RUN, "--spec-type", "draft-mtp", *argv).error)


def test_a_model_without_an_mtp_block(kvs: Kvs, tiny_llama: Path) -> None:
    """draft-mtp is refused with the reason; drafts on resident pages are there for every model."""
    command = ("run", "-m", tiny_llama, *RUN, *GREEDY)
    error = kvs(*command, "--spec-type", "draft-mtp").error
    assert re.search(r"tiny llama has no MTP block \(llama.nextn_predict_layers is 0\); .*draft-resident", error)
    assert "the MTP layers of tiny llama are 0" in kvs(*command, "--kv-stream-auxiliary-layers", "1").error
    assert kvs(*command, "--spec-type", "draft-resident").out == kvs(*command).out


def test_what_agrees_is_taken(kvs: Kvs, tiny_qwen35: Path) -> None:
    """The cache's own types for drafts, the model's own count of layers, and several lists of types."""
    command = ("run", "-m", tiny_qwen35, *RUN, *GREEDY, "-ctk", "q8_0", "-ctv", "q4_0")
    same = ("-ctkd", "q8_0", "-ctvd", "q4_0", "--kv-stream-auxiliary-layers", "1")
    expected = kvs(*command)
    for types in (["draft-mtp,ngram-cache"], ["draft-mtp", "--spec-type", "ngram-cache"], ["none"]):
        assert kvs(*command, *same, "--spec-type", *types).out == expected.out
    mixed = kvs(*command, "--json", "--spec-type", "draft-mtp", "--spec-type", "ngram-cache").json["spec"]["types"]
    assert mixed == ["ngram-cache", "draft-mtp"]
    assert kvs(*command, "--json", "--spec-default").json["spec"]["types"] == ["ngram-mod"]
