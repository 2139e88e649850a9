"""What a command advises where memory is too small is nothing that it would refuse for another reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Kvs

RESIDENT = ("-c", "8192", "-ub", "32", "--kv-stream-pool-mib", "2", "--kv-residency-mode", "resident")


@pytest.fixture
def run(kvs: Kvs, tiny_llama: Path) -> Kvs:
    """``kvs run`` of the tiny model for no token more than the prompt."""
    return lambda *flags: kvs("run", "-m", tiny_llama, "--device", "cpu", "-n", "0", *flags)


def test_the_context_holds_the_text(run: Kvs) -> None:
    """A smaller one is advised where the prompt, and what context shifts keep, would fit into it."""
    advice = "; raise it, or lower --ctx-size to 1024"
    assert run(*RESIDENT, "-p", "x").error.endswith(advice)
    assert run(*RESIDENT, "-p", "x", "-c", "1024").code == 0
    assert run(*RESIDENT, "-p", "word " * 1200).error.endswith("; raise it")
    kept = ("-p", "x", "--context-shift", "--keep")
    most = next(keep for keep in (1018, 1019, 1020, 1021) if run(*kept, str(keep + 1), "-c", "1024").code)
    assert run(*RESIDENT, *kept, str(most)).error.endswith(advice)
    assert run(*RESIDENT, *kept, str(most + 1)).error.endswith("; raise it")


def test_the_pages_are_those_of_the_session(run: Kvs, tmp_path: Path) -> None:
    """Once there is a file; how many tokens it has is not known by then either."""
    file, tight = tmp_path / "talk.kvs", ("-p", "x", "-c", "8192", "-ub", "32", "--kv-stream-pool-mib", "1")
    advice = "; raise it, or lower --kv-page-tokens to 64"
    assert run(*tight, "--session", file).error.endswith(advice)
    assert run("-p", "x", "--session", file).code == 0
    assert run(*tight, "--session", file).error.endswith("; raise it")
    assert run(*RESIDENT, "-p", "x", "--session", file).error.endswith("; raise it")


@pytest.mark.parametrize("command", ["run", "plan"])
def test_the_ubatch_holds_a_verification(kvs: Kvs, tiny_llama: Path, run: Kvs, command: str) -> None:
    """Of the widest draft: 65 rows here, for which 64 are too few."""
    def error(*flags: str) -> str:
        return (run("-p", "x", *flags) if command == "run" else kvs("plan", tiny_llama, *flags)).error

    tight = ("-c", "8192", "-ub", "512", "--kv-page-tokens", "32", "--kv-stream-arena-mib")
    drafts = ("--spec-type", "ngram-mod")
    assert error(*tight, "1").endswith("; raise it, or lower --ubatch-size to 64")
    assert error(*tight, "1", *drafts).endswith("; raise it")
    assert error(*tight, "2", *drafts).endswith("; raise it, or lower --ubatch-size to 128")
    assert run("-p", "x", *tight, "2", *drafts, "-ub", "128").code == 0


def test_a_bench_has_the_context_of_its_text(kvs: Kvs, tiny_llama: Path, tmp_path: Path) -> None:
    """And advises no other."""
    text = tmp_path / "text.txt"
    text.write_text("word " * 9000)
    error = kvs("bench", "perplexity", "-m", tiny_llama, "--text-file", text, *RESIDENT).error
    assert error.endswith("; raise it")
