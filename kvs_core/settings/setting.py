"""Setting: one row of the table, and the rules that say which of its values do nothing here or cannot be honoured."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from kvs_core.settings.kinds import Kind

Command = Literal["run", "info", "plan", "serve"]
Relevance = Literal["core", "accept", "reject"]

COMMANDS: tuple[Command, ...] = ("run", "info", "plan", "serve")
_LLAMA_ARG = "LLAMA_ARG_"


class Group(Enum):
    """Sections of the help, in its order. The value is the heading."""

    GENERAL = "General"
    PROMPT = "Prompt and output"
    MODEL = "Model"
    CONTEXT = "Context and batch"
    KV = "KV cache and its streaming"
    DEVICE = "Device"
    ROPE = "Position encoding (RoPE, YaRN)"
    SAMPLING = "Sampling"
    CONSTRAINTS = "Constrained output"
    TEMPLATE = "Chat template and reasoning"
    SPECULATIVE = "Speculation"
    LOGGING = "Logging"
    SERVER = "Server"
    CACHE = "Prompt cache"
    THREADS = "CPU threads and placement"
    TERMINAL = "Conversations in a terminal"
    MULTIMODAL = "Images, audio, video"
    ADAPTERS = "Adapters"
    EMBEDDINGS = "Embeddings and reranking"
    TOOLS = "Agent tools"
    ROUTER = "Several models"
    PRESETS = "Presets"


@dataclass(frozen=True, slots=True)
class Rule:
    """A text that is due for some values of a setting.

    With ``only``, for those values; otherwise for every value except those in ``unless``. A value of several parts is
    judged part by part.
    """

    text: str
    only: tuple[object, ...] = ()
    unless: tuple[object, ...] = ()

    def applies(self, value: object) -> bool:
        parts = value if isinstance(value, tuple) and value else (value,)
        if self.only:
            return any(part in self.only for part in parts)
        return any(part not in self.unless for part in parts)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, under all its names.

    key        name of its value in the program, from its main flag
    flags      every spelling that sets it; ``off`` every spelling that turns a pair off
    env        its variable. A pair also has ``LLAMA_ARG_NO_X``: being set at all means off
    env_off    a variable of another kind that turns it off when it says on, enabled, true or 1
    default    None: unset, and the reader of the value decides
    relevance  core: part of kvs; accept: understood for the sake of llama-server command lines; reject: never honoured
    refuse     values that cannot be honoured: each text says why and what to use instead
    note       values that are taken but do nothing here: each text says so. The default value is never worth a note
    commands   where it means something; elsewhere it is taken, and named once as without effect
    needs      key of the setting without which it does nothing on the commands of ``needed_by``
    append     repeating the flag adds to the value instead of replacing it
    api        its name in llama-server's request API, for sampling values
    """

    key: str
    flags: tuple[str, ...]
    kind: Kind
    help: str
    group: Group
    default: object = None
    relevance: Relevance = "core"
    env: str = ""
    off: tuple[str, ...] = ()
    env_off: str = ""
    unit: str = ""
    refuse: tuple[Rule, ...] = ()
    note: tuple[Rule, ...] = ()
    commands: tuple[Command, ...] = COMMANDS
    needs: str = ""
    needed_by: tuple[Command, ...] = ()
    append: bool = False
    api: str = ""

    @property
    def flag(self) -> str:
        """The spelling used in messages: the first long one."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])

    @property
    def env_absent(self) -> str:
        """The variable of a pair whose mere presence means off; empty for everything else."""
        if self.off and self.env.startswith(_LLAMA_ARG):
            return f"{_LLAMA_ARG}NO_{self.env.removeprefix(_LLAMA_ARG)}"
        return ""

    @property
    def refused_outright(self) -> bool:
        """No value of it can be used."""
        return any(not rule.only and not rule.unless for rule in self.refuse)

    @property
    def inert(self) -> bool:
        """Whatever its value, it does nothing that is not done anyway, or is refused."""
        judged = bool(self.note or self.refuse)
        return any(not rule.only for rule in self.note) or (self.relevance == "accept" and judged)

    def usable(self, command: Command) -> bool:
        """Whether some value of it does something on this command."""
        return (command in self.commands and self.relevance != "reject" and not self.refused_outright
                and not self.inert)

    @property
    def usage(self) -> str:
        """Its usage on one line: ``-c, --ctx-size N``."""
        names = ", ".join((*self.flags, *self.off))
        return f"{names} {self.kind.metavar}" if self.kind.metavar else names

    def refusal(self, value: object) -> str:
        """Why ``value`` cannot be honoured and what to use; empty if it can."""
        if value == self.default:
            return ""
        return next((rule.text for rule in self.refuse if rule.applies(value)), "")

    def no_effect(self, value: object) -> str:
        """What to say of a value that does nothing here; empty if it does, or if it is what kvs does anyway."""
        if value == self.default:
            return ""
        return next((rule.text for rule in self.note if rule.applies(value)), "")
