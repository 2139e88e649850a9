"""Completion scripts, written from the table of settings: commands, flags, and words or files for their values."""

from __future__ import annotations

from collections.abc import Sequence

from kvs_core.settings.kinds import FOLDER, PATH
from kvs_core.settings.setting import Command, Setting
from kvs_core.settings.table import TABLE

SHELLS = ("bash", "zsh", "fish")

_OF_FILES = (PATH, FOLDER)

_BASH = """\
_kvs() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$word"))
        return
    fi
    case "$before" in
{values}
    esac
    case "$command:$word" in
{flags}
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _kvs kvs
"""


def completion_script(shell: str, commands: Sequence[Command]) -> str:
    """The script to source in ``shell``, one of SHELLS, that completes ``commands`` and their flags."""
    if shell == "fish":
        return _fish(commands)
    offered = [setting for setting in TABLE if any(setting.usable(command) for command in commands)]
    bash = _BASH.format(
        commands=" ".join((*commands, "profile-layers", "bench", "doctor", "synthesize", "completion")),
        values="\n".join(_bash_values(setting) for setting in offered if _words(setting) or setting.kind in _OF_FILES),
        flags="\n".join(f"""    {command}:-*) COMPREPLY=($(compgen -W "{' '.join(_flags(command))}" -- "$word")) ;;"""
                        for command in commands),
    )
    return "autoload -U +X bashcompinit && bashcompinit\n" + bash if shell == "zsh" else bash


def _flags(command: Command) -> list[str]:
    return [flag for setting in TABLE if setting.usable(command) for flag in (*setting.flags, *setting.off)]


def _words(setting: Setting) -> tuple[str, ...]:
    """The words that a value may be, without those that are refused."""
    return tuple(word for word in setting.kind.words if not setting.refusal(setting.kind.parse(word)))


def _bash_values(setting: Setting) -> str:
    reply = "compgen -f" if setting.kind in _OF_FILES else f"compgen -W \"{' '.join(_words(setting))}\""
    return f"""    {"|".join(setting.flags)}) COMPREPLY=($({reply} -- "$word")); return ;;"""


def _fish(commands: Sequence[Command]) -> str:
    names = " ".join((*commands, "profile-layers", "bench", "doctor", "synthesize", "completion"))
    lines = [f'complete -c kvs -n __fish_use_subcommand -f -a "{names}"']
    for command in commands:
        for setting in TABLE:
            if setting.usable(command):
                lines += _fish_setting(setting, command)
    return "\n".join(lines) + "\n"


def _fish_setting(setting: Setting, command: Command) -> list[str]:
    text = setting.help.split(". ")[0].replace("\\", "\\\\").replace("'", "\\'")
    value = "" if not setting.kind.metavar else " -r" if setting.kind in _OF_FILES else " -x"
    if words := _words(setting):
        value += f" -a '{' '.join(words)}'"
    lines = []
    for flag in (*setting.flags, *setting.off):
        style = "-l" if flag.startswith("--") else "-s" if len(flag) == 2 else "-o"
        lines.append(f"complete -c kvs -n '__fish_seen_subcommand_from {command}' {style} {flag.lstrip('-')}"
                     f"{value} -d '{text}'")
    return lines
