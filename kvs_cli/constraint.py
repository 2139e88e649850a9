"""The rule that a text has to follow, from ``--grammar`` and ``--json-schema`` to the tokens that may come next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvs_cli.open_model import OpenModel
from kvs_cli.prompt import read_text_file
from kvs_core.errors import SettingsError
from kvs_core.formats.reasoning import open_tags
from kvs_core.sampling.constrained import Constraint
from kvs_core.sampling.thoughts import AfterText
from kvs_core.settings import ConstraintSettings
from kvs_core.settings.kinds import JSON_OBJECT

if TYPE_CHECKING:
    from kvs_core.formats.grammar import GrammarCompiler

_TAIL_TOKENS = 32   # of a prompt: the tag that opens thoughts, and white space


def read_constraint(settings: ConstraintSettings) -> ConstraintSettings:
    """The same with the content of its file in the file's place. Raises SettingsError."""
    if settings.grammar_file is not None:
        return ConstraintSettings(grammar=read_text_file(settings.grammar_file, "--grammar-file"))
    if settings.schema_file is not None:
        return ConstraintSettings(schema=_read_schema(settings.schema_file))
    return settings


def compile_constraint(
    settings: ConstraintSettings, compiler: GrammarCompiler, *, after_thoughts: bool = False
) -> Constraint | None:
    """The rule of settings that were read; used up by one text. Raises SettingsError, naming the flag.

    ``after_thoughts``: white space may come before the JSON of a schema.
    """
    try:
        if settings.grammar is not None:
            return compiler.from_gbnf(settings.grammar)
        if settings.schema is not None:
            return compiler.from_schema(settings.schema, after_thoughts=after_thoughts)
    except SettingsError as error:
        flag = "--json-schema" if settings.grammar is None else "--grammar"
        raise SettingsError(f"{flag}: {error}") from None
    return None


def run_constraint(settings: ConstraintSettings, model: OpenModel, prompt: Sequence[int]) -> Constraint | None:
    """The rule for the one text of ``kvs run``; see ``compile_constraint``. It holds behind the thoughts, if a chat
    template has opened some at the end of ``prompt``."""
    if settings == ConstraintSettings():
        return None
    from kvs_core.formats.grammar import GrammarCompiler  # here, since few runs need it

    tags = open_tags(model.tokenizer.decode(prompt[-_TAIL_TOKENS:], special=True))
    compiler = GrammarCompiler(model.tokenizer, model.spec.n_vocab)
    rule = compile_constraint(read_constraint(settings), compiler, after_thoughts=tags is not None)
    return rule if rule is None or tags is None else AfterText(rule, model.tokenizer, text=tags.end)


def _read_schema(path: Path) -> dict[str, object]:
    text = read_text_file(path, "--json-schema-file")
    try:
        schema = JSON_OBJECT.parse(text)
    except ValueError as error:
        raise SettingsError(f"--json-schema-file {path}: {error}; give a file that holds one JSON schema") from None
    assert isinstance(schema, dict)
    return schema
