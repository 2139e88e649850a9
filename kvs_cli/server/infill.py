"""``POST /infill``: the text between two others, of models whose vocabulary has tokens to mark them (FIM).

    [other files] PRE prefix prompt SUF suffix MID        what follows is the middle
    [other files] SUF suffix PRE prefix prompt MID        with --spm-infill

As in llama-server: of a long prefix its end is kept, of a long suffix its beginning, three to one within a batch, and
the other files fill what the context has left, the last ones first.
"""

from __future__ import annotations

from kvs_cli.server.errors import ApiError, bad_request
from kvs_cli.server.fields import Fields, missing, refuse
from kvs_cli.server.prompts import PromptReader
from kvs_core.formats.tokenizer import Tokenizer
from kvs_core.settings import ContextPlan

_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_PROJECT = "myproject\n"
_UNNAMED = "tmp"
_CURRENT = "filename\n"
_BETWEEN = "\n\n--- snippet ---\n\n"   # of files, where no token stands between them


def check_infill(tokenizer: Tokenizer) -> None:
    """ApiError 501 for a vocabulary without the tokens."""
    lacking = [f"{name} token is missing." for key, name in _NAMES.items() if key not in tokenizer.fim_ids]
    if lacking:
        raise ApiError("not_supported_error", f"Infill is not supported by this model: {' '.join(lacking)}")


def infill_prompt(
    body: Fields, reader: PromptReader, tokenizer: Tokenizer, context: ContextPlan, *, n_predict: int, spm: bool
) -> tuple[int, ...]:
    """The tokens of a request's prompt, for a vocabulary that was checked. ApiError 400 for fields of another shape.

    n_predict  tokens that a text may have by the server's flag, -1: no limit
    """
    fim = tokenizer.fim_ids
    if not isinstance(body.get("prompt", ""), str):
        refuse("prompt", body["prompt"], "a string")
    for name in ("input_prefix", "input_suffix"):
        if name not in body:
            raise missing(name)
    prompt = reader.encode(body.text("prompt"), add_special=False)
    prefix = reader.tokens(body["input_prefix"], add_special=False, parse_special=False)
    suffix = reader.tokens(body["input_suffix"], add_special=False, parse_special=False)
    extra = _extra(body.array("input_extra"), reader, tokenizer)
    quarter = context.batch_tokens // 4
    prefix = prefix[max(0, len(prefix) - 3 * quarter) :]
    suffix = suffix[: max(0, quarter - 2 - len(prompt))]
    before, behind = [fim["fim_pre"], *prefix, *prompt], [fim["fim_suf"], *suffix]
    first, second = (behind, before) if spm else (before, behind)
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    marked = [*bos, *first, *second, fim["fim_mid"]]
    left = min(context.context_tokens - context.batch_tokens - 2 * n_predict, context.context_tokens - 1 - len(marked))
    return reader.checked([*extra[max(0, len(extra) - max(0, left)) :], *marked])


def _extra(files: list[object], reader: PromptReader, tokenizer: Tokenizer) -> list[int]:
    """Tokens of other files, and of the names where the vocabulary has a place for them."""
    fim = tokenizer.fim_ids

    def plain(text: str) -> list[int]:
        return reader.encode(text, add_special=False, parse_special=False)

    tokens = [fim["fim_rep"], *plain(_PROJECT)] if "fim_rep" in fim else []
    for each in files:
        text = each.get("text") if isinstance(each, dict) else None
        name = each.get("filename", _UNNAMED) if isinstance(each, dict) else None
        if not isinstance(text, str) or not isinstance(name, str):
            raise bad_request("Field 'input_extra': expected an array of objects with a text, and perhaps a filename")
        tokens += [fim["fim_sep"], *plain(f"{name}\n")] if "fim_sep" in fim else plain(_BETWEEN)
        tokens += plain(text)
    return [*tokens, fim["fim_sep"], *plain(_CURRENT)] if "fim_sep" in fim else tokens
