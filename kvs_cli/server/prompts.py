"""What a completion request may give as its prompt: texts, tokens, mixtures, and several of them at once."""

from __future__ import annotations

from kvs_cli.server.errors import bad_request
from kvs_cli.server.fields import missing
from kvs_cli.server.jobs import MAX_WAITING
from kvs_core.engine.session import check_prompt
from kvs_core.errors import ContextError
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.settings import ContextPlan
from kvs_core.units import MIB, ceil_div

_SURE_BYTES = MIB   # up to here a text is tokenized without asking whether it can fit
MAX_PROMPTS = MAX_WAITING


class PromptReader:
    """Prompts to tokens that fit the context. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, context: ContextPlan) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._longest = max(len(tokenizer.token_bytes(token, special=True)) for token in range(tokenizer.n_vocab))

    def text(self, text: str) -> tuple[int, ...]:
        """A text, with BOS where the model wants it and the texts of special tokens as those tokens."""
        return self.checked(self.encode(text))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Tokens of a text of any length. ContextError, before the work, for one that is far too long."""
        size_bytes = len(text.encode(errors="replace"))
        least = ceil_div(size_bytes, max(1, self._longest))
        if size_bytes > _SURE_BYTES and least >= self._context.context_tokens:
            raise ContextError(
                "the text is too long", prompt_tokens=least, context_tokens=self._context.context_tokens
            )
        return self._tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def prompts(self, given: object) -> list[tuple[int, ...]]:
        """One prompt, or one for each entry of an array of prompts."""
        if given is None:
            raise missing("prompt")
        if not isinstance(given, list) or _is_one(given):
            return [self._one(given)]
        if not given or len(given) > MAX_PROMPTS:
            raise bad_request(f"'prompt' has {len(given)} prompts; give 1 to {MAX_PROMPTS}")
        return [self._one(each) for each in given]

    def tokens(self, given: object, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """A text, a token or a list of both, of any length. With ``add_special`` BOS comes in front of a first text."""
        if isinstance(given, str):
            return self.encode(given, add_special=add_special, parse_special=parse_special)
        tokens: list[int] = []
        for index, each in enumerate(given if isinstance(given, list) else [given]):
            if isinstance(each, str):
                tokens += self.encode(each, add_special=add_special and index == 0, parse_special=parse_special)
            elif isinstance(each, int) and not isinstance(each, bool):
                if not 0 <= each < self._tokenizer.n_vocab:
                    raise bad_request("Prompt contains invalid tokens")
                tokens.append(each)
            else:
                raise bad_request("a prompt must be a string, an array of tokens and strings, or an array of prompts")
        return tokens

    def _one(self, given: object) -> tuple[int, ...]:
        if isinstance(given, dict):
            if given.get("multimodal_data"):
                raise bad_request("this server reads text alone; leave 'multimodal_data' out")
            if not isinstance(given.get("prompt_string"), str):
                raise bad_request("a prompt object needs a 'prompt_string'")
            given = given["prompt_string"]
        if not isinstance(given, (str, list)):
            raise bad_request("a prompt must be a string, an array of tokens and strings, or an array of prompts")
        return self.checked(self.tokens(given, add_special=True))

    def checked(self, tokens: list[int]) -> tuple[int, ...]:
        """The same, if they fit the context; else ContextError."""
        check_prompt(len(tokens), self._context)
        return tuple(tokens)


def _is_one(given: list[object]) -> bool:
    """Whether an array is one prompt: tokens, perhaps with texts among them."""
    kinds = {type(each) for each in given}
    return int in kinds and kinds <= {int, str}
