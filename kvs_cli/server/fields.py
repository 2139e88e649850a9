"""A request's JSON object, read field by field: null is absent, a wrong type is a 400 naming the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from kvs_cli.server.errors import ApiError, bad_request

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Fields(Mapping[str, Any]):
    """The fields that are there. As a mapping: their values as sent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def first(self, *names: str) -> str:
        """The first of ``names`` that is there; the last one if none is."""
        return next((name for name in names if name in self._values), names[-1])

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(name, default)
        return value if isinstance(value, bool) else refuse(name, value, "true or false")

    def whole(self, name: str, default: int, *, least: int | None = None, most: int | None = None) -> int:
        """A whole number; one that is written with a fraction of zero is one too."""
        value = self._values.get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            refuse(name, value, "a whole number")
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        if not low <= value <= high:
            raise bad_request(f"Field '{name}': Value must be between {low} <= value <= {high}")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self._values.get(name, default)
        return value if isinstance(value, str) else refuse(name, value, "a string")

    def array(self, name: str) -> list[Any]:
        """An array; empty if absent."""
        value = self._values.get(name, [])
        return value if isinstance(value, list) else refuse(name, value, "an array")

    def object(self, name: str) -> Fields:
        """An object; empty if absent."""
        value = self._values.get(name, {})
        return Fields(value) if isinstance(value, dict) else refuse(name, value, "an object")


def refuse(name: str, value: object, wanted: str) -> NoReturn:
    """Raise the 400 for a field of another type."""
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array",
             dict: "an object"}  # fmt: skip
    raise bad_request(f"Field '{name}': expected {wanted}, got {kinds.get(type(value), 'null')}")


def read_fields(body: bytes) -> Fields:
    """The object that a request's body holds. A 400 if it holds anything else."""
    try:
        value = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:   # UnicodeDecodeError is a ValueError
        raise bad_request(f"the request is no JSON: {_short(error)}") from None
    if not isinstance(value, dict):
        raise bad_request("the request must be a JSON object")
    if _SURROGATE.search(body):
        value = _encodable(value)
    return Fields(value)


def missing(name: str) -> ApiError:
    """The 400 for a field that has to be there."""
    return bad_request(f"'{name}' is required")


def _encodable(value: Any) -> Any:
    """The value with U+FFFD for halves of characters, which JSON can spell but no text in UTF-8 can hold."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_encodable(each) for each in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _short(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
