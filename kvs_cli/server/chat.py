"""Chat requests: messages, tools and wishes become a prompt, a rule for the text, and a parser for it.

OpenAI's shape is the one that is understood; Anthropic's and the Responses API's are put into it first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvs_cli.server.errors import bad_request
from kvs_cli.server.fields import Fields, missing, refuse
from kvs_cli.server.generation import Task
from kvs_cli.server.options import Options
from kvs_cli.server.service import Service
from kvs_core.engine.session import common_prefix
from kvs_core.errors import SettingsError
from kvs_core.formats.chat_messages import checked_messages, checked_tools
from kvs_core.formats.chat_output import ChatParser
from kvs_core.formats.reasoning import ReasoningTags, is_open, reasoning_tags
from kvs_core.formats.tool_calls import CALL_END, CALL_START, ToolNotation, tool_notation, tools_text
from kvs_core.sampling.constrained import AllOf, Constraint
from kvs_core.sampling.thoughts import AfterText, ThoughtLimit

LOGGER = logging.getLogger(__name__)

_CHOICES = ("auto", "none", "required")
_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat request, checked.

    text         the prompt
    border       of it, the characters that a next turn keeps, though a template may drop the thoughts behind them
    tags         of the thoughts, None: they are part of the text
    is_open      the prompt has opened the thoughts
    tools        whose calls are looked for
    continued    the text of the assistant's message that is continued
    inline       in streams thoughts stay in the text, in replies they do not
    """

    text: str
    border: int
    options: Options
    tags: ReasoningTags | None
    is_open: bool
    notation: ToolNotation
    tools: tuple[Mapping[str, Any], ...]
    several: bool
    tool_choice: str
    continued: str
    inline: bool

    @property
    def opening(self) -> str:
        """What of the text the prompt holds already, where thoughts are not taken out of it."""
        known = reasoning_tags(self.text)
        return f"{known.start}\n" if self.tags is None and is_open(self.text, known) else ""

    def parser(self, *, stream: bool) -> ChatParser:
        """For the text that follows the prompt."""
        tags = None if stream and self.inline else self.tags
        return ChatParser(tags=tags, is_open=self.is_open, notation=self.notation, tools=self.tools)


def read_chat(body: Fields, service: Service) -> Chat:
    """Check a request and render its prompt. ApiError or KvsError."""
    messages = body.array("messages") if "messages" in body else None
    if messages is None:
        raise missing("messages")
    tools = checked_tools(body.array("tools"))
    choice = body["tool_choice"] if isinstance(body.get("tool_choice"), str) else "auto"
    if choice not in _CHOICES:
        raise bad_request(f"Field 'tool_choice': {choice!r:.40} is not one of {', '.join(_CHOICES)}")
    if tools and body.text("grammar"):
        raise bad_request("a grammar cannot be combined with tools; leave one of them out")
    replies = service.settings.replies
    called = tuple(tools) if choice != "none" and replies.parse else ()
    options = _options(body, service, called=bool(called))
    variables = _variables(body, service)
    text, border, continued = _render(body, service, messages, tools, variables)
    fmt = body.text("reasoning_format", replies.reasoning_format)
    if fmt not in _FORMATS:
        raise bad_request(f"Field 'reasoning_format': {fmt!r:.40} is not one of {', '.join(_FORMATS)}")
    tags = reasoning_tags(service.template.text)
    return Chat(
        text=text, border=border, options=options,
        tags=tags if fmt != "none" and replies.parse else None, is_open=is_open(text, tags),
        notation=tool_notation(service.template.text),
        tools=called,
        several=body.flag("parallel_tool_calls", service.template.supports_tools), tool_choice=choice,
        continued=continued, inline=fmt == "deepseek-legacy",
    )


def chat_task(chat: Chat, service: Service) -> Task:
    """Tokens, rule and settings of a chat. ApiError or KvsError."""
    visible = {
        tokens[0] for text in (CALL_START, CALL_END, *reasoning_tags(service.template.text))
        if len(tokens := service.model.tokenizer.encode(text, add_special=False)) == 1
    }  # fmt: skip
    prompt = service.prompts.text(chat.text)
    kept = service.prompts.encode(chat.text[: chat.border])
    return service.task(
        prompt, chat.options, border=common_prefix(kept, prompt), constraint=_constraint(chat, service),
        visible=frozenset(visible), chat_format="Content-only" if not chat.tools else chat.notation.value,
        reasoning_format="none" if chat.tags is None else service.settings.replies.reasoning_format,
    )


def _options(body: Fields, service: Service, *, called: bool) -> Options:
    """The options of a chat: logprobs is a switch here, and the form of the reply may be given in OpenAI's way.

    ``called``: there are tools, whose calls the server's own grammar does not know.
    """
    changed = dict(body)
    if "top_logprobs" in body and not body.flag("logprobs", False):
        raise bad_request("top_logprobs requires logprobs to be set to true")
    if body.flag("logprobs", False):
        changed["n_probs"] = body.whole("top_logprobs", 20, least=0)
    changed.pop("logprobs", None)
    wanted = body.object("response_format")
    kind = wanted.text("type", "text")
    if kind == "json_object":
        changed["json_schema"] = dict(wanted.object("schema"))
    elif kind == "json_schema":
        changed["json_schema"] = dict(wanted.object("json_schema").object("schema"))
    elif kind != "text":
        raise bad_request(f'response_format type must be one of text, json_object or json_schema, not {kind!r:.40}')
    if body.text("grammar") and changed.get("json_schema") is not None:
        raise bad_request("a grammar cannot be combined with a JSON schema; leave one of them out")
    defaults = replace(service.defaults, grammar="", json_schema=None) if called else service.defaults
    return Options.read(Fields(changed), defaults, service.model.tokenizer)


def _variables(body: Fields, service: Service) -> dict[str, Any]:
    """The template's further variables: the server's, then the request's."""
    variables: dict[str, Any] = {"preserve_reasoning": service.settings.replies.preserve_thoughts}
    variables |= service.settings.chat.variables
    given = body.object("chat_template_kwargs")
    if "enable_thinking" in given:
        given.flag("enable_thinking", True)
    effort = body.get("reasoning_effort", body.object("reasoning").get("effort"))
    if effort is not None and not isinstance(effort, str):
        refuse("reasoning_effort", effort, "a string")
    if effort == "none":
        variables["enable_thinking"] = False
    elif effort is not None:
        variables["reasoning_effort"] = effort
    return variables | dict(given)


def _render(
    body: Fields, service: Service, messages: list[Any], tools: list[dict[str, Any]], variables: dict[str, Any]
) -> tuple[str, int, str]:
    """The prompt, its border, and the text of the last message where that is to be continued."""
    template = service.template
    if tools and not template.supports_tools:
        messages = _with_tools(messages, tools)
        tools = []
    add_prompt = body.flag("add_generation_prompt", True)
    wish = body.get("continue_final_message")
    if wish not in (None, True, False, "content", "reasoning_content"):
        raise bad_request("Field 'continue_final_message': expected true, false, content or reasoning_content")
    last = messages[-1] if messages and isinstance(messages[-1], Mapping) else {}
    trailing = last.get("role") == "assistant" and service.settings.replies.continue_assistant
    if wish is False or not (wish or (trailing and add_prompt)):
        told = template.render(messages, add_generation_prompt=False, tools=tools, kwargs=variables)
        if not add_prompt:
            return told, len(told), ""
        text = template.render(messages, tools=tools, kwargs=variables)
        return text, common_prefix(told, text), ""
    if wish and "add_generation_prompt" in body and add_prompt:
        raise bad_request("add_generation_prompt and continue_final_message exclude each other; set one of them")
    if last.get("role") != "assistant":
        raise bad_request("continue_final_message needs a last message of the assistant")
    if last.get("tool_calls"):
        raise bad_request("a message with tool_calls cannot be continued")
    if len(messages) > 1 and isinstance(messages[-2], Mapping) and messages[-2].get("role") == "assistant":
        raise bad_request("Cannot have 2 or more assistant messages at the end of the list.")
    head = template.render(messages[:-1], tools=tools, kwargs=variables)
    content = _joined(last.get("content"))
    thoughts = _joined(last.get("reasoning_content"))
    tags = reasoning_tags(template.text)
    if is_open(head, tags):
        head += thoughts if wish == "reasoning_content" else f"{thoughts}\n{tags.end}\n\n"
    return head + ("" if wish == "reasoning_content" else content), len(head), content


def _with_tools(messages: list[Any], tools: list[dict[str, Any]]) -> list[Any]:
    """Messages whose first one tells of the tools, for a template that has no place for them; and calls as text."""
    told: list[Any] = []
    for message in messages:
        if isinstance(message, Mapping) and message.get("role") == "tool":
            answer = f"<tool_response>\n{_joined(message.get('content'))}\n</tool_response>"
            told.append({"role": "user", "content": answer})
        elif isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list):
            [checked] = checked_messages([message])
            calls = [_call_text(call["function"]) for call in checked["tool_calls"]]
            told.append({"role": "assistant", "content": "\n".join([*checked["content"], *calls])})
        else:
            told.append(message)
    text = tools_text(tools)
    if told and isinstance(told[0], Mapping) and told[0].get("role") in ("system", "developer"):
        return [{**told[0], "content": f"{_joined(told[0].get('content'))}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{CALL_START}\n{json.dumps(call, ensure_ascii=False)}\n{CALL_END}"


def _joined(content: object) -> str:
    if isinstance(content, list):
        return "\n\n".join(part.get("text", "") for part in content
                           if isinstance(part, Mapping) and isinstance(part.get("text", ""), str))
    return content if isinstance(content, str) else ""


def _constraint(chat: Chat, service: Service) -> Constraint | None:
    """The limit on thoughts, and behind these the grammar, the schema, or the calls."""
    tags = reasoning_tags(service.template.text)
    tokenizer = service.model.tokenizer
    rule = service.constraint(chat.options, after_thoughts=chat.is_open) or _call_rule(chat, service)
    if rule is not None and chat.is_open and not isinstance(rule, AfterText):
        rule = AfterText(rule, tokenizer, text=tags.end)
    if chat.options.thought_limit < 0:
        return rule
    limit = ThoughtLimit(
        chat.options.thought_limit, tokenizer, n_vocab=service.model.spec.n_vocab, start=tags.start, end=tags.end,
        closing=tokenizer.encode(f"{chat.options.thought_message}\n{tags.end}", add_special=False),
        is_open=chat.is_open,
    )
    return limit if rule is None else AllOf(limit, rule)


def _call_rule(chat: Chat, service: Service) -> Constraint | None:
    """What tool calls have to look like: from the start where one is required, else from the tag that opens one."""
    if not chat.tools:
        return None
    required = chat.tool_choice == "required"
    try:
        rule = service.grammars.for_calls(
            chat.notation, chat.tools, several=chat.several, is_open=not required, after_thoughts=chat.is_open
        )
    except SettingsError as error:
        if required:
            raise
        LOGGER.warning("calls of these tools are not held to their schemas: %s", error)
        return None
    return rule if required else AfterText(rule, service.model.tokenizer, text=CALL_START, exactly=True)
