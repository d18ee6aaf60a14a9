"""The /admin routes: who may call them, what reaches the engine, how it answers."""

import asyncio
import json

import pytest

from ostinato.errors import ProfileRefused, SleepRefused, WakeFailed
from tests.support.fake_engine import say
from tests.support.serving import serving

KEY = {"Authorization": "Bearer root"}
PATHS = ("sleep", "wake", "kv", "reset_prefix_cache", "abort", "profile/start", "profile/stop")
ASLEEP = {"asleep": 0, "kv_bytes": 64, "kv_target_bytes": None, "weights_bytes": 0, "seconds": 0.0}


async def test_without_an_admin_key_the_routes_do_not_exist():
    async with serving(say([10])) as served:
        for path in PATHS:
            status, answer = await served.post(f"/admin/{path}", {"level": 1})
            assert (status, answer["error"]["code"]) == (404, "unknown_url")
        assert served.engine.calls == []


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer secret"}, {"Authorization": "root"}])
async def test_only_the_admin_key_opens_them_and_it_opens_nothing_else(headers):
    async with serving(say([10]), admin_key="root", api_key="secret") as served:
        for path in (*PATHS, "nothing"):
            status, answer = await served.post(f"/admin/{path}", {"level": 1}, **headers)
            assert (status, answer["error"]["code"]) == (403, "invalid_admin_key")
        assert (await served.post("/admin/nothing", {}, **KEY))[0] == 404
        assert (await served.post("/v1/completions", {"prompt": "a"}, **KEY))[0] == 401
        assert served.engine.calls == []


async def test_they_answer_with_the_state_after_the_call():
    async with serving(say([10]), admin_key="root") as served:
        assert await served.post("/admin/sleep", {"level": 2}, **KEY) == (200, {**ASLEEP, "asleep": 2})
        assert (await served.get("/health"))[1] == {
            "status": "asleep", "level": 2, "running": 0, "waiting": 0, "stalled_seconds": 0.0
        }  # fmt: skip
        assert await served.post("/admin/wake", b"", **KEY) == (200, ASLEEP)
        assert await served.post("/admin/wake", {}, **KEY) == (200, ASLEEP)
        target = {"target_bytes": 1 << 40}
        assert await served.post("/admin/kv", target, **KEY) == (200, {**ASLEEP, "kv_target_bytes": 1 << 40})
        assert (await served.post("/admin/kv", {"target_bytes": None}, **KEY))[0] == 200
        calls = [("sleep", 2), ("wake", None), ("wake", None), ("kv", 1 << 40), ("kv", None)]
        assert served.engine.calls == calls
        assert (await served.get("/config"))[1]["server"]["admin_key"] == "***"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("kv", {"target_bytes": -1}, "target_bytes"),
        ("kv", {"target_bytes": "5"}, "target_bytes"),
        ("kv", {"target_bytes": 1.5}, "target_bytes"),
        ("kv", {"target": 5}, "target"),
        ("kv", {}, "target_bytes"),
        ("sleep", {}, "level"),
        ("sleep", {"level": 3}, "level"),
        ("sleep", {"level": True}, "level"),
        ("sleep", {"level": 1, "tags": ["kv"]}, "tags"),
        ("wake", {"tags": ["weights"]}, "tags"),
        ("reset_prefix_cache", {"now": True}, "now"),
        ("abort", {}, "request_ids"),
        ("abort", {"request_ids": ["a"], "all": True}, "request_ids"),
        ("abort", {"request_ids": []}, "request_ids"),
        ("abort", {"request_ids": [""]}, "request_ids[0]"),
        ("abort", {"request_ids": "a"}, "request_ids"),
        ("abort", {"all": False}, "all"),
        ("profile/start", {"path": "/etc/passwd"}, "path"),
        ("profile/start", {"folder": "x"}, "folder"),
        ("profile/start", {"seconds": 0}, "seconds"),
        ("profile/start", {"seconds": "5"}, "seconds"),
        ("profile/start", {"seconds": 1e9}, "seconds"),
        ("profile/stop", {"file": "x"}, "file"),
    ],
)
async def test_wrong_bodies_are_refused_by_the_name_of_the_field(path, body, param):
    async with serving(say([10]), admin_key="root") as served:
        status, answer = await served.post(f"/admin/{path}", body, **KEY)
        assert (status, answer["error"]["param"]) == (400, param)
        assert served.engine.calls == []


async def test_what_the_engine_refuses_keeps_its_words():
    async with serving(say([10]), admin_key="root") as served:
        served.engine.refuses = SleepRefused("offload has registered KV memory")
        status, answer = await served.post("/admin/sleep", {"level": 1}, **KEY)
        assert (status, answer["error"]["code"]) == (409, "sleep_refused")
        assert answer["error"]["message"] == "offload has registered KV memory"
        served.engine.refuses = WakeFailed("no KV memory")
        status, answer = await served.post("/admin/wake", {}, **KEY)
        assert (status, answer["error"]["code"]) == (503, "wake_failed")
        served.engine.dead = "gone"
        assert (await served.post("/admin/kv", {"target_bytes": 5}, **KEY))[0] == 503


async def test_the_prefix_cache_is_reset_and_profiles_are_started_and_stopped():
    async with serving(say([10]), admin_key="root") as served:
        assert await served.post("/admin/reset_prefix_cache", b"", **KEY) == (200, {"blocks": 3})
        assert await served.post("/admin/profile/start", {"seconds": 2.5}, **KEY) == (200, {"seconds": 2.5})
        assert await served.post("/admin/profile/start", b"", **KEY) == (200, {"seconds": 30.0})
        assert await served.post("/admin/profile/stop", {}, **KEY) == (200, {"file": "/traces/trace-1.json"})
        assert served.engine.calls == [
            ("reset_prefix_cache", None),
            ("start_profile", 2.5),
            ("start_profile", None),
            ("stop_profile", None),
        ]
        served.engine.refuses = ProfileRefused("a profile is running already; stop it first")
        status, answer = await served.post("/admin/profile/start", b"", **KEY)
        assert (status, answer["error"]["code"]) == (409, "profile_refused")


GENERATIONS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a", "n": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40},
    "/v1/responses": {"input": "a"},
}


@pytest.mark.parametrize("path", GENERATIONS)
@pytest.mark.parametrize("by", ["request_ids", "all"])
async def test_an_aborted_request_ends_with_503_and_is_named(path, by):
    async with serving(say([10] * 5), admin_key="root") as served:
        served.engine.gate = asyncio.Event()
        asking = asyncio.create_task(served.post(path, GENERATIONS[path], **{"X-Request-Id": "proxy-7"}))
        while not served.engine.running:
            await asyncio.sleep(0.001)
        body = {"all": True} if by == "all" else {"request_ids": ["proxy-7", "nobody"]}
        status, told = await served.post("/admin/abort", body, **KEY)
        assert status == 200
        assert len(told["aborted"]) == 1
        assert told["unknown"] == ([] if by == "all" else ["nobody"])
        status, answer = await asking
        assert status == 503
        assert "aborted" in json.dumps(answer["error"])
        assert (served.engine.running, served.state.live) == ({}, {})
        assert await served.post("/admin/abort", {"all": True}, **KEY) == (
            200,
            {"aborted": [], "unknown": []},
        )


@pytest.mark.parametrize("path", GENERATIONS)
async def test_a_stream_is_aborted_by_the_id_that_it_told(path):
    async with serving(say([10] * 50), admin_key="root") as served:
        served.engine.step_s = 0.05
        body = {**GENERATIONS[path], "stream": True}
        async with served.http.post(served.url + path, json=body) as response:
            head = (await response.content.readuntil(b"\n\n")).decode()
            event = json.loads(head.partition("data: ")[2])
            name = event.get("id") or event.get("message", event.get("response"))["id"]
            told = await served.post("/admin/abort", {"request_ids": [name]}, **KEY)
            rest = (await response.read()).decode()
        assert told[0] == 200
        assert (len(told[1]["aborted"]), told[1]["unknown"]) == (1, [])
        assert "aborted" in rest
        assert (served.engine.running, served.state.live) == ({}, {})
