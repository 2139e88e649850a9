"""The table: every setting, in the order of the help, and the ways to look one up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvs_core.settings import (
    context,
    device,
    foreign,
    general,
    kv,
    logging,
    model,
    sampling,
    server,
    speculative,
    template,
    terminal,
)
from kvs_core.settings.setting import Setting

TABLE: tuple[Setting, ...] = tuple(
    setting
    for room in (
        general, model, context, kv, device, sampling, template, speculative, logging, server, terminal, foreign,
    )
    for setting in room.SETTINGS
)

BY_KEY: Mapping[str, Setting] = MappingProxyType({setting.key: setting for setting in TABLE})


def _by_flag() -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for setting in TABLE:
        for flag in (*setting.flags, *setting.off):
            assert flag not in found, f"{flag} is declared twice"
            found[flag] = setting
    return found


BY_FLAG: Mapping[str, Setting] = MappingProxyType(_by_flag())


def yaml_name(flag: str) -> str:
    """The YAML key of a flag: without its dashes in front, underscores as dashes."""
    return flag.lstrip("-").replace("_", "-")


BY_YAML_NAME: Mapping[str, tuple[Setting, str]] = MappingProxyType(
    {yaml_name(flag): (setting, flag) for flag, setting in BY_FLAG.items()})
"""The setting and the flag that a YAML key stands for."""

DEFAULTS: Mapping[str, object] = MappingProxyType({setting.key: setting.default for setting in TABLE})
