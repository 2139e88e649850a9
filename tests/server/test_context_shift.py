"""``kvs serve --context-shift``: texts longer than the context, and conversations that go on behind a shift."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running, running
from tests.support.tiny_gguf import write_tiny_llama

PROMPT = [5 + index * 7 % 200 for index in range(40)]
LONG: dict[str, Any] = {"prompt": PROMPT, "n_predict": 768, "temperature": 0, "ignore_eos": True, "return_tokens": True}


@pytest.fixture(scope="module")
def server(llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A context of 256 tokens, of which a request that says nothing keeps 5 and the BOS."""
    folder = tmp_path_factory.mktemp("slots")
    with running("-m", llama_path, "-c", 256, "--context-shift", "--keep", 5, "--slot-save-path", folder) as started:
        yield started


def forgotten(total: int, keep: int) -> tuple[int, int]:
    """Of a text of ``total`` tokens with rows, in a context of 256: how many are dropped, and how many are left."""
    dropped = held = 0
    for _ in range(total):
        if held == 255:
            dropped += (255 - keep) // 2
            held -= (255 - keep) // 2
        held += 1
    return dropped, held


def test_a_text_of_three_contexts(server: Running) -> None:
    """It ends where the request says, is truncated, and counts all its tokens."""
    reply = server.post("/completion", **LONG)
    assert (reply["stop_type"], reply["truncated"]) == ("limit", True)
    assert reply["tokens_predicted"] == reply["timings"]["predicted_n"] == len(reply["tokens"]) == 768
    assert (reply["timings"]["prompt_n"] + reply["timings"]["cache_n"], reply["tokens_evaluated"]) == (40, 40)
    assert reply["timings"]["predicted_per_second"] == pytest.approx(767e3 / reply["timings"]["predicted_ms"])
    assert reply["tokens_cached"] == forgotten(40 + 767, 6)[1]


def test_streamed_pages_give_the_same_text(tmp_path: Path) -> None:
    """Of a model of large pages, most of which pass the link in every step before a shift."""
    path = write_tiny_llama(tmp_path / "llama.gguf", seed=2, n_layer=2, kv_heads=4, head_dim=128, pre="llama-bpe")
    made = []
    for small in ((), ("--kv-stream-pool-mib", 1)):
        with running(
            "-m", path, "-c", 256, "-ub", 32, "-ctk", "f32", "--kv-page-tokens", 32, "--context-shift", "--keep", 5,
            "--metrics", *small,
        ) as started:
            tokens = started.post("/completion", **LONG)["tokens"]
            made.append((tokens, moved(started)))
    (resident, few), (streamed, many) = made
    assert streamed == resident
    assert many > 20 * few


def moved(server: Running) -> float:
    """Bytes copied to the device."""
    found = re.search(r"^kvs:h2d_bytes_total (\S+)$", server.http.get("/metrics").text, re.M)
    assert found is not None
    return float(found[1])


def test_without_it_the_context_ends_the_text(llama_path: Path) -> None:
    """As before, whatever the request says of a shift."""
    with running("-m", llama_path, "-c", 256) as plain:
        reply = plain.post("/completion", **LONG, n_keep=4, n_discard=3)
    assert (reply["stop_type"], reply["truncated"], reply["tokens_predicted"]) == ("limit", True, 216)
    assert (reply["generation_settings"]["n_keep"], reply["generation_settings"]["n_discard"]) == (4, 3)


def test_a_conversation_goes_on_behind_a_shift(server: Running) -> None:
    """The slot holds what is left of the text: a prompt that says it is not read again, and gives the next tokens as if
    the text had gone on; one that says the dropped tokens too shares what was kept in front of them."""
    asked = LONG | {"n_predict": 300, "cache_prompt": True}
    whole = server.post("/completion", **asked | {"n_predict": 310})["tokens"]
    first = server.post("/completion", **asked | {"cache_prompt": False})["tokens"]
    assert first == whole[:300]
    dropped, held = forgotten(40 + 299, 6)
    text = [*PROMPT, *first]
    left = text[:6] + text[6 + dropped :]
    assert len(left) == held + 1
    again = server.post("/completion", **asked | {"prompt": left, "n_predict": 10})
    assert (again["timings"]["cache_n"], again["timings"]["prompt_n"]) == (held, 1)
    assert again["tokens"] == whole[300:]
    assert not again["truncated"]
    other = server.post("/completion", **asked | {"prompt": text[:100], "n_predict": 1})
    assert other["timings"]["cache_n"] == 6


def test_what_a_request_says_of_it(server: Running) -> None:
    """``n_keep`` -1 keeps the prompt, ``n_discard`` says how many tokens go; both are echoed, and checked."""
    asked = LONG | {"n_predict": 240, "n_keep": -1, "n_discard": 20}
    reply = server.post("/completion", **asked)
    assert reply["truncated"]
    assert (reply["generation_settings"]["n_keep"], reply["generation_settings"]["n_discard"]) == (-1, 20)
    # 279 rows: two shifts of 20 tokens.
    assert reply["tokens_cached"] == 239
    assert server.post("/completion", **LONG | {"n_predict": 1})["generation_settings"]["n_keep"] == 5
    text = [*PROMPT, *reply["tokens"]]
    left = text[:41] + text[41 + 40 :]
    server.post("/completion", **asked)
    again = server.post("/completion", **asked | {"prompt": left, "n_predict": 1})
    assert again["timings"]["cache_n"] == 239
    server.post("/completion", 400, **asked | {"n_keep": -2})
    server.post("/completion", 400, **asked | {"n_discard": -1})
    server.post("/completion", 400, **asked | {"n_discard": "x"})


def test_what_leaves_no_room_is_cut_down(
    server: Running, llama_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the context all but four tokens are kept at most, as in llama-server, be it a request that asks for more or
    ``--keep``, of which a line at start says so."""
    asked = LONG | {"n_predict": 240}
    reply = server.post("/completion", **asked, n_keep=5000)
    assert reply["generation_settings"]["n_keep"] == 5000
    assert (reply["truncated"], reply["tokens_cached"]) == (True, forgotten(40 + 239, 252)[1])
    with running("-m", llama_path, "-c", 256, "--context-shift", "--keep", 700) as other:
        assert other.post("/completion", **asked)["tokens"] == reply["tokens"]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["--keep 700: context shifts of a context of 256 tokens keep 251 at most"]


def test_a_slot_is_saved_and_restored_behind_a_shift(server: Running) -> None:
    """With the tokens that are left: what follows is the same."""
    asked = LONG | {"n_predict": 300}
    text = [*PROMPT, *server.post("/completion", **asked)["tokens"]]
    dropped, held = forgotten(40 + 299, 6)
    left = text[:6] + text[6 + dropped :]
    assert server.post("/slots/0?action=save", filename="talk")["n_saved"] == held
    wanted = server.post("/completion", **asked | {"prompt": left, "n_predict": 10})["tokens"]
    server.post("/slots/0?action=erase")
    assert server.post("/slots/0?action=restore", filename="talk")["n_restored"] == held
    again = server.post("/completion", **asked | {"prompt": left, "n_predict": 10})
    assert (again["timings"]["cache_n"], again["tokens"]) == (held, wanted)
