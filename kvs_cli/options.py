"""Settings from YAML, environment and command line, by the rules of llama-server's command line.

    default  <  --config FILE.yaml  <  environment  <  command line

A flag's value is the argument after it, even if that begins with a dash; ``--flag=value`` works too. Underscores in a
long flag are dashes. A flag given twice counts once, the last time, unless it gathers values. Whatever is wrong is a
SettingsError of one line; what is merely without effect is a notice.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from kvs_cli.yaml_file import read_yaml
from kvs_core.errors import SettingsError
from kvs_core.settings.drafters import drafters_of
from kvs_core.settings.kinds import ON, shown
from kvs_core.settings.setting import Command, Setting
from kvs_core.settings.table import BY_FLAG, BY_KEY, BY_YAML_NAME, DEFAULTS, TABLE, yaml_name

_MAX_POSITIONALS = 1  # the prompt file of run, the model of info
_ACTIONS = ("help", "help_all", "version", "completion_bash", "list_devices", "cache_list")


class Source(IntEnum):
    """Where a value came from; a greater one wins."""

    YAML = 1
    ENVIRONMENT = 2
    COMMAND_LINE = 3


@dataclass(frozen=True, slots=True)
class Parsed:
    """The outcome of reading all sources.

    values       one value for every key of the table: what was given, else the default
    explicit     keys that YAML, a variable or a flag gave
    notices      lines for stderr: warnings, and what was taken but does nothing here
    positionals  arguments that are no flags, in order
    """

    values: Mapping[str, Any]
    explicit: frozenset[str]
    notices: tuple[str, ...]
    positionals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Given:
    """One value as found. ``name`` is what the user wrote to give it."""

    setting: Setting
    value: object
    name: str
    source: Source


def parse(argv: Sequence[str], environ: Mapping[str, str], command: Command) -> Parsed:
    """Read ``argv`` (the arguments after the command), the environment and the file of ``--config``.

    Raises SettingsError for whatever is unknown, malformed or cannot be honoured by ``command``. When an action such as
    ``--help`` or ``--version`` is asked for, other values are not judged.
    """
    notices: list[str] = []
    flags, positionals = _from_command_line(argv, command, notices)
    given: dict[str, _Given] = {}
    if "config" in flags:
        given |= _from_yaml(Path(str(flags["config"].value)), command)
    given |= _from_environment(environ, flags, notices)
    given |= flags
    if not any(given[action].value for action in _ACTIONS if action in given):
        _refuse(given.values(), command)
        notices += _without_effect(given, command)
        notices += _of_idle_drafters(given, command)
    values = dict(DEFAULTS) | {key: found.value for key, found in given.items()}
    return Parsed(MappingProxyType(values), frozenset(given), tuple(notices), positionals)


def _from_command_line(
    argv: Sequence[str], command: Command, notices: list[str]
) -> tuple[dict[str, _Given], tuple[str, ...]]:
    given: dict[str, _Given] = {}
    positionals: list[str] = []
    repeated: list[str] = []
    rest = list(reversed(argv))
    while rest:
        argument = rest.pop()
        if argument == "-" or not argument.startswith("-"):
            positionals.append(argument)
            if len(positionals) > _MAX_POSITIONALS:
                raise SettingsError(f"invalid argument: {shown(argument)[1:-1]}; {shown(positionals[0])} came before, "
                                    "and there is room for one argument without a flag")
            continue
        flag, inline = _split_flag(argument)
        setting = BY_FLAG.get(flag)
        if setting is None:
            raise SettingsError(f"invalid argument: {shown(argument)[1:-1]}{_nearest(flag, BY_FLAG, command)}")
        value = _flag_value(setting, flag, inline, rest)
        before = given.get(setting.key)
        if before is not None:
            if setting.append:
                value = (*_as_tuple(before.value), *_as_tuple(value))
            elif flag not in repeated:
                repeated.append(flag)
                notices.append(f"warning: {flag} is specified multiple times; the last one counts")
        given[setting.key] = _Given(setting, value, flag, Source.COMMAND_LINE)
    return given, tuple(positionals)


def _split_flag(argument: str) -> tuple[str, str | None]:
    """The flag as declared, and the value of a ``--flag=value``."""
    if not argument.startswith("--"):
        return argument, None
    flag, equals, inline = argument.partition("=")
    return flag.replace("_", "-"), inline if equals else None


def _flag_value(setting: Setting, flag: str, inline: str | None, rest: list[str]) -> object:
    arity = setting.kind.arity
    if arity == 0:
        if inline is not None:
            raise SettingsError(f"{flag} takes no value, got {shown(inline)}; usage: {setting.usage}")
        return flag not in setting.off
    texts = [inline] if inline is not None else []
    while len(texts) < arity and rest:
        texts.append(rest.pop())
    if len(texts) < arity:
        raise SettingsError(f"{flag}: expected value for argument; usage: {setting.usage}")
    return _value(setting, flag, " ".join(texts))


def _value(setting: Setting, name: str, text: str) -> object:
    """``text`` by the setting's grammar; one part becomes a tuple where the setting gathers parts."""
    try:
        value = setting.kind.parse(text)
    except ValueError as error:
        raise SettingsError(f"{name}: {error}; usage: {setting.usage}") from None
    return (value,) if setting.append and not setting.kind.many else value


def _as_tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _from_environment(environ: Mapping[str, str], flags: Mapping[str, _Given],
                      notices: list[str]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for setting in TABLE:
        found = next(((name, text) for name, text in _variables(setting, environ)), None)
        if found is None:
            continue
        name, text = found
        if setting.key in flags:
            notices.append(f"warning: {name} is set, but {flags[setting.key].name} overrides it")
            continue
        value = text if isinstance(text, bool) else _value(setting, name, text)
        given[setting.key] = _Given(setting, value, name, Source.ENVIRONMENT)
    return given


def _variables(setting: Setting, environ: Mapping[str, str]) -> Iterable[tuple[str, str | bool]]:
    """What the environment says of a setting, the word that counts first. An empty variable says nothing."""
    if setting.env_absent and setting.env_absent in environ:
        yield setting.env_absent, False
    if setting.env_off and environ.get(setting.env_off, "").lower() in ON:
        yield setting.env_off, False
    if setting.env and environ.get(setting.env):
        plain_switch = setting.kind.arity == 0 and not setting.off
        if not plain_switch:
            yield setting.env, environ[setting.env]
        elif environ[setting.env].lower() in ON:
            yield setting.env, True


def _from_yaml(path: Path, command: Command) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for key, entry in read_yaml(path).items():
        where = f"{path.name}: {shown(key)[1:-1]}"
        setting, flag = BY_YAML_NAME.get(key.replace("_", "-"), (None, ""))
        if setting is None:
            raise SettingsError(f"{where}: no such setting{_nearest(yaml_name(key), BY_YAML_NAME, command)}")
        if setting.key in given:
            raise SettingsError(f"{where}: the same setting as {given[setting.key].name}; keep one of them")
        if setting.key == "config":
            raise SettingsError(f"{where}: a configuration cannot name another one; give --config on the command line")
        given[setting.key] = _Given(setting, _yaml_value(setting, flag, where, entry), where, Source.YAML)
    return given


def _yaml_value(setting: Setting, flag: str, where: str, entry: str | list[str]) -> object:
    if isinstance(entry, str):
        value = _value(setting, where, entry)
        return not value if flag in setting.off else value
    if not (setting.append or setting.kind.many):
        raise SettingsError(f"{where}: takes one value, got a list of {len(entry)}; usage: {setting.usage}")
    return tuple(part for text in entry for part in _as_tuple(_value(setting, where, text)))


def _refuse(given: Iterable[_Given], command: Command) -> None:
    for found in given:
        setting = found.setting
        if command not in setting.commands and setting.relevance != "reject":
            continue
        reason = setting.refusal(found.value)
        if reason:
            raise SettingsError(f"{found.name}{_shown_value(found)}: {reason}")


def _shown_value(found: _Given) -> str:
    """The value, after a flag or variable that takes one of a few words or a number; never text, keys or tokens. Of
    several, those that are refused."""
    value = found.value
    if found.source is Source.YAML or isinstance(value, bool) or found.setting.refused_outright:
        return ""
    parts = [part for part in _as_tuple(value) if found.setting.refusal((part,))]
    text = ",".join(map(str, parts))
    return f" {text}" if found.source is Source.COMMAND_LINE else f"={text}"


def _of_idle_drafters(given: Mapping[str, _Given], command: Command) -> list[str]:
    """Flags for drafters that ``--spec-type`` does not name, one line for those of the same drafters."""
    asked = set(cast("Sequence[str]", given["spec_type"].value)) if "spec_type" in given else set[str]()
    if "spec_default" in given and given["spec_default"].value:
        asked.add("ngram-mod")
    idle: dict[tuple[str, ...], list[str]] = {}
    for key, found in given.items():
        types = drafters_of(key)
        says_more = command not in found.setting.commands or found.setting.no_effect(found.value)
        if types and asked.isdisjoint(types) and found.source is Source.COMMAND_LINE and not says_more:
            idle.setdefault(types, []).append(found.name)
    return [f"{', '.join(names)}: no effect without --spec-type {' or '.join(types)}" for types, names in idle.items()]


def _without_effect(given: Mapping[str, _Given], command: Command) -> list[str]:
    """One line per reason, naming all that it holds for.

    Configuration files and variables serve several commands, so what belongs to another command, or to another way of
    running, is named only when it is a flag; variables that other programs read as well are never named.
    """
    reasons: dict[str, list[str]] = {}
    for found in given.values():
        setting, is_flag = found.setting, found.source is Source.COMMAND_LINE
        switch = given.get(setting.needs)
        if command not in setting.commands:
            reason = f"no effect on kvs {command}" if is_flag else ""
        elif command in setting.needed_by and not (switch and switch.value):
            reason = f"no effect without {BY_KEY[setting.needs].flag}" if is_flag else ""
        else:
            text = setting.no_effect(found.value)
            shared = found.source is Source.ENVIRONMENT and not found.name.startswith("LLAMA_")
            reason = f"no effect: {text}" if text and not shared else ""
        if reason:
            reasons.setdefault(reason, []).append(found.name)
    return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]


def _nearest(name: str, known: Iterable[str], command: Command) -> str:
    """A hint at the known name most like ``name``, or how ``command`` lists them all."""
    by_letters = {other.lstrip("-"): other for other in known}
    near = difflib.get_close_matches(name[:100].lstrip("-"), by_letters, n=1)
    return f"; did you mean {by_letters[near[0]]}?" if near else f"; kvs {command} --help-all lists all of them"
