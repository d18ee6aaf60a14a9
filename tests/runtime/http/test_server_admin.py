"""The /admin routes: who may call them, what reaches the engine, how it answers."""

import pytest

from ostinato.errors import SleepRefused, WakeFailed
from tests.support.fake_engine import say
from tests.support.serving import serving

KEY = {"Authorization": "Bearer root"}
ASLEEP = {"asleep": 0, "kv_bytes": 64, "kv_target_bytes": None, "weights_bytes": 0, "seconds": 0.0}


async def test_without_an_admin_key_the_routes_do_not_exist():
    async with serving(say([10])) as served:
        for path in ("sleep", "wake", "kv"):
            status, answer = await served.post(f"/admin/{path}", {"level": 1})
            assert (status, answer["error"]["code"]) == (404, "unknown_url")
        assert served.engine.calls == []


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer secret"}, {"Authorization": "root"}])
async def test_only_the_admin_key_opens_them_and_it_opens_nothing_else(headers):
    async with serving(say([10]), admin_key="root", api_key="secret") as served:
        for path in ("sleep", "wake", "kv", "nothing"):
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
