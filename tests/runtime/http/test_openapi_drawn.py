"""Requests that schemathesis draws from /openapi.json: no 5xx, and every answer is as the document says.

`OSTINATO_DRAWN=500` draws that many per operation; the suite draws a few, always the same.
"""

import asyncio
import json
import os
import threading
from collections.abc import Iterator

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ostinato.runtime.http.openapi import ROUTES
from tests.support.fake_engine import say
from tests.support.serving import serving

DRAWN = int(os.environ.get("OSTINATO_DRAWN", "6"))
KEY = {"Authorization": "Bearer root"}  # of /admin/; the server has no other
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
BODIES = [f"{method} {path}" for (method, path), route in ROUTES.items() if route.body is not None]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on a thread of its own: schemathesis asks with blocking calls."""
    ready, done = threading.Event(), asyncio.Event()
    found: list[str] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with serving(say([10, 11], stop_id=1), admin_key="root") as served:
            found.append(served.url)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def operations(url):
    schema = schemathesis.openapi.from_dict(requests.get(f"{url}/openapi.json", timeout=10).json())
    schema.validate()
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


def draw(operation, mode, url):
    """Ask, and hold every answer to the document."""

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=DRAWN,
        derandomize=DRAWN < 100,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case):
        case.validate_response(case.call(base_url=url, headers=KEY, timeout=20), checks=CHECKS)

    ask()


TURN = {"role": "user", "content": "a"}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
GOOD = {
    "POST /v1/chat/completions": [{"messages": [TURN]}, {"messages": [TURN], "n": 2, **LOGPROBS}],
    "POST /v1/completions": [{"prompt": "a"}, {"prompt": ["a", "b"], "logprobs": 2, "echo": True}],
    "POST /v1/messages": [{"messages": [TURN], "max_tokens": 5}],
    "POST /v1/messages/count_tokens": [{"messages": [TURN]}],
    "POST /v1/responses": [{"input": "a"}, {"input": [TURN], "background": True}],
    "POST /v1/responses/input_tokens": [{"input": [TURN], "instructions": "a"}],
    "POST /tokenize": [{"prompt": "a", "return_token_strs": True}, {"messages": [TURN]}],
    "POST /detokenize": [{"tokens": [10, 11]}],
    "POST /admin/sleep": [{"level": 2}],
    "POST /admin/wake": [{}],
    "POST /admin/kv": [{"target_bytes": 5}],
    "POST /admin/reset_prefix_cache": [{}],
    "POST /admin/abort": [{"all": True}, {"request_ids": ["nobody"]}],
    "POST /admin/profile/start": [{"seconds": 2}],
    "POST /admin/profile/stop": [{}],
}
NOT_HERE = {f"POST {path}" for path in ("/v1/embeddings", "/v1/score", "/score")}  # need another model
NOT_HERE |= {f"POST {path}" for path in ("/v1/rerank", "/v2/rerank", "/rerank")}


def answered(operation, url, **case):
    """A request that must succeed; its answer is as the document says."""
    case = operation.Case(**case)
    response = case.call(base_url=url, headers=KEY, timeout=20)
    assert response.status_code == 200, response.text
    case.validate_response(response, checks=CHECKS)
    return response


@pytest.mark.parametrize("name", BODIES)
def test_good_requests_are_answered_as_the_document_says_whole_and_streamed(operations, url, name):
    assert (name in GOOD) != (name in NOT_HERE)
    streams = "text/event-stream" in operations[name].definition.raw["responses"]["200"]["content"]
    for body in GOOD.get(name, []):
        for more in ({}, {"stream": True}) if streams else ({},):
            response = answered(operations[name], url, body={**body, **more}, media_type="application/json")
            (media,) = response.headers["content-type"]
            assert media.startswith("text/event-stream" if more else "application/json")


def test_what_is_done_with_a_response_is_as_the_document_says(operations, url):
    body = {"input": "a", "background": True, "stream": True}
    events = answered(operations["POST /v1/responses"], url, body=body, media_type="application/json").text
    path = {"id": json.loads(events.partition("data: ")[2].partition("\n")[0])["response"]["id"]}
    one = "/v1/responses/{id}"
    answered(operations[f"GET {one}"], url, path_parameters=path)
    again = {"stream": "true", "starting_after": 1}
    assert "event:" in answered(operations[f"GET {one}"], url, path_parameters=path, query=again).text
    page = {"limit": 1, "order": "asc"}
    answered(operations[f"GET {one}/input_items"], url, path_parameters=path, query=page)
    answered(operations[f"POST {one}/cancel"], url, path_parameters=path)
    answered(operations[f"DELETE {one}"], url, path_parameters=path)
    answered(operations["GET /v1/models/{name}"], url, path_parameters={"name": "toy"})
    answered(operations["GET /page/{name}"], url, path_parameters={"name": "chat.js"})


@pytest.mark.parametrize("name", [f"{method} {path}" for method, path in ROUTES])
def test_requests_that_fit_the_document_get_answers_that_do(operations, url, name):
    draw(operations[name], GenerationMode.POSITIVE, url)


@pytest.mark.parametrize("name", BODIES)
def test_requests_that_do_not_fit_are_refused_as_the_document_says(operations, url, name):
    draw(operations[name], GenerationMode.NEGATIVE, url)
