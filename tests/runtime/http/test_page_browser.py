"""The web page in a real browser, before a server with a scripted engine."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import Page, chromium, find
from tests.support.fake_engine import say
from tests.support.serving import Served, serving
from tests.support.toy_text import CHATML, front_end, tokenizer

PROGRAM = find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium; there is none on the PATH")

TEMPLATE = "{%- if tools %}{{ tools | tojson }}{% endif %}" + CHATML + "{# <think> <tool_call> #}"
SCRIPT_TAG = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 😀"}}\n</tool_call>'
DONE = "document.getElementById('stop').hidden && document.querySelector('.turn.assistant .foot').textContent"


async def opened(stack: AsyncExitStack, folder: Path, text: str, **settings: Any) -> tuple[Served, Page]:
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    served = await stack.enter_async_context(
        serving(say(ids, stop_id=1), text=front_end(template=TEMPLATE), window=2048, **settings)
    )
    page = await stack.enter_async_context(chromium(PROGRAM or "", folder / "profile"))
    await page.look(width=1440, height=900)
    await page.open(served.url + "/")
    return served, page


async def ask(page: Page, text: str) -> None:
    await page.value("document.getElementById('prompt').focus()")
    await page.type(text)
    await page.press("Enter", 13, "\r")


async def test_an_answer_is_streamed_as_text_with_its_thoughts_and_calls(tmp_path: Path):
    async with AsyncExitStack() as stack:
        said = f"<think>\nhm {SCRIPT_TAG}\n</think>\n\nHello {SCRIPT_TAG}{CALL}"
        served, page = await opened(stack, tmp_path, said)
        await page.value(f"document.getElementById('tools').value = {json.dumps(json.dumps(TOOLS))}")
        await page.value("document.getElementById('system').value = 'Be kind.'")
        await page.value("document.getElementById('max-tokens').value = '1000'")
        await page.value("document.getElementById('temperature').value = '0.5'")
        await ask(page, SCRIPT_TAG)
        await page.until(DONE)
        turns = "[...document.querySelectorAll('.turn.assistant > .text, .turn.user > .text')]"
        shown = await page.value(turns + ".map((e) => e.textContent)")
        assert [one.strip() for one in shown] == [SCRIPT_TAG, f"Hello {SCRIPT_TAG}"]
        assert SCRIPT_TAG in await page.value("document.querySelector('.thought .text').textContent")
        assert await page.value("document.querySelector('.thought').open") is False
        assert await page.value("document.querySelector('.call pre').textContent") == '{"city":"Köln 😀"}'
        assert (
            await page.value("document.getElementById('prompt-label').textContent") == "Result of get_weather"
        )
        assert await page.value("document.getElementById('said').textContent.startsWith('Answer: ')")
        assert await page.value("document.activeElement.id") == "prompt"
        assert await page.value("document.title") == "ostinato"
        assert await page.value("document.querySelectorAll('.log script, .log img').length") == 0
        sampling = served.engine.requests[0].sampling
        assert (sampling.max_tokens, sampling.temperature) == (1000, 0.5)
        await ask(page, "rain")
        await page.until("document.querySelectorAll('.turn.assistant .foot').length === 2 && " + DONE)
        prompt = tokenizer().decode(served.engine.requests[1].prompt_token_ids, skip_special_tokens=False)
        for part in ("Be kind.", f"user\n{SCRIPT_TAG}", '<tool_call>{"city": "Köln 😀"}', "tool\nrain"):
            assert part in prompt
        assert page.problems == []


async def test_the_live_view_shows_the_engine_and_fits_every_width_and_colour(tmp_path: Path):
    async with AsyncExitStack() as stack:
        served, page = await opened(stack, tmp_path, "Hello")
        await page.until("document.querySelectorAll('#kv-legend dd').length === 6")
        legend = "[...document.querySelectorAll('#kv-legend dd')].map((e) => e.textContent)"
        assert (await page.value(legend))[2:] == ["10 blocks", "90 blocks", "10 blocks", "100 blocks"]
        assert "Free 10 blocks" in await page.value("document.getElementById('kv-map').ariaLabel")
        assert "now 10 blocks" in await page.value("document.querySelector('#kv-chart svg').ariaLabel")
        await page.until("document.getElementById('state').textContent === 'idle'")
        grounds = set()
        for width in (360, 768, 1440):
            for dark in (False, True):
                await page.look(width=width, height=800, dark=dark)
                assert await page.value("document.documentElement.scrollWidth") == width
                grounds.add(await page.value("getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2
        served.engine.asleep = 1
        await page.until("document.getElementById('state').textContent === 'asleep, level 1'")
        assert page.problems == []


async def test_a_key_is_asked_for_and_kept_in_memory_alone(tmp_path: Path):
    async with AsyncExitStack() as stack:
        served, page = await opened(stack, tmp_path, "Hello there", api_key="secret")
        await page.until("document.getElementById('state').textContent === 'needs an API key'")
        await ask(page, "Hi")
        await page.until("!document.getElementById('problem').hidden")
        assert "API key" in await page.value("document.getElementById('problem').textContent")
        assert await page.value("document.getElementById('prompt').value") == "Hi"
        assert served.engine.requests == []
        await page.value("document.getElementById('key').focus()")
        await page.type("secret")
        await page.press("Enter", 13, "\r")
        await page.until("document.getElementById('model').textContent === 'toy'")
        await page.value("document.getElementById('prompt').focus()")
        await page.press("Enter", 13, "\r")
        await page.until(DONE)
        assert (
            await page.value("document.querySelector('.turn.assistant > .text').textContent") == "Hello there"
        )
        kept = await page.value("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert kept == '[{},{},""]'
        await page.open(served.url + "/?again")
        await page.until("document.getElementById('state').textContent === 'needs an API key'")
        assert await page.value("document.getElementById('key').value") == ""
        assert all("401" in one for one in page.problems)


@pytest.mark.parametrize("how", ["button", "escape"])
async def test_stop_ends_the_request_and_keeps_what_was_said(tmp_path: Path, how: str):
    async with AsyncExitStack() as stack:
        served, page = await opened(stack, tmp_path, "the quick brown fox " * 300)
        served.engine.step_s = 0.02
        await ask(page, "Hi")
        await page.until("document.querySelector('.turn.assistant')?.textContent.includes('quick')")
        if how == "button":
            await page.value("document.getElementById('stop').click()")
        else:
            await page.press("Escape", 27)
        await page.until(DONE)
        assert (await page.value("document.querySelector('.turn.assistant .foot').textContent")) == "stopped"
        while served.engine.running:  # the server sees within a second that the browser left
            await asyncio.sleep(0.02)
        assert served.engine.aborted == [served.engine.requests[0].request_id]
        await page.value("document.getElementById('clear').click()")
        assert await page.value("document.querySelectorAll('.turn').length") == 0
        assert page.problems == []
