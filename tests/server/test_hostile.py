"""Templates that mean harm, and requests that try to make one do it: an error, and the server goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvs_core.formats import chat
from kvs_core.formats.template_process import TemplateProcess
from tests.cli.conftest import Kvs, kvs
from tests.server.running import Running, running

__all__ = ["kvs"]

LIMIT_S = 1.5   # instead of ten: what is harmless renders in a hundredth
CHAT = "/v1/chat/completions"

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DEEDS = {
    "loops": LOOPS,
    "power": "{{ n ** (n ** n) }}",
    "repeats": "{{ 'x' * (n * 10**9) }}",
    "pads": "{{ '%0999999999d' % n }}",
    "indents": "{{ messages | tojson(indent=n * 10**9) }}",
    "prints": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "ranges": "{{ range(n * 10**9) | list }}",
    "recurses": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "grows": "{% set s = namespace(v='xx') %}{% for a in range(99) %}{% set s.v = s.v + s.v %}{% endfor %}",
}
TRICKS = {
    "mro": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "item": "{{ ''['__class__'] }}",
    "filter": "{{ ''|attr('__class__') }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "map": "{{ ['']|map(attribute='__class__')|list }}",
    "globals": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "init": "{{ cycler.__init__.__globals__ }}",
    "self": "{{ self._TemplateReference__context.environment }}",
    "function": "{{ raise_exception.__code__ }}",
    "generator": "{{ (messages|map('upper')).gi_frame }}",
    "module": "{{ namespace.__module__ }}",
    "changes": "{{ messages.append('x') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
}
LEAKS = ("<class", "<function", "root:", "uid=", "<jinja", "<code", "<frame", "<module", "<generator", "kvs_core")


def guarded(deeds: dict[str, str]) -> str:
    """A template that prints its message, and does the deed whose name that is."""
    cases = "".join(f"{{% if messages[0].content == '{name}' %}}{deed}{{% endif %}}" for name, deed in deeds.items())
    return "{% set n = messages | length + 8 %}{{ messages[0].content }}" + cases


@pytest.fixture(scope="module")
def limited() -> Iterator[None]:
    """Templates have less time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "TemplateProcess", partial(TemplateProcess, LIMIT_S))
        yield


@pytest.fixture(scope="module")
def hostile(limited: None, llama_path: Path) -> Iterator[Running]:
    """A server with a template that does what it is told."""
    with running("-m", llama_path, "-c", 512, "--chat-template", guarded(DEEDS | TRICKS)) as server:
        yield server


def said(text: str) -> list[dict[str, Any]]:
    """One message."""
    return [{"role": "user", "content": text}]


def fine(server: Running) -> bool:
    """Whether a harmless chat is answered."""
    reply = server.post(CHAT, messages=said("hello"), max_tokens=2)
    return bool(reply["usage"]["completion_tokens"] == 2)


@pytest.mark.parametrize("name", DEEDS)
def test_what_takes_too_much_is_stopped(hostile: Running, name: str) -> None:
    """Time, memory, output or depth: one line that names the template; the next chat is answered."""
    start = time.monotonic()
    reply = hostile.http.post(CHAT, json={"messages": said(name), "max_tokens": 2})
    assert time.monotonic() - start < LIMIT_S + 5
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) in ((500, 500), (400, 400))
    assert error["message"].startswith("--chat-template: ")
    assert "\n" not in error["message"]
    assert fine(hostile)


def test_others_are_answered_while_a_template_loops(hostile: Running) -> None:
    """Health, metrics of the slot, and completions, which need no template, do not wait for it."""
    with httpx.Client(base_url=hostile.url, timeout=30, trust_env=False) as other:
        replies: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: replies.append(other.post(CHAT, json={"messages": said("loops"), "max_tokens": 2}))
        )
        thread.start()
        answered = 0
        while thread.is_alive():
            start = time.monotonic()
            assert hostile.get("/health") == {"status": "ok"}
            assert hostile.get("/slots")[0]["is_processing"] is False
            assert hostile.post("/completion", prompt="x", n_predict=1)["tokens_predicted"] == 1
            assert hostile.post("/tokenize", content="x")["tokens"]
            assert time.monotonic() - start < LIMIT_S
            answered += 1
        assert answered > 2
    assert "did not render within" in replies[0].json()["error"]["message"]
    assert fine(hostile)


@pytest.mark.parametrize("name", TRICKS)
def test_a_template_reaches_nothing_of_the_server(hostile: Running, name: str) -> None:
    """Attributes, formats and imports that lead out of the sandbox: refused, or nothing is there to print."""
    reply = hostile.http.post("/apply-template", json={"messages": said(name)})
    if reply.status_code == 200:
        assert reply.json()["prompt"] in (name, f"{name}[]", f"{name}[Undefined]")
    else:
        assert reply.status_code in (400, 500)
        assert "\n" not in reply.json()["error"]["message"]
        assert not [leak for leak in LEAKS if leak in reply.text]
    assert fine(hostile)


@pytest.mark.parametrize("kwargs", [
    {"messages": "{{ ''.__class__ }}"},
    {"range": "x", "namespace": 1, "raise_exception": None, "self": {}, "loop": []},
    {"__class__": "x", "bos_token": ["x"], "add_generation_prompt": {"a": 1}},
    {"n": 10**300, "x": "y" * 300_000},
    {"tools": [[[[[[[["x"]]]]]]]], "enable_thinking": True},
    {"enable_thinking": {"a": 1}},
])  # fmt: skip
def test_variables_of_a_request_are_values(hostile: Running, kwargs: dict[str, Any]) -> None:
    """Whatever a request gives the template, it is never run, and the answer is a reply or a 400."""
    reply = hostile.http.post("/apply-template", json={"messages": said("hello"), "chat_template_kwargs": kwargs})
    assert reply.status_code in (200, 400), reply.text
    assert "<class" not in reply.text
    assert fine(hostile)


@pytest.mark.parametrize(("template", "words"), [
    ("{% if %}", "cannot be used"),
    ("{{ 9 ** (9 ** 9) }}", "did not render within"),
    ("{% for a in messages %}" * 500, "--chat-template: "),
])  # fmt: skip
def test_what_does_harm_when_it_is_compiled_keeps_the_server_from_starting(
    limited: None, kvs: Kvs, llama_path: Path, template: str, words: str
) -> None:
    """One line and exit code 1."""
    assert words in kvs("serve", "-m", llama_path, "--port", 0, "--device", "cpu", "--chat-template", template).error


def test_a_template_that_always_loops_leaves_the_rest(limited: None, llama_path: Path) -> None:
    """Its chats fail, each within the limit; completions work, and so does the end."""
    with running("-m", llama_path, "-c", 256, "--chat-template", "{{ x }}" + LOOPS) as server:
        error = server.post(CHAT, 500, messages=said("x"))["error"]
        assert error["type"] == "server_error"
        assert "did not render within" in error["message"]
        assert server.post("/completion", prompt="x", n_predict=1)["tokens_predicted"] == 1
        assert server.get("/health") == {"status": "ok"}
