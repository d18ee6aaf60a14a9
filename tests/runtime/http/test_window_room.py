"""Case B17: prompt, limit and window meet in one way on every route, streamed or whole, and in Python."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from ostinato.errors import ContextTooLong
from ostinato.runtime.engine_thread import EngineThread
from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import SamplingParams
from tests.support.engine_runs import toy_config
from tests.support.fake_engine import say
from tests.support.serving import Served, serving
from tests.support.toy_model import load_toy
from tests.support.toy_text import front_end

pytestmark = pytest.mark.asyncio(loop_scope="module")

WINDOW = 64
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"  # "!" is one token, so lengths are exact
LIMITS = {  # route: its fields for the most tokens
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
ROUTES = pytest.mark.parametrize(
    ("path", "name"), [(p, name) for p, names in LIMITS.items() for name in names]
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serving(say([10] * 200), text=front_end(template=PLAIN), window=WINDOW) as running:
        yield running


def body(path: str, length: int, **fields: object) -> dict[str, Any]:
    text = "!" * length
    if path == "/v1/completions":
        return {"prompt": text, **fields}
    if path == "/v1/responses":
        return {"input": text, **fields}
    return {"messages": [{"role": "user", "content": text}], **fields}


async def refused(served: Served, path: str, raw: bytes) -> str:
    """The message of a 400, which comes before a stream begins."""
    before = len(served.engine.requests)
    status, answer = await served.post(path, raw)
    assert status == 400, answer
    assert len(served.engine.requests) == before
    return str(answer["error"]["message"])


async def generated(served: Served, path: str, raw: bytes) -> tuple[int, str]:
    """Tokens of an answer and why it ended; the engine was asked for no more than those."""
    asked = json.loads(raw)
    if asked.get("stream"):
        if path.endswith("completions"):
            raw = json.dumps({**asked, "stream_options": {"include_usage": True}}).encode()
        async with served.http.post(served.url + path, data=raw) as response:
            assert response.status == 200
            text = await response.text()
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    else:
        status, whole = await served.post(path, raw)
        assert status == 200, whole
        events = [whole]
    count, reason = 0, ""
    for event in events:
        event = event.get("response", event)
        usage = event.get("usage") or {}
        count = usage.get("completion_tokens", usage.get("output_tokens", count))
        for choice in event.get("choices", ()):
            reason = choice["finish_reason"] or reason
        reason = (event.get("incomplete_details") or {}).get("reason", reason)
        delta = event["delta"] if event.get("type") == "message_delta" else {}
        reason = event.get("stop_reason") or delta.get("stop_reason") or reason
    assert served.engine.requests[-1].sampling.max_tokens == count
    return count, reason


CUT = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}  # elsewhere `length`


@ROUTES
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_prompt_that_fits_is_answered_to_the_end_of_the_window(
    served: Served, path: str, name: str, stream: bool
):
    for length, most, count in ((60, 10, 4), (60, 3, 3), (63, 10, 1), (60, 1_000_000_000, 4), (60, None, 4)):
        if most is None and path == "/v1/messages":
            continue  # there the limit is required
        fields = {"stream": stream} if most is None else {name: most, "stream": stream}
        raw = json.dumps(body(path, length, **fields)).encode()
        assert await generated(served, path, raw) == (count, CUT.get(path, "length")), (length, most)
    raw = json.dumps(body(path, 60, **{name: 0, "stream": stream})).replace(f'"{name}": 0', f'"{name}": 1e9')
    assert await generated(served, path, raw.encode()) == (4, CUT.get(path, "length"))


@ROUTES
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_prompt_without_room_is_refused_with_window_and_length(
    served: Served, path: str, name: str, stream: bool
):
    for length in (64, 65, 1000):
        for most in (1, 2045):
            fields = body(path, length, **{name: most, "stream": stream})
            said = await refused(served, path, json.dumps(fields).encode())
            assert f"it has {length} tokens, this model's maximum context length is 64 tokens" in said


@ROUTES
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_limit_below_one_is_refused_by_name(served: Served, path: str, name: str, stream: bool):
    for most in (0, -1, "5", 1.5, True):
        fields = body(path, 60, **{name: most, "stream": stream})
        assert (await refused(served, path, json.dumps(fields).encode())).startswith(f"{name}: ")


async def test_tokens_of_the_template_count():
    async with serving(say([10] * 200), window=WINDOW) as chatty:

        def asking(length: int) -> dict[str, Any]:
            return {"messages": [{"role": "user", "content": "!" * length}]}

        around = (await chatty.post("/tokenize", asking(1)))[1]["count"] - 1
        assert around > 5
        path, room = "/v1/chat/completions", WINDOW - around
        for length, count in ((room - 4, 4), (room - 1, 1)):
            raw = json.dumps({**asking(length), "max_tokens": 10}).encode()
            assert await generated(chatty, path, raw) == (count, "length")
        for length in (room, room + 1):
            said = await refused(chatty, path, json.dumps(asking(length)).encode())
            assert (
                f"it has {length + around} tokens, this model's maximum context length is 64 tokens" in said
            )


async def test_python_has_the_same_rules():
    config = toy_config(max_model_len=WINDOW)
    engine = EngineThread("toy", config, load=load_toy)
    with LLM.over(engine, front_end(template=PLAIN), config) as llm:

        def ends(length: int, most: int | None) -> list[tuple[int, str | None]]:
            prompt, params = "!" * length, SamplingParams(max_tokens=most, ignore_eos=True)
            made = [*llm.generate(prompt, params), *llm.chat([{"role": "user", "content": prompt}], params)]
            return [(len(one.outputs[0].token_ids), one.outputs[0].finish_reason) for one in made]

        for length, most, count in ((60, 10, 4), (63, 10, 1), (60, 10**9, 4), (60, None, 4)):
            assert ends(length, most) == [(count, "length")] * 2
        for length in (64, 70):
            with pytest.raises(
                ContextTooLong, match=f"has {length} tokens, this model's maximum context length is 64"
            ):
                ends(length, 10)
        for most in (0, -1):
            with pytest.raises(ValueError, match="max_tokens"):
                ends(60, most)
