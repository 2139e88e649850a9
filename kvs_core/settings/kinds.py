"""Kinds of value: how one text from the command line, a variable or YAML becomes a value, or is refused.

Every ``parse`` takes text and raises ``ValueError`` with a message that says what was expected. The same grammar
serves all three sources, so a value means the same wherever it is written.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ON = ("on", "enabled", "true", "1")
OFF = ("off", "disabled", "false", "0")
AUTO = ("auto", "-1")

_INT_DIGITS = 20  # no number here needs more; longer ones cost time to convert
_JSON_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value.

    metavar  what stands for the value in usage lines; empty for a switch
    samples  texts that ``parse`` takes: examples for help and tests
    arity    how many arguments follow the flag
    many     the value is a tuple of parts, which ``joint`` separates in text
    words    the words it may be, for completion
    """

    metavar: str
    samples: tuple[str, ...]
    parse: Callable[[str], object]
    arity: int = 1
    many: bool = False
    words: tuple[str, ...] = ()
    joint: str = ","


def as_switch(text: str) -> bool:
    """on, enabled, true, 1 or off, disabled, false, 0."""
    if text.lower() in ON:
        return True
    if text.lower() in OFF:
        return False
    raise ValueError(f"expected on or off, got {shown(text)}")


def shown(text: str) -> str:
    """``text`` as it may safely stand in a message: quoted, short, without control characters."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def clean_text(text: str) -> str:
    """``text``, if it is text: argument bytes that are no UTF-8 and NUL are refused."""
    if "\0" in text:
        raise ValueError("the value holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the value is not valid UTF-8") from None
    return text


def as_path(text: str) -> Path:
    """``text`` as a path; empty text and NUL are refused."""
    if not text or "\0" in text:
        raise ValueError(f"expected a path, got {shown(text)}")
    return Path(text)


def _as_int(text: str, least: int | None, most: int | None) -> int:
    if not re.fullmatch(rf"[+-]?[0-9]{{1,{_INT_DIGITS}}}", text):
        raise ValueError(f"expected a whole number, got {shown(text)}")
    value = int(text)
    _check_limits(value, least, most)
    return value


def _as_float(text: str, least: float | None, most: float | None) -> float:
    try:
        value = float(text) if "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {shown(text)}")
    _check_limits(value, least, most)
    return value


def _check_limits(value: float, least: float | None, most: float | None) -> None:
    if least is not None and value < least:
        raise ValueError(f"{value} is too small; the least is {least}")
    if most is not None and value > most:
        raise ValueError(f"{value} is too large; the most is {most}")


def split_csv(text: str) -> tuple[str, ...]:
    """The parts of ``a,"b,c",d``: a part in double quotes may hold commas; empty parts are refused."""
    clean_text(text)
    try:
        rows = list(csv.reader([text], strict=True))
    except csv.Error as error:
        raise ValueError(f"expected parts separated by commas ({error})") from None
    parts = tuple(part.strip() for part in rows[0]) if rows else ()
    if not parts or not all(parts):
        raise ValueError("expected parts separated by commas, none of them empty")
    return parts


# What a setting is declared with: a constant, or a function of its limits.

SWITCH = Kind("", ("on", "true", "1"), as_switch, arity=0)


ON_OFF = Kind("on|off", ("on", "off", "enabled", "0"), as_switch, words=("on", "off"))


def _as_on_off_auto(text: str) -> str:
    if text.lower() not in (*ON, *OFF, *AUTO):
        raise ValueError(f"expected on, off or auto, got {shown(text)}")
    return "auto" if text.lower() in AUTO else ("on" if as_switch(text) else "off")


ON_OFF_AUTO = Kind("on|off|auto", ("on", "off", "auto", "-1"), _as_on_off_auto,
                   words=("on", "off", "auto"))
TEXT = Kind("TEXT", ("some text",), clean_text)
PATH = Kind("FILE", ("some/file",), as_path)
FOLDER = Kind("FOLDER", ("some/folder",), as_path)
CSV = Kind("A,B,...", ("a", 'a,"b,c"'), split_csv, many=True)


def integer(least: int | None = None, most: int | None = None, *, words: tuple[str, ...] = (),
            sample: str = "") -> Kind:
    """A whole number in [least, most], or one of ``words``."""
    samples = (sample or str(max(least or 0, 1)), *words)

    def parse(text: str) -> object:
        if text.lower() in words:
            return text.lower()
        return _as_int(text, least, most)

    return Kind("|".join(("N", *words)), samples, parse, words=words)


def number(least: float | None = None, most: float | None = None, *, sample: str = "0.5") -> Kind:
    """A finite decimal number in [least, most]."""
    return Kind("X", (sample,), lambda text: _as_float(text, least, most))


def number_above(bound: float) -> Kind:
    """A finite decimal number greater than ``bound``."""

    def parse(text: str) -> float:
        value = _as_float(text, None, None)
        if value <= bound:
            raise ValueError(f"{value} is too small; it has to be above {bound:g}")
        return value

    return Kind("X", ("1.5",), parse)


def choice(*names: str) -> Kind:
    """One of ``names``."""
    return Kind("|".join(names), names, lambda text: _one_of(text, names), words=names)


def choices(*names: str) -> Kind:
    """Several of ``names``, separated by commas."""
    return Kind("|".join(names) + ",...", (*names, ",".join(names[:2])),
                lambda text: tuple(_one_of(part, names) for part in split_csv(text)), many=True, words=names)


def _one_of(text: str, names: tuple[str, ...]) -> str:
    if text not in names:
        raise ValueError(f"expected one of {', '.join(names)}, got {shown(text)}")
    return text


def numbers(least: float, most: float) -> Kind:
    """Decimal numbers in [least, most], separated by commas."""
    return Kind("X,X,...", ("0.5,0.25",), lambda text: tuple(_as_float(p, least, most) for p in split_csv(text)),
                many=True)


def pattern(metavar: str, regex: str, sample: str, *, expected: str = "") -> Kind:
    """Text of a fixed form, such as ``lo-hi``. expected: what it is called in an error; unset: by its metavar."""

    def parse(text: str) -> str:
        if not re.fullmatch(regex, text):
            raise ValueError(f"expected {expected or metavar}, got {shown(text)}")
        return text

    return Kind(metavar, (sample,), parse)


HEX_MASK = pattern("HEX", r"(0[xX])?[0-9a-fA-F]{1,512}", "0xff")
CPU_RANGE = pattern("LO-HI", r"[0-9]{0,6}-[0-9]{0,6}", "0-3")
ANY = Kind("VALUE", ("value",), lambda text: text)
TWO = Kind("START END", ("1 2",), lambda text: text, arity=2)


def _as_json_object(text: str) -> dict[str, object]:
    if len(text) > _JSON_CHARS:
        raise ValueError(f"expected a JSON object, got {len(text)} characters; the most is {_JSON_CHARS}")
    try:
        value = json.loads(clean_text(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, got {shown(text)} ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {shown(text)}")
    return value


JSON_OBJECT = Kind("JSON", ('{"a": 1}',), _as_json_object)


def separated(separator: str, metavar: str, sample: str) -> Kind:
    """Names separated by ``separator``, kept as written."""

    def parse(text: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in clean_text(text).split(separator) if part.strip())

    return Kind(metavar, (sample,), parse, many=True, joint=separator)
