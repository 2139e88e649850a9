"""Help of a command, from the table of settings: what works first, then what is only taken or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvs_core.settings import setting as rows
from kvs_core.settings.setting import Command, Setting
from kvs_core.settings.table import TABLE

_NARROW = 72  # below this many columns, a flag and its text stand under each other

_ABOUT: Mapping[Command, str] = MappingProxyType({
    "run": "Continue a prompt with a GGUF model. The text goes to stdout, everything else to stderr.",
    "info": "Show a model's metadata, its layers, and the memory that a context and an arena take.",
    "plan": "Foretell, before the weights are loaded, whether a model fits and how fast it will be over its context.",
    "serve": "Serve a GGUF model over HTTP.",
})
_USAGE: Mapping[Command, str] = MappingProxyType({
    "run": "kvs run [PROMPT_FILE | -] [--model FILE] [options]",
    "info": "kvs info [MODEL] [options]",
    "plan": "kvs plan [MODEL] [options]",
    "serve": "kvs serve [--model FILE] [options]",
})
_EXAMPLES: Mapping[Command, tuple[tuple[str, str], ...]] = MappingProxyType({
    "run": (
        ("kvs run -m model.gguf --chat -p 'Why is the sky blue?' -n 200", "Ask a question."),
        ("kvs run book.txt -m model.gguf -ctk q8_0 -ctv q4_0 --kv-stream-arena-mib 512",
         "Read a long text with 512 MiB for its KV cache: the rest of it is streamed, the answer is the same."),
        ("git diff | kvs run - -m model.gguf --temp 0 --json > result.json",
         "Read the prompt from a pipe, take the likeliest tokens, and keep the numbers."),
    ),
    "info": (
        ("kvs info model.gguf", "What is in the file."),
        ("kvs info model.gguf -c 32768 -ctk q8_0 -ctv q4_0 --kv-stream-arena-mib 512",
         "The memory plan for a context of 32768 tokens."),
    ),
    "plan": (
        ("kvs plan model.gguf -c 131072 -ctk q8_0 -ctv q4_0", "How fast it will be with the memory that is free now."),
        ("kvs plan synthetic:qwen3.5-27b:iq4_xs:mtp -ctk q8_0 -ctv q4_0 --kv-stream-arena-mib 2240 --spec-type "
         "draft-mtp --spec-draft-n-max 3 --spec-synth-len 2.5 --plot plan.png",
         "A model that is not there yet, with drafts of which so many are accepted."),
    ),
    "serve": (("kvs serve -m model.gguf --port 8080", "Serve on http://127.0.0.1:8080."),),
})


def print_help(command: Command, *, everything: bool, console: Console) -> None:
    """Print the help of ``command``; with ``everything`` also the settings that do nothing here or are refused."""
    console.print(Text.assemble(("Usage: ", "bold"), _USAGE[command]))
    console.print()
    console.print(Text(_ABOUT[command]))
    _print_heading("Examples", console)
    for line, text in _EXAMPLES[command]:
        console.print(Padding(Text(text), (0, 0, 0, 2)))
        console.print(Padding(Text(line, style="cyan"), (0, 0, 0, 4)))
    for group in rows.Group:
        settings = [setting for setting in TABLE if setting.group is group and setting.usable(command)]
        if settings:
            _print_heading(group.value, console)
            _print_rows(((setting.usage, _describe(setting)) for setting in settings), console)
    others = [setting for setting in TABLE if not setting.usable(command)]
    refused = [setting for setting in others if setting.relevance == "reject"
               or (setting.refused_outright and command in setting.commands)]
    taken = [setting for setting in others if setting not in refused]
    if everything:
        _print_heading("Taken, without effect here", console)
        idle = [(_spellings(setting), _why_inert(setting, command)) for setting in taken]
        _print_rows(_by_reason(idle + [(_allowed(setting), "It is so in any case.") for setting in refused]), console)
        _print_heading("Refused, with what to use instead", console)
        _print_rows(_by_reason(
            ([flag for flag in _spellings(setting) if flag not in _allowed(setting)], _why_refused(setting))
            for setting in refused), console)
    else:
        console.print()
        console.print(Text(f"Of llama-server's other settings {len(taken)} are taken without effect and {len(refused)} "
                           f"are refused with what to use instead: kvs {command} --help-all lists them."))
    console.print()
    console.print(Text("Every setting can also stand in a YAML file (--config), and those with a variable in the "
                       "environment. Flags win over variables, variables over the file."))


def _print_heading(text: str, console: Console) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _print_rows(pairs: Iterable[tuple[str, str]], console: Console) -> None:
    if console.width < _NARROW:
        for usage, text in pairs:
            console.print(Padding(Text(usage, style="cyan"), (0, 0, 0, 2)))
            console.print(Padding(Text(text), (0, 0, 0, 6)))
        return
    table = Table.grid(padding=(0, 2), pad_edge=True, expand=True)
    table.add_column(style="cyan", ratio=2, overflow="fold")
    table.add_column(ratio=3, overflow="fold")
    for usage, text in pairs:
        table.add_row(Text(usage), Text(text))
    console.print(Group(table))


def _describe(setting: Setting) -> str:
    facts = []
    if setting.unit:
        facts.append(f"in {setting.unit}")
    if setting.kind.metavar and setting.default not in (None, (), ""):
        facts.append(f"default {_shown_default(setting)}")
    if setting.off:
        facts.append(f"default {'on' if setting.default else 'off'}")
    if variable := setting.env or setting.env_off:
        facts.append(f"{variable}=1 turns it off" if setting.env_off else variable)
    limits = [f"{_word_list(rule.only)}: {rule.text}." for rule in (*setting.refuse, *setting.note) if rule.only]
    return " ".join((setting.help, *limits, f"[{'; '.join(facts)}]" if facts else "")).strip()


def _word_list(values: tuple[object, ...]) -> str:
    return ", ".join("on" if value is True else "off" if value is False else str(value) for value in values)


def _shown_default(setting: Setting) -> str:
    """As it can be typed; of a flag that is repeated, the values of each."""
    value = setting.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, tuple):
        return str(value)
    return (setting.kind.joint if setting.kind.many else " ").join(repr(part)[1:-1] for part in value)


def _spellings(setting: Setting) -> Sequence[str]:
    return (*setting.flags, *setting.off)


def _allowed(setting: Setting) -> Sequence[str]:
    """Spellings of a refused pair that ask for what is done anyway."""
    if not setting.off:
        return ()
    return (*(() if setting.refusal(True) else setting.flags), *(() if setting.refusal(False) else setting.off))


def _by_reason(pairs: Iterable[tuple[Sequence[str], str]]) -> list[tuple[str, str]]:
    """One row per reason, with all flags that it holds for."""
    rows_by_reason: dict[str, list[str]] = {}
    for flags, reason in pairs:
        rows_by_reason.setdefault(reason, []).extend(flags)
    return [(", ".join(flags), reason) for reason, flags in rows_by_reason.items() if flags]


def _why_inert(setting: Setting, command: Command) -> str:
    if command not in setting.commands:
        return "A server uses it." if setting.commands == ("serve",) else f"kvs {setting.commands[0]} uses it."
    plain = [rule for rule in setting.note if not rule.only]
    return " ".join(_judged(rule) for rule in plain or (*setting.note, *setting.refuse))


def _why_refused(setting: Setting) -> str:
    return " ".join(dict.fromkeys(_judged(rule) for rule in setting.refuse))


def _judged(rule: rows.Rule) -> str:
    values = f"{_word_list(rule.only)}: " if rule.only and True not in rule.only and False not in rule.only else ""
    return f"{values}{rule.text}."
