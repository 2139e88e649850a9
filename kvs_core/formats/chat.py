"""Chat templates: messages to the one prompt text that a model was trained to continue.

A template is a Jinja program in the model file, written for Hugging Face's library. What it sees here is what
llama.cpp shows it; how it is kept from doing harm says ``template_worker.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from kvs_core.errors import SettingsError, TokenizerError
from kvs_core.formats.chat_messages import (
    Message,
    checked_messages,
    checked_tools,
    merge_system,
    with_arguments,
    with_content,
)
from kvs_core.formats.template_process import TemplateProcess
from kvs_core.formats.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)

_MAX_TEMPLATE_CHARS = 1 << 20
_PROBE = "kvs-probe-text"
_CHANNEL = "<|channel|>"  # of gpt-oss, the one format with a developer's role

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The format of a model that brings none."""


class ChatTemplate:
    """A model's chat template, and the second one that some models have for requests with tools.

    text  the template, as Jinja
    """

    def __init__(self, text: str, tools_text: str | None, tokenizer: Tokenizer, *, source: str) -> None:
        """``source`` names the template in messages. Raises TokenizerError for what is no template."""
        self.text = text
        self._tools_text = tools_text
        self._tokenizer = tokenizer
        self._source = source
        self._process = TemplateProcess()
        self._names = set[str]()
        for each in filter(None, (text, tools_text)):
            if len(each) > _MAX_TEMPLATE_CHARS:
                raise TokenizerError(f"{source}: has {len(each)} characters; at most {_MAX_TEMPLATE_CHARS} make sense")
            self._names |= self._process.names(each, name=source)

    @staticmethod
    def from_metadata(
        metadata: Mapping[str, Any], tokenizer: Tokenizer, *, override: str | None = None, source: str
    ) -> ChatTemplate:
        """The template to use: ``override`` (Jinja, or ``chatml``), else the file's, else ChatML.

        Raises TokenizerError for one that does not parse, SettingsError for an override that is no template at all.
        """
        if override is not None and override != "chatml":
            if "{{" not in override and "{%" not in override:
                raise SettingsError(f"--chat-template {override:.40}: is no Jinja; give a template's text, or chatml")
            return ChatTemplate(override, None, tokenizer, source="--chat-template")
        own = metadata.get("tokenizer.chat_template")
        tools_own = metadata.get("tokenizer.chat_template.tool_use")
        for key, value in (("chat_template", own), ("chat_template.tool_use", tools_own)):
            if value is not None and not isinstance(value, str):
                raise TokenizerError(f"{source}: tokenizer.{key} is {type(value).__name__}; a string is expected")
        if override is None and own:
            return ChatTemplate(own, tools_own or None, tokenizer, source=f"{source}: its chat template")
        if override is None:
            _LOG.info("%s: has no chat template; ChatML is used", source)
        return ChatTemplate(CHATML, None, tokenizer, source="the ChatML template")

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None, enable_thinking: bool | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for ``messages``, to be encoded with add_special and parse_special.

        messages         role and content (text, None, or a list of text parts), reasoning_content, tool_calls, name,
                         tool_call_id, as in OpenAI's API
        tools            function declarations, as there
        enable_thinking  None: on where the template knows it
        kwargs           further variables for the template; they win over its own

        A BOS that the tokenizer adds itself is not in the text, nor such an EOS at its end.
        Raises SettingsError for messages of another shape or refused by the template, TokenizerError when the
        template itself is at fault.
        """
        extra = dict(kwargs or {})
        thinking = extra.get("enable_thinking", enable_thinking)
        if thinking is None:
            thinking = self.supports_thinking
        if not isinstance(thinking, bool):
            raise SettingsError(f"enable_thinking is {thinking!r:.40}; it must be true or false")
        variables: dict[str, Any] = {"messages": self._prepare(messages)}
        if add_generation_prompt:
            variables["add_generation_prompt"] = True  # when false, left undefined
        if tools:
            variables["tools"] = checked_tools(tools)
        variables |= _reasoning_names(extra) | extra | {"enable_thinking": thinking}
        text = self._render(variables)
        # Whether the model's file or its template puts them there, they must come once.
        if self._tokenizer.add_bos:
            text = text.removeprefix(self._special_text(self._tokenizer.bos_id))
        if self._tokenizer.add_eos:
            text = text.removesuffix(self._special_text(self._tokenizer.eos_id))
        return text

    @property
    def supports_thinking(self) -> bool:
        """Whether it reads ``enable_thinking``."""
        return "enable_thinking" in self._names

    @property
    def supports_tools(self) -> bool:
        """Whether it reads ``tools``: a server tells its clients."""
        return "tools" in self._names

    @cached_property
    def supports_system(self) -> bool:
        """Whether a system message reaches the prompt as such."""
        return self._prints([{"role": "system", "content": _PROBE}, {"role": "user", "content": "x"}])

    @cached_property
    def needs_parts(self) -> bool:
        """Whether it prints content only when that is a list of parts."""
        part = {"type": "text", "text": _PROBE}
        return not self._prints([{"role": "user", "content": _PROBE}]) and self._prints(
            [{"role": "user", "content": [part]}]
        )

    @cached_property
    def wants_argument_objects(self) -> bool:
        """Whether it writes a tool call's arguments as JSON when it gets an object; some expect the JSON text."""
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {_PROBE: "x"}}}
        asked: list[Message] = [{"role": "user", "content": "x"}]
        asked.append({"role": "assistant", "content": "", "tool_calls": [call]})
        # Joined to text, a dict shows the quotes of Python.
        return self._prints(asked) and not self._prints(asked, f"'{_PROBE}'")

    def _prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        prepared = checked_messages(messages)
        if _CHANNEL not in self.text:
            prepared = [m | {"role": "system"} if m["role"] == "developer" else m for m in prepared]
        if any(m["role"] == "system" for m in prepared) and not self.supports_system:
            prepared = merge_system(prepared)
        if any("tool_calls" in m for m in prepared):
            prepared = with_arguments(prepared, objects=self.wants_argument_objects)
        return with_content(prepared, parts=self.needs_parts)

    def _render(self, variables: dict[str, Any]) -> str:
        now = datetime.now()
        given = {
            "bos_token": self._special_text(self._tokenizer.bos_id),
            "eos_token": self._special_text(self._tokenizer.eos_id),
            "datetime": now.strftime("%b %d %Y"),
            "date_string": now.strftime("%d %b %Y"),
        }
        text = self._tools_text if self._tools_text and "tools" in variables else self.text
        return self._process.render(text, given | variables, name=self._source)

    def _prints(self, messages: list[Message], text: str = _PROBE) -> bool:
        """Whether ``text`` is in the prompt for ``messages``; not if they are refused."""
        try:
            return text in self._render({"messages": messages, "add_generation_prompt": True, "enable_thinking": False})
        except SettingsError:
            return False

    def _special_text(self, token_id: int | None) -> str:
        return "" if token_id is None else self._tokenizer.token_text(token_id)


def _reasoning_names(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Whether earlier reasoning stays, and how much effort to spend, under all names that templates read."""
    keep = extra.get("preserve_reasoning", True)
    named = dict.fromkeys(("preserve_reasoning", "preserve_thinking"), keep)
    named |= dict.fromkeys(("clear_thinking", "truncate_history_thinking", "drop_thinking"), not keep)
    if "reasoning_effort" in extra:
        named["reasoning_strength"] = extra["reasoning_effort"]
    return named
