"""Grammars allow the tokens of conforming text and no others."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from kvs_core.errors import SettingsError
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.grammar import GrammarCompiler, Rule
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.formats.tool_calls import CallArguments, CallParser, CallStart, ToolNotation
from tests.support.tiny_gguf import write_tiny_llama

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look_up", "parameters": {
        "type": "object", "properties": {"word": {"enum": ["sea", "the river"]}, "page": {"type": "integer",
        "minimum": 10, "maximum": 99}}, "required": ["word"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level vocabulary with control tokens."""
    path = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf", seed=2)
    return Tokenizer.from_metadata(GgufFile.open(path).metadata, source="test")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    """For a row of logits that is longer than the vocabulary."""
    return GrammarCompiler(tokenizer, tokenizer.n_vocab + 5)


def write(rule: Rule, tokenizer: Tokenizer, seed: int, most: int = 400) -> str:
    """A random text under a rule; random end tokens end it where they may."""
    dice = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < most:
        allowed = rule.allowed()
        assert allowed.shape == (tokenizer.n_vocab + 5,)
        assert not allowed[tokenizer.n_vocab :].any()
        token = dice.choice(np.flatnonzero(allowed).tolist())
        rule.accept(token)
        if token in tokenizer.eog_ids:
            return tokenizer.decode(tokens)
        tokens.append(token)
    raise AssertionError(f"no end after {most} tokens: {tokenizer.decode(tokens)!r:.200}")


@pytest.mark.parametrize("seed", range(5))
def test_texts_conform(compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> None:
    """GBNF with repetition and classes; a schema with numbers; nothing outside of them is allowed."""
    text = write(compiler.from_gbnf('root ::= item (", " item){1,3}\nitem ::= [a-c] [0-9]'), tokenizer, seed)
    assert all(len(item) == 2 and item[0] in "abc" and item[1].isdigit() for item in text.split(", "))
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 99}},
              "required": ["n"], "additionalProperties": False}  # fmt: skip
    assert json.loads(write(compiler.from_schema(schema), tokenizer, seed))["n"] in range(3, 100)


@pytest.mark.parametrize("notation", ToolNotation)
@pytest.mark.parametrize("opened", [False, True])
def test_calls_conform(compiler: GrammarCompiler, tokenizer: Tokenizer, notation: ToolNotation, opened: bool) -> None:
    """What the rule for calls allows is what the parser for calls reads, with arguments by the schema."""
    names = set()
    for seed in range(8):
        rule = compiler.for_calls(notation, TOOLS, several=False, is_open=opened)
        parser = CallParser(notation, TOOLS)
        text = "<tool_call>" * opened + write(rule, tokenizer, seed)
        start, *rest = [*parser.push(text), *parser.flush()]
        assert isinstance(start, CallStart)
        arguments = json.loads("".join(event.text for event in rest if isinstance(event, CallArguments)))
        names.add(start.name)
        if start.name == "look_up":
            assert arguments["word"] in ("sea", "the river")
            assert arguments.get("page", 10) in range(10, 100)
        else:
            assert arguments == {}
    assert names == {"look_up", "stop"}


@pytest.mark.parametrize("text", ["", "root ::= ", "root ::= (", 'foo ::= "x"', "root ::= bar", "root ::= [z-a]",
                                  "(" * 10_000, "root ::= " + "(" * 100_000, "x" * (1 << 21), "\0"])
def test_bad_grammars(compiler: GrammarCompiler, text: str) -> None:
    """One line that says so; never another kind of error."""
    if text == "root ::= ":   # the empty text, and that is sound
        compiler.from_gbnf(text)
        return
    with pytest.raises(SettingsError, match="failed to parse grammar") as caught:
        compiler.from_gbnf(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("schema", [{"type": "poem"}, {"$ref": "#/none"}, {"pattern": "(", "type": "string"},
                                    {"allOf": [{"type": "string"}, {"type": "number"}]}])
def test_bad_schemas(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    """One line that says so."""
    with pytest.raises(SettingsError, match="JSON schema conversion failed") as caught:
        compiler.from_schema(schema)
    assert "\n" not in str(caught.value)


def test_a_deep_schema_is_refused(compiler: GrammarCompiler) -> None:
    """Not by a crash."""
    schema: dict[str, Any] = {}
    for _ in range(20_000):
        schema = {"items": schema}
    with pytest.raises(SettingsError):
        compiler.from_schema(schema)


def test_a_token_that_was_not_allowed_ends_it(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """The rule says that it cannot go on; it does not raise on the token itself."""
    rule = compiler.from_gbnf('root ::= "yes"')
    rule.accept(tokenizer.encode("no", add_special=False)[0])
    with pytest.raises(SettingsError, match="cannot be followed any further"):
        rule.allowed()
