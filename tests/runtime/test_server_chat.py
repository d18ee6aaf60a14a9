"""POST /v1/chat/completions: what a client reads, streamed and whole."""

from tests.support.fake_engine import Script, say
from tests.support.serving import serving
from tests.support.toy_text import tokenizer

CHAT = "/v1/chat/completions"
ASK = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}]}
EMOJI = "ok 😀 yes"


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def answer(text: str = EMOJI, **kwargs: int) -> Script:
    return say(ids(text), stop_id=1, **kwargs)


async def test_whole_answer_is_the_text_without_the_stop_token():
    async with serving(answer()) as served:
        status, body = await served.post(CHAT, ASK)
        assert status == 200
        assert body["object"] == "chat.completion"
        assert body["model"] == "toy"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": EMOJI, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        prompt = len(served.engine.requests[0].prompt_token_ids)
        generated = len(ids(EMOJI)) + 1
        assert body["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


async def test_stream_is_role_then_text_then_reason_then_usage_then_done():
    async with serving(answer()) as served:
        events = await served.events(CHAT, {**ASK, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    *chunks, usage = events[:-1]
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == EMOJI
    assert chunks[-1]["choices"][0]["delta"] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ids(EMOJI)) + 1
