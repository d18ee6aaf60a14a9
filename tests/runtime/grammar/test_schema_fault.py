"""Where a JSON schema is none, by its path."""

from typing import Any

import pytest

from ostinato.runtime.grammar.schema_fault import schema_fault

TYPES = "types are string, number, integer, boolean, object, array, null"
TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "strng"}, f"type: got \"strng\"; {TYPES}, did you mean 'string'?"),
        ({"type": "map"}, f'type: got "map"; {TYPES}'),
        ({"type": 5}, f"type: got 5; {TYPES}"),
        ({"type": ["string", "nul"]}, f"type: got \"nul\"; {TYPES}, did you mean 'null'?"),
        (
            {"type": "object", "properties": {"a": TEXT, "b": {"type": "array", "items": {"type": "int"}}}},
            f'properties.b.items.type: got "int"; {TYPES}',
        ),
        ({"anyOf": [TEXT, {"type": "x"}]}, f'anyOf[1].type: got "x"; {TYPES}'),
        ({"$defs": {"a": {"not": {"type": "x"}}}}, f'$defs.a.not.type: got "x"; {TYPES}'),
        ({"prefixItems": [True, {"type": "x"}]}, f'prefixItems[1].type: got "x"; {TYPES}'),
        ({"items": [TEXT, {"type": "x"}]}, f'items[1].type: got "x"; {TYPES}'),  # of drafts before 2020-12
        ({"properties": {"a": {"type": "x"}, "b": {"type": "y"}}}, 'properties.a.type: got "x"'),
        ({"properties": {"foo": "bar"}}, 'properties.foo: got "bar"; give an object, true or false'),
        (7, "the schema: got 7; give an object, true or false"),
        ({"additionalProperties": {"type": "y" * 1000}}, "additionalProperties.type: got \"yyy"),
    ],
)  # fmt: skip
def test_the_first_wrong_place_is_named_with_what_may_stand_there(schema: object, says: str):
    told = schema_fault(schema)
    assert told is not None
    assert told.startswith(says)
    assert len(told) < 220


@pytest.mark.parametrize(
    "schema",
    [
        True,
        TEXT,
        {"properties": {"type": {"type": ["integer", "null"]}, "items": False}},  # names, not keywords
        {"enum": [{"type": "strng"}], "default": {"type": "x"}, "const": {"properties": 5}},  # values
        {"x-guidance": {"type": "x"}},
    ],
)
def test_names_of_properties_and_values_are_no_keywords(schema: Any):
    assert schema_fault(schema) is None
