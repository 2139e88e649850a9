"""Grammars for a model's text: GBNF and JSON schemas, compiled by llguidance to the tokens that may come next.

    compiler = GrammarCompiler(tokenizer, n_vocab)      once per model, at the first request that needs it
    rule = compiler.from_schema(schema)                 SettingsError if it is none
    rule.allowed() -> [V] bool;  rule.accept(token)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance import TokenizerWrapper as Wrapper

from kvs_core.errors import SettingsError
from kvs_core.formats.gbnf import to_lark
from kvs_core.formats.json_schema import closed
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.formats.tool_calls import CALL_END, CALL_START, ToolNotation

MAX_GRAMMAR_CHARS = 1 << 20

# llama.cpp's: without a bound a small model may never leave the white space.
_JSON = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})?", "coerce_one_of": True}   # oneOf as anyOf

_BLANKS = r"/[ \n]{0,4}/ "

_SHOWN = re.compile(r"\Aat \d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)   # where in the translation: nobody has seen that


class Rule:
    """What of a grammar is still to come. It sees only tokens that it allowed."""

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab

    def allowed(self) -> npt.NDArray[np.bool_]:
        """[V] bool: tokens that may follow; end tokens where the grammar may end. SettingsError if it cannot go on."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():   # a matcher that has failed allows the end, as if the text were complete
            _refuse("the grammar cannot be followed any further", self._matcher.get_error())
        mask = np.unpackbits(bits, bitorder="little", count=min(8 * bits.size, self._n_vocab)).astype(np.bool_)
        return np.pad(mask, (0, self._n_vocab - mask.size))

    def accept(self, token: int, /) -> None:
        """The next token of the text."""
        self._matcher.consume_token(token)


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        """``n_vocab``: numbers of a logits row."""
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab

    def from_gbnf(self, text: str) -> Rule:
        """The grammar that starts with the rule ``root``."""
        if len(text) > MAX_GRAMMAR_CHARS:
            _refuse("failed to parse grammar", f"it has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are read")
        try:
            lark = to_lark(text)
        except SettingsError as error:
            _refuse("failed to parse grammar", str(error))
        return self._compile(LLMatcher.grammar_from_lark(lark), "failed to parse grammar")

    def from_schema(self, schema: Mapping[str, Any], *, after_thoughts: bool = False) -> Rule:
        """JSON of a schema, read as by ``json_schema.closed``; an empty one: any object.

        ``after_thoughts``: white space may come before it, as models write it there.
        """
        lark = f"start: {_BLANKS * after_thoughts}%json {_schema_text(_closed(schema or {'type': 'object'}))}"
        return self._compile(LLMatcher.grammar_from_lark(lark), "JSON schema conversion failed")

    def for_calls(
        self, notation: ToolNotation, tools: Sequence[Mapping[str, Any]], *, several: bool, is_open: bool = False,
        after_thoughts: bool = False,
    ) -> Rule:
        """One tool call, or ``several``, in a notation of ``tool_calls``, and nothing else.

        ``is_open``: the tag that opens the first one was written already. ``after_thoughts``: as in ``from_schema``.
        """
        functions = [tool["function"] for tool in tools]
        first = "inner" if is_open else f"{_BLANKS * after_thoughts}call"
        lark = "\n".join([
            f"start: {first} (NL call)*" if several else f"start: {first}",
            "NL: /\\n{0,2}/",
            f"call: {_text(CALL_START)} inner",
            *(_xml_calls(functions) if notation is ToolNotation.XML else _json_calls(functions)),
        ])
        return self._compile(LLMatcher.grammar_from_lark(lark), "the tools make no grammar")

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        # A control token prints nothing, so no grammar can ask for it by its text.
        return LLTokenizer(
            Wrapper(_Vocabulary(self._tokenizer)), n_vocab=self._n_vocab, eos_token=sorted(self._tokenizer.eog_ids)
        )

    def _compile(self, grammar: str, what: str) -> Rule:
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            _refuse(what, matcher.get_error())
        return Rule(matcher, self._n_vocab)


class _Vocabulary:
    """A tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.n_vocab)
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(i, special=True) for i in ids]
        self.special_token_ids = [i for i in ids if self.tokens[i] and not tokenizer.token_bytes(i)]
        self.eos_token_id = min(tokenizer.eog_ids)
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace"), add_special=False, parse_special=False)


@contextmanager
def _not_too_deep() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        _refuse("JSON schema conversion failed", "it is nested too deeply")


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    with _not_too_deep():
        return closed(schema)


def _schema_text(schema: dict[str, Any]) -> str:
    with _not_too_deep():
        text = json.dumps(schema | {"x-guidance": _JSON})
    if len(text) > MAX_GRAMMAR_CHARS:
        _refuse("JSON schema conversion failed", f"it has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are read")
    return text


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    return _closed(parameters if isinstance(parameters, Mapping) and parameters else {"type": "object"})


def _json_calls(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    # An id of its own makes each schema the root of its references.
    calls = [{"type": "object", "properties": {
                  "name": {"const": f["name"]}, "arguments": _parameters(f) | {"$id": f"urn:kvs:{index}"}},
              "required": ["name", "arguments"], "additionalProperties": False} for index, f in enumerate(functions)]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    newline, end = _text("\n"), _text(f"\n{CALL_END}")
    return [f"inner: {newline} body {end}", f"body: %json {_schema_text(schema)}"]


def _xml_calls(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    close = _text(f"</function>\n{CALL_END}")
    end = _text("\n</parameter>\n")
    rules = ["inner: " + " | ".join(f"f{index}" for index in range(len(functions))),
             f"text[suffix={end}]: /(?s:.*)/"]
    for index, function in enumerate(functions):
        schema = _parameters(function)
        properties = schema.get("properties")
        required = schema.get("required")
        named: dict[str, Any] = {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}
        parts = [_text(f"\n<function={function['name']}>\n")]
        for number, (name, each) in enumerate(dict(properties if isinstance(properties, Mapping) else {}).items()):
            rule = f"f{index}p{number}"
            begin = _text(f"<parameter={name}>\n")
            rules.append(f"{rule}: {begin} {_xml_value(each, end, named)}")
            parts.append(rule if isinstance(required, list) and name in required else f"{rule}?")
        rules.append(f"f{index}: {' '.join(parts)} {close}")
    return rules


def _xml_value(schema: object, end: str, named: dict[str, Any]) -> str:
    """A parameter's value and its end: strings stand as they are, everything else is JSON.

    ``named``: the parameters' definitions, for references to them.
    """
    schema = schema if isinstance(schema, dict) else {}
    kind, choices = schema.get("type"), schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(_text(choice) for choice in choices)}) {end}"
    return "text" if kind in (None, "string") else f"%json {_schema_text(schema | named)} {end}"


def _text(text: str) -> str:
    """A literal of the grammar language."""
    return json.dumps(text, ensure_ascii=False)


def _refuse(what: str, why: str) -> NoReturn:
    own = _SHOWN.sub("", why.split("<state>")[0])
    line = " ".join(own.removeprefix("failed to compile JSON schema: ").split())
    raise SettingsError(f"{what}: {line[:300]}" if line else what)
