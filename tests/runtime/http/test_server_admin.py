"""POST /admin/kv reaches the engine; wrong bodies do not."""

import pytest

from tests.support.fake_engine import say
from tests.support.serving import serving


async def test_a_target_is_passed_on_and_null_takes_it_away():
    async with serving(say([10])) as served:
        assert await served.post("/admin/kv", {"target_bytes": 1 << 40}) == (
            202,
            {"target_bytes": 1 << 40, "committed_bytes": 0},
        )
        assert (await served.post("/admin/kv", {"target_bytes": None}))[0] == 202
        assert served.engine.kv_targets == [1 << 40, None]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"target_bytes": -1}, "target_bytes"),
        ({"target_bytes": "5"}, "target_bytes"),
        ({"target": 5}, "target"),
    ],
)
async def test_wrong_bodies_are_refused_by_the_name_of_the_field(body, param):
    async with serving(say([10])) as served:
        status, answer = await served.post("/admin/kv", body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert served.engine.kv_targets == []


async def test_it_needs_the_key_and_a_living_engine():
    async with serving(say([10]), api_key="secret") as served:
        assert (await served.post("/admin/kv", {"target_bytes": 5}))[0] == 401
        served.engine.dead = "gone"
        status, _ = await served.post("/admin/kv", {"target_bytes": 5}, Authorization="Bearer secret")
        assert status == 503
        assert served.engine.kv_targets == []
