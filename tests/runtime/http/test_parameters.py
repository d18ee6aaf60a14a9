"""Each parameter of the completion routes does what docs/api.md says, streamed and whole."""

from typing import Any

import pytest

from ostinato.runtime.bad_words import word_ids
from ostinato.runtime.messages import GenerateRequest, TokenEvent, TokenLogprob
from tests.support.fake_engine import Script, say
from tests.support.serving import Served, serving
from tests.support.toy_text import CHATML, front_end, tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    TEXT: {"prompt": "the quick", "max_tokens": 40},
}
WORDS = " brown fox 😀"
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT], ids=["chat", "text"])


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def answer(text: str = WORDS, *, chunk: int = 1) -> Script:
    return say(ids(text), stop_id=1, chunk=chunk)


async def both(served: Served, path: str, **fields: object) -> tuple[dict[str, Any], list[Any]]:
    """The whole answer, and the chunks of the streamed one."""
    status, whole = await served.post(path, {**ASK[path], **fields})
    assert status == 200, whole
    events = await served.events(path, {**ASK[path], **fields})
    assert events.pop() == "[DONE]"
    return whole, events


def joined_ids(events: list[Any], index: int = 0) -> list[int]:
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return [token for choice in choices for token in choice["token_ids"]]


@BOTH
@pytest.mark.parametrize("chunk", [1, 3, 50])
async def test_token_ids_are_all_that_were_generated_and_the_prompt_is_told_once(path: str, chunk: int):
    async with serving(answer(chunk=chunk)) as served:
        whole, events = await both(served, path, return_token_ids=True, n=2)
        prompt = list(served.engine.requests[0].prompt_token_ids)
    for choice in whole["choices"]:
        assert choice["token_ids"] == [*ids(WORDS), 1]
        assert joined_ids(events, choice["index"]) == choice["token_ids"]
    if path == CHAT:
        assert whole["prompt_token_ids"] == prompt
        assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [prompt]
    else:
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [prompt] * 2
        told = [c["prompt_token_ids"] for e in events for c in e["choices"]]
        assert [one for one in told if one is not None] == [prompt] * 2


@BOTH
async def test_token_ids_hold_those_that_a_stop_string_cut_and_none_behind_them(path: str):
    async with serving(answer(" brown fox jumps", chunk=2)) as served:
        whole, events = await both(served, path, return_token_ids=True, stop="fox")
    choice = whole["choices"][0]
    assert choice["token_ids"] == ids(" brown fox jumps")[: len(choice["token_ids"])]
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    assert joined_ids(events) == choice["token_ids"]


@BOTH
async def test_nothing_is_said_of_what_was_not_asked(path: str):
    async with serving(answer()) as served:
        whole, events = await both(served, path)
    for told in (whole, *events, *whole["choices"], *(c for e in events for c in e["choices"])):
        assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & told.keys()


@BOTH
async def test_prompt_logprobs_are_null_then_records_with_the_token_itself(path: str):
    async with serving(answer("a")) as served:
        whole, events = await both(served, path, prompt_logprobs=2)
        prompt = served.engine.requests[0].prompt_token_ids
        assert {request.sampling.prompt_logprobs for request in served.engine.requests} == {2}
    told = whole["prompt_logprobs"] if path == CHAT else whole["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    assert len(told) == len(prompt)
    text = served.state.text.codec.token_text
    for token, record in zip(prompt[1:], told[1:], strict=True):
        if token == 1:
            continue  # what the engine of this test takes for impossible
        assert record[str(token)] == {"logprob": -0.5, "rank": 1, "decoded_token": text(token)}
        assert record["1"] == {"logprob": -9999.0, "rank": 2, "decoded_token": "<|im_end|>"}
    streamed = [event for event in events if event.get("prompt_logprobs")]
    streamed += [c for e in events for c in e["choices"] if c.get("prompt_logprobs")]
    assert [one["prompt_logprobs"] for one in streamed] == [told]
    assert streamed[0] in (events[0], events[0]["choices"][0])


async def test_prompt_logprobs_of_a_token_that_is_not_among_the_likeliest_are_added():
    def script(request: GenerateRequest) -> list[TokenEvent]:
        record = TokenLogprob(token_id=11, logprob=-7.0, rank=300, top=((5, -0.1),))
        return [TokenEvent(request.request_id, (10,), prompt_logprobs=(None, record), finish_reason="length")]

    async with serving(script) as served:
        fields = {"prompt": [10, 11], "prompt_logprobs": 1}
        _, whole = await served.post(TEXT, fields)
        _, alone = await served.post(TEXT, {**fields, "prompt_logprobs": 0})
    record = whole["choices"][0]["prompt_logprobs"][1]
    assert {key: (one["logprob"], one["rank"]) for key, one in record.items()} == {
        "5": (-0.1, 1),
        "11": (-7.0, 300),
    }
    assert list(alone["choices"][0]["prompt_logprobs"][1]) == ["11"]


async def test_prompt_logprobs_of_one_token_are_null_alone():
    async with serving(answer("a")) as served:
        _, whole = await served.post(TEXT, {"prompt": [10], "prompt_logprobs": 1})
        _, echoed = await served.post(TEXT, {"prompt": [10], "echo": True, "logprobs": 0, "max_tokens": 0})
    assert whole["choices"][0]["prompt_logprobs"] == [None]
    assert echoed["choices"][0]["logprobs"]["token_logprobs"] == [None]


@BOTH
async def test_an_integer_in_quotes_is_refused_with_the_field_and_the_word_integer(path: str):
    names = ("prompt_logprobs", "n", "max_tokens", "min_tokens", "top_k", "seed", "priority")
    async with serving(answer()) as served:
        for name in (*names, "truncate_prompt_tokens"):
            for value in ("2", True, [2], 2.5):
                status, body = await served.post(path, {**ASK[path], name: value})
                error = body["error"]
                assert (status, error["code"], error["param"]) == (400, "invalid_value", name), value
                assert "valid integer" in error["message"]
        assert served.engine.requests == []


async def test_named_tokens_are_the_alternatives_in_their_order():
    named = [ids("b")[0], ids("a")[0], 5]  # "a" is chosen
    async with serving(answer("a")) as served:
        fields = {**ASK[CHAT], "logprobs": True, "logprob_token_ids": named}
        _, chat = await served.post(CHAT, fields)
        _, text = await served.post(TEXT, {**ASK[TEXT], "logprobs": 0, "logprob_token_ids": named})
        asked = {(r.sampling.logprobs, r.sampling.logprob_token_ids) for r in served.engine.requests}
        name = served.state.text.codec.token_text
    assert asked == {(0, tuple(named))}
    top = chat["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["token"] for entry in top] == [name(one) for one in named]
    assert [entry["logprob"] for entry in top] == [-float(one) for one in named]
    best = text["choices"][0]["logprobs"]["top_logprobs"][0]
    assert list(best) == [name(one) for one in named]
    assert best == {"b": -float(named[0]), "a": -0.5, name(5): -5.0}  # the chosen token with its own


@BOTH
async def test_tokens_can_be_named_by_their_ids(path: str):
    wanted = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2, "echo": True}
    async with serving(answer()) as served:
        whole, events = await both(served, path, return_tokens_as_token_ids=True, **wanted)
        prompt = list(served.engine.requests[0].prompt_token_ids)
    told = whole["choices"][0]["logprobs"]
    if path == CHAT:
        assert [one["token"] for one in told["content"]] == [f"token_id:{i}" for i in ids(WORDS)]
        assert bytes(b for one in told["content"] for b in one["bytes"]).decode() == WORDS
        tops = [one["token"] for entry in told["content"] for one in entry["top_logprobs"]]
        assert len(tops) == 2 * len(ids(WORDS))
        streamed = [e["choices"][0]["logprobs"] for e in events]
        assert [one for listed in streamed if listed for one in listed["content"]] == told["content"]
    else:
        assert told["tokens"] == [f"token_id:{i}" for i in [*prompt, *ids(WORDS), 1]]
        tops = [name for entry in told["top_logprobs"] if entry for name in entry]
        streamed = [name for e in events for name in e["choices"][0]["logprobs"]["tokens"]]
        assert streamed == told["tokens"]
    assert all(name.removeprefix("token_id:").isdecimal() for name in tops)


@BOTH
async def test_stop_reason_is_what_was_asked_to_stop_at(path: str):
    def after(token: int) -> Script:
        return say(ids(" brown fox"), stop_id=token)

    other = ids("x")[0]
    cases: list[tuple[Script, dict[str, object], object]] = [
        (after(1), {}, None),
        (after(other), {"stop_token_ids": [other, 1]}, other),
        (after(1), {"stop_token_ids": [1]}, 1),
        (after(1), {"stop": ["zzz", "fox"]}, "fox"),
        (after(1), {"stop": "fox", "include_stop_str_in_output": True}, "fox"),
        (say(ids(" brown fox"), reason="length"), {"stop": "zzz"}, None),
    ]
    for script, fields, expected in cases:
        async with serving(script) as served:
            whole, events = await both(served, path, **fields)
        assert [one["stop_reason"] for one in whole["choices"]] == [expected]
        ends = [one for event in events for one in event["choices"] if one["finish_reason"]]
        assert [one["stop_reason"] for one in ends] == [expected]
    async with serving(after(1)) as served:
        _, alone = await served.post(TEXT, {"prompt": "a", "echo": True, "max_tokens": 0, "stop": "brown"})
    assert alone["choices"][0]["stop_reason"] is None  # nothing was generated


@BOTH
async def test_usage_is_repeated_in_every_chunk_for_its_choice(path: str):
    async with serving(answer()) as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        _, whole = await served.post(path, {**ASK[path], "n": 2})
        events = await served.events(path, {**ASK[path], "n": 2, "stream_options": options})
    *chunks, last = events[:-1]
    prompt = whole["usage"]["prompt_tokens"]
    for index in (0, 1):
        own = [chunk["usage"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        counts = [used["completion_tokens"] for used in own]
        assert counts == sorted(counts)
        assert counts[-1] == len(ids(WORDS)) + 1
        assert all(used["total_tokens"] == prompt + used["completion_tokens"] for used in own)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


async def test_best_of_returns_the_likeliest_per_token_best_first_and_counts_all():
    def script(request: GenerateRequest) -> list[TokenEvent]:
        seed = request.sampling.seed or 0
        each = {0: -1.0, 1: -0.25, 2: -3.0, 3: -0.5}[seed]
        length = 1 if seed == 2 else 4  # a short answer is no likely one
        records = tuple(TokenLogprob(token_id=20 + seed, logprob=each, rank=1) for _ in range(length))
        tokens = (20 + seed,) * length
        return [TokenEvent(request.request_id, tokens, records, finish_reason="stop")]

    async with serving(script) as served:
        fields = {"prompt": ["a", "b"], "n": 2, "best_of": 4, "seed": 0, "return_token_ids": True}
        status, whole = await served.post(TEXT, fields)
        _, with_logprobs = await served.post(TEXT, {**fields, "logprobs": 1})
    assert status == 200
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    firsts = [choice["token_ids"][0] for choice in whole["choices"]]
    assert firsts == [21, 23, 21, 23]
    assert [choice["logprobs"] for choice in whole["choices"]] == [None] * 4
    assert whole["usage"]["completion_tokens"] == 2 * (4 + 4 + 1 + 4)
    assert whole["usage"]["prompt_tokens"] == 2
    assert with_logprobs["choices"][0]["logprobs"]["token_logprobs"] == [-0.25] * 4


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 5, "max_tokens": 9}, 5),
        ({"truncate_prompt_tokens": 60}, 20),
        ({"truncate_prompt_tokens": -1, "max_tokens": 50}, 14),
        ({"truncate_prompt_tokens": -1, "max_tokens": 500}, 1),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1}, 20),
    ],
)
async def test_a_long_prompt_keeps_its_end(fields: dict[str, object], kept: int):
    prompt = list(range(30, 50))
    async with serving(say([10] * 100, reason="length")) as served:
        status, whole = await served.post(TEXT, {"prompt": prompt, "echo": True, **fields})
        assert list(served.engine.requests[0].prompt_token_ids) == prompt[-kept:]
        assert whole["choices"][0]["text"].startswith(served.state.text.decode(prompt[-kept:]))
    assert status == 200


async def test_a_text_and_a_conversation_over_the_window_can_be_cut_to_fit():
    long = "the quick brown fox " * 5000
    async with serving(answer("a")) as served:
        status, _ = await served.post(TEXT, {"prompt": long, "truncate_prompt_tokens": -1})
        assert status == 200
        kept = served.engine.requests[0].prompt_token_ids
        assert (len(kept), list(kept)) == (64 - 16, ids(long)[-48:])
        messages = [{"role": "user", "content": long}]
        status, _ = await served.post(CHAT, {"messages": messages, "truncate_prompt_tokens": -1})
        assert status == 200
        assert len(served.engine.requests[1].prompt_token_ids) == 63
        status, body = await served.post(CHAT, {"messages": messages, "truncate_prompt_tokens": 64})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


@BOTH
async def test_request_id_names_the_answer_and_may_not_be_in_use(path: str):
    prefix = "chatcmpl" if path == CHAT else "cmpl"
    async with serving(say([10] * 3)) as served:
        fields = {**ASK[path], "request_id": "mine-7"}
        whole, events = await both(served, path, request_id="mine-7")
        assert {whole["id"], *(event["id"] for event in events)} == {f"{prefix}-mine-7"}
        served.state.live[f"{prefix}-mine-7-0"] = ""
        status, body = await served.post(path, fields)
        assert (status, body["error"]["param"]) == (400, "request_id")
        served.state.live.clear()


@BOTH
async def test_spaces_between_special_tokens_change_nothing(path: str):
    script = say([*ids("a"), 0, 0, *ids("b")], stop_id=1)
    texts = []
    async with serving(script) as served:
        for value in (True, False, None):
            fields = {"skip_special_tokens": False, "spaces_between_special_tokens": value}
            _, whole = await served.post(path, {**ASK[path], **fields})
            choice = whole["choices"][0]
            texts.append(choice["text"] if path == TEXT else choice["message"]["content"])
    assert texts == ["a<|im_start|><|im_start|>b"] * 3


async def test_bad_words_reach_the_engine_as_the_tokens_that_spell_them():
    text = front_end()
    found = word_ids(text, ["fox", " fox", "fox jumps", "é"])
    assert tuple(ids("fox")) in found
    assert tuple(ids(" fox")) in found
    assert tuple(ids(" fox jumps")) in found
    assert len(set(found)) == len(found)
    assert all(text.decode(word).strip() in ("fox", "fox jumps", "é") for word in found)


PROMPT_OF = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is "}]}


async def prompt_text(served: Served, fields: dict[str, object]) -> str:
    status, body = await served.post("/tokenize", fields)
    assert status == 200, body
    return served.state.text.decode(body["tokens"], skip_special=False)


async def test_the_last_message_can_be_continued():
    async with serving(answer(), window=200) as served:
        text = await prompt_text(served, {**PROMPT_OF, "continue_final_message": True})
        plain = await prompt_text(served, {**PROMPT_OF, "add_generation_prompt": False})
        status, whole = await served.post(CHAT, {**PROMPT_OF, "continue_final_message": True})
        assert (
            served.state.text.decode(served.engine.requests[0].prompt_token_ids, skip_special=False) == text
        )
    assert text.endswith("assistant\nIt is ")
    assert plain == text + "<|im_end|>\n"
    assert (status, whole["choices"][0]["message"]["content"]) == (200, WORDS)


@pytest.mark.parametrize("chunk", [1, 50])
async def test_the_message_that_is_continued_can_stand_in_front_of_the_answer(chunk: int):
    parts = [{"type": "text", "text": "It"}, {"type": "text", "text": "is "}]
    listed = {"messages": [PROMPT_OF["messages"][0], {"role": "assistant", "content": parts}]}
    async with serving(answer(chunk=chunk), window=200) as served:
        for asked, said in ((PROMPT_OF, "It is "), (listed, "It\nis ")):
            fields = {**asked, "continue_final_message": True, "echo": True, "n": 2, "logprobs": True}
            status, whole = await served.post(CHAT, fields)
            assert status == 200, whole
            events = await served.events(CHAT, fields)
            choices = [one for event in events[:-1] for one in event["choices"]]
            for choice in whole["choices"]:
                assert choice["message"]["content"] == said + WORDS
                assert len(choice["logprobs"]["content"]) == len(ids(WORDS))  # of the answer alone
                own = [one["delta"] for one in choices if one["index"] == choice["index"]]
                assert own[0] == {"role": "assistant", "content": ""}
                assert "".join(delta.get("content") or "" for delta in own) == said + WORDS
            assert whole["usage"]["completion_tokens"] == 2 * (len(ids(WORDS)) + 1)
            _, plain = await served.post(CHAT, {**fields, "echo": False})
            assert plain["choices"][0]["message"]["content"] == WORDS
        status, body = await served.post(CHAT, {**PROMPT_OF, "echo": True})
        assert (status, body["error"]["param"]) == (400, "echo")


@pytest.mark.parametrize(
    "fields",
    [
        {**PROMPT_OF, "add_generation_prompt": True},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "assistant", "content": ""}]},
    ],
)
async def test_nothing_to_continue_is_refused(fields: dict[str, object]):
    async with serving(answer()) as served:
        for path in (CHAT, "/tokenize"):
            status, body = await served.post(path, {**fields, "continue_final_message": True})
            assert (status, body["error"]["param"]) == (400, "continue_final_message")


async def test_documents_reach_a_template_that_reads_them_and_no_other():
    template = CHATML + "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}"
    documents = [{"title": "one", "text": "x"}, {"title": "two"}]
    async with serving(answer(), text=front_end(template=template)) as served:
        assert (await prompt_text(served, {**ASK[CHAT], "documents": documents})).endswith("[one][two]")
    async with serving(answer()) as served:
        for fields in ({"documents": documents}, {"documents": "x"}, {"documents": ["x"]}):
            status, body = await served.post(CHAT, {**ASK[CHAT], **fields})
            assert (status, body["error"]["param"].split("[")[0]) == (400, "documents")
        assert (await served.post(CHAT, {**ASK[CHAT], "documents": []}))[0] == 200
