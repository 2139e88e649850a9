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


def accepts(rule: Rule, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the whole text is one that the rule allows, by the longest tokens that it allows."""
    left = text.encode()
    while left:
        pieces = {int(token): tokenizer.token_bytes(int(token)) for token in np.flatnonzero(rule.allowed())}
        fitting = [token for token, piece in pieces.items() if piece and left.startswith(piece)]
        if not fitting:
            return False
        token = max(fitting, key=lambda token: len(pieces[token]))
        rule.accept(token)
        left = left[len(pieces[token]) :]
    return any(rule.allowed()[token] for token in tokenizer.eog_ids)


SEA = {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}


@pytest.mark.parametrize("text", ['{"deep":true}', '{ "deep" : true }', '{\n\n\t"deep": true\n}'])
def test_text_of_a_schema(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    """It begins and ends with the value; between the parts of it there is a blank, or a line end or two with up to 20
    blanks or tabs. Behind thoughts, white space may come before it."""
    assert accepts(compiler.from_schema(SEA), tokenizer, text)
    for other in (" " + text, "\n" + text, text + " ", text + "\n"):
        assert not accepts(compiler.from_schema(SEA), tokenizer, other)
    assert accepts(compiler.from_schema(SEA, after_thoughts=True), tokenizer, "\n\n" + text)
    assert not accepts(compiler.from_schema(SEA, after_thoughts=True), tokenizer, "\n" * 5 + text)


@pytest.mark.parametrize(("between", "fits"), [("\n" + " " * 20, True), ("\n" + " " * 21, False), ("\n\n\n", False),
                                               ("  ", False), ("\t", False), ("\r\n", False)])
def test_white_space_of_a_schema(compiler: GrammarCompiler, tokenizer: Tokenizer, between: str, fits: bool) -> None:
    """Bounded, so that a model cannot stay in it."""
    assert accepts(compiler.from_schema(SEA), tokenizer, f'{{{between}"deep":true}}') is fits


def test_other_properties_of_a_schema(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Where properties are listed there are no others, unless the schema says so; an object without any is open."""
    more = '{"deep":true,"blue":1}'
    assert not accepts(compiler.from_schema(SEA), tokenizer, more)
    assert accepts(compiler.from_schema(SEA | {"additionalProperties": True}), tokenizer, more)
    assert accepts(compiler.from_schema(SEA | {"additionalProperties": {"type": "integer"}}), tokenizer, more)
    assert accepts(compiler.from_schema({"type": "object"}), tokenizer, more)
    assert accepts(compiler.from_schema({}), tokenizer, more)


@pytest.mark.parametrize("notation", ToolNotation)
@pytest.mark.parametrize(("arguments", "fits"), [({"at": {"deep": True}}, True), ({"at": {"deep": 1}}, False),
                                                 ({"at": {"deep": True, "blue": 1}}, False)])
def test_a_call_with_definitions(
    compiler: GrammarCompiler, tokenizer: Tokenizer, notation: ToolNotation, arguments: dict[str, Any], fits: bool
) -> None:
    """Definitions of a tool's parameters are found, and closed like every object. A call begins with its tag; behind
    thoughts, white space may come before it. Another tool's definition of the same name is another."""
    dive, fly = ({"function": {"name": name, "parameters": {
        "type": "object", "properties": {"at": {"type": "object", "allOf": [{"$ref": "#/$defs/place"}]}},
        "required": ["at"], "$defs": {"place": place},
    }}} for name, place in (("dive", SEA), ("fly", {"type": "object"})))
    value = json.dumps(arguments["at"])
    call = "<tool_call>\n" + (
        f"<function=dive>\n<parameter=at>\n{value}\n</parameter>\n</function>" if notation is ToolNotation.XML
        else json.dumps({"name": "dive", "arguments": arguments})
    ) + "\n</tool_call>"

    def rule(**about: bool) -> Rule:
        return compiler.for_calls(notation, [dive, fly], several=False, **about)

    assert accepts(rule(), tokenizer, call) is fits
    assert not accepts(rule(), tokenizer, "\n" + call)
    assert accepts(rule(after_thoughts=True), tokenizer, "\n\n" + call) is fits
    assert accepts(rule(), tokenizer, call.replace("dive", "fly"))


def test_one_of_several(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """As any of them, as in llama-server, also where they could overlap."""
    places = {name: {"type": "object", "properties": {name: {"type": "integer"}}} for name in ("a", "b")}
    schema = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": places}
    for text, fits in (('{"a": 1}', True), ('{"b": 1}', True), ("{}", True), ('{"c": 1}', False)):
        assert accepts(compiler.from_schema(schema), tokenizer, text) is fits, text


def test_tools_whose_schemas_have_one_id(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Each has its own definitions all the same."""
    dive, fly = ({"function": {"name": name, "parameters": {
        "$id": "urn:x", "type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"],
        "$defs": {"place": {"type": kind}},
    }}} for name, kind in (("dive", "integer"), ("fly", "boolean")))
    rule = '<tool_call>\n{"name": "%s", "arguments": {"at": %s}}\n</tool_call>'
    for name, value, fits in (("dive", "1", True), ("fly", "true", True), ("dive", "true", False), ("fly", "1", False)):
        made = compiler.for_calls(ToolNotation.JSON, [dive, fly], several=False)
        assert accepts(made, tokenizer, rule % (name, value)) is fits, (name, value)


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
