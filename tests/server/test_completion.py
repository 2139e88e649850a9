"""``/completion`` and ``/v1/completions``: llama-server's fields, defaults, counts and ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import Running, running
from tests.server.scrapes import scrape
from tests.support.tiny_gguf import write_tiny_qwen35

GREEDY: dict[str, Any] = {"temperature": 0}
PROMPT = "The cache holds the keys and the values of every token"


@pytest.mark.parametrize("name", ["llama", "qwen"])
def test_a_stream_is_the_reply_in_parts(name: str, request: pytest.FixtureRequest) -> None:
    """The parts' text and tokens join to the reply's, whatever characters span tokens; counts and ends agree."""
    server: Running = request.getfixturevalue(name)
    asked = GREEDY | {"prompt": PROMPT, "n_predict": 60, "return_tokens": True}
    whole = server.post("/completion", **asked)
    *parts, last = server.stream("/completion", **asked)
    assert "".join(part["content"] for part in parts) == whole["content"]
    streamed = [token for part in parts for token in part["tokens"]]
    assert streamed == whole["tokens"][: len(streamed)]
    assert (last["content"], last["tokens"], last["stop"]) == ("", [], True)
    assert {part["stop"] for part in parts} == {False}
    assert {part["id_slot"] for part in parts} == {-1}
    assert len(whole["tokens"]) == whole["tokens_predicted"] == last["tokens_predicted"]
    assert whole["stop_type"] == last["stop_type"] == "limit"
    assert not whole["truncated"]


def test_the_reply_has_llama_servers_fields(llama: Running) -> None:
    """Names and order of the fields, the prompt with its BOS, numbers that agree, and nothing that is no number."""
    reply = llama.post("/completion", prompt=PROMPT, n_predict=5, **GREEDY)
    assert list(reply) == [
        "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
        "generation_settings", "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached",
        "timings",
    ]  # fmt: skip
    assert reply["prompt"] == f"<|begin_of_text|>{PROMPT}"
    assert reply["model"] == "tiny"
    timings = reply["timings"]
    assert all(math.isfinite(value) for value in timings.values())
    assert timings["cache_n"] + timings["prompt_n"] == reply["tokens_evaluated"]
    assert timings["predicted_n"] == 5
    assert reply["tokens_cached"] == reply["tokens_evaluated"] + 4
    assert reply["generation_settings"]["temperature"] == 0
    assert reply["generation_settings"]["top_p"] == pytest.approx(0.95)


def test_one_token_has_rates_of_zero(llama: Running) -> None:
    """``n_predict`` 0 makes one token, which is free."""
    reply = llama.post("/completion", prompt=PROMPT, n_predict=0, **GREEDY)
    assert reply["tokens_predicted"] == 1
    assert reply["timings"]["predicted_per_second"] == 0


def test_a_common_prefix_is_not_run_again(llama: Running) -> None:
    """Counts of the cache: all but one token of the same prompt, the common part of another, none if not wanted."""
    llama.post("/completion", prompt="something else entirely", n_predict=1)
    first = llama.post("/completion", prompt=PROMPT, n_predict=4, **GREEDY)
    again = llama.post("/completion", prompt=PROMPT, n_predict=4, **GREEDY)
    longer = llama.post("/completion", prompt=PROMPT + first["content"], n_predict=1)
    cold = llama.post("/completion", prompt=PROMPT, n_predict=4, cache_prompt=False, **GREEDY)
    n = first["tokens_evaluated"]
    assert again["timings"]["cache_n"] == n - 1
    assert longer["timings"]["cache_n"] >= n - 1
    assert cold["timings"]["cache_n"] == 0
    assert first["content"] == again["content"] == cold["content"]


def test_recurrent_layers_go_on_or_go_back(qwen: Running) -> None:
    """A prompt that continues what is held runs its new tokens alone; another one goes on at the last checkpoint that
    it shares, the end of the first prompt. The text is the same."""
    asked = GREEDY | {"prompt": PROMPT, "n_predict": 4, "return_tokens": True}
    first = qwen.post("/completion", **asked)
    tokens = qwen.post("/tokenize", content=PROMPT)["tokens"]
    held = tokens + first["tokens"][:-1]   # the last one was never run
    more = GREEDY | {"prompt": [*held, 7], "n_predict": 4}
    warm = qwen.post("/completion", **more)
    back = qwen.post("/completion", **more)
    cold = qwen.post("/completion", **more, cache_prompt=False)
    assert [reply["timings"]["cache_n"] for reply in (warm, back, cold)] == [len(held), len(tokens), 0]
    assert warm["content"] == back["content"] == cold["content"]
    assert qwen.post("/completion", **asked)["content"] == first["content"]


def test_prompts_of_all_kinds(llama: Running) -> None:
    """Text, tokens, a mixture and an object are one prompt each; an array of prompts has a result for each."""
    tokens = llama.post("/tokenize", content=PROMPT, add_special=True)["tokens"]
    asked = GREEDY | {"n_predict": 6}
    by_text = llama.post("/completion", prompt=PROMPT, **asked)
    for prompt in (tokens, [tokens[0], tokens[1], *tokens[2:]], {"prompt_string": PROMPT}):
        assert llama.post("/completion", prompt=prompt, **asked)["content"] == by_text["content"]
    mixed = llama.post("/completion", prompt=["The cache", tokens[5]], **asked)
    assert mixed["prompt"].startswith("<|begin_of_text|>The cache")
    several = llama.post("/completion", prompt=[PROMPT, tokens, "x"], **asked)
    assert [each["index"] for each in several] == [0, 1, 2]
    assert several[0]["content"] == several[1]["content"] == by_text["content"]
    events = llama.stream("/completion", prompt=[PROMPT, "x"], **asked)
    assert "".join(event["content"] for event in events if event["index"] == 1) == several[2]["content"]


def test_an_empty_prompt_without_bos_is_an_empty_text(qwen: Running) -> None:
    """Nothing can follow nothing; with an array of no prompts there is nothing to reply to."""
    reply = qwen.post("/completion", prompt="", n_predict=5)
    assert (reply["content"], reply["stop_type"], reply["tokens_predicted"]) == ("", "none", 0)
    qwen.post("/completion", 400, prompt=[])


def test_stop_strings_are_not_part_of_the_text(llama: Running) -> None:
    """The text ends before the string, also when tokens cut it in two, and no part of it is streamed."""
    whole = llama.post("/completion", prompt=PROMPT, n_predict=40, **GREEDY)["content"]
    stop = whole[9:14]
    asked = GREEDY | {"prompt": PROMPT, "n_predict": 40, "stop": [stop, "never"]}
    reply = llama.post("/completion", **asked)
    assert (reply["stop_type"], reply["stopping_word"]) == ("word", stop)
    assert reply["content"] == whole[: whole.index(stop)]
    assert "".join(event["content"] for event in llama.stream("/completion", **asked)) == reply["content"]


def test_a_full_context_ends_the_text(llama: Running) -> None:
    """Prompt and text fill the context to its last token; a prompt that leaves no room is refused with both numbers."""
    prompt = [5] * 1000
    reply = llama.post("/completion", prompt=prompt, ignore_eos=True)
    assert (reply["tokens_predicted"], reply["truncated"], reply["stop_type"]) == (24, True, "limit")
    error = llama.post("/completion", 400, prompt=[5] * 1024)["error"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 1024, 1024)
    assert error["message"].startswith("request (1024 tokens) exceeds the available context size (1024 tokens)")


def test_biases_ban_and_force(llama: Running) -> None:
    """By token, by text, by OpenAI's object; false is never; tokens beyond the vocabulary are nobody's."""
    a = llama.post("/tokenize", content="a")["tokens"][0]
    for bias in ([[a, 100]], [["a", 100]], {str(a): 100}, {"a": 100}, [[a, 100], [10**6, 5]]):
        assert llama.post("/completion", prompt="x", n_predict=3, logit_bias=bias, **GREEDY)["content"] == "aaa"
    reply = llama.post("/completion", prompt="x", n_predict=3, logit_bias=[[a, 100], [a, False]], **GREEDY)
    assert "a" not in reply["content"]
    assert {"bias": None, "token": a} in reply["generation_settings"]["logit_bias"]


def test_probabilities(llama: Running) -> None:
    """``n_probs`` gives each token's logarithm and the best ones'; after the chain they are probabilities instead."""
    reply = llama.post("/completion", prompt=PROMPT, n_predict=3, n_probs=4, **GREEDY)
    for each in reply["completion_probabilities"]:
        assert len(each["top_logprobs"]) == 4
        assert each["logprob"] == each["top_logprobs"][0]["logprob"] <= 0
        assert bytes(each["bytes"]).decode(errors="replace") == each["token"]
    asked: dict[str, Any] = {"prompt": PROMPT, "n_predict": 3, "n_probs": 4, "post_sampling_probs": True, "top_k": 2,
                             "seed": 3}
    after = llama.post("/completion", **asked)["completion_probabilities"]
    assert len(after) == 3
    for each in after:
        assert 1 <= len(each["top_probs"]) <= 2
        assert each["prob"] in [top["prob"] for top in each["top_probs"]]
        assert sum(top["prob"] for top in each["top_probs"]) == pytest.approx(1)


def test_chosen_fields_and_progress(llama: Running) -> None:
    """``response_fields`` keeps paths under their own names; ``return_progress`` tells of the prompt, in steps."""
    chosen = llama.post("/completion", prompt="x", n_predict=1, response_fields=["content", "timings/prompt_n", "no"])
    assert list(chosen) == ["content", "timings/prompt_n"]
    events = llama.stream("/completion", prompt=[5] * 600, n_predict=1, return_progress=True, cache_prompt=False)
    steps = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert steps[-1]["processed"] == steps[-1]["total"] == 600
    assert [step["processed"] for step in steps] == sorted(step["processed"] for step in steps)


def test_openais_legacy_route(llama: Running) -> None:
    """The same text in OpenAI's shape; the last chunk has the reason, the usage and no text."""
    asked = GREEDY | {"prompt": PROMPT, "max_tokens": 6}
    native = llama.post("/completion", **asked)
    reply = llama.post("/v1/completions", **asked)
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (native["content"], "length", None)
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + 6
    *chunks, last = llama.stream("/v1/completions", **asked)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == native["content"]
    assert last["choices"][0] == {"text": "", "index": 0, "logprobs": None, "finish_reason": "length"}
    assert last["usage"]["completion_tokens"] == 6


def test_a_grammar_or_schema_holds(llama: Running) -> None:
    """What a random model writes under a grammar or a JSON schema conforms; a bad one is refused."""
    reply = llama.post("/completion", prompt="x", n_predict=50, grammar='root ::= ("yes" | "no") "!"', seed=1)
    assert reply["content"] in ("yes!", "no!")
    assert reply["stop_type"] == "eos"
    schema = {"enum": ["red", "green"]}
    blank: list[Any] = [[text, 100] for text in (" ", "\n")]
    reply = llama.post("/completion", prompt="x", json_schema=schema, logit_bias=blank)
    assert reply["content"] in ('"red"', '"green"')
    error = llama.post("/completion", 400, prompt="x", grammar="root ::= (")["error"]
    assert error["message"].startswith("Failed to initialize samplers: failed to parse grammar")
    error = llama.post("/completion", 400, prompt="x", json_schema={"type": "nonsense"})["error"]
    assert "JSON schema conversion failed" in error["message"]


def test_tokens_and_back(llama: Running) -> None:
    """Tokenize and detokenize are inverse; pieces that are no characters are bytes."""
    text = "héllo 漢字 <|eot_id|>"
    tokens = llama.post("/tokenize", content=text)["tokens"]
    assert llama.post("/detokenize", tokens=tokens) == {"content": text}
    pieces = llama.post("/tokenize", content=text, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    data = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert data.decode() == text
    plain = llama.post("/tokenize", content="<|eot_id|>", parse_special=False)["tokens"]
    assert len(plain) > 1
    assert llama.post("/tokenize") == {"tokens": []}


@pytest.mark.parametrize("kind", ["ngram-simple", "draft-mtp"])
def test_drafts_change_nothing_but_the_counts(kind: str, tmp_path: Path) -> None:
    """With drafters the greedy text, its ends and its grammar are the same; timings and metrics count the drafts."""
    path = write_tiny_qwen35(tmp_path / "qwen35.gguf", seed=1)
    text = "The river is quiet. " * 4
    asked = GREEDY | {"prompt": text, "n_predict": 40, "logit_bias": [["a", 9], ["b", 9]], "cache_prompt": False}
    rule = asked | {"grammar": 'root ::= ("ab" | "ba"){12} "c"'}
    stop = asked | {"stop": ["aaaaa", "bbb"]}
    with running("-m", path, "-c", 1024) as server:
        plain = [server.post("/completion", **each)["content"] for each in (asked, rule, stop)]
    argv = ("--spec-type", kind, "--spec-ngram-simple-size-n", 2, "--spec-ngram-simple-size-m", 2)
    with running("-m", path, "-c", 1024, "--metrics", *argv) as server:
        replies = [server.post("/completion", **each) for each in (asked, rule, stop)]
        assert [reply["content"] for reply in replies] == plain
        drafted = sum(reply["timings"].get("draft_n", 0) for reply in replies)
        assert drafted > 0
        assert scrape(server.http)["llamacpp:spec_decode_num_draft_tokens_total"] == drafted
        assert server.get("/slots")[0]["speculative"]
        assert replies[0]["generation_settings"]["speculative.types"] == kind
