"""Calls that a grammar makes and `max_tokens` cuts: no piece of one is content, streamed as whole."""

from typing import Any

import pytest

from tests.support.tool_serving import CALL, SECOND, WEATHER, both, served
from tests.support.toy_text import tokenizer

NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
STRICT = {**NOW, "function": {**NOW["function"], "strict": True}}
ONE = {"type": "function", "function": {"name": "get_weather"}}
JSON = {"type": "json_object"}
MARKER = "<tool_call>"  # several tokens here: a piece of it may still be text where text may be


@pytest.mark.parametrize(
    ("fields", "text", "says"),
    [
        ({"tool_choice": "required"}, f"<think>hm</think>\n{CALL}{SECOND}", ""),
        ({"tool_choice": ONE}, CALL, ""),
        ({"tools": [WEATHER, STRICT]}, f"Let me look.\n{CALL}{SECOND}", "Let me look."),
        ({"response_format": JSON}, f"{CALL}{SECOND}", ""),
        ({"response_format": JSON}, '{"a": "<tool_call>\\n{', '{"a": "<tool_call>\\n{'),
    ],
)
async def test_calls_cut_at_any_token_leave_no_content(fields: dict[str, Any], text: str, says: str):
    asked = {"tools": [WEATHER, NOW], **fields}
    async with served(text) as server:
        for tokens in range(1, len(tokenizer().encode(text, add_special_tokens=False).ids), 2):
            streamed, whole = await both(server, **asked, max_tokens=tokens)
            assert streamed == whole
            assert whole["finish_reason"] == "length"
            content = whole["content"]
            rest = content.removeprefix(says).strip()
            if fields.get("tool_choice"):
                assert content == ""
            else:
                assert says.startswith(content) or (rest != MARKER and MARKER.startswith(rest)), content
            names = [call["name"] for call in whole["calls"]]
            assert names == ["get_weather", "now"][: len(names)]
