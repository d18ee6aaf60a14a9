"""Browsers: which pages may use the server, and what they are told."""

import pytest

from ostinato.errors import ConfigError
from ostinato.runtime.http.web_origins import WebOrigins
from tests.support.fake_engine import say
from tests.support.serving import serving

ASK = {"prompt": "hello", "max_tokens": 5}
PAGE = "https://chat.example.com"
ASKS_FIRST = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


async def test_without_the_setting_no_answer_speaks_of_origins_and_foreign_pages_are_refused():
    async with serving(say([10])) as served:
        for headers in ({}, {"Origin": served.url}):
            async with served.http.post(served.url + "/v1/completions", json=ASK, headers=headers) as answer:
                assert answer.status == 200
                assert not [name for name in answer.headers if name.startswith("Access-Control")]
        for origin in (PAGE, "null", "http://127.0.0.1:1", "https://" + served.url[7:], "x", "http://[::1"):
            async with served.http.post(
                served.url + "/v1/completions", json=ASK, headers={"Origin": origin}
            ) as answer:
                assert answer.status == (200 if origin.startswith("https://127") else 403), origin
                assert not [name for name in answer.headers if name.startswith("Access-Control")]
        async with served.http.options(
            served.url + "/v1/completions", headers={"Origin": PAGE, **ASKS_FIRST}
        ) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (403, "origin_not_allowed")
        assert len(served.engine.requests) == 3


async def test_listed_pages_may_ask_and_read_also_errors_and_streams():
    async with serving(say([10]), cors_origins=f"{PAGE},http://localhost:3000", api_key="k") as served:
        headers = {"Origin": PAGE}
        async with served.http.options(
            served.url + "/v1/completions", headers=headers | ASKS_FIRST
        ) as answer:
            assert (answer.status, await answer.read()) == (204, b"")
            assert "Authorization" in answer.headers["Access-Control-Allow-Headers"]
            assert answer.headers["Access-Control-Allow-Origin"] == PAGE
        for key, status in (("k", 200), ("wrong", 401)):
            async with served.http.post(
                served.url + "/v1/completions",
                json={**ASK, "stream": True},
                headers=headers | {"Authorization": f"Bearer {key}"},
            ) as answer:
                assert answer.status == status
                assert answer.headers["Access-Control-Allow-Origin"] == PAGE
                assert answer.headers["Vary"] == "Origin"
                assert "Access-Control-Allow-Credentials" not in answer.headers
        async with served.http.get(served.url + "/health", headers={"Origin": PAGE + ".evil.com"}) as answer:
            assert answer.status == 403


async def test_a_star_lets_every_page_in():
    async with (
        serving(say([10]), cors_origins="*") as served,
        served.http.get(served.url + "/health", headers={"Origin": "null"}) as answer,
    ):
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, "null")


@pytest.mark.parametrize(
    ("host", "needs_key", "is_own"),
    [
        ("127.0.0.1:8000", False, True),
        ("[::1]:8000", False, True),
        ("localhost:8000", False, True),
        ("bigbox:8000", False, True),  # a name that only a local network has
        ("bigbox.local:8000", False, True),
        ("evil.example.com:8000", False, False),  # may point anywhere, also here
        ("evil.example.com:8000", True, True),  # does not know the key
        ("llm.example.com", False, True),  # server.host
    ],
)
def test_a_page_of_the_server_itself_is_known_by_a_name_that_nobody_else_can_give(host, needs_key, is_own):
    origins = WebOrigins((), needs_key=needs_key, host="llm.example.com")
    assert origins._is_own(f"http://{host}", host) is is_own
    assert not origins._is_own(f"http://{host}", "other:8000")


@pytest.mark.parametrize(
    "origin", ["chat.example.com", "https://a.com/", "https://a.com/x", "ftp://a.com", "https://"]
)
def test_what_is_no_origin_is_a_config_error(origin: str):
    with pytest.raises(ConfigError, match=r"server\.cors_origins=.*scheme://host"):
        WebOrigins((origin,), needs_key=True, host="x")
