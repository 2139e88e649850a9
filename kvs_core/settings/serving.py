"""What ``kvs serve`` receives, checked at birth as the other rooms' values are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvs_core.errors import SettingsError
from kvs_core.settings.rooms import ChatSettings, ConstraintSettings, EngineSettings, LoggingSettings

ReasoningFormat = Literal["none", "auto", "deepseek", "deepseek-legacy"]


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Where and how the server listens.

    hosts     addresses, or UNIX sockets where they end in .sock; port 0: any free one
    ssl_*     PEM files, both or none
    prefix    of every route: empty, or with a slash in front and none behind
    """

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    ssl_key: Path | None = None
    ssl_cert: Path | None = None
    prefix: str = ""
    timeout_s: float = 3600
    ping_s: int = 30
    threads: int | None = None
    reuse_port: bool = False

    def __post_init__(self) -> None:
        if (self.ssl_key is None) != (self.ssl_cert is None):
            given, lacking = ("--ssl-key-file", "--ssl-cert-file") if self.ssl_key else (
                "--ssl-cert-file", "--ssl-key-file")
            raise SettingsError(f"{given} needs {lacking}: TLS takes a key and its certificate; give both")
        if self.prefix and (not self.prefix.startswith("/") or self.prefix.endswith("/")):
            raise SettingsError(f"--api-prefix {self.prefix}: begin it with a slash and end it without one, as in /api")
        if not self.hosts:
            raise SettingsError("--host names no address; give one, such as 127.0.0.1")


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may ask. keys: one of them has to come with a request, if there are any; key_file: more keys, one per line.
    cors_origins: ``*``, ``localhost`` for local ones, or the origins."""

    keys: tuple[str, ...] = field(default=(), repr=False)
    key_file: Path | None = None
    cors_origins: tuple[str, ...] = ("*",)
    cors_methods: tuple[str, ...] = ("GET", "POST", "DELETE", "OPTIONS")
    cors_headers: tuple[str, ...] = ("*",)
    cors_credentials: bool = True


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """What replies hold where a request does not say. thought_limit: most tokens of thought, -1: no limit.
    preserve_thoughts: earlier turns keep theirs; parse: look for thoughts and tool calls; continue_assistant: a last
    message of the assistant is continued."""

    stop: tuple[str, ...] = ()
    special: bool = False
    reasoning_format: ReasoningFormat = "deepseek"
    thought_limit: int = -1
    thought_message: str = ""
    preserve_thoughts: bool = True
    parse: bool = True
    continue_assistant: bool = True
    verbose: bool = False


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What stays between requests. reuse: a prompt's known beginning is not read again; checkpoints: most of them, at
    least checkpoint_tokens apart; ram_mib: for conversations that are set aside, -1: no limit, 0: none, and for the
    checkpoints of the one in hand, with what the history keeps for them, 0 too: no limit; folder: of saved slots."""

    reuse: bool = True
    ram_mib: int = 8192
    checkpoints: int = 32
    checkpoint_tokens: int = 8192
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """One ``kvs serve``. aliases: names of the model, the first in the alphabet being its id; metrics, props, slots:
    whether GET /metrics, POST /props and GET /slots answer; page: whether there is one at /; constraint: for requests
    that bring none."""

    engine: EngineSettings
    sampling: Mapping[str, object]
    chat: ChatSettings
    listen: ListenSettings = ListenSettings()
    access: AccessSettings = AccessSettings()
    replies: ReplySettings = ReplySettings()
    cache: CacheSettings = CacheSettings()
    constraint: ConstraintSettings = field(default_factory=ConstraintSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    metrics: bool = False
    props: bool = False
    slots: bool = True
    spm_infill: bool = False
    page: bool = True
