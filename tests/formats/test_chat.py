"""Chat templates render what the model was trained on, and a hostile one does no harm."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st

from kvs_core.errors import CapabilityError, SettingsError, TokenizerError
from kvs_core.formats.chat import ChatTemplate
from kvs_core.formats.gguf import GgufFile
from kvs_core.formats.template_process import TemplateProcess
from kvs_core.formats.tokenizer import Tokenizer
from tests.formats.llamacpp_vocab import byte_vocab
from tests.support import llamacpp

HI = [{"role": "user", "content": "hi"}]
SPECIALS = {"<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def tokenizer(**keys: Any) -> Tokenizer:
    metadata = byte_vocab("gpt-2", SPECIALS, joined="a", **keys)
    texts = metadata["tokenizer.ggml.tokens"]
    ids = {"tokenizer.ggml.bos_token_id": texts.index("<s>"), "tokenizer.ggml.eos_token_id": texts.index("</s>")}
    return Tokenizer.from_metadata(metadata | ids, source="m.gguf")


def template(text: str, **keys: Any) -> ChatTemplate:
    return ChatTemplate.from_metadata({"tokenizer.chat_template": text}, tokenizer(**keys), source="m.gguf")


def test_smollm2_prompt(smollm2_path: Path) -> None:
    """A real model's template: its own system message, the turn, and the start of the answer."""
    metadata = GgufFile.open(smollm2_path).metadata
    own = Tokenizer.from_metadata(metadata, source="m.gguf")
    chat = ChatTemplate.from_metadata(metadata, own, source="m.gguf")
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turn = "<|im_start|>user\nhi<|im_end|>\n"
    assert chat.render(HI) == system + turn + "<|im_start|>assistant\n"
    assert chat.render(HI, add_generation_prompt=False) == system + turn
    assert (chat.supports_system, chat.supports_tools, chat.supports_thinking) == (True, False, False)


@pytest.fixture(scope="module")
def chatml() -> ChatTemplate:
    return ChatTemplate.from_metadata({}, tokenizer(), source="m.gguf")


class LlamaMessage(ctypes.Structure):
    _fields_ = (("role", ctypes.c_char_p), ("content", ctypes.c_char_p))


@given(
    contents=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1, max_size=4),
    answer=st.booleans(),
)
def test_chatml_is_that_of_llamacpp(chatml: ChatTemplate, contents: list[str], answer: bool) -> None:
    """The format of models without a template is byte for byte the one that llama.cpp writes."""
    roles = ["system", "user", "assistant", "user"]
    ours = chatml.render(
        [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)],
        add_generation_prompt=answer,
    )
    rows = [LlamaMessage(role.encode(), text.encode()) for role, text in zip(roles, contents, strict=False)]
    buffer = ctypes.create_string_buffer(1 << 16)
    size = llamacpp._lib.llama_chat_apply_template(
        b"chatml", (LlamaMessage * len(rows))(*rows), ctypes.c_size_t(len(rows)), answer, buffer, len(buffer)
    )
    assert ours.encode() == buffer.raw[:size]


def test_which_template_is_used() -> None:
    """An override wins over the file's, ``chatml`` names the built-in one, tools bring out the file's second one."""
    file = {"tokenizer.chat_template": "own", "tokenizer.chat_template.tool_use": "tools {{ tools[0].function.name }}"}
    chosen = ChatTemplate.from_metadata(file, tokenizer(), source="m.gguf")
    assert chosen.render(HI) == "own"
    assert chosen.render(HI, tools=[TOOL]) == "tools f"
    assert chosen.supports_tools
    override = ChatTemplate.from_metadata(file, tokenizer(), override="{{ 'mine' }}", source="m.gguf")
    assert override.render(HI, tools=[TOOL]) == "mine"
    chatml = ChatTemplate.from_metadata(file, tokenizer(), override="chatml", source="m.gguf")
    assert chatml.render(HI).startswith("<|im_start|>user\nhi")


@pytest.mark.parametrize("keys", [{"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_bos_and_eos_come_once(keys: dict[str, bool]) -> None:
    """What the tokenizer adds is not in the text, so that the prompt's tokens have each exactly once."""
    chat = template("{{ bos_token }}" + PLAIN + "{{ eos_token }}", **keys)
    text = chat.render(HI)
    assert text == ("[user:hi]" if keys["add_bos_token"] else "<s>[user:hi]</s>")
    ids = tokenizer(**keys).encode(text)
    assert (ids[0], ids[-1]) == (tokenizer().bos_id, tokenizer().eos_id)
    assert (ids.count(ids[0]), ids.count(ids[-1])) == (1, 1)


def test_what_a_template_can_use() -> None:
    """Functions, filters, tags and white space are as in Hugging Face's library; JSON keeps order and characters."""
    expected = {
        "{{ {'b': ['ü', 1], 'a': '<'} | tojson }}": '{"b": ["ü", 1], "a": "<"}',
        "{{ {'b': 1} | tojson(indent=2) }}": '{\n  "b": 1\n}',
        "{{ strftime_now('%Y') }}": datetime.now().strftime("%Y"),
        "{{ date_string }}, {{ datetime }}": datetime.now().strftime("%d %b %Y, %b %d %Y"),
        "{% for i in [1, 2, 3] %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}": "12",
        "{% generation %}x{% endgeneration %}": "x",
        "a\n  {% if true %}\n  b\n  {% endif %}\nc": "a\n  b\nc",
        "{% set n = namespace(i=0) %}{% set n.i = 3 %}{{ n.i }}{{ x is defined }}": "3False",
    }
    assert template("|".join(expected)).render(HI).split("|") == list(expected.values())


def test_variables() -> None:
    """kwargs reach the template and win; absent things are undefined, not empty; reasoning has all its names."""
    chat = template(
        "{{ [add_generation_prompt is defined, tools is defined, enable_thinking, x, clear_thinking,"
        " reasoning_strength | default(0)] | tojson }}"
    )
    assert json.loads(chat.render(HI, tools=[TOOL], kwargs={"x": 1, "reasoning_effort": "low"})) == [
        True, True, True, 1, False, "low",
    ]  # fmt: skip
    plain = chat.render(HI, add_generation_prompt=False, tools=[], enable_thinking=False,
                        kwargs={"x": None, "preserve_reasoning": False})  # fmt: skip
    assert json.loads(plain) == [False, False, False, None, True, 0]


def test_thinking() -> None:
    """Thinking is on where the template knows it and nobody says otherwise; only a bool switches it."""
    chat = template("{% if enable_thinking %}think{% else %}no{% endif %}")
    assert chat.supports_thinking
    assert chat.render(HI) == "think"
    assert chat.render(HI, enable_thinking=False) == "no"
    assert chat.render(HI, enable_thinking=True, kwargs={"enable_thinking": False}) == "no"
    assert not template(PLAIN).supports_thinking
    with pytest.raises(SettingsError, match="enable_thinking is 'false'; it must be true or false"):
        chat.render(HI, kwargs={"enable_thinking": "false"})


def test_system_messages_reach_a_template_that_ignores_them() -> None:
    """They go in front of the next message's text; a developer's message is a system message."""
    ignoring = template("{% for m in messages if m.role != 'system' %}[{{ m.role }}:{{ m.content }}]{% endfor %}")
    refusing = template("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
                        "[{{ m.role }}:{{ m.content }}]{% endfor %}")  # fmt: skip
    messages = [{"role": "developer", "content": "be"}, {"role": "system", "content": "brief"}, *HI]
    for chat in (ignoring, refusing):
        assert not chat.supports_system
        assert chat.render(messages) == "[user:be\nbrief\nhi]"
        assert chat.render(messages[:1]) == "[user:be]"
    assert template(PLAIN).render(messages) == "[system:be][system:brief][user:hi]"
    assert template(PLAIN + "{# <|channel|> #}").render(messages[:1]) == "[developer:be]"


def test_content_parts() -> None:
    """Text parts are joined by lines, or passed as parts to a template that reads only those."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert template(PLAIN).render(messages) == "[user:a\nb]"
    typed = template("{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}")
    assert typed.needs_parts
    assert typed.render(messages) == "<a><b>"
    assert typed.render(HI) == "<hi>"


@pytest.mark.parametrize("arguments", ['{"city": "Köln"}', {"city": "Köln"}])
def test_tool_calls(arguments: Any) -> None:
    """Arguments reach a template as an object or as JSON text, whichever it writes as JSON; content is never null."""
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    each = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}|{{ c.type }}|"
    ends = "{% endfor %}{% endfor %}"
    objects = template(each + "{{ c.function.arguments | tojson }}" + ends)
    items = template(each + "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}" + ends)
    text = template(each + "{{ c.function.arguments }}" + ends)
    joined = template(each + "{{ 'x' + c.function.arguments }}" + ends)
    assert objects.render(messages) == 'hi|function|{"city": "Köln"}'
    assert items.render(messages) == "hi|function|city=Köln"
    assert text.render(messages) == 'hi|function|{"city": "Köln"}'
    assert joined.render(messages) == 'hi|function|x{"city": "Köln"}'


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list of at least one message"),
        ("hi", "messages must be a list"),
        ([{"content": "hi"}], r'messages\[0\] must be an object with a "role"'),
        ([*HI, "x"], r'messages\[1\] must be an object with a "role"'),
        ([{"role": "user"}], r'messages\[0\] has no "content"'),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a text or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is of type 'image_url'; only text"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is no part"),
        ([{"role": "assistant", "tool_calls": 1}], r"messages\[0\].tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"tool_calls\[0\] must be"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"tool_calls\[0\].function.arguments must be a JSON object",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}],
            "must be a JSON object: got int",
        ),
        ([{"role": "user", "content": "hi", "extra": {1, 2}}], "messages and variables must be JSON values"),
    ],
)  # fmt: skip
def test_bad_messages_are_refused(chatml: ChatTemplate, messages: Any, message: str) -> None:
    """A request of another shape is the caller's mistake, and the line says where it is."""
    with pytest.raises(SettingsError, match=message):
        chatml.render(messages)


@pytest.mark.parametrize("tools", ["f", [1], [{"type": "function"}], [{"type": "web", "function": {"name": "f"}}]])
def test_bad_tools_are_refused(chatml: ChatTemplate, tools: Any) -> None:
    """So is a tool that declares no function."""
    with pytest.raises(SettingsError, match="tools"):
        chatml.render(HI, tools=tools)


def test_a_template_can_refuse_messages() -> None:
    """What a template raises is told to the user, in one line; so is what it does to values that are not there."""
    with pytest.raises(SettingsError, match=r"its chat template: refuses these messages: roles must alternate$"):
        template("{{ raise_exception('roles must\n alternate') }}").render(HI)
    with pytest.raises(SettingsError, match="'nothing' is undefined"):
        template("{{ nothing.at.all }}").render(HI)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% if %}", "m.gguf: its chat template: cannot be used: line 1: "),
        ("{{ x | nofilter }}", "No filter named 'nofilter'"),
        ("\n{% endfor %}", "line 2: "),
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "recursion"),
        ("x" * ((1 << 20) + 1), "has 1048577 characters; at most 1048576"),
        (3, "tokenizer.chat_template is int; a string is expected"),
    ],
)
def test_what_is_no_template_is_refused_at_once(text: Any, message: str) -> None:
    """A template that does not parse is found when it is loaded, not when it is first used."""
    with pytest.raises(TokenizerError, match=message):
        template(text)


def test_an_override_that_is_no_template_is_refused() -> None:
    """The name of a format that is not built in would otherwise be the whole prompt."""
    with pytest.raises(SettingsError, match="--chat-template llama3: is no Jinja"):
        ChatTemplate.from_metadata({}, tokenizer(), override="llama3", source="m.gguf")


LOOP = "{% for i in range(99999) %}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        (LOOP * 3 + "{% endfor %}" * 3, "did not render within 0.5 s"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "within 0.5 s"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ (10 ** (10 ** 9)) % 7 }}", "within 0.5 s"),
        ("{{ 'a' * 10**10 }}", "needs more than 512 MiB"),
        ("{{ [0] * 10**10 }}", "needs more than 512 MiB"),
        ("{{ '%10000000000d' | format(1) }}", "512 MiB"),
        ("{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "512 MiB"),
        (LOOP + "{{ 'x' * 1000 }}{% endfor %}", "prints more than 16777216 characters"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_a_hostile_template_does_no_harm(text: str, message: str) -> None:
    """Endless loops, huge values and ways out of the sandbox end in one line, and the next template still works."""
    process = TemplateProcess(time_limit_s=0.5)
    with pytest.raises((TokenizerError, SettingsError), match=message) as caught:
        process.render(text, {"messages": []}, name="m.gguf")
    assert "\n" not in str(caught.value)
    assert process.render("{{ x }}", {"x": "\ud800é"}, name="m.gguf") == "\ud800é"


def test_a_worker_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no process can be had, the line says so, and what works without."""
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(CapabilityError, match="ended with code 1 at its start; use a plain prompt"):
        TemplateProcess().render("x", {}, name="m.gguf")


def test_a_worker_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says of the start is in the line."""
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(CapabilityError, match="cannot be started: No such file or directory; use a plain prompt"):
        TemplateProcess().render("x", {}, name="m.gguf")


def test_a_worker_that_is_never_ready_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The start has a limit of its own."""
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(60)")
    monkeypatch.setattr("kvs_core.formats.template_process._WORKER", slow)
    monkeypatch.setattr("kvs_core.formats.template_process.START_LIMIT_S", 0.3)
    with pytest.raises(CapabilityError, match=r"slow.py was not ready within 0.3 s; use a plain prompt"):
        TemplateProcess().render("x", {}, name="m.gguf")


def test_an_interrupted_request_leaves_nothing_behind() -> None:
    """After an exception in the middle of a request the next one gets its own answer, and the worker before is gone."""
    process = TemplateProcess()
    process.render("x", {}, name="m.gguf")
    first = process._process
    assert first is not None
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        process.render(LOOP * 2 + "{% endfor %}" * 2 + "FIRST", {}, name="m.gguf")
    timer.join()
    assert first.returncode is not None
    assert process.render("SECOND", {}, name="m.gguf") == "SECOND"


@pytest.mark.parametrize("text", [LOOP * 3 + "{% endfor %}" * 3, "{{ (10 ** (10 ** 9)) % 7 }}"])
def test_a_worker_outlives_nobody(text: str) -> None:
    """One that renders without end stops by itself soon after its parent has been killed, also in the midst of one
    operation that never ends."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("the system has no /proc")
    program = f"""
from kvs_core.formats.template_process import TemplateProcess
process = TemplateProcess(time_limit_s=0.5)
process.render("x", {{}}, name="m.gguf")
process._time_limit_s = 60.0
print(process._process.pid, flush=True)
process.render({text!r}, {{}}, name="m.gguf")
"""
    line = [sys.executable, "-c", program]
    with subprocess.Popen(line, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.3)
        parent.kill()
    deadline = time.monotonic() + 20
    while _runs(worker):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_a_worker_ends_with_its_owner() -> None:
    """No process is left behind when a template is dropped."""
    owner = TemplateProcess()
    owner.render("x", {}, name="m.gguf")
    process = owner._process
    assert process is not None
    assert process.poll() is None
    del owner
    gc.collect()
    assert process.returncode is not None
