"""Thinking budgets over HTTP, on every route, by a real engine: what is said, shown and counted."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ostinato.runtime.config import EngineConfig, ServerConfig
from ostinato.runtime.engine_thread import EngineThread
from ostinato.runtime.http.serve_app import listen, serve
from ostinato.runtime.http.server import make_app
from tests.support import toy_text
from tests.support.engine_runs import toy_config
from tests.support.fake_engine import say
from tests.support.serving import serving
from tests.support.thinking_text import SENTENCE, front_end, tokenizer_json
from tests.support.toy_model import EOS, ToyModel

CHAT, COMPLETE, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
HELLO = [{"role": "user", "content": "Hello"}]
BUDGET = 7


class Client:
    """Posts to one server."""

    def __init__(self, url: str, http: aiohttp.ClientSession, *, whole: bool) -> None:
        self._url, self._http = url, http
        self.text = front_end(whole=whole)

    def ids(self, text: str) -> list[int]:
        return self.text.encode(text, add_special_tokens=False)

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        async with self._http.post(self._url + path, json=body) as response:
            answer: dict[str, Any] = await response.json()
            return {**answer, "status": response.status}

    async def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        async with self._http.post(self._url + path, json={**body, "stream": True}) as response:
            raw = await response.text()
        lines = [line[6:] for line in raw.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]


@asynccontextmanager
async def thinker(path: Path, *, whole: bool = True, **settings: Any) -> AsyncIterator[Client]:
    """The toy model as one that thinks; `whole`: its marks are tokens."""
    (path / "tokenizer").mkdir(exist_ok=True)
    (path / "tokenizer" / "tokenizer.json").write_text(tokenizer_json(whole=whole), encoding="utf-8")

    def load(path: Path, config: EngineConfig) -> ToyModel:
        return ToyModel(path)

    config = ServerConfig(port=0, drain_s=1.0, **settings)
    engine = EngineThread(path, toy_config(), load=load)
    app = make_app(engine, config, front_end(whole=whole))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(serve(app, listen(config), on_ready=ready.set_result, stop=stop))
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    try:
        async with aiohttp.ClientSession() as http:
            yield Client(ready.result(), http, whole=whole)
    finally:
        stop.set()
        await task


@pytest.mark.parametrize("whole", [True, False], ids=["marks are tokens", "marks in pieces"])
async def test_chat_says_the_sentence_and_counts_every_token(tmp_path: Path, whole: bool):
    async with thinker(tmp_path, whole=whole, reasoning_end_str=SENTENCE) as client:
        closing = client.ids(SENTENCE.removesuffix("</think>")) + client.ids("</think>")
        asked = {
            "messages": HELLO, "max_tokens": 90, "seed": 4, "thinking_token_budget": BUDGET, "n": 2,
            "return_token_ids": True, "logprobs": True, "stop": ["limited time", "user"],
        }  # fmt: skip
        answer = await client.post(CHAT, **asked)
        assert answer["status"] == 200, answer
        assert len(answer["choices"]) == 2
        streamed: dict[int, dict[str, Any]] = {0: {}, 1: {}}
        listed: dict[int, list[Any]] = {0: [], 1: []}
        for chunk in await client.stream(CHAT, **asked):
            for choice in chunk["choices"]:
                for name, text in choice["delta"].items():
                    streamed[choice["index"]][name] = streamed[choice["index"]].get(name, "") + text
                listed[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
        for choice in answer["choices"]:
            message, ids = choice["message"], choice["token_ids"]
            assert ids[BUDGET : BUDGET + len(closing)] == closing
            assert message["reasoning_content"].endswith(SENTENCE.removesuffix("</think>"))
            assert "Considering" not in message["content"]
            joined = streamed[choice["index"]]
            assert joined["content"] == message["content"]
            assert joined["reasoning_content"] == message["reasoning_content"]
            whole_list, pieces = choice["logprobs"]["content"], listed[choice["index"]]
            assert [entry["token"] for entry in pieces] == [entry["token"] for entry in whole_list]
            assert [entry["token"] for entry in pieces] == [client.text.codec.token_text(i) for i in ids]
            values = [entry["logprob"] for entry in whole_list]
            assert [entry["logprob"] for entry in pieces] == pytest.approx(values, abs=1e-3)
        used = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert used == 2 * (BUDGET + len(closing))
        first, second = (choice["token_ids"][:BUDGET] for choice in answer["choices"])
        assert first != second


async def test_text_completions_have_begun_to_think_where_the_prompt_has(tmp_path: Path):
    async with thinker(tmp_path, reasoning_end_str=SENTENCE) as client:
        body = {"max_tokens": 120, "seed": 1, "thinking_token_budget": BUDGET, "skip_special_tokens": False}
        prompts = ["a<think>so", "a<think>so</think>b"]
        begun, closed = (await client.post(COMPLETE, prompt=prompts, **body))["choices"]
        assert SENTENCE in begun["text"]
        assert "Considering" not in closed["text"]
        # all of it is text here, so a stop string is looked for in what the server writes as well
        cut = await client.post(COMPLETE, prompt=prompts[0], **body, stop="limited time")
        assert cut["choices"][0]["finish_reason"] == "stop"
        assert cut["choices"][0]["text"].endswith("Considering the ")


async def test_responses_and_messages_have_budgets_of_their_own_names(tmp_path: Path):
    async with thinker(tmp_path) as client:
        common = {"temperature": 1.0, "seed": 2, "logit_bias": {str(EOS): -100}}
        made = await client.post(
            RESPONSES, input="Hello", max_output_tokens=30, thinking_token_budget=BUDGET, **common
        )
        assert made["status"] == 200, made
        assert [item["type"] for item in made["output"]] == ["reasoning", "message"]
        assert made["usage"]["output_tokens_details"]["reasoning_tokens"] == BUDGET + 1
        chat = await client.post(CHAT, messages=HELLO, max_tokens=30, thinking_token_budget=BUDGET, **common)
        thought = made["output"][0]["content"][0]["text"]
        assert chat["choices"][0]["message"]["reasoning_content"] == thought
        body = {"messages": HELLO, "max_tokens": 30, **common}
        made = await client.post(MESSAGES, thinking={"type": "enabled", "budget_tokens": BUDGET}, **body)
        assert [block["type"] for block in made["content"]] == ["thinking", "text"]
        assert made["content"][0]["thinking"] == thought
        events = await client.stream(MESSAGES, thinking={"type": "enabled", "budget_tokens": BUDGET}, **body)
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert "".join(delta.get("thinking", "") for delta in deltas) == thought
        free = await client.post(MESSAGES, thinking={"type": "enabled"}, **body)
        assert free["content"][0]["thinking"].startswith(thought)
        assert len(free["content"][0]["thinking"]) > len(thought)


async def test_a_budget_of_nothing_and_an_answer_by_a_schema(tmp_path: Path):
    async with thinker(tmp_path, reasoning_end_str=SENTENCE) as client:
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        strict = {**schema, "additionalProperties": False}
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": strict, "strict": True}}
        for budget in (0, 5):
            answer = await client.post(
                CHAT, messages=HELLO, max_tokens=120, seed=budget, thinking_token_budget=budget,
                response_format=wanted, logit_bias={str(client.ids("</think>")[0]): -100},
            )  # fmt: skip
            assert answer["status"] == 200, answer
            message = answer["choices"][0]["message"]
            assert json.loads(message["content"]).keys() == {"a"}
            thought, sentence, behind = message["reasoning_content"].partition(
                SENTENCE.removesuffix("</think>")
            )
            assert (bool(thought), bool(sentence), behind) == (budget > 0, True, "")


@pytest.mark.parametrize("whole", [True, False], ids=["marks are tokens", "marks in pieces"])
async def test_a_call_that_must_be_made_follows_the_forced_end(tmp_path: Path, whole: bool):
    parameters = {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "room": {"type": "string", "enum": ["hall", "attic"]}},
        "required": ["on", "room"],
    }
    tools = [{"type": "function", "function": {"name": "light", "parameters": parameters}}]
    async with thinker(tmp_path, whole=whole, reasoning_end_str=SENTENCE) as client:
        asked = {"messages": HELLO, "max_tokens": 250, "tools": tools, "parallel_tool_calls": False}
        for choice in ("required", {"type": "function", "function": {"name": "light"}}):
            answer = await client.post(CHAT, **asked, tool_choice=choice, seed=3, thinking_token_budget=4)
            assert answer["status"] == 200, answer
            (made,) = answer["choices"]
            assert made["finish_reason"] == "tool_calls"
            assert made["message"]["content"] is None
            (call,) = made["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert list(arguments) == ["on", "room"]
            assert arguments["on"] in (True, False)
            assert arguments["room"] in ("hall", "attic")
            assert made["message"]["reasoning_content"].endswith(SENTENCE.removesuffix("</think>"))


async def test_an_open_thought_that_is_continued_has_the_budget_and_the_grammar_behind_it(tmp_path: Path):
    async with thinker(tmp_path) as client:
        turn = {"role": "assistant", "content": "<think>I was about to"}
        answer = await client.post(
            CHAT, messages=[*HELLO, turn], continue_final_message=True, max_tokens=40, seed=3,
            thinking_token_budget=BUDGET, guided_choice=["yes", "no"], return_token_ids=True,
        )  # fmt: skip
        assert answer["status"] == 200, answer
        (end,) = client.ids("</think>")
        (choice,) = answer["choices"]
        assert choice["token_ids"].index(end) == BUDGET
        assert choice["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HELLO, "thinking_token_budget": 3}, "thinking_token_budget"),
        (CHAT, {"messages": HELLO, "thinking_token_budget": -1}, "thinking_token_budget"),
        (CHAT, {"messages": HELLO, "thinking_token_budget": "3"}, "thinking_token_budget"),
        (COMPLETE, {"prompt": "x", "thinking_token_budget": 3}, "thinking_token_budget"),
        (RESPONSES, {"input": "x", "thinking_token_budget": 3}, "thinking_token_budget"),
    ],
)
async def test_a_model_that_is_not_known_to_think_has_no_budget(path: str, body: dict[str, Any], param: str):
    async with serving(say([5])) as server:
        status, answer = await server.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["message"].startswith(param)
        assert server.engine.requests == []


async def test_the_messages_api_names_its_own_field():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}"
    async with serving(say([5]), text=toy_text.front_end(template=template)) as server:
        thinking = {"type": "enabled", "budget_tokens": 3}
        body = {"messages": HELLO, "max_tokens": 5, "thinking": thinking}
        status, answer = await server.post(MESSAGES, body)
        assert status == 400
        assert answer["error"]["message"].startswith("thinking.budget_tokens: it is not known how")
