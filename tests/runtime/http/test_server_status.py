"""/v1/models, /health, /metrics, /config, /version, /tokenize, /detokenize."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

import ostinato
from ostinato.runtime.config import EngineConfig, KVConfig
from ostinato.runtime.http.metrics import ServerMetrics
from ostinato.runtime.messages import EngineStats
from tests.support.fake_engine import say
from tests.support.serving import Served, serving
from tests.support.toy_text import BOS, front_end, tokenizer

ASK = {"prompt": "hello", "max_tokens": 5}


async def scrape(served: Served) -> dict[tuple[str, ...], float]:
    async with served.http.get(served.url + "/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = list(text_string_to_metric_families(await response.text()))
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


async def test_models_lists_the_served_name():
    async with serving(say([10]), served_name="org/model-1") as served:
        _, listed = await served.get("/v1/models")
        assert [(entry["id"], entry["object"], entry["max_model_len"]) for entry in listed["data"]] == [
            ("org/model-1", "model", 64)
        ]
        assert (await served.get("/v1/models/org/model-1"))[1] == listed["data"][0]
        _, body = await served.post("/v1/completions", {**ASK, "model": "org/model-1"})
        assert body["model"] == "org/model-1"
        assert (await served.post("/v1/completions", {**ASK, "model": "toy"}))[0] == 404


async def test_health_follows_step_progress():
    async with serving(say([10]), stall_s=30) as served:
        served.engine.stalled = 29.0
        assert (await served.get("/health"))[0] == 200
        served.engine.stalled = 31.0
        status, body = await served.get("/health")
        assert (status, body["status"]) == (503, "stalled")
        assert "no engine step for 31.0 s" in body["reason"]


async def test_metrics_count_requests_tokens_and_times():
    async with serving(say([10] * 4, stop_id=1)) as served:
        await served.post("/v1/completions", ASK)
        await served.post("/v1/completions", {**ASK, "max_tokens": 2})
        await served.post("/v1/completions", {**ASK, "n": 0})
        samples = await scrape(served)
        assert samples["ostinato_requests_total", "stop"] == 1
        assert samples["ostinato_requests_total", "length"] == 1
        assert samples["ostinato_http_responses_total", "/v1/completions", "200"] == 2
        assert samples["ostinato_http_responses_total", "/v1/completions", "400"] == 1
        assert samples["ostinato_time_to_first_token_seconds_count",] == 2
        assert samples["ostinato_inter_token_latency_seconds_count",] == 4 + 1
        assert samples["ostinato_request_seconds_count",] == 2
        assert samples["ostinato_kv_blocks_capacity",] == 100
        assert samples["ostinato_kv_blocks_committed",] == 10


def test_metrics_show_every_number_of_the_engine_under_a_name_of_its_own():
    whole = [name for name, field in EngineStats.model_fields.items() if field.annotation is int]
    stats = EngineStats(**{name: at + 1 for at, name in enumerate(whole)}, eager_steps={"too_large": 77})
    text = ServerMetrics(lambda: stats, lambda: 7.0).render().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    shown = {sample.value for sample in samples if not sample.labels}
    assert {getattr(stats, name) for name in whole} <= shown
    assert 'ostinato_eager_steps_total{reason="too_large"} 77.0' in text
    assert "ostinato_stalled_seconds 7.0" in text


def test_times_of_a_sequence_are_split_into_queue_prefill_and_decode(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("ostinato.runtime.http.metrics.time.monotonic", lambda: now[0])
    metrics = ServerMetrics(EngineStats, lambda: 0.0)
    for tokens in ([1, 1, 2], [1], []):  # a token each 0.25 s; one token; ended before the first
        clock = metrics.clock(3)
        clock.times.started = now[0]
        now[0] += 1.5
        if tokens:
            clock.queued(1.0)
        for count in tokens:
            clock.tokens(count)
            now[0] += 0.25 * count
        clock.end("stop")
    text = metrics.render().decode()
    samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    told = {
        name: (samples[f"ostinato_{name}_seconds_count"], samples[f"ostinato_{name}_seconds_sum"])
        for name in ("queue", "prefill", "decode", "time_per_output_token", "request")
    }
    assert told == {
        "queue": (2, 2.0),
        "prefill": (2, 1.0),
        "decode": (2, 0.5),
        "time_per_output_token": (1, 0.5 / 3),
        "request": (3, 1.5 * 3 + 1.25),
    }


async def test_two_servers_in_one_process_count_for_themselves():
    async with serving(say([10])) as one, serving(say([10])) as two:
        await one.post("/v1/completions", ASK)
        assert ("ostinato_requests_total", "stop") in await scrape(one)
        assert ("ostinato_requests_total", "stop") not in await scrape(two)


async def test_config_shows_everything_but_the_key():
    async with serving(say([10]), api_key="secret", drain_s=3.0) as served:
        served.state.engine_config = EngineConfig(kv=KVConfig(block_tokens=32))
        _, shown = await served.get("/config", Authorization="Bearer secret")
    assert shown["server"]["api_key"] == ["***"]
    assert shown["server"]["drain_s"] == 3.0
    assert shown["kv"]["block_tokens"] == 32


async def test_version_is_the_packages():
    async with serving(say([10])) as served:
        assert await served.get("/version") == (200, {"version": ostinato.__version__})


async def test_tokenize_counts_as_the_completion_routes_do():
    async with serving(say([10]), text=front_end(add_bos=True), window=200) as served:
        messages = [{"role": "user", "content": [{"type": "text", "text": "naïve 😀"}]}]
        for path, fields in (
            ("/v1/completions", {"prompt": "naïve 😀"}),
            ("/v1/completions", {"prompt": "naïve 😀", "add_special_tokens": False}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/chat/completions", {"messages": messages, "add_generation_prompt": False}),
        ):
            await served.post(path, fields)
            _, counted = await served.post("/tokenize", fields)
            assert counted["tokens"] == list(served.engine.requests[-1].prompt_token_ids)
            assert counted["count"] == len(counted["tokens"])
            assert counted["max_model_len"] == 200


async def test_tokenize_and_detokenize_are_inverse_and_show_special_tokens():
    text = f"{BOS}user\nnaïve 😀"
    async with serving(say([10])) as served:
        _, made = await served.post("/tokenize", {"prompt": text, "return_token_strs": True})
        _, back = await served.post("/detokenize", {"tokens": made["tokens"]})
        assert made["tokens"] == tokenizer().encode(text).ids
        assert made["token_strs"][0] == BOS
        assert back == {"prompt": text}
        assert await served.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})
        status, body = await served.post("/detokenize", {"tokens": [1, 410]})
        assert (status, body["error"]["param"]) == (400, "tokens")
