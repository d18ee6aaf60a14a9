"""A chat server whose model writes thoughts and calls, and what a client reads of them."""

from typing import Any

from tests.support.fake_engine import Script, say
from tests.support.serving import Served, serving
from tests.support.toy_text import CHATML, front_end, tokenizer

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{%- if tools %}{% for t in tools %}<tools>{{ t | tojson }}</tools>{% endfor %}{% endif %}"
    + CHATML
    + "{% if enable_thinking %}<think>\n{% endif %}{# <tool_call> #}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "d", "parameters": {"type": "object"}},
}
ASK = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}], "tools": [WEATHER]}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 😀", "days": 9007199254740993}}\n'
    "</tool_call>"
)
ARGUMENTS = '{"city":"Köln 😀","days":9007199254740993}'
SECOND = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def writes(text: str, *, chunk: int = 1) -> Script:
    return say(tokenizer().encode(text, add_special_tokens=False).ids, stop_id=1, chunk=chunk)


def served(text: str, *, chunk: int = 1, template: str = TEMPLATE, **settings: Any):
    return serving(writes(text, chunk=chunk), text=front_end(template=template), window=1024, **settings)


def joined(events: list) -> dict[str, Any]:
    """The message that a client builds of the deltas, as OpenAI's own does."""
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish_reason": None}
    for event in events[:-1]:
        (choice,) = event["choices"]
        delta = choice["delta"]
        made["content"] += delta.get("content") or ""
        made["reasoning_content"] += delta.get("reasoning_content", "")
        assert delta.get("reasoning_content") == delta.get("reasoning")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert (call["index"], call["type"]) == (len(made["calls"]), "function")
                made["calls"].append({"id": call["id"], **call["function"]})
            else:
                assert call.keys() == {"index", "function"}
                made["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            assert made["finish_reason"] is None
            made["finish_reason"] = choice["finish_reason"]
    return made


async def both(served: Served, **fields: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """(streamed, whole) in one form, ids of calls apart."""
    streamed = joined(await served.events(CHAT, {**ASK, **fields}))
    status, body = await served.post(CHAT, {**ASK, **fields})
    assert status == 200, body
    (choice,) = body["choices"]
    message = choice["message"]
    whole = {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())],
        "finish_reason": choice["finish_reason"],
    }
    ids = [call.pop("id") for made in (streamed, whole) for call in made["calls"]]
    assert len(set(ids)) == len(ids)
    return streamed, whole
