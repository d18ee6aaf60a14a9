"""/openapi.json is true: of the routes that there are, of what they accept, of what they answer."""

import json
import re
from typing import Any

import pytest

from ostinato.runtime.http import answer_schema as answers
from ostinato.runtime.http.api_schema import ChatRequest, CompletionRequest
from ostinato.runtime.http.openapi import ROUTES
from tests.runtime.http.test_api_schema import ACCEPTED, CHAT, TEXT, WRONG, refused
from tests.support.fake_engine import say
from tests.support.json_schema import fits
from tests.support.serving import Served, serving

PATHS = {ChatRequest: "/v1/chat/completions", CompletionRequest: "/v1/completions"}


async def document_of(served: Served, **headers: str) -> dict[str, Any]:
    status, document = await served.get("/openapi.json", **headers)
    assert (status, document["openapi"]) == (200, "3.1.0")
    return document


async def the_document() -> dict[str, Any]:
    async with serving(say([10]), admin_key="root") as served:
        return await document_of(served)


def body_schema(document: dict[str, Any], path: str) -> Any:
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


async def test_every_route_is_there_and_no_other():
    async with serving(say([10]), admin_key="root") as served:
        document = await document_of(served)
        routes = {
            (route.method, re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical))
            for route in served.app.router.routes()
            if route.method != "HEAD"
        }
    told = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert told == routes
    assert routes == ROUTES.keys(), "a new route is described in runtime/http/openapi.py"
    operations = [one for item in document["paths"].values() for one in item.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    assert all(one["summary"] for one in operations)
    async with serving(say([10])) as served:
        assert not [path for path in (await document_of(served))["paths"] if path.startswith("/admin")]


async def test_references_lead_somewhere_and_keys_are_told():
    async with serving(say([10]), api_key=("secret",), admin_key="root") as served:
        assert (await served.get("/openapi.json"))[0] == 401
        document = await document_of(served, Authorization="Bearer secret")
    for ref in re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(document)):
        assert ref in document["components"]["schemas"]
    paths = document["paths"]
    assert paths["/v1/completions"]["post"]["security"] == [{"apiKey": []}, {"xApiKey": []}]
    assert paths["/admin/sleep"]["post"]["security"] == [{"adminKey": []}]
    assert "security" not in paths["/health"]["get"]
    open_document = await the_document()
    assert "security" not in open_document["paths"]["/v1/completions"]["post"]


ACROSS_FIELDS = {"stream_options", "best_of"}  # rules about several fields, which a schema cannot say


async def test_the_schemas_refuse_what_the_server_refuses_and_accept_what_it_accepts():
    document = await the_document()
    checked = 0
    for schema, good in ((ChatRequest, CHAT), (CompletionRequest, TEXT)):
        rule = body_schema(document, PATHS[schema])
        assert fits(rule, good, document)
        for name, value, _ in ACCEPTED:
            schema.model_validate({**good, name: value})
            assert fits(rule, {**good, name: value}, document), name
        for name, value in WRONG:
            if name in ACROSS_FIELDS or (schema, name, value) in UNSAYABLE:
                continue
            refused(schema, {**good, name: value})
            assert not fits(rule, {**good, name: value}, document), (name, value)
            checked += 1
        for name in schema.model_fields:
            if name not in good:
                assert fits(rule, {**good, name: None}, document), name
        for name in schema.ignored:
            assert fits(rule, {**good, name: None}, document)
        for name, accepted in schema.unsupported.items():
            for value in (None, *accepted):
                assert fits(rule, {**good, name: value}, document), (name, value)
    assert checked > 100


# Two keys that are one token; 0 is right with `echo`.
UNSAYABLE = [(schema, "logit_bias", {"1": 1, "01": 2}) for schema in PATHS]
UNSAYABLE += [(CompletionRequest, "max_tokens", 0)]


@pytest.mark.parametrize(
    "fields",
    [{}, {"logprobs": True, "top_logprobs": 3}, {"prompt_logprobs": 1}, {"return_token_ids": True, "n": 2}],
)
async def test_chat_answers_are_as_told(fields: dict[str, object]):
    async with serving(say([10, 11], stop_id=1)) as served:
        _, whole = await served.post("/v1/chat/completions", {**CHAT, "model": "toy", **fields})
    answers.ChatAnswer.model_validate(whole)


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 3, "echo": True}, {"prompt_logprobs": 1}, {"return_token_ids": True, "n": 2}]
)
async def test_text_answers_are_as_told(fields: dict[str, object]):
    async with serving(say([10, 11], stop_id=1)) as served:
        _, whole = await served.post("/v1/completions", {**TEXT, "model": "toy", **fields})
    answers.TextAnswer.model_validate(whole)


async def test_other_answers_and_errors_are_as_told():
    async with serving(say([10]), admin_key="root") as served:
        document = await document_of(served)
        key = {"Authorization": "Bearer root"}
        seen = {
            ("GET", "/v1/models"): (await served.get("/v1/models")),
            ("GET", "/v1/models/{name}"): (await served.get("/v1/models/toy")),
            ("GET", "/health"): (await served.get("/health")),
            ("GET", "/version"): (await served.get("/version")),
            ("POST", "/tokenize"): (
                await served.post("/tokenize", {"prompt": "a", "return_token_strs": True})
            ),
            ("POST", "/detokenize"): (await served.post("/detokenize", {"tokens": [10]})),
            ("POST", "/admin/sleep"): (await served.post("/admin/sleep", {"level": 1}, **key)),
        }
        failed = [
            await served.post("/v1/completions", {"prompt": 5}),
            await served.post("/v1/messages", {"messages": []}),
            await served.get("/v1/models/other"),
        ]
    for (method, path), (status, body) in seen.items():
        assert status == 200, path
        content = document["paths"][path][method.lower()]["responses"]["200"]["content"]
        assert fits(content["application/json"]["schema"], body, document), path
    for status, body in failed:
        assert status >= 400
        assert fits({"$ref": "#/components/schemas/Error"}, body, document)
