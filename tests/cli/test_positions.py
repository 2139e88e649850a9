"""``--rope-*`` and ``--yarn-*``: they count, they make longer contexts possible, and what lies beyond is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import GREEDY, Kvs

RUN = ("-p", "The river carries stones from the mountain to the sea.", "-n", "16", "--json", "--ignore-eos", *GREEDY)
YARN = ("--rope-scaling", "yarn", "--rope-scale", "8", "--yarn-orig-ctx", "16")
KEYS = ("llama.rope.scaling.type=str:yarn,llama.rope.scaling.factor=float:8,"
        "llama.rope.scaling.original_context_length=int:16")


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        (YARN, KEYS),
        ((*YARN, "--yarn-beta-fast", "4", "--yarn-beta-slow", "0.5", "--yarn-ext-factor", "0.8",
          "--yarn-attn-factor", "0.9"),
         f"{KEYS},llama.rope.scaling.yarn_beta_fast=float:4,llama.rope.scaling.yarn_beta_slow=float:0.5,"
         "llama.rope.scaling.yarn_ext_factor=float:0.8,llama.rope.scaling.yarn_attn_factor=float:0.9"),
        (("--rope-scaling", "linear", "--rope-freq-scale", "0.125"), "llama.rope.scaling.factor=float:8"),
        (("--rope-freq-base", "100"), "llama.rope.freq_base=float:100"),
    ],
)
def test_flags_are_the_keys_of_a_file(kvs: Kvs, tiny_llama: Path, flags: tuple[str, ...], keys: str) -> None:
    """The same probabilities from flags as from the model's keys, and other ones than without."""
    plain, told, keyed = (
        kvs("run", "-m", tiny_llama, *RUN, "--n-probs", "2", *more).json["probs"]
        for more in ((), flags, ("--override-kv", keys))
    )
    assert told == keyed
    assert told != plain


def test_a_scaled_context_may_be_longer_than_the_trained_one(kvs: Kvs, tiny_llama: Path) -> None:
    """Up to the factor times the original context, in ``run``, ``info`` and ``plan`` alike; then it is capped."""
    trained = ("--override-kv", "llama.context_length=int:512")
    scaled = ("--rope-scaling", "yarn", "--rope-scale", "4")
    told = kvs("run", "-m", tiny_llama, *RUN, *trained, "-c", "2048").err
    assert "trained for 512 tokens; the context is 512" in told
    done = kvs("run", "-m", tiny_llama, *RUN, *trained, *scaled, "-c", "2048")
    assert "trained for" not in done.err
    assert "trained for 512 tokens; the context is 2048" in kvs(
        "run", "-m", tiny_llama, *RUN, *trained, *scaled, "-c", "4096"
    ).err
    for command in ("info", "plan"):
        told = kvs(command, tiny_llama, *trained, *scaled, "-c", "2048", "--json").json
        assert (told["plan"] if command == "info" else told)["context_tokens"] == 2048


def test_dual_chunks_are_refused_where_they_are_not_plain(kvs: Kvs, tiny_llama: Path) -> None:
    """A context of one chunk runs as it would without; a longer one, which the default is, is one line."""
    key = ("--override-kv", "llama.attention.dual_chunk.chunk_size=int:1024")
    plain = kvs("run", "-m", tiny_llama, *RUN, "-c", "1024").json["token_ids"]
    assert kvs("run", "-m", tiny_llama, *RUN, "-c", "1024", *key).json["token_ids"] == plain
    words = ("attends in dual chunks beyond 1024 tokens, for which kvs has no code, and the context is 32768; "
             "use --ctx-size 1024 or less")
    for command in (("run", "-m", tiny_llama, *RUN), ("info", tiny_llama), ("plan", tiny_llama)):
        assert words in kvs(*command, *key).error
