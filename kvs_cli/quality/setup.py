"""What the quality benches share: engine settings behind their own flags, lists of numbers, the folder of results."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from errno import EACCES, ENOTDIR
from pathlib import Path
from typing import Any

from kvs_cli.logging import configure_logging
from kvs_cli.open_model import OpenModel, open_engine, open_model
from kvs_cli.options import Parsed, parse
from kvs_cli.prompt import read_text_file
from kvs_cli.render import Screen, print_json
from kvs_core.bench_text import benchmark_text
from kvs_core.engine.engine import Engine
from kvs_core.engine.levers import Bounds
from kvs_core.errors import ContextError, SettingsError
from kvs_core.settings import EngineSettings, SpeculativeSettings
from kvs_core.settings.kinds import shown
from kvs_core.settings.rooms import ContextPlan
from kvs_core.settings.setting import Group
from kvs_core.settings.table import BY_FLAG
from kvs_core.settings.typed import engine_settings, logging_settings

LOGGER = logging.getLogger(__name__)

MOST_NUMBERS = 1_000
_CHARS_PER_TOKEN = 6
_CUT_TOKENS = 64   # at the end of a text that was cut, the tokens may be others than those of the whole
_ACTIONS = ("help_all", "version", "completion_bash", "list_devices", "cache_list")
_OF_TEXTS = ("n_predict", "context_shift", "keep")   # nothing is written here
_USED = frozenset((
    Group.GENERAL, Group.MODEL, Group.CONTEXT, Group.KV, Group.DEVICE, Group.ROPE, Group.LOGGING, Group.THREADS,
))  # fmt: skip

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """A bench at its start: the model is open, its weights are not read yet.

    name       of the files of its results
    settings   of the engine; drafters are left out, since nothing is drafted here
    output     folder of the results, which is made before the long work; None: none are written
    text_flag  that names the file of the text
    """

    name: str
    settings: EngineSettings
    model: OpenModel
    screen: Screen
    output: Path | None
    json: bool
    text_flag: str = "--text-file"

    @staticmethod
    def begin(
        name: str, arguments: Sequence[str], *, output: Path | None, json: bool, command: str = "",
        text_flag: str = "--text-file",
    ) -> Bench:
        """Read the engine's settings, set up logging and open the model. Raises ``KvsError``.

        command  by default ``kvs bench NAME``
        """
        parsed = parse(arguments, os.environ, "run")
        _check_flags(command or f"kvs bench {name}", text_flag, arguments, parsed)
        configure_logging(logging_settings(parsed.values))
        for notice in parsed.notices:
            LOGGER.warning("%s", notice)
        settings = replace(engine_settings(parsed.values), speculative=SpeculativeSettings())
        if output is not None:
            _check_folder(output)
        screen = Screen.of(logging_settings(parsed.values))
        model = open_model(settings.model, screen, settings.rope)
        return Bench(name, settings, model, screen, output, json, text_flag)

    @property
    def context(self) -> ContextPlan:
        """What ``--ctx-size`` stands for, as in ``kvs run``: rounded up, by default the training length."""
        return self.settings.context.plan(self.model.spec.n_ctx_train, self.model.spec.n_ctx_most)

    def context_of(self, needed_tokens: int, flag: str) -> int:
        """``ctx_size`` for ``needed_tokens``: what ``--ctx-size`` says, else that. Raises ``ContextError``."""
        holds = self.context.context_tokens
        if needed_tokens > holds:
            raise ContextError(
                f"{flag}: {needed_tokens} tokens are needed, the context holds {holds}; "
                f"{self.context.advice(f'lower {flag}')}", prompt_tokens=needed_tokens, context_tokens=holds,
            )
        return self.settings.context.ctx_size or needed_tokens

    @contextmanager
    def engine(
        self, context_tokens: int, settings: EngineSettings | None = None, *, pool_bytes: int | None = None
    ) -> Iterator[Engine]:
        """The model with a context of that size, by other settings if they are given; see ``open_engine``."""
        chosen = settings or self.settings
        chosen = replace(chosen, context=replace(chosen.context, ctx_size=context_tokens))
        bounds = Bounds(context_tokens=context_tokens)
        with open_engine(self.model, chosen, self.screen, pool_bytes=pool_bytes, bounds=bounds) as engine:
            yield engine

    def facts(self) -> dict[str, Any]:
        """What every result says of its model."""
        return {
            "bench": self.name,
            "model": str(self.model.file.path),
            "synthetic": self.model.file.synthetic,
            "type_k": self.settings.kv.type_k,
            "type_v": self.settings.kv.type_v,
            "page_tokens": self.settings.kv.page_tokens,
        }

    def make_output(self) -> None:
        """Make the folder of the results, and those above it. Raises ``SettingsError``.

        When all else is known to be well, so that what is wrong leaves none behind; and before the work, so that hours
        of it do not end where nothing can be written.
        """
        if self.output is not None:
            try:
                self.output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unwritable(self.output, error) from None

    def write(self, summary: Row, rows: Sequence[Row]) -> None:
        """``NAME.csv`` with the rows and ``NAME.json`` with all of it, and with ``--json`` the object on stdout.

        Rows have the same keys. Raises ``SettingsError`` for a folder that takes no more.
        """
        result = {**summary, "rows": list(rows)}
        if self.output is not None:
            try:
                with open(self.output / f"{self.name}.csv", "w", encoding="utf-8", newline="") as file:
                    table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                    table.writeheader()
                    table.writerows(rows)
                text = json.dumps(result, indent=1, allow_nan=False)
                (self.output / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")
            except OSError as error:
                raise _unwritable(self.output, error) from None
        if self.json:
            print_json(result)

    def tokens_of(self, path: Path | None, needed: int, most: int, flag: str) -> list[int]:
        """The first ``most`` tokens of a text file, by default of the benchmark text; fewer if that is all of it.

        Raises ``SettingsError`` if there are less than ``needed``.
        """
        text = benchmark_text() if path is None else read_text_file(path, self.text_flag)
        chars = _CHARS_PER_TOKEN * most
        while True:
            tokens = self.model.tokenizer.encode(text[:chars], add_special=False, parse_special=False)
            if chars >= len(text):
                break
            tokens = tokens[:-_CUT_TOKENS]
            if len(tokens) >= most:
                break
            chars *= 2
        tokens = tokens[:most]
        if len(tokens) < needed:
            name = "the benchmark text" if path is None else str(path)
            advice = f"give a longer {self.text_flag} or lower {flag}"
            raise SettingsError(f"{flag}: {needed} tokens of text are needed, {name} has {len(tokens)}; {advice}")
        return tokens

    @property
    def start_tokens(self) -> list[int]:
        """What stands before any text: BOS, if the model wants one."""
        tokenizer = self.model.tokenizer
        return [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []


def _check_flags(command: str, text_flag: str, arguments: Sequence[str], parsed: Parsed) -> None:
    """``SettingsError`` for a flag that would do nothing. Files and variables serve other commands as well."""
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        setting = BY_FLAG.get(flag) if argument.startswith("-") else None
        if setting is None:
            continue
        if setting.key in _ACTIONS:
            raise SettingsError(f"{flag}: not a flag of {command}; kvs run {flag} takes it")
        if setting.group not in _USED or setting.key in _OF_TEXTS:
            raise SettingsError(f"{flag}: has no effect on {command}; leave it out")
    if parsed.positionals:
        raise SettingsError(f"{shown(parsed.positionals[0])}: {command} takes flags alone; give the model with "
                            f"--model, a text with {text_flag}")


def _check_folder(path: Path) -> None:
    """``SettingsError`` for a folder that cannot be made or written, as far as that shows before it is made."""
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise _unwritable(path, NotADirectoryError(ENOTDIR, f"{there} is no folder"))
    if not os.access(there, os.W_OK | os.X_OK):
        raise _unwritable(path, PermissionError(EACCES, f"{there} takes no files"))


def numbers(text: str, flag: str, *, least: int, most: int) -> tuple[int, ...]:
    """``1024,2048`` or ``1024:8192:1024`` (first, last, step), or both mixed; ascending, each once.

    Raises ``SettingsError`` for anything else, a number outside [least, most], or more than ``MOST_NUMBERS``.
    """
    found: set[int] = set()
    for part in text.split(","):
        bounds = part.strip().split(":")
        if len(bounds) not in (1, 3) or not all(re.fullmatch("[0-9]{1,9}", bound) for bound in bounds):
            raise SettingsError(f"{flag} {shown(part)}: give numbers such as {least},{most} or FIRST:LAST:STEP")
        first, last, step = map(int, bounds if len(bounds) == 3 else (bounds[0], bounds[0], "1"))
        if not least <= first <= last <= most or step < 1:
            raise SettingsError(f"{flag} {part}: give numbers from {least} to {most}, the last not below the first")
        if (last - first) // step + len(found) >= MOST_NUMBERS:
            raise SettingsError(f"{flag} {part}: at most {MOST_NUMBERS} numbers are taken; use a larger step")
        found.update(range(first, last + 1, step))
    return tuple(sorted(found))


def between(value: int, least: int, most: int, flag: str) -> int:
    """``value``. Raises ``SettingsError`` if it is not in [least, most]."""
    if not least <= value <= most:
        raise SettingsError(f"{flag} is {value}; give a number from {least} to {most}")
    return value


def _unwritable(path: Path, error: OSError) -> SettingsError:
    return SettingsError(f"--output {path}: cannot be written: {error.strerror or error}; give another folder")
