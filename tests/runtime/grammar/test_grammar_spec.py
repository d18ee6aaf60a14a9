"""What a request says about its answer's shape, before anything is compiled."""

import json
from typing import Any

import pytest

from ostinato.errors import InvalidRequest
from ostinato.runtime.grammar.grammar_spec import (
    MAX_GRAMMAR_BYTES,
    GrammarSpec,
    has_grammar,
    read_grammar,
)
from ostinato.runtime.messages import SamplingParams

TAGS = {"structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f="]}


def spec(**sampling: Any) -> GrammarSpec | None:
    return read_grammar(SamplingParams.model_validate(sampling))


def test_each_field_gives_its_kind_of_grammar():
    assert spec() is None
    assert spec(response_format={"type": "text"}) is None
    assert spec(response_format={"type": "text"}, regex="a") == GrammarSpec("regex", "a")
    assert spec(response_format={"type": "json_object"}) == GrammarSpec("json_schema", '{"type":"object"}')
    assert spec(json_schema={"type": "null"}) == GrammarSpec("json_schema", '{"type":"null"}')
    assert spec(json_schema=True) == GrammarSpec("json_schema", "true")
    assert spec(grammar='start: "a"') == GrammarSpec("grammar", 'start: "a"')
    assert spec(choice=("yes", 'a "b"', "yes")) == GrammarSpec("grammar", 'start: "yes" | "a \\"b\\""\n')
    assert spec(structural_tag=TAGS) == GrammarSpec("tags", json.dumps(TAGS, separators=(",", ":")))


@pytest.mark.parametrize(("strict", "lenient"), [(True, False), (None, False), (False, True)])
def test_only_strict_false_ignores_what_cannot_be_enforced(strict: bool | None, lenient: bool):
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "null"}, "strict": strict},
    }
    assert spec(response_format=wanted) == GrammarSpec("json_schema", '{"type":"null"}', lenient)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type: got 'xml'"),
        ({"response_format": {}}, "response_format.type: got None"),
        ({"response_format": {"type": "json_schema"}}, "there is no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "got int"),
        ({"json_schema": {"const": float("nan")}}, "not JSON"),
        ({"choice": ()}, "at least one text"),
        ({"choice": ("a", "")}, "no empty one"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "at most 262144"),
        ({"structural_tag": {"triggers": ["<"]}}, "structural_tag.structures"),
        ({"structural_tag": {**TAGS, "triggers": ["x"]}}, "structures[0].begin: '<f=a>' begins with none"),
        ({"structural_tag": {**TAGS, "format": {}}}, "structural_tag.structures: has no place beside format"),
        ({"structural_tag": {**TAGS, "tags": []}}, "structural_tag.tags: is not supported"),
        ({"structural_tag": {**TAGS, "structures": [{"begin": 1}]}}, "begin and end must be texts"),
    ],
)
def test_what_can_be_seen_at_once_is_refused_by_name(sampling: dict[str, Any], words: str):
    with pytest.raises(InvalidRequest) as caught:
        spec(**sampling)
    assert words in str(caught.value)
    assert caught.value.param == next(iter(sampling))


def test_two_grammars_contradict_and_the_second_is_named():
    with pytest.raises(InvalidRequest, match="regex: contradicts response_format") as caught:
        spec(response_format={"type": "json_object"}, regex="a")
    assert caught.value.param == "regex"


def test_the_front_ends_name_of_the_field_is_used():
    with pytest.raises(InvalidRequest, match=r"guided_choice: give at least") as caught:
        spec(choice=(), grammar_param="guided_choice")
    assert caught.value.param == "guided_choice"


def test_has_grammar_agrees_with_read_grammar():
    for sampling in ({}, {"response_format": {"type": "text"}}, {"regex": "a"}, {"json_schema": False}):
        params = SamplingParams.model_validate(sampling)
        assert has_grammar(params) == (read_grammar(params) is not None)
