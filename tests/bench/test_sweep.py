"""Loads against scripted servers over real connections: bodies, records, concurrency, sweeps, processes."""

import asyncio
import json
from itertools import pairwise

import aiohttp
import pytest
from aiohttp import web

from ostinato.bench.data_settings import DataSettings
from ostinato.bench.fd_limit import raise_fd_limit
from ostinato.bench.load import LoadSettings
from ostinato.bench.load_item import LoadItem
from ostinato.bench.request_record import RequestRecord
from ostinato.bench.sender import Sender, open_session
from ostinato.bench.summary import SummarySettings
from ostinato.bench.sweep import Watcher, run_sweep
from ostinato.bench.target import TargetSettings, url_of
from ostinato.errors import ConfigError
from tests.support.scripted_http import chat, event, plays, scripted, used

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SLACK_S = 0.15  # on a busy machine events come late, never early


def text(piece, reason=None):
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": reason}]})


SHORT = plays(
    [(0, text("a")), (0, text("b", "length")), (0, event(used(2, cached=3))), (0, event(b"[DONE]"))]
)
TALK = plays([(0, event(chat(content="hm"))), (0, event(chat("stop"))), (0, event(used(1)))])


async def sweep(url, *, target=None, data=None, load=None, **more):
    return await run_sweep(
        TargetSettings(url=url, **{"backend": "openai", "ready_timeout_s": 5, **(target or {})}),
        DataSettings(**{"num_prompts": 6, "input_len": 5, "output_len": 2, **(data or {})}),
        LoadSettings(**(load or {})),
        SummarySettings(),
        **more,
    )


async def test_b03_over_a_real_connection():
    script = [
        (0.005, event(chat(role="assistant", content=""))),
        (0.05, b": keep-alive\n\n"),
        (0.200, event(chat(reasoning="a"))),
        (0.300, event(chat(reasoning="b"))),
        (0.500, event(chat(content="c"))),
        (0.600, event(chat("stop", content=""))),
        (0.650, event(used(3))),
        (0.651, event(b"[DONE]")),
    ]
    async with scripted({CHAT: plays(script)}) as server:
        target = TargetSettings(url=server.url)
        async with open_session(target) as http:
            record = RequestRecord(0)
            await Sender(http, target, "toy").send(LoadItem(["hi"], 3), record)
    assert record.ok, record.error
    assert 0.2 <= record.first_token_at < 0.2 + SLACK_S
    assert 0.5 <= record.first_content_at < 0.5 + SLACK_S
    assert 0.6 <= record.end_at < 0.6 + SLACK_S
    assert record.itl_s == pytest.approx([0.1, 0.2], abs=SLACK_S)
    assert (record.output_tokens, record.prompt_tokens) == (3, 7)


async def test_a_sweep_runs_every_pair_and_every_run_with_fresh_prompts():
    ends = []

    class Ends(Watcher):
        def end(self, point, run, records):
            ends.append((*point, run, len(records)))

    async with scripted({TEXT: SHORT, "/start": done, "/stop": done}) as server:
        hooks = {"profile_start": "/start", "profile_stop": "/stop"}
        load = {"request_rate": (500.0, "inf"), "max_concurrency": (1, 2), "runs": 2, "warm_ups": 3}
        address = f"{server.url}/v1"  # as OpenAI's clients are given it
        model, points = await sweep(address, target=hooks, load=load, watcher=Ends(), save_requests=True)
    assert model == "toy"
    pairs = [(500.0, 1), (500.0, 2), ("inf", 1), ("inf", 2)]
    assert [(point["request_rate"], point["max_concurrency"]) for point in points] == pairs
    assert [end[1:] for end in ends] == [(c, run, 6) for _, c in pairs for run in (0, 1)]
    paths = [path for path, _ in server.bodies]
    assert paths == [TEXT] * 4 + (["/start"] + [TEXT] * 6 + ["/stop"]) * 8  # ready check and warm-ups first
    prompts = [body["prompt"] for path, body in server.bodies if path == TEXT][1:]
    assert len(set(prompts)) == len(prompts)
    assert server.peak == 2
    run = points[0]["runs"][0]
    assert (run["completed"], run["output_tokens"], run["cached_tokens"]) == (6, 12, 18)
    assert points[0]["over_runs"]["output_tokens"] == {"mean": 12.0, "ci95": 0.0}
    assert len(points[3]["requests"]) == 2
    assert {dump["output_tokens"] for dump in points[3]["requests"][1]} == {2}


async def done(request, body):
    return web.json_response({})


async def test_the_profiler_has_a_key_of_its_own_which_no_request_gets():
    seen = []

    async def keys(request, body):
        seen.append((request.path, request.headers.get("Authorization")))
        return await (SHORT if request.path == TEXT else done)(request, body)

    async with scripted(dict.fromkeys((TEXT, "/start", "/stop"), keys)) as server:
        hooks = {"profile_start": "/start", "profile_stop": "/stop", "api_key": "user", "profile_key": "root"}
        await sweep(server.url, target=hooks, data={"num_prompts": 1})
    assert set(seen) == {(TEXT, "Bearer user"), ("/start", "Bearer root"), ("/stop", "Bearer root")}


async def test_bodies_ask_for_usage_full_length_and_what_the_user_adds():
    extra = json.dumps({"top_k": 5, "temperature": None})
    async with scripted({TEXT: SHORT}) as server:
        target = {"extra_body": extra, "api_key": "k", "headers": ("X-Team: a:b",), "model": "mine"}
        await sweep(server.url, target=target, data={"num_prompts": 1})
    _, body = server.bodies[-1]
    assert len(body.pop("prompt").split()) == 5
    assert body == {
        "model": "mine",
        "max_tokens": 2,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 5,
    }
    assert server.headers[-1]["Authorization"] == "Bearer k"
    assert server.headers[-1]["X-Team"] == "a:b"


async def test_a_conversation_carries_the_servers_answers_and_waits_between_turns():
    data = {"dataset": "multi_turn", "turns": 3, "turn_delay_s": 0.05, "num_prompts": 2}
    shares = {"global_prefix_ratio": 0.4}
    async with scripted({CHAT: TALK}) as server:
        _, (point,) = await sweep(
            server.url, target={"backend": "openai-chat"}, data={**data, **shares}, save_requests=True
        )
    bodies = [body["messages"] for _, body in server.bodies][1:]
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    assert sorted(len(messages) for messages in bodies) == [2, 2, 4, 4, 6, 6]
    for messages in bodies:
        assert [message["role"] for message in messages] == roles[: len(messages)]
        assert all(m["content"] == "hm" for m in messages if m["role"] == "assistant")
    (requests,) = point["requests"]
    assert sorted(request["turn"] for request in requests) == [0, 0, 1, 1, 2, 2]
    for index in (0, 1):
        turns = sorted((r for r in requests if r["index"] == index), key=lambda r: r["turn"])
        for before, after in pairwise(turns):
            assert after["start_s"] >= before["start_s"] + before["end_at"] + 0.05
    assert point["runs"][0]["completed"] == 6


async def test_embeddings_and_rerank_have_a_latency_and_no_tokens():
    async def embed(request, body):
        return web.json_response(
            {"data": [{}] * len(body["input"]), "usage": {"prompt_tokens": 9, "total_tokens": 9}}
        )

    async def rank(request, body):
        return web.json_response({"results": [{}], "usage": {"total_tokens": 4}})

    async with scripted({"/v1/embeddings": embed, "/v1/rerank": rank}) as server:
        _, (one,) = await sweep(server.url, target={"backend": "embeddings"}, data={"batch_size": 3})
        _, (two,) = await sweep(server.url, target={"backend": "rerank"}, data={"dataset": "rerank"})
        with pytest.raises(ConfigError, match="rerank needs both"):
            await sweep(server.url, target={"backend": "rerank"})
    assert len(server.bodies[0][1]["input"]) == 3
    assert len(server.bodies[-1][1]["documents"]) == 8
    for point, prompt, texts in ((one, 54, 18), (two, 24, 48)):
        run = point["runs"][0]
        assert (run["completed"], run["prompt_tokens"], run["inputs"]) == (6, prompt, texts)
        assert (run["ttft_ms"], run["output_tok_s"]) == (None, None)
        assert run["input_per_s"] == pytest.approx(texts / run["duration_s"])
        assert run["latency_ms"]["mean"] > 0


@pytest.mark.parametrize("entries", [[], None, [{}] * 2, [{}] * 4])
async def test_an_answer_with_another_number_of_vectors_has_failed(entries):
    async def embed(request, body):
        return web.json_response({"data": entries})

    async with scripted({"/v1/embeddings": embed}) as server:
        target = {"backend": "embeddings", "ready_timeout_s": 0}
        _, (point,) = await sweep(server.url, target=target, data={"batch_size": 3})
    (said,) = point["runs"][0]["errors"]
    assert said.endswith("results for 3 inputs")


async def test_an_answer_in_one_piece_has_no_first_token():
    async def whole(request, body):
        assert "stream" not in body
        choice = {"message": {"content": "all"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 5}})

    async with scripted({CHAT: whole}) as server:
        target = {"backend": "openai-chat", "stream": False}
        _, (point,) = await sweep(server.url, target=target, load={"save_text": True}, save_requests=True)
    assert point["runs"][0]["output_tokens"] == 30
    assert point["runs"][0]["ttft_ms"] is None
    assert {request["text"] for request in point["requests"][0]} == {"all"}


async def test_failures_are_counted_by_reason_and_do_not_stop_the_run():
    calls = iter(range(100))

    async def sometimes(request, body):
        at = next(calls)
        if at == 2:
            return web.json_response({"error": {"message": "too many"}}, status=429)
        if at == 3:
            request.transport.abort()
            return web.Response()
        if at == 4:
            return await plays([(0, text("a"))])(request, body)
        return await SHORT(request, body)

    async with scripted({TEXT: sometimes}) as server:
        _, (point,) = await sweep(server.url, load={"max_concurrency": (1,)})
    run = point["runs"][0]
    assert (run["completed"], run["failed"]) == (3, 3)
    errors = sorted(run["errors"])
    assert errors[0] in (
        "ClientOSError: [Errno 104] Connection reset by peer",
        "ServerDisconnectedError: Server disconnected",
    )
    assert errors[1].startswith('status 429: {"error"')
    assert errors[2] == "the stream ended without a finish_reason"


async def test_the_ready_check_waits_for_a_start_and_says_what_a_refusal_said():
    calls = iter(range(100))

    async def starting(request, body):
        return web.Response(status=503) if next(calls) < 1 else await SHORT(request, body)

    async def refusing(request, body):
        return web.json_response({"error": "no such model"}, status=404)

    async with scripted({TEXT: starting, CHAT: refusing}) as server:
        _, (point,) = await sweep(server.url, data={"num_prompts": 1})
        assert point["runs"][0]["completed"] == 1
        with pytest.raises(
            ConfigError, match=r"does not answer a request of this kind: status 404.*no such model"
        ):
            await sweep(server.url, target={"backend": "openai-chat"})
        with pytest.raises(ConfigError, match=r"POST http.*/nowhere: status 404"):
            await sweep(server.url, target={"profile_start": "/nowhere"}, data={"num_prompts": 1})
    with pytest.raises(ConfigError, match=r"does not answer.*is the server running there"):
        await sweep(server.url, target={"ready_timeout_s": 0})


@pytest.mark.parametrize(
    ("given", "goes_to"),
    [
        ({"url": "http://a:1/v1/"}, "http://a:1/v1/chat/completions"),
        ({"url": "http://a:1/x"}, "http://a:1/x/v1/chat/completions"),
        ({"url": "http://a:1/v1", "endpoint": "/chat"}, "http://a:1/v1/chat"),
    ],
)
def test_an_address_with_v1_is_that_without(given: dict[str, str], goes_to: str):
    assert url_of(TargetSettings(**given)) == goes_to


def test_an_address_without_a_scheme_is_refused():
    with pytest.raises(ConfigError, match=r"^--url 'localhost:8000': must begin with http://"):
        url_of(TargetSettings(url="localhost:8000"))


@pytest.mark.parametrize(
    ("whole", "error"),
    [
        (b'{"choices": ["x"]}', "the answer has another shape"),
        (b'{"choices": [], "usage": 3}', "the answer has another shape"),
        (b"[" * 100_000, "RecursionError: "),
        (b'{"a": "\xff"}', "UnicodeDecodeError: "),
    ],
    ids=("choices", "usage", "deep", "latin"),
)
async def test_an_answer_in_one_piece_of_another_shape_has_failed(whole, error):
    async def answer(request, body):
        return web.Response(body=whole, content_type="application/json")

    async with scripted({TEXT: answer}) as server:
        target = {"stream": False, "ready_timeout_s": 0}
        _, (point,) = await sweep(server.url, target=target, data={"num_prompts": 1})
    assert [message.startswith(error) for message in point["runs"][0]["errors"]] == [True]


@pytest.mark.parametrize("models", [b"[1]", b"{x", b"[" * 100_000, b'{"data": [{}]}', b'{"data": "abc"}'])
async def test_a_list_of_models_in_another_shape_is_told(models):
    async with scripted({TEXT: SHORT}, models=models) as server:
        with pytest.raises(ConfigError, match="/v1/models lists models in another shape than OpenAI's"):
            await sweep(server.url)


async def test_several_processes_send_every_request_once_within_the_concurrency():
    async def slow(request, body):
        await asyncio.sleep(0.02)
        return await SHORT(request, body)

    news = []

    class News(Watcher):
        def advance(self, requests, tokens):
            news.append((requests, tokens))

    async with scripted({TEXT: slow}) as server:
        data, load = {"num_prompts": 12}, {"processes": 3, "max_concurrency": (4,)}
        _, (point,) = await sweep(server.url, data=data, load=load, watcher=News(), save_requests=True)
    assert sorted(request["index"] for request in point["requests"][0]) == list(range(12))
    assert point["runs"][0]["completed"] == 12
    assert len({body["prompt"] for _, body in server.bodies[1:]}) == 12
    assert 3 <= server.peak <= 4
    assert [sum(column) for column in zip(*news, strict=True)] == [12, 24]


async def test_a_cancelled_request_is_recorded_as_such():
    async with scripted({TEXT: plays([(0, text("a")), (60, text("b"))])}) as server:
        target = TargetSettings(url=server.url, backend="openai")
        async with open_session(target) as http:
            record = RequestRecord(0)
            task = asyncio.create_task(Sender(http, target, "toy").send(LoadItem(["hi"]), record))
            while not record.token_times_at:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert (record.ok, record.error) == (False, "cancelled")


def test_more_connections_than_the_hard_limit_allows_are_refused():
    raise_fd_limit(8)
    with pytest.raises(ConfigError, match="the hard limit is"):
        raise_fd_limit(1 << 40)


def test_the_session_has_no_limit_of_its_own():
    async def limit():
        async with open_session(TargetSettings()) as http:
            assert isinstance(http.connector, aiohttp.TCPConnector)
            return http.connector.limit

    assert asyncio.run(limit()) == 0
