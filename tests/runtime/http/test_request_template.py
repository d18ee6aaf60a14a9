"""Templates that come with a request: off by default, and programs that can neither stay nor grow."""

import subprocess
import threading
import time

import pytest

from ostinato.errors import InvalidRequest
from ostinato.runtime.http import request_template
from ostinato.runtime.http.request_template import render_request_template
from tests.support.fake_engine import say
from tests.support.serving import serving

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
MINE = "{{ bos_token }}{% for m in messages %}<{{ m.content }}>{% endfor %}{{ tone }}"
ASK = {"messages": MESSAGES, "chat_template": MINE, "chat_template_kwargs": {"tone": "glad"}}


async def test_a_template_is_refused_unless_the_operator_allows_it():
    async with serving(say([10])) as served:
        for path in (CHAT, "/tokenize"):
            status, body = await served.post(path, ASK)
            assert (status, body["error"]["param"]) == (400, "chat_template")
            assert "server.allow_chat_template" in body["error"]["message"]
        assert (await served.post(CHAT, {**ASK, "chat_template": None}))[0] == 200


async def test_an_allowed_template_renders_the_conversation_and_says_what_it_objects_to():
    async with serving(say([10]), allow_chat_template=True) as served:
        status, _ = await served.post(CHAT, ASK)
        assert status == 200
        ids = list(served.engine.requests[0].prompt_token_ids)
        assert served.state.text.decode(ids, skip_special=False) == "<|im_start|><Hello>glad"
        assert (await served.post("/tokenize", ASK))[1]["tokens"] == ids
        for template, says in (
            ("{{ raise_exception('not so') }}", "chat_template: not so"),
            ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ):
            status, body = await served.post(CHAT, {**ASK, "chat_template": template})
            assert (status, body["error"]["param"]) == (400, "chat_template"), template
            assert says in body["error"]["message"]
        status, body = await served.post(CHAT, {**ASK, "chat_template": "x" * 65_537})
        assert (status, body["error"]["param"]) == (400, "chat_template")
        status, body = await served.post(CHAT, {**ASK, "chat_template_kwargs": {"messages": []}})
        assert (status, body["error"]["param"]) == (400, "chat_template_kwargs")


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GREEDY = "{{ ('x' * 2000000000) | length }}"
LONG = "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}"


def test_loops_memory_and_text_without_end_are_ended_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OSTINATO_API_KEY", "secret")
    said: dict[str, str] = {}

    def try_it(template: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            render_request_template({"template": template, "messages": MESSAGES}, 0.5)
        assert caught.value.param == "chat_template"
        said[template] = str(caught.value)

    began = time.monotonic()
    threads = [threading.Thread(target=try_it, args=(template,)) for template in (LOOP, GREEDY, LONG)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 3 * request_template.START_S
    assert "it took over 0.5 s or 512 MiB" in said[LOOP]
    assert "512 MiB" in said[GREEDY]
    assert "writes over" in said[LONG] or "took over" in said[LONG]  # which of them depends on the machine


def test_the_process_of_a_template_knows_no_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OSTINATO_ADMIN_KEY", "secret")
    seen: dict[str, str] = {}

    def spied(*command: object, env: dict[str, str], **rest: object) -> None:
        seen.update(env)
        raise subprocess.TimeoutExpired("python", 1.0)

    monkeypatch.setattr(request_template.subprocess, "run", spied)
    with pytest.raises(InvalidRequest):
        render_request_template({"template": "", "messages": MESSAGES}, 2.0)
    assert "PATH" in seen
    assert not [name for name in seen if "OSTINATO" in name]
