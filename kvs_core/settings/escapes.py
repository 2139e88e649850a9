"""Backslash escapes in text from the command line."""

from __future__ import annotations

import re

from kvs_core.errors import SettingsError

_ESCAPE = re.compile(rb"\\(?:([nrt'\"\\])|x([0-9a-fA-F]{2}))")
_CHARS = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def expand_escapes(text: str, flag: str) -> str:
    r"""``text`` with \n \r \t \' \" \\ and \xHH (one byte of UTF-8) expanded; any other backslash stays as it is.

    Raises SettingsError, naming ``flag``, if the bytes given with \xHH make no UTF-8.
    """

    def expand(match: re.Match[bytes]) -> bytes:
        return _CHARS[match[1]] if match[1] else bytes.fromhex(match[2].decode())

    try:
        return _ESCAPE.sub(expand, text.encode()).decode()
    except UnicodeDecodeError:
        raise SettingsError(f"{flag}: its \\xHH escapes make no valid UTF-8; give whole characters, "
                            "or use --no-escape") from None
