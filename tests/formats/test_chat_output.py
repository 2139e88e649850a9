"""Thoughts and tool calls are found in text however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.formats.chat_output import ChatEvent, ChatParser, Thought
from kvs_core.formats.reasoning import ReasoningTags, held_back, is_open, reasoning_tags
from kvs_core.formats.tool_calls import CallArguments, CallStart, Text, ToolNotation, tool_notation, tools_text

THINK = ReasoningTags("<think>", "</think>")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {
        "word": {"type": "string"}, "page": {"type": "integer"}, "any": {}}}},
}  # fmt: skip
XML = "<tool_call>\n<function=look_up>\n{}</function>\n</tool_call>"
SEA = XML.format("<parameter=word>\n12\n</parameter>\n<parameter=page>\n12\n</parameter>\n")
JSON = '<tool_call>\n{"name": "look_up", "arguments": {"word": "sea"}}\n</tool_call>'


def parse(
    text: str, cuts: list[int], *, opened: bool = False, notation: ToolNotation = ToolNotation.XML, tools: bool = True
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Thoughts, text, and calls with their arguments, of a text that arrives cut at these places."""
    parser = ChatParser(
        tags=THINK, is_open=opened, notation=notation, tools=[TOOL] if tools else [], new_id=lambda: "id"
    )
    events: list[ChatEvent] = []
    at = 0
    for cut in [*sorted(cuts), len(text)]:
        events += parser.push(text[at:cut])
        at = max(at, cut)
    events += parser.flush()
    assert all(event.text for event in events if isinstance(event, Thought | Text))
    names = [event.name for event in events if isinstance(event, CallStart)]
    assert [event.call for event in events if isinstance(event, CallStart)] == list(range(len(names)))
    arguments = ["".join(e.text for e in events if isinstance(e, CallArguments) and e.call == call)
                 for call in range(len(names))]
    assert parser.calls == len(names)
    return (
        "".join(event.text for event in events if isinstance(event, Thought)),
        "".join(event.text for event in events if isinstance(event, Text)),
        [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)],
    )


CASES = [
    # text, opened, thoughts, answer
    ("hello", False, "", "hello"),
    ("  hello \n", False, "", "  hello \n"),
    ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
    (" \n<think>hm</think>yes ", False, "hm", "yes "),
    ("hm, so\n  on \n</think>\n\n yes\n", True, "hm, so\n  on", "yes\n"),
    ("hm", True, "hm", ""),
    (" \n</think>\n\nyes", True, "", "yes"),
    ("hm </thin", True, "hm </thin", ""),
    ("<thin", False, "", "<thin"),
    ("", False, "", ""),
    ("a <think>b</think>", False, "", "a <think>b</think>"),
]


@pytest.mark.parametrize(("text", "opened", "thoughts", "answer"), CASES)
@given(data=st.data())
def test_thoughts(text: str, opened: bool, thoughts: str, answer: str, data: st.DataObject) -> None:
    """They come first or not at all, without the white space around them; an unfinished tag is text."""
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert parse(text, cuts, opened=opened, tools=False) == (thoughts, answer, [])


CALLS = [
    # text, notation, answer, calls
    (SEA, ToolNotation.XML, "", [("look_up", {"word": "12", "page": 12})]),
    (f"Let me see.\n\n{SEA}\n{SEA}\n", ToolNotation.XML, "Let me see.", [("look_up", {"word": "12", "page": 12})] * 2),
    (XML.format(""), ToolNotation.XML, "", [("look_up", {})]),
    (XML.format("<parameter=any>\n{\"a\": [1]}\n</parameter>\n<parameter=word>\na\n\n<b>\n</parameter>\n"),
     ToolNotation.XML, "", [("look_up", {"any": {"a": [1]}, "word": "a\n\n<b>"})]),
    (SEA[:-25], ToolNotation.XML, "", [("look_up", {"word": "12", "page": 12})]),       # cut off
    ("<tool_call>\n<function=look_up>\n<parameter=wor", ToolNotation.XML, "", [("look_up", {})]),
    ("<tool_call> is a tag", ToolNotation.XML, "<tool_call> is a tag", []),
    ("a < b, <tool", ToolNotation.XML, "a < b, <tool", []),
    (JSON, ToolNotation.JSON, "", [("look_up", {"word": "sea"})]),
    (f"So: {JSON}{JSON} done", ToolNotation.JSON, "So:done", [("look_up", {"word": "sea"})] * 2),
    (JSON[:-5], ToolNotation.JSON, "", [("look_up", {"word": "sea"})]),
    (JSON.replace('{"word": "sea"}', '"{\\"word\\": 1}"'), ToolNotation.JSON, "", [("look_up", {"word": 1})]),
    ("<tool_call>{broken</tool_call>", ToolNotation.JSON, "<tool_call>{broken</tool_call>", []),
    ("<tool_call>[1]", ToolNotation.JSON, "<tool_call>[1]", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "notation", "answer", "calls"), CALLS)
@given(data=st.data())
def test_calls(
    text: str, notation: ToolNotation, answer: str, calls: list[tuple[str, Any]], data: st.DataObject
) -> None:
    """Of any number, with text before them or thoughts; a value is text where the schema says string, else JSON; what
    is no call stays text."""
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert parse(text, cuts, notation=notation) == ("", answer, calls)
    assert parse(f"hm {text}", cuts, opened=True, notation=notation)[2] == (calls if "<tool_call>" in text else [])


@given(st.text(alphabet="<>/=tolcafunimer_ \n{}\"p", max_size=60), st.sampled_from(ToolNotation), st.booleans(),
       st.data())
def test_any_text_is_parsed(text: str, notation: ToolNotation, opened: bool, data: st.DataObject) -> None:
    """Nothing is lost but tags and white space, and the result does not depend on the cuts."""
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    text = f"{text}<tool_call>\n<function=f>{text}"
    assert parse(text, cuts, opened=opened, notation=notation) == parse(text, [], opened=opened, notation=notation)


def test_what_a_template_tells() -> None:
    """Its tags, its notation, and whether a prompt has opened the thoughts."""
    assert reasoning_tags("{{ '[THINK]' }} {{ '[/THINK]' }}") == ("[THINK]", "[/THINK]")
    assert reasoning_tags("nothing") == THINK
    assert tool_notation("<function=name>") is ToolNotation.XML
    assert tool_notation("<tool_call>") is ToolNotation.JSON
    assert is_open("<|im_start|>assistant\n<think>\n", THINK)
    assert not is_open("<think>\n\n</think>\n\n", THINK)
    assert "look_up" in tools_text([TOOL])


@given(st.text(alphabet="ab<", max_size=8), st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=3))
def test_what_is_held_back(text: str, tags: list[str]) -> None:
    """The longest end of the text that a tag begins with, the whole tag excepted."""
    sizes = [n for n in range(len(text) + 1) for tag in tags if n < len(tag) and tag[:n] == text[len(text) - n :]]
    assert held_back(text, tags) == max(sizes, default=0)
