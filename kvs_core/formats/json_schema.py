"""JSON schemas read as llama-server reads them: where properties are listed, no others may come.

llama.cpp's grammars/README.md: ``additionalProperties`` is false by default. In JSON Schema it is true, and a small
model then adds keys for as long as it is let.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

# They say more of an object's properties, or of what lies in a value, than what is joined with them.
_TELLING = (
    "properties", "required", "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "enum", "const", "not", "if", "items",
    "prefixItems", "additionalItems", "contains", "unevaluatedItems",
)  # fmt: skip
_JOINED = ("allOf", "anyOf", "oneOf", "$ref")   # other schemas of the same value
_NAMED = ("properties", "patternProperties")    # schemas by name, of values inside
_INSIDE = ("additionalProperties", "items", "prefixItems", "additionalItems")
_OPENING = (
    *_JOINED, "additionalProperties", "patternProperties", "unevaluatedProperties", "enum", "const", "not", "if",
    "dependentSchemas",
)  # fmt: skip


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which every object that lists its properties has no others, and is an object.

    As it was remains what says itself whether there are others; what shares its value with another schema (``allOf``,
    keywords beside ``$ref`` or ``anyOf``), since each would forbid the other's properties; and what requires
    properties that it does not list; and all of a schema with a reference that is no path, or with an inner ``$id``.
    RecursionError for a schema that is nested too deeply.
    """
    root: dict[str, Any] = json.loads(json.dumps(schema))
    shares = _shares(root)
    if shares is not None:
        for node, shared in shares:
            if not shared and _lists_all(node):
                node["additionalProperties"] = False
                node.setdefault("type", "object")
    return root


def _shares(root: dict[str, Any]) -> list[tuple[dict[str, Any], bool]] | None:
    """Every schema that a text may meet, and whether it shares a value with another on some way there; None where that
    cannot be known, since a reference leads somewhere else than into ``root`` by its path."""
    found: dict[int, tuple[dict[str, Any], bool]] = {}
    ahead: list[tuple[object, bool]] = [(root, False)]
    while ahead:
        node, shared = ahead.pop()
        if not isinstance(node, dict) or (id(node) in found and found[id(node)][1] >= shared):
            continue
        if "$id" in node and node is not root:   # references are relative to it
            return None
        found[id(node)] = node, shared
        joined = [keyword for keyword in _JOINED if keyword in node]
        beside = shared or len(joined) > 1 or any(word in node for word in _TELLING)
        for keyword in joined:
            if keyword == "$ref":
                target = _target(root, node["$ref"])
                if target is None:
                    return None
                ahead.append((target, beside))
            else:
                parts = _parts(node[keyword])
                ahead += [(part, beside or (keyword == "allOf" and len(parts) > 1)) for part in parts]
        inner = shared or bool(joined) or "patternProperties" in node   # whose patterns may match any name
        for keyword in _NAMED:
            if isinstance(node.get(keyword), dict):
                ahead += [(part, inner) for part in node[keyword].values()]
        for keyword in _INSIDE:
            ahead += [(part, inner) for part in _parts(node.get(keyword))]
    return list(found.values())


def _parts(value: object) -> list[object]:
    """Of a keyword that takes a schema, or several."""
    return value if isinstance(value, list) else [value]


def _target(root: dict[str, Any], reference: object) -> object:
    """What a path such as ``#/$defs/name`` leads to (RFC 6901); None for nothing, and for references of other kinds."""
    if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
        return None
    place: object = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, dict):
            place = place.get(name)
        else:
            return None
    return place


def _lists_all(node: dict[str, Any]) -> bool:
    """Whether nothing but properties says what an object holds, and they are all that it needs."""
    listed, required = node.get("properties"), node.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list) or any(word in node for word in _OPENING):
        return False
    least = node.get("minProperties", 0)
    named = all(isinstance(name, str) and name in listed for name in required)
    return named and isinstance(least, int) and least <= len(listed)
