"""Prompts: from wherever they come, only text that fits the context reaches the model."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import GREEDY, Kvs, tokenizer_of


def test_a_prompt_beyond_the_context_is_refused_before_loading(kvs: Kvs, tiny_llama: Path, tmp_path: Path) -> None:
    """Both numbers are named, no device is opened, and nothing is cut off."""
    prompt = "word " * 200
    tokens = len(tokenizer_of(tiny_llama).encode(prompt))
    done = kvs("run", "-m", tiny_llama, "-p", prompt, "-c", "256")
    assert f"the prompt has {tokens} tokens, the context holds 256" in done.error
    assert "device:" not in done.err
    file = tmp_path / "long.txt"
    file.write_text("x" * (5 << 20))
    assert "the prompt has 5242880 bytes, at least" in kvs("run", file, "-m", tiny_llama, "-c", "256").error


def test_a_prompt_that_just_fits(kvs: Kvs, tiny_llama: Path) -> None:
    """One token less than the context leaves room for one more, which is made."""
    tokenizer = tokenizer_of(tiny_llama)
    prompt = "x" * next(n for n in range(1, 2000) if len(tokenizer.encode("x" * n)) == 255)
    result = kvs("run", "-m", tiny_llama, "-p", prompt, "-c", "256", "--json").json
    assert (result["prompt_tokens"], result["generated_tokens"]) == (255, 1)
    assert "the prompt has 256 tokens" in kvs("run", "-m", tiny_llama, "-p", prompt + "x", "-c", "256").error


def test_prompt_files(kvs: Kvs, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, ``-f``, stdin and ``-p`` with the same text give the same result; a byte order mark is no text."""
    text = "héllo\nwörld\n"
    file, marked = tmp_path / "prompt.txt", tmp_path / "marked.txt"
    file.write_bytes(text.encode())
    marked.write_bytes(b"\xef\xbb\xbf" + text.encode())
    command = ("-m", tiny_llama, "-n", "8", "--json", *GREEDY)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode()), isatty=lambda: False))
    ways = [("-p", text, "--no-escape"), (file,), ("-f", file), (marked,), ("-",)]
    results = [kvs("run", *way, *command).json for way in ways]
    assert len({(tuple(result["token_ids"]), result["prompt_tokens"]) for result in results}) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"text \xff\xfe", "byte 0xff at offset 5 is not UTF-8"),
        ("text".encode("utf-16"), "byte 0xff at offset 0 is not UTF-8"),
        (b"text\0more", "NUL byte at offset 4"),
        (b"half \xe6\xbc", "byte 0xe6 at offset 5 is not UTF-8"),
        (b"a" * ((64 << 20) + 1), "larger than 64 MiB"),
        (None, "No such file or directory"),
    ],
    ids=["invalid", "utf-16", "nul", "cut", "huge", "missing"],
)
def test_prompt_files_that_are_no_text(
    kvs: Kvs, tiny_llama: Path, tmp_path: Path, content: bytes | None, words: str
) -> None:
    """What cannot be a prompt is refused with its name and the place, before the model is opened."""
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    error = kvs("run", file, "-m", tiny_llama).error
    assert error.startswith(f"prompt {file}: ")
    assert words in error


def test_a_directory_is_no_prompt(kvs: Kvs, tiny_llama: Path, tmp_path: Path) -> None:
    """Nor is an endless device read to its end."""
    assert "Is a directory" in kvs("run", tmp_path, "-m", tiny_llama).error
    assert "larger than 64 MiB" in kvs("run", "/dev/zero", "-m", tiny_llama).error


def test_an_empty_prompt(kvs: Kvs, tiny_llama: Path, tiny_qwen35: Path) -> None:
    """A model with a BOS begins from it; one without says what is missing."""
    result = kvs("run", "-m", tiny_llama, "-p", "", "-n", "3", "--json").json
    assert (result["prompt_tokens"], result["generated_tokens"]) == (1, 3)
    assert "the prompt is empty" in kvs("run", "-m", tiny_qwen35, "-p", "", "-n", "3").error


def test_chat_wraps_the_prompt(kvs: Kvs, tiny_qwen35: Path, tmp_path: Path) -> None:
    """``--chat`` is the model's template around the prompt; another template and a system message are used as given."""
    command = ("run", "-m", tiny_qwen35, "-n", "6", "--json", *GREEDY)
    raw = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    expected = kvs(*command, "-p", raw.replace("\n", r"\n")).json
    chat = kvs(*command, "-p", "hi", "--chat", "-sys", "be brief").json
    assert chat["prompt_tokens"] == expected["prompt_tokens"]
    assert chat["token_ids"] == expected["token_ids"]
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1].content }}{{ tail }}")
    own = kvs(*command, "-p", "hi", "--chat", "--chat-template-file", template, "--chat-template-kwargs",
              '{"tail": " there"}').json
    assert own["token_ids"] == kvs(*command, "-p", "hi there").json["token_ids"]


@pytest.mark.parametrize(
    ("template", "words"),
    [("{{ raise_exception('no') }}", "refuses these messages: no"), ("{% if %}", "cannot be used"),
     ("{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}", "did not render")],
)
def test_templates_that_fail(
    kvs: Kvs, tiny_qwen35: Path, template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that refuses, does not parse or does not end is one line."""
    monkeypatch.setattr("kvs_core.formats.template_process.TemplateProcess.__init__.__defaults__", (1.0,))
    assert words in kvs("run", "-m", tiny_qwen35, "-p", "x", "--chat", "--chat-template", template).error
