"""From where the prompt is given to its text, and on to its tokens."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvs_cli.open_model import OpenModel
from kvs_core.engine.session import check_prompt
from kvs_core.errors import ContextError, SettingsError
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.settings import ChatSettings, ContextPlan, PromptSettings
from kvs_core.units import MIB, ceil_div

if TYPE_CHECKING:
    from kvs_core.formats.chat import ChatTemplate

LOGGER = logging.getLogger(__name__)

_MAX_BYTES = 64 * MIB   # more than a context of ten million tokens
_SURE_BYTES = MIB       # up to here a text is tokenized without asking whether it can fit


def read_prompt(settings: PromptSettings) -> str:
    """The prompt's text. Raises SettingsError, naming the source, unless that is UTF-8 text of at most 64 MiB.

    A byte order mark in front is left out; nothing else is changed.
    """
    if settings.text is not None:
        return settings.text
    if settings.file is None:
        if sys.stdin.isatty():
            LOGGER.info("reading the prompt from the terminal; end it with Ctrl-D on a line of its own")
        return _decode(_read(sys.stdin.buffer, "prompt from stdin"), "prompt from stdin")
    return read_text_file(settings.file, "prompt")


def prompt_tokens(model: OpenModel, text: str, chat: ChatSettings, context: ContextPlan) -> list[int]:
    """The tokens to continue, with BOS where the model wants it and the texts of special tokens as those tokens.

    Raises ContextError if they do not fit the context, SettingsError if there are none or the template refuses.
    """
    _check_size(text, model.tokenizer, context)
    if chat.enabled:
        text = _in_template(model, text, chat)
    tokens = model.tokenizer.encode(text)
    if not tokens:
        raise SettingsError("the prompt is empty, and this model puts no token in front of a text; give some text")
    check_prompt(len(tokens), context)
    return tokens


def read_template(model: OpenModel, chat: ChatSettings) -> ChatTemplate:
    """The chat template to use: the one that was given, else the model's. SettingsError or TokenizerError."""
    from kvs_core.formats.chat import ChatTemplate  # here, since Jinja is slow to import

    return ChatTemplate.from_metadata(
        model.file.metadata, model.tokenizer, override=with_template(chat).template, source=str(model.file.path)
    )


def with_template(chat: ChatSettings) -> ChatSettings:
    """The same with the content of its template's file in the file's place. Raises SettingsError."""
    if chat.template_file is None:
        return chat
    text = read_text_file(chat.template_file, "--chat-template-file")
    return replace(chat, template=text, template_file=None)


def _in_template(model: OpenModel, text: str, chat: ChatSettings) -> str:
    """``text`` as a user's message, ready for the model's answer."""
    template = read_template(model, chat)
    messages = [{"role": "user", "content": text}]
    if chat.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": chat.system_prompt})
    return template.render(messages, kwargs=chat.variables)


def read_text_file(path: Path, what: str) -> str:
    """The text of a file of at most 64 MiB. Raises SettingsError, which calls it ``what`` and its path."""
    name = f"{what} {path}"
    try:
        with path.open("rb") as file:
            return _decode(_read(file, name), name)
    except OSError as error:
        raise SettingsError(f"{name}: {error.strerror or error}; give a readable text file") from None


def _read(file: BinaryIO, name: str) -> bytes:
    data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise SettingsError(f"{name}: larger than {_MAX_BYTES // MIB} MiB; give a shorter text")
    return data


def _decode(data: bytes, name: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{name}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8; "
            "give a text file in UTF-8"
        ) from None
    zero = data.find(0)
    if zero >= 0:
        raise SettingsError(f"{name}: NUL byte at offset {zero}, so it is no text; give a text file in UTF-8")
    return text.removeprefix("\ufeff")


def _check_size(text: str, tokenizer: Tokenizer, context: ContextPlan) -> None:
    """Refuse a long text that cannot fit, however well it tokenizes, before it is tokenized."""
    size_bytes = len(text.encode())
    if size_bytes <= _SURE_BYTES:
        return
    longest = max(len(tokenizer.token_bytes(token, special=True)) for token in range(tokenizer.n_vocab))
    least_tokens = ceil_div(size_bytes, longest)
    if least_tokens >= context.context_tokens:
        raise ContextError(
            f"the prompt has {size_bytes} bytes, at least {least_tokens} tokens; the context holds "
            f"{context.context_tokens}; {context.advice('shorten the prompt')}",
            prompt_tokens=least_tokens,
            context_tokens=context.context_tokens,
        )
