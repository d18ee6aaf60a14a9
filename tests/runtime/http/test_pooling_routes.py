"""/v1/embeddings, /v1/score and /v1/rerank: what they take, what they answer, what they refuse."""

import asyncio
import base64
import struct
import threading
from typing import Any, Literal

import openai
import pytest
import torch

from ostinato.bench.load_item import LoadItem
from ostinato.bench.ready import find_model
from ostinato.bench.request_record import RequestRecord
from ostinato.bench.sender import Sender, open_session
from ostinato.bench.target import TargetSettings
from ostinato.runtime.http import answer_schema as answers
from tests.support.fake_engine import say
from tests.support.pool_serving import pool_serving
from tests.support.serving import Served, serving
from tests.support.tiny_encoders import words
from tests.support.toy_pool_model import EMBEDS, SCORES, ToyPoolModel, numbers

EMBED, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"


def unit(*ids: int, types: list[int] | None = None) -> list[float]:
    vector = numbers(list(ids), types)
    return (vector / vector.norm()).tolist()


def cosine(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


async def ask(served: Served, path: str, **body: Any) -> dict[str, Any]:
    status, answer = await served.post(path, body)
    assert status == 200, answer
    return answer


async def test_every_form_of_input_gets_its_vectors_and_usage():
    async with pool_serving(ToyPoolModel()) as served:
        one = await ask(served, EMBED, input=words(5, 6), model="toy")
        several = await ask(served, EMBED, input=[words(5, 6), words(7)])
        ids = await ask(served, EMBED, input=[[5, 6], [7, 8, 9]])
        flat = await ask(served, EMBED, input=[5, 6])
        bare = await ask(served, EMBED, input=words(5, 6), add_special_tokens=False)
    for answer in (one, several, ids, flat, bare):
        answers.Embeddings.model_validate(answer, strict=True)
    assert one["data"][0]["embedding"] == pytest.approx(unit(2, 5, 6, 3))
    assert (one["model"], one["usage"]) == ("toy", {"prompt_tokens": 4, "total_tokens": 4})
    assert several["data"][1]["embedding"] == pytest.approx(unit(2, 7, 3))
    assert [entry["index"] for entry in several["data"]] == [0, 1]
    assert several["usage"]["prompt_tokens"] == 7
    assert ids["data"][1]["embedding"] == pytest.approx(unit(7, 8, 9))
    assert flat["data"][0]["embedding"] == bare["data"][0]["embedding"] == pytest.approx(unit(5, 6))


async def test_base64_holds_the_same_numbers_and_dimensions_are_cut_first():
    async with pool_serving(ToyPoolModel()) as served:
        plain = await ask(served, EMBED, input=[5, 6])
        packed = await ask(served, EMBED, input=[5, 6], encoding_format="base64")
        short = await ask(served, EMBED, input=[5, 6], dimensions=2)
        raw = await ask(served, EMBED, input=[5, 6], dimensions=2, normalize=False)
    bytes_ = base64.b64decode(packed["data"][0]["embedding"], validate=True)
    assert list(struct.unpack("<6f", bytes_)) == plain["data"][0]["embedding"]
    truth = numbers([5, 6])[:2]
    assert short["data"][0]["embedding"] == pytest.approx((truth / truth.norm()).tolist())
    assert raw["data"][0]["embedding"] == truth.tolist()


async def test_the_official_client_reads_float_and_base64():
    async with (
        pool_serving(ToyPoolModel()) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        packed = await client.embeddings.create(model="toy", input=[words(5), words(6)])
        plain = await client.embeddings.create(model="toy", input=words(6), encoding_format="float")
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="x")
    assert packed.data[1].embedding == plain.data[0].embedding == pytest.approx(unit(2, 6, 3))
    assert packed.usage.total_tokens == 6


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "is required"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must be a string"),
        ({"input": ["w5", ""]}, "input[1]", "must not be empty"),
        ({"input": [[5], []]}, "input[1]", "at least one token"),
        ({"input": [5, 200]}, "input", "token id 200 is outside"),
        ({"input": [5, "w5"]}, "input[1]", "valid integer"),
        ({"input": ["w5"] * 2049}, "input", "at most 2048"),
        ({"input": "w5", "dimensions": 7}, "dimensions", "not from 1 to 6"),
        ({"input": "w5", "dimensions": "2"}, "dimensions", "valid integer"),
        ({"input": "w5", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "w5", "temperature": 1}, "temperature", "not a known field"),
        ({"input": words(*range(5, 21))}, "input", "18 tokens and this model's maximum context length is 16"),
        ({"input": [5] * 17}, "input", "17 tokens and this model's maximum context length is 16"),
        ({"input": "w5", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1, or 1 or more"),
        ({"input": "w5", "truncate_prompt_tokens": 17}, "truncate_prompt_tokens", "over the model's window"),
        ({"input": "w5", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "no room for text"),
    ],
)
async def test_wrong_requests_are_refused_by_field(body: dict[str, Any], param: str, said: str):
    async with pool_serving(ToyPoolModel()) as served:
        status, answer = await served.post(EMBED, body)
    error = answer["error"]
    assert (status, error["param"]) == (400, param), error
    assert said in error["message"]


async def test_too_long_inputs_are_cut_where_asked_with_their_special_tokens():
    async with pool_serving(ToyPoolModel()) as served:
        cut = await ask(served, EMBED, input=words(*range(5, 105)), truncate_prompt_tokens=-1)
        few = await ask(served, EMBED, input=words(*range(5, 105)), truncate_prompt_tokens=4)
        ids = await ask(served, EMBED, input=[*range(5, 105)], truncate_prompt_tokens=4)
    assert cut["data"][0]["embedding"] == pytest.approx(unit(2, *range(5, 19), 3))
    assert few["data"][0]["embedding"] == pytest.approx(unit(2, 5, 6, 3))
    assert ids["data"][0]["embedding"] == pytest.approx(unit(5, 6, 7, 8))


async def test_a_cross_encoder_scores_pairs():
    async with pool_serving(ToyPoolModel(SCORES)) as served:
        one = await ask(served, SCORE, text_1="w5", text_2="w6")
        several = await ask(served, "/score", text_1="w5", text_2=["w6", "w100 w101"], use_activation=False)
        matched = await ask(served, SCORE, text_1=["w5", "w7"], text_2=["w6", "w8"])
        status, uneven = await served.post(SCORE, {"text_1": ["w5", "w6"], "text_2": ["w7"] * 3})
        refused = (await served.post(EMBED, {"input": "w5"}))[1]
        empty = (await served.post(SCORE, {"text_1": ["w5", ""], "text_2": ["w6", "w7"]}))[1]
    for answer in (one, several, matched):
        answers.Scores.model_validate(answer, strict=True)
    logits = [float(numbers([2, 5, 3, *b, 3], [0, 0, 0, *[1] * len(b), 1])[0]) for b in ((6,), (100, 101))]
    assert one["data"][0]["score"] == pytest.approx(float(torch.tensor(logits[0]).sigmoid()))
    assert [entry["score"] for entry in several["data"]] == pytest.approx(logits)
    assert one["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert matched["data"][0]["score"] == pytest.approx(one["data"][0]["score"])
    assert (status, uneven["error"]["param"]) == (400, "text_2")
    assert (empty["error"]["param"], empty["error"]["message"]) == ("text_1", "text_1: must not be empty")
    assert refused["error"]["code"] == "wrong_task"
    assert (
        "toy cannot embed: it is a model to score with, for /v1/score and /v1/rerank"
        in refused["error"]["message"]
    )


async def test_documents_are_ranked_best_first():
    documents = ["w6", {"text": "w150"}, "w90 w91", "w6"]
    async with pool_serving(ToyPoolModel(SCORES)) as served:
        for path in (RERANK, "/v2/rerank", "/rerank"):
            answer = await ask(served, path, query="w5", documents=documents)
            answers.Ranking.model_validate(answer, strict=True)
            assert [entry["index"] for entry in answer["results"]] == [1, 2, 0, 3]
        best = await ask(served, RERANK, query="w5", documents=documents, top_n=1, return_documents=False)
        everything = await ask(served, RERANK, query="w5", documents=documents, top_n=0)
    assert answer["results"][0]["document"] == {"text": "w150"}
    assert answer["usage"]["total_tokens"] == 5 + 5 + 6 + 5
    assert best["results"] == [{"index": 1, "relevance_score": answer["results"][0]["relevance_score"]}]
    assert len(everything["results"]) == 4


async def test_a_model_that_embeds_scores_by_the_angle_of_vectors():
    async with pool_serving(ToyPoolModel()) as served:
        scored = await ask(served, SCORE, text_1="w5", text_2=["w6", "w150"])
        ranked = await ask(served, RERANK, query="w5", documents=["w150", "w6"])
        status, refused = await served.post(SCORE, {"text_1": "w5", "text_2": "w6", "use_activation": True})
    truth = [cosine(unit(2, 5, 3), unit(2, other, 3)) for other in (6, 150)]
    assert [entry["score"] for entry in scored["data"]] == pytest.approx(truth)
    assert [entry["relevance_score"] for entry in ranked["results"]] == pytest.approx(truth)
    assert scored["usage"]["prompt_tokens"] == 9
    assert (status, refused["error"]["param"]) == (400, "use_activation")


async def test_models_that_generate_and_models_that_do_not_say_what_they_can():
    async with serving(say([10])) as served:
        for path, body in ((EMBED, {"input": "a"}), (RERANK, {"query": "a", "documents": ["b"]})):
            status, answer = await served.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "wrong_task")
            assert "it is a model to generate with, for /v1/chat/completions" in answer["error"]["message"]
    turn = [{"role": "user", "content": "a"}]
    async with pool_serving(ToyPoolModel()) as served:
        for path, body in (
            ("/v1/chat/completions", {"messages": turn}),
            ("/v1/completions", {"prompt": "w5"}),
            ("/v1/responses", {"input": "w5"}),
            ("/v1/messages", {"messages": turn, "max_tokens": 5}),
        ):
            status, answer = await served.post(path, body)
            assert status == 400, answer
            assert "it is a model to embed with" in answer["error"]["message"]
        tokens = await ask(served, "/tokenize", prompt="w5")
        assert tokens["tokens"] == [2, 5, 3]
        assert (await served.get("/health"))[0] == 200
        assert (await served.get("/v1/models"))[1]["data"][0]["id"] == "toy"


async def test_a_client_that_leaves_ends_the_work():
    model = ToyPoolModel(gate=threading.Event())
    async with pool_serving(model) as served:
        body = {"input": [[5] * 16] * 40}
        left = asyncio.create_task(served.post(EMBED, body))
        while not model.steps:
            await asyncio.sleep(0.005)
        assert len(served.state.live) == 40
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        while served.state.live:
            await asyncio.sleep(0.005)
        model.gate.set()
        after = await ask(served, EMBED, input=[7])
        assert after["data"][0]["embedding"] == pytest.approx(unit(7))
        assert len(model.steps) <= 3  # of twenty: the one under way, perhaps one more, and that of the last
        _, metrics = await _metrics(served)
        assert 'ostinato_requests_total{outcome="cancelled"} 40.0' in metrics
        assert "ostinato_requests_waiting 0.0" in metrics


async def _metrics(served: Served) -> tuple[int, str]:
    async with served.http.get(served.url + "/metrics") as response:
        return response.status, await response.text()


@pytest.mark.parametrize(
    ("backend", "item", "inputs", "tokens"),
    [
        ("embeddings", LoadItem(["w5"], inputs=["w5", "w6 w7"]), 2, 3 + 4),
        ("rerank", LoadItem(["w5"], documents=["w6", "w7", "w8 w9"]), 3, 5 + 5 + 6),
    ],
)
async def test_the_load_tool_measures_these_routes(
    backend: Literal["embeddings", "rerank"], item: LoadItem, inputs: int, tokens: int
):
    async with pool_serving(ToyPoolModel(SCORES if backend == "rerank" else EMBEDS)) as served:
        target = TargetSettings(url=served.url, backend=backend)
        async with open_session(target) as http:
            sender, record = Sender(http, target, await find_model(http, target)), RequestRecord(0)
            await sender.send(item, record)
    assert (record.ok, record.error, record.inputs, record.prompt_tokens) == (True, "", inputs, tokens)


async def test_failures_of_the_engine_have_one_answer_and_leave_others_alone():
    model = ToyPoolModel(broken=9)
    async with pool_serving(model, max_waiting=3) as served:
        status, failed = await served.post(EMBED, {"input": [[5], [9]]})
        assert (status, failed["error"]["code"]) == (500, "engine_error")
        status, full = await served.post(EMBED, {"input": [[5]] * 4})
        assert (status, full["error"]["code"]) == (429, "overloaded")
        assert (await ask(served, EMBED, input=[5]))["usage"]["total_tokens"] == 1
        assert not served.state.live


async def test_a_request_that_takes_too_long_is_ended_and_an_operator_may_end_one():
    model = ToyPoolModel(gate=threading.Event())
    async with pool_serving(model, request_timeout_s=0.2, admin_key="root") as served:
        status, late = await served.post(EMBED, {"input": [5]})
        assert (status, late["error"]["code"]) == (504, "generation_timeout")
        assert 'ostinato_requests_total{outcome="abort"} 1.0' in (await _metrics(served))[1]
    model = ToyPoolModel(gate=threading.Event())
    async with pool_serving(model, admin_key="root") as served:
        first = asyncio.create_task(served.post(EMBED, {"input": [5]}))
        while not model.steps:
            await asyncio.sleep(0.005)
        second = asyncio.create_task(served.post(EMBED, {"input": [6], "request_id": "mine"}))
        while "embd-mine-0" not in served.state.live:
            await asyncio.sleep(0.005)
        ending = asyncio.create_task(
            served.post("/admin/abort", {"request_ids": ["mine"]}, Authorization="Bearer root")
        )
        while not served.state.engine._calls:  # the abort is in the engine's inbox
            await asyncio.sleep(0.005)
        model.gate.set()
        assert (await ending)[1] == {"aborted": ["embd-mine"], "unknown": []}
        status, aborted = await second
        assert (status, aborted["error"]["code"]) == (503, "aborted")
        assert (await first)[0] == 200
