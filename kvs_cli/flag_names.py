"""Flags in errors, by the names under which a command takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping


def with_flags(text: str, names: Mapping[str, str]) -> str:
    """``text`` with every flag that ``names`` has another name for by that name."""
    return re.sub("--[a-z][a-z0-9-]*", lambda flag: names.get(flag[0], flag[0]), text)
