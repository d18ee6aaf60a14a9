"""Structured output over HTTP: fields, names of errors, and a real engine behind a real port. Case B57."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from ostinato.errors import InvalidRequest
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.engine_thread import EngineThread
from ostinato.runtime.http.api_errors import refusal
from ostinato.runtime.http.api_schema import ChatRequest, CompletionRequest
from ostinato.runtime.http.grammar_schema import grammar_params
from tests.support.engine_runs import toy_config
from tests.support.grammar_runs import toy_folder
from tests.support.serving import serving_engine
from tests.support.toy_model import ToyModel
from tests.support.toy_text import tokenizer

EOS_ID = 1
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
STRICT = {**SCHEMA, "additionalProperties": False}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {}, "end": "<"}],
    "triggers": ["<f"],
}
TAG_FORMAT = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [{"type": "const_string", "value": "It is "}, {"type": "any_text"}],
    },
}


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}}),
        ({"response_format": TAGS}, {"response_format": TAGS}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        ),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA, "grammar_param": "guided_json"}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA, "grammar_param": "guided_json"}),
        ({"guided_regex": "a+"}, {"regex": "a+", "grammar_param": "guided_regex"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b"), "grammar_param": "guided_choice"}),
        ({"guided_grammar": "g"}, {"grammar": "g", "grammar_param": "guided_grammar"}),
        (
            {
                "structured_outputs": {
                    "regex": "a+",
                    "json": None,
                    "whitespace_pattern": None,
                    "disable_fallback": True,
                    "disable_any_whitespace": False,
                    "disable_additional_properties": False,
                }
            },
            {"regex": "a+", "grammar_param": "structured_outputs.regex"},
        ),
        (
            {"structured_outputs": {"json": False}},
            {"json_schema": False, "grammar_param": "structured_outputs.json"},
        ),
        (
            {"structured_outputs": {"json_object": True}},
            {"response_format": {"type": "json_object"}, "grammar_param": "structured_outputs.json_object"},
        ),
        *(
            (
                {"structured_outputs": {"structural_tag": written}},
                {"response_format": tag, "grammar_param": "structured_outputs.structural_tag"},
            )
            for tag in (TAGS, TAG_FORMAT)
            for written in (tag, json.dumps(tag), json.dumps({key: tag[key] for key in tag if key != "type"}))
        ),
        ({"response_format": TAG_FORMAT}, {"response_format": TAG_FORMAT}),
    ],
)
def test_every_way_to_ask_reaches_the_engine(fields: dict[str, Any], params: dict[str, Any]):
    for schema, base in (
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
        (CompletionRequest, {"prompt": "x"}),
    ):
        assert grammar_params(schema.model_validate({**base, **fields})) == params


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
    (
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["a"]}},
        "response_format.structures",
    ),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
    ({"guided_regex": 1}, "guided_regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "3"}, "guided_json"),
    ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
    ({"guided_json": '{"const": NaN}'}, "guided_json"),
    ({"structured_outputs": {"json": '{"const": 1, "const": 2}'}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": '{"items":' * 101 + "{}" + "}" * 101}}, "structured_outputs.json"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    *(
        ({"structured_outputs": {"structural_tag": wrong}}, "structured_outputs.structural_tag")
        for wrong in (7, "[]", "{", '{"type": "json_object"}', {"type": "text"})
    ),
    ({"response_format": {"type": "structural_tag", "format": 7}}, "response_format.format"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[str(fields)[:60] for fields, _ in WRONG])
def test_what_is_asked_wrongly_is_named(fields: dict[str, Any], param: str):
    with pytest.raises((ValidationError, InvalidRequest)) as caught:
        grammar_params(CompletionRequest.model_validate({"prompt": "x", **fields}))
    error = caught.value
    assert (refusal(error) if isinstance(error, ValidationError) else error).param == param


@asynccontextmanager
async def toy_server(path: Path) -> AsyncIterator[str]:
    """A server whose engine is the toy model on a thread."""
    folder = toy_folder(path)

    def load(path: Path, config: EngineConfig) -> ToyModel:
        return ToyModel(path)

    async with serving_engine(EngineThread(folder, toy_config(), load=load)) as served:
        yield served.url


async def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(url + path, json=body) as response:
        raw = await response.text()
        return response.status, raw if body.get("stream") and response.status == 200 else json.loads(raw)


async def test_answers_match_on_both_routes_streamed_and_whole(tmp_path: Path):
    async with toy_server(tmp_path) as url:
        base: dict[str, Any] = {"seed": 3, "max_tokens": 100, "logit_bias": {"3": 1}}
        chat = {**base, "messages": [{"role": "user", "content": "Hello"}]}
        text = {**base, "prompt": "the quick"}
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": STRICT, "strict": True}}
        status, answer = await post(url, CHAT, {**chat, "response_format": wanted})
        assert status == 200, answer
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"])["a"] <= 99
        status, answer = await post(url, COMPLETE, {**text, "n": 3, "guided_regex": "[a-z]{3}[0-9]{2}"})
        assert status == 200, answer
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            assert re.fullmatch("[a-z]{3}[0-9]{2}", choice["text"])
        status, answer = await post(url, CHAT, {**chat, "response_format": TAG_FORMAT})
        assert answer["choices"][0]["message"]["content"].startswith("It is ")
        wrong = {"type": "structural_tag", "format": {"type": "const_string"}}
        status, answer = await post(url, CHAT, {**chat, "response_format": wrong})
        assert (status, answer["error"]["param"]) == (400, "response_format")
        assert "response_format.format.value: give a text" in answer["error"]["message"]
        status, raw = await post(
            url, COMPLETE, {**text, "stream": True, "structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert status == 200, raw
        pieces = [json.loads(line[6:]) for line in raw.split("\n\n") if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) in ("yes", "no")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {"type": "object", "properties": {"foo": "bar"}}}, "guided_json"),
    ({"guided_json": {"type": "objekt"}}, "guided_json"),
    ({"guided_json": {"type": "string", "pattern": "([a-z"}}, "guided_json"),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_regex": "a" * 300_000}, "guided_regex"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
]


async def test_wrong_grammars_are_400_beside_answers_that_go_on_streamed_or_not(tmp_path: Path):
    async with toy_server(tmp_path) as url:
        long = {"prompt": "the quick", "max_tokens": 120, "ignore_eos": True}
        beside = [asyncio.create_task(post(url, COMPLETE, long)) for _ in range(3)]
        for stream in (False, True):
            for fields, param in REFUSED:
                status, body = await post(url, COMPLETE, {"prompt": "x", "stream": stream, **fields})
                assert (status, body["error"]["param"], body["error"]["code"]) == (
                    400,
                    param,
                    "invalid_value",
                )
                assert body["error"]["message"].startswith(f"{param}: ")
                assert len(json.dumps(body)) < 1024
        for status, answer in await asyncio.gather(*beside):
            assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        async with aiohttp.ClientSession() as http, http.get(url + "/health") as response:
            assert response.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_go_on_is_the_fault_of_its_request(tmp_path: Path, stream: bool):
    letter = tokenizer().token_to_id("a")
    async with toy_server(tmp_path) as url:
        for fields, param in (
            ({"guided_regex": "[0-9]+", "allowed_token_ids": [letter]}, "guided_regex"),
            ({"allowed_token_ids": [EOS_ID], "min_tokens": 2}, None),
        ):
            status, body = await post(url, COMPLETE, {"prompt": "x", "stream": stream, **fields})
            told = body["error"]
            assert (status, told["code"], told["param"]) == (400, "invalid_value", param)
            assert told["message"].startswith(f"{param}: " if param else "logit_bias, min_tokens")
        fields = {"guided_regex": "a[0-9]", "allowed_token_ids": [letter], "seed": 1}
        status, body = await post(url, COMPLETE, {"prompt": "x", "stream": stream, **fields})
        if stream and status == 200:  # it had begun; both tokens may also come together
            body = json.loads(body.split("\n\n")[-2].removeprefix("data: "))
        assert (body["error"]["param"], body["error"]["type"]) == ("guided_regex", "invalid_request_error")


def wanting(schema: object, **more: object) -> dict[str, Any]:
    """Fields of a chat whose answer is to follow a schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60, "response_format": wanted}


async def test_response_format_is_enforced_or_refused_by_its_place(tmp_path: Path):
    """Case B57, by its numbers."""
    schemas: list[object] = [
        {"type": "object", "properties": {"foo": "bar"}},
        {"type": "objekt"},
        {"type": "string", "pattern": "([a-z"},
        {"$ref": "#/nowhere"},
        {"type": "array", "uniqueItems": True},
    ]
    async with toy_server(tmp_path) as url:
        long = {"prompt": "the quick", "max_tokens": 120, "ignore_eos": True}
        beside = [asyncio.create_task(post(url, COMPLETE, long)) for _ in range(3)]
        for stream in (False, True):
            for schema in schemas:
                status, body = await post(url, CHAT, {**wanting(schema, strict=True), "stream": stream})
                assert (status, body["error"]["param"]) == (400, "response_format"), schema
            status, body = await post(url, CHAT, {**wanting(None), "stream": stream})
            assert (status, body["error"]["param"]) == (400, "response_format.json_schema.schema")
            for seed in range(5):
                fields = wanting({"type": "integer", "minimum": 3, "maximum": 3})
                assert await said(url, {**fields, "seed": seed, "stream": stream}) == "3"
                fields = wanting(
                    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99}, strict=True
                )
                assert int(await said(url, {**fields, "seed": seed, "stream": stream})) % 7 == 0
        for status, answer in await asyncio.gather(*beside):
            assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")


async def said(url: str, fields: dict[str, Any]) -> str:
    """The text of a chat, streamed or whole."""
    status, answer = await post(url, CHAT, fields)
    assert status == 200, answer
    if not fields["stream"]:
        return str(answer["choices"][0]["message"]["content"])
    pieces = [json.loads(line[6:]) for line in answer.split("\n\n") if line.startswith("data: {")]
    return "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)


async def test_health_answers_while_large_schemas_are_compiled(tmp_path: Path):
    deep: object = {"type": "integer"}
    for _ in range(45):  # with what is around it nearly as deep as a body may be
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    wide = {"enum": [f"w{at}_{at * 7}" for at in range(8000)]}
    async with toy_server(tmp_path) as url, aiohttp.ClientSession() as http:
        for schema in (deep, wide):
            began = time.monotonic()
            asked = asyncio.create_task(post(url, CHAT, wanting(schema)))
            longest_s = 0.0
            while not asked.done():
                asked_at = time.monotonic()
                async with http.get(url + "/health") as response:
                    assert response.status == 200
                longest_s = max(longest_s, time.monotonic() - asked_at)
            status, answer = await asked
            assert (status, status == 200 or answer["error"]["param"]) in (
                (200, True),
                (400, "response_format"),
            )
            assert time.monotonic() - began < 10  # below one on an idle machine
            assert longest_s < 1  # 20 ms
