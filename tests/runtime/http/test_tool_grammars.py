"""Calls that must be made or be strict, and tools that may be called: what the engine is asked for."""

from typing import Any

import pytest

from tests.support.tool_serving import ARGUMENTS, ASK, CALL, CHAT, WEATHER, both, served


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_call_that_must_be_made_becomes_a_grammar_behind_the_thoughts(choice: object):
    async with served(CALL) as server:
        streamed, whole = await both(server, tool_choice=choice)
        sampling = server.engine.requests[0].sampling
        assert (streamed, sampling.grammar_param, sampling.grammar_after) == (whole, "tool_choice", ())
        assert "get_weather" in (sampling.grammar or "")
        await both(server, tool_choice=choice, chat_template_kwargs={"enable_thinking": True})
        after = server.engine.requests[-1].sampling.grammar_after
        assert server.state.text.decode(after) == "</think>"


async def test_of_the_tools_only_those_that_are_allowed_are_shown_and_called():
    spec = {"name": "now", "parameters": {"type": "object"}, "strict": True}  # of a tool that is not allowed
    now = {"type": "function", "function": spec}
    named = {"type": "function", "function": {"name": "get_weather"}}

    def allowed(mode: str, *tools: object) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}

    async with served(CALL) as server:
        for mode in ("auto", "required"):
            streamed, whole = await both(server, tools=[WEATHER, now], tool_choice=allowed(mode, named))
            assert streamed == whole
            assert whole["calls"] == [{"name": "get_weather", "arguments": ARGUMENTS}]
            request = server.engine.requests[-1]
            prompt = server.state.text.decode(request.prompt_token_ids, skip_special=False)
            assert ('"get_weather"' in prompt, '"now"' in prompt) == (True, False)
            grammar = request.sampling.grammar or ""
            assert ("get_weather" in grammar, "now" in grammar) == (mode == "required", False)
        other = {"type": "function", "function": {"name": "other"}}
        wrong = [
            (allowed("auto", named, other), "tool_choice.allowed_tools.tools[1].function.name"),
            (allowed("auto"), "tool_choice.allowed_tools.tools"),
            (allowed("none", named), "tool_choice.allowed_tools.mode"),
            ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ]
        for choice, param in wrong:
            status, body = await server.post(CHAT, {**ASK, "tool_choice": choice})
            assert (status, body["error"]["param"]) == (400, param)


async def test_strict_tools_become_a_grammar_and_others_do_not():
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    async with served(CALL) as server:
        await both(server)
        assert server.engine.requests[-1].sampling.grammar is None
        await both(server, tools=[strict])
        sampling = server.engine.requests[-1].sampling
        assert (sampling.grammar_param, sampling.grammar is None) == ("tools", False)
        await both(server, tools=[strict], tool_choice="none")
        assert server.engine.requests[-1].sampling.grammar is None


JSON = {"json_schema": {"name": "n", "schema": {"type": "object", "properties": {"sunny": {}}}}}


async def test_with_a_response_format_the_answer_is_calls_or_json():
    """Agents send both: tools, and what the last answer must look like."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    for format_ in ({"type": "json_schema", **JSON}, {"type": "json_object"}):
        for tool, param in ((WEATHER, "response_format"), (strict, "tools")):
            async with served(CALL) as server:
                streamed, whole = await both(server, tools=[tool], response_format=format_)
                assert streamed == whole
                assert [call["name"] for call in whole["calls"]] == ["get_weather"]
                (first, *_) = server.engine.requests
                assert (first.sampling.response_format, first.sampling.grammar_param) == (None, param)
                assert "get_weather" in (first.sampling.grammar or "")
                assert ("sunny" in (first.sampling.grammar or "")) == ("json_schema" in format_)
                for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
                    await both(server, tools=[tool], response_format=format_, tool_choice=choice)
                    forced = server.engine.requests[-1].sampling
                    assert forced.grammar_param == "tool_choice"
                    assert "sunny" not in (forced.grammar or "")  # calls have no content
                await both(server, tools=[tool], response_format=format_, tool_choice="none")
                assert server.engine.requests[-1].sampling.response_format is not None


async def test_a_grammar_of_the_whole_answer_leaves_no_room_for_calls_that_must_be_made():
    whole_answer: list[dict[str, Any]] = [
        {"guided_json": {"type": "object"}},
        {"structured_outputs": {"json_object": True}},
        {"guided_regex": "a"},
    ]
    async with served(CALL) as server:
        for fields in whole_answer:
            status, body = await server.post(CHAT, {**ASK, **fields, "tool_choice": "required"})
            assert (status, body["error"]["param"]) == (400, _written(fields))
            assert (await server.post(CHAT, {**ASK, **fields}))[0] == 200
            assert server.engine.requests[-1].sampling.grammar is None


def _written(fields: dict[str, Any]) -> str:
    (name,) = fields
    return f"{name}.json_object" if name == "structured_outputs" else name
