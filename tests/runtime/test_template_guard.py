"""A chat template ends in time, within its output, and gives its thread back."""

import asyncio
import threading
import time

import pytest

from ostinato.errors import InvalidRequest
from ostinato.runtime import template_guard
from ostinato.runtime.template_guard import within
from tests.support.toy_text import front_end

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = "{% for a in messages %}{% for b in messages %}{{ messages | length }}{% endfor %}{% endfor %}"
SELECTS = (
    "{% set r = range(99999) %}{% for a in r %}{% set x = r | select('odd') | list | length %}{% endfor %}"
)
RECURSION = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"
SWALLOWS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ b.x is defined }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("bomb", [LOOPS, MESSAGES, SELECTS, SWALLOWS], ids=lambda text: text[:24])
async def test_a_template_that_takes_too_long_is_one_refusal_and_the_threads_work_on(bomb: str):
    text = front_end(template=bomb)
    text.template_timeout_s = 0.2
    messages = [{"role": "user", "content": "x"}] * 3000
    began = time.monotonic()
    refusals = await asyncio.gather(
        *(text.off_loop(lambda: text.encode_chat(messages)) for _ in range(3)), return_exceptions=True
    )
    assert time.monotonic() - began < 20  # 0.6 s when nobody else is there
    for refusal in refusals:
        assert isinstance(refusal, InvalidRequest), refusal
        assert "did not finish within 0.2 s (server.template_timeout_s)" in str(refusal)
    assert await text.off_loop(lambda: text.encode("hello"))
    text.close()


def test_a_template_that_writes_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(template_guard, "MAX_OUTPUT", 10_000)
    text = front_end(template="{% for m in messages %}{{ messages[0].content }}{% endfor %}<|end|>")
    assert text.render_chat([{"role": "user", "content": "abc"}]) == "abc<|end|>"
    with pytest.raises(InvalidRequest, match="writes over 10000 characters"):
        text.render_chat([{"role": "user", "content": "x" * 200}] * 200)
    text.close()


def test_endless_recursion_is_a_refusal():
    text = front_end(template=RECURSION)
    with pytest.raises(InvalidRequest, match="recursion"):
        text.render_chat([{"role": "user", "content": "x"}])
    text.close()


def test_nothing_is_raised_in_a_thread_whose_work_ended_just_in_time():
    """Ends of work and of its time fall together, over and over; what comes next is never hit."""
    outcomes = {"in time": 0, "late": 0}

    def run() -> None:
        for at in range(300):
            pause_s = 0.0005 + at % 10 * 1e-4
            try:
                within(0.001, lambda: time.sleep(pause_s))  # noqa: B023  # called at once
                outcomes["in time"] += 1
            except InvalidRequest:
                outcomes["late"] += 1
            sum(range(2000))  # would be hit by a stray exception

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(outcomes.values()) == 600
    assert min(outcomes.values()) > 0
