"""Which objects of a schema are closed, and which stay as they are."""

from __future__ import annotations

from typing import Any

import pytest

from kvs_core.formats.json_schema import closed

Schema = dict[str, Any]
A: Schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: Schema = {"type": "object", "properties": {"b": {"type": "integer"}}}
ONLY_A = A | {"additionalProperties": False}
ONLY_B = B | {"additionalProperties": False}
TO_A = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(("schema", "expected"), [
    (A, ONLY_A),
    ({"properties": {}}, {"properties": {}, "type": "object", "additionalProperties": False}),
    (A | {"type": ["object", "null"]}, ONLY_A | {"type": ["object", "null"]}),
    (A | {"required": ["a"], "minProperties": 1}, ONLY_A | {"required": ["a"], "minProperties": 1}),
    ({"properties": {"properties": A}}, {"properties": {"properties": ONLY_A}, "type": "object",
                                         "additionalProperties": False}),
    ({"type": "array", "items": A}, {"type": "array", "items": ONLY_A}),
    ({"prefixItems": [A, True], "items": B}, {"prefixItems": [ONLY_A, True], "items": ONLY_B}),
    ({"additionalProperties": A}, {"additionalProperties": ONLY_A}),
    ({"anyOf": [A, {"type": "null"}], "default": None, "title": "A"},
     {"anyOf": [ONLY_A, {"type": "null"}], "default": None, "title": "A"}),
    ({"oneOf": [A, B], "discriminator": {"propertyName": "k"}, "x-order": 1},
     {"oneOf": [ONLY_A, ONLY_B], "discriminator": {"propertyName": "k"}, "x-order": 1}),
    ({"type": "object", "oneOf": [A, B]}, {"type": "object", "oneOf": [ONLY_A, ONLY_B]}),
    ({"allOf": [A], "description": "one"}, {"allOf": [ONLY_A], "description": "one"}),
    ({"allOf": [{"anyOf": [A]}]}, {"allOf": [{"anyOf": [ONLY_A]}]}),
    (TO_A | {"$defs": {"a": A}}, TO_A | {"$defs": {"a": ONLY_A}}),
    ({"$ref": "#/definitions/a~1b%20c", "definitions": {"a/b c": A}},
     {"$ref": "#/definitions/a~1b%20c", "definitions": {"a/b c": ONLY_A}}),
    (B | {"properties": {"b": {"$ref": "#"}}}, ONLY_B | {"properties": {"b": {"$ref": "#"}}}),
    ({"prefixItems": [A, {"$ref": "#/prefixItems/0"}]}, {"prefixItems": [ONLY_A, {"$ref": "#/prefixItems/0"}]}),
])  # fmt: skip
def test_objects_that_list_their_properties_are_closed(schema: Schema, expected: Schema) -> None:
    """Wherever a text may meet them; what was given stays as it was."""
    before = repr(schema)
    assert closed(schema) == expected
    assert repr(schema) == before


@pytest.mark.parametrize("schema", [
    {"type": "object"},
    {"type": "object", "required": ["a"]},
    A | {"additionalProperties": True},
    A | {"additionalProperties": {"type": "string"}},
    A | {"patternProperties": {"^x": {"type": "string"}}},
    A | {"unevaluatedProperties": False},
    {"properties": {"x": A}, "patternProperties": {"^x": B}},
    A | {"required": ["a", "b"]},
    A | {"required": [["a"]]},
    A | {"minProperties": 2},
    A | {"enum": [{"a": 1, "b": 2}]},
    {"const": A},
    {"default": A, "examples": [A], "type": "object"},
    {"allOf": [A, B]},
    {"allOf": [{"anyOf": [A, B]}, {"anyOf": [A, B]}]},
    {"allOf": [{"type": "array", "items": A}, {"items": B}]},
    A | {"anyOf": [B, {"required": ["a"]}]},
    {"anyOf": [A, B], "required": ["c"]},
    {"anyOf": [A, B], "oneOf": [A, B]},
    TO_A | {"required": ["b"], "$defs": {"a": A}},
    {"allOf": [TO_A, B], "$defs": {"a": A}},
    {"allOf": [TO_A, B], "$defs": {"a": {"$ref": "#/$defs/more"}, "more": A}},
    {"prefixItems": [TO_A, {"allOf": [TO_A, B]}], "$defs": {"a": A}},
    {"prefixItems": [{"allOf": [TO_A, B]}, TO_A], "$defs": {"a": A}},
    {"allOf": [{"$ref": "#/$defs/tree"}, B], "$defs": {"tree": {"anyOf": [A, {"$ref": "#/$defs/tree"}]}}},
    {"prefixItems": [A, {"$ref": "https://example.org/a"}]},
    {"prefixItems": [A, {"$id": "urn:x", "$ref": "#/$defs/a", "$defs": {"a": B}}]},
    {"prefixItems": [A, {"$ref": "#/$defs/none"}, {"$ref": "#/prefixItems/7"}, {"$ref": "#/prefixItems/0/type/x"}]},
])  # fmt: skip
def test_what_stays_as_it_is(schema: Schema) -> None:
    """What says itself whether there are others, shares its value with another schema, requires what it does not list,
    or is data; and all, where a reference leads to what cannot be known."""
    assert closed(schema) == schema


def test_what_is_beside_a_union_of_closed_ones() -> None:
    """A definition that is used alone is closed, beside another that is used with others."""
    schema: Schema = {"prefixItems": [TO_A, {"allOf": [{"$ref": "#/$defs/b"}, A]}], "$defs": {"a": A, "b": B}}
    assert closed(schema) == schema | {"$defs": {"a": ONLY_A, "b": B}}


def test_a_long_chain_of_references() -> None:
    """They may go in circles."""
    names = [f"d{number}" for number in range(2_000)]
    definitions: Schema = {name: {"type": "array", "items": {"$ref": f"#/$defs/{after}"}}
                           for name, after in zip(names, [*names[1:], names[0]], strict=True)}
    schema: Schema = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions}
    assert closed(schema) == schema | {"type": "object", "additionalProperties": False}
