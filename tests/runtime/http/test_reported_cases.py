"""Faults that users of other servers reported: the right values, for the whole kind of each."""

import json
import re
from typing import Any

import pytest

from ostinato.runtime.config import EngineConfig
from ostinato.runtime.http.api_schema import ChatRequest, CompletionRequest
from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import GenerateRequest, TokenEvent
from ostinato.runtime.text import TextFrontEnd
from tests.support.fake_engine import FakeEngine, Script, info, say
from tests.support.serving import Served, serving
from tests.support.toy_text import BOS, EOS, front_end, halved_emoji, tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
ASK: dict[str, dict[str, object]] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "the quick"}}
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT], ids=["chat", "text"])


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def pieces(*texts: str) -> Script:
    """Each text arrives as one event; EOS ends the answer."""

    def script(request: GenerateRequest) -> list[TokenEvent]:
        said = [TokenEvent(request.request_id, tuple(ids(text))) for text in texts]
        return [*said, TokenEvent(request.request_id, (1,), finish_reason="stop", stop_token_id=1)]

    return script


async def streamed(served: Served, path: str, **fields: object) -> tuple[list[str], str]:
    """Texts of the chunks that have one, and the reason of the end."""
    events = await served.events(path, {**ASK[path], "max_tokens": 40, **fields})
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    texts = [one["text"] if path == TEXT else one["delta"].get("content") for one in choices]
    return [text for text in texts if text], choices[-1]["finish_reason"]


# Log-probabilities: legal combinations answer, the others are refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    ],
)
async def test_logprobs_of_chat_that_make_no_sense_are_refused(fields: dict[str, object], param: str):
    async with serving(pieces("a")) as served:
        for stream in (False, True):
            status, body = await served.post(CHAT, {**ASK[CHAT], **fields, "stream": stream})
            assert (status, body["error"]["param"]) == (400, param)


async def test_echo_with_logprobs_answers_under_every_filter():
    filters: list[dict[str, object]] = [
        {"top_k": 1, "temperature": 1},
        {"temperature": 0},
        {"top_p": 0.01},
        {"logit_bias": {"10": -100}},
        {"allowed_token_ids": [10]},
    ]
    async with serving(say(ids("a😀"), stop_id=1)) as served:
        for filtered in filters:
            for limit in (0, 20):
                fields = {**ASK[TEXT], "echo": True, "logprobs": 5, "max_tokens": limit, **filtered}
                status, whole = await served.post(TEXT, fields)  # `post` refuses NaN and Infinity
                assert status == 200
                logprobs = whole["choices"][0]["logprobs"]
                assert logprobs["token_logprobs"][0] is None
                assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
                lengths = {len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs")}
                assert lengths == {len(logprobs["text_offset"])}


@pytest.mark.parametrize("halves", [True, False], ids=["two tokens", "four tokens"])
async def test_bytes_of_a_character_in_several_tokens_join_to_it(halves: bool):
    tokens = halved_emoji() if halves else tokenizer()
    said = tokens.encode("x😀y", add_special_tokens=False).ids
    assert len(said) == (4 if halves else 6)
    parts = ["F0 9F", "98 80"] if halves else ["F0", "9F", "98", "80"]
    async with serving(say(said, stop_id=1), text=front_end(tokens=tokens)) as served:
        fields = {**ASK[CHAT], "logprobs": True, "top_logprobs": 0}
        _, whole = await served.post(CHAT, fields)
        streamed = [event["choices"][0]["logprobs"] for event in (await served.events(CHAT, fields))[:-1]]
        _, text = await served.post(TEXT, {**ASK[TEXT], "logprobs": 0})
    content = whole["choices"][0]["logprobs"]["content"]
    assert [bytes(one["bytes"]) for one in content[1:-1]] == [bytes.fromhex(part) for part in parts]
    assert bytes(byte for one in content for byte in one["bytes"]) == "x😀y".encode()
    assert [one for listed in streamed if listed for one in listed["content"]] == content
    named = [r"bytes:" + "".join(rf"\x{byte.lower()}" for byte in part.split()) for part in parts]
    assert text["choices"][0]["logprobs"]["tokens"] == ["x", *named, "y", EOS]
    assert "�" not in json.dumps([whole, text], ensure_ascii=False)


# BOS


CONTENT = "{% for m in messages %}{{ m.content }}{% endfor %}"
CHATS: dict[str, dict[str, object]] = {
    CHAT: {"messages": HELLO},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
}


@pytest.mark.parametrize("has_bos", [True, False], ids=["template with BOS", "template without"])
async def test_every_way_to_chat_has_the_template_s_bos_and_no_other(has_bos: bool):
    """Case B31: servers, Python and /tokenize agree; the load tool sends text, and counts what is told."""

    def text() -> TextFrontEnd:
        return front_end(template="{{ bos_token }}" * has_bos + CONTENT, add_bos=True)

    bos, hello = [0] * has_bos, ids("Hello")
    async with serving(pieces("a"), text=text()) as served:
        for path, fields in CHATS.items():
            _, whole = await served.post(path, fields)
            assert list(served.engine.requests[-1].prompt_token_ids) == [*bos, *hello], path
            usage = whole["usage"]
            assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(bos) + len(hello)
        _, told = await served.post("/tokenize", ASK[CHAT])
        assert told["tokens"] == [*bos, *hello]
        _, told = await served.post("/v1/messages/count_tokens", {"messages": HELLO})
        assert told["input_tokens"] == len(bos) + len(hello)
        for prompt in ("Hi", BOS + "Hi"):
            _, whole = await served.post(TEXT, {"prompt": prompt})
            assert list(served.engine.requests[-1].prompt_token_ids) == [0, *ids("Hi")]
            assert whole["usage"]["prompt_tokens"] == 1 + len(ids("Hi"))
            assert (await served.post("/tokenize", {"prompt": prompt}))[1]["tokens"] == [0, *ids("Hi")]
    engine = FakeEngine(pieces("a"), info(vocab_size=410, eos=1))
    with LLM.over(engine, text(), EngineConfig()) as llm:
        assert list(llm.chat(HELLO)[0].prompt_token_ids) == [*bos, *hello]
        assert list(llm.generate("Hi")[0].prompt_token_ids) == [0, *ids("Hi")]


async def test_bos_is_added_to_a_chat_where_it_is_asked_for():
    async with serving(pieces("a"), text=front_end(template=CONTENT, add_bos=True)) as served:
        for special in (None, False, True):
            fields = {**ASK[CHAT], "add_special_tokens": special}
            await served.post(CHAT, fields)
            _, told = await served.post("/tokenize", fields)
            ours = list(served.engine.requests[-1].prompt_token_ids)
            assert ours == told["tokens"] == [0] * bool(special) + ids("Hello")


async def test_a_model_without_a_template_completes_text_and_refuses_chats():
    """Case B45: never a made-up template."""
    async with serving(pieces("a"), text=front_end(template=None)) as served:
        for path, fields in CHATS.items():
            status, body = await served.post(path, fields)
            assert status == 400
            assert "no chat template" in body["error"]["message"]
        assert (await served.post(TEXT, ASK[TEXT]))[0] == 200


async def test_text_that_spells_a_special_token_becomes_it():
    """The documented rule; `BOS` and `EOS` are the toy's."""
    said = f"a{EOS}b{BOS}"
    tokens = [*ids("a"), 1, *ids("b"), 0]
    messages = [{"role": "user", "content": said}]
    async with serving(pieces("a"), text=front_end(template=CONTENT)) as served:
        for asked in ({"messages": messages}, {"prompt": said}):
            assert (await served.post("/tokenize", asked))[1]["tokens"] == tokens
            path = CHAT if "messages" in asked else TEXT
            await served.post(path, asked)
            assert list(served.engine.requests[-1].prompt_token_ids) == tokens
    engine = FakeEngine(pieces("a"), info(vocab_size=410, eos=1))
    with LLM.over(engine, front_end(template=CONTENT), EngineConfig()) as llm:
        assert list(llm.chat(messages)[0].prompt_token_ids) == tokens


# Arguments of past tool calls

GEMMA = (
    "{% for m in messages %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "call:{{ call.function.name }}{{ '{' }}{% for key, value in call.function.arguments.items() %}"
    '{{ key }}:{% if value is string %}<|"|>{{ value }}<|"|>{% else %}{{ value | tojson }}{% endif %}'
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% endfor %}{% endfor %}"
)


async def rendered(served: Served, arguments: str, content: object = None) -> tuple[int, Any]:
    function = {"name": "terminal", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    status, body = await served.post("/tokenize", {"messages": [*HELLO, answer]})
    if status != 200:
        return status, body["error"]["param"]
    return status, served.state.text.decode(body["tokens"], skip_special=False)


async def test_arguments_reach_the_template_decoded_and_unchanged():
    async with serving(pieces("a"), text=front_end(template=GEMMA), window=300) as served:
        cases = {
            '{"command":"date"}': 'call:terminal{command:<|"|>date<|"|>}',
            "": "call:terminal{}",
            "  ": "call:terminal{}",
            "{}": "call:terminal{}",
            '{"n":9007199254740993}': "call:terminal{n:9007199254740993}",
            '{"a":{"b":["ü",null,true]}}': 'call:terminal{a:{"b": ["ü", null, true]}}',
            '{"q":"say \\"hi\\""}': 'call:terminal{q:<|"|>say "hi"<|"|>}',
        }
        for arguments, said in cases.items():
            for content in (None, "", "text"):
                assert await rendered(served, arguments, content) == (200, f"Hello{content or ''}{said}")
        assert await rendered(served, "{}", []) == (400, "messages[1].content")


async def test_broken_arguments_are_that_request_s_400():
    where = "messages[1].tool_calls[0].function.arguments"
    broken = ("{", "[1]", "null", '"x"', "5", '{"a":1,"a":2}', '{"a":NaN}', "[" * 5000, '{"a":"\\ud800"}')
    async with serving(pieces("a"), text=front_end(template=GEMMA)) as served:
        for arguments in broken:
            assert await rendered(served, arguments) == (400, where)
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            answer = {"role": "assistant", "content": None, "tool_calls": [call]}
            status, body = await served.post(CHAT, {"messages": [*HELLO, answer]})
            assert (status, body["error"]["param"]) == (400, where)
            item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
            status, body = await served.post("/v1/responses", {"input": [*HELLO, item]})
            assert (status, body["error"]["param"]) == (400, "input[1]")


# Stop strings in a stream


@BOTH
@pytest.mark.parametrize(
    ("said", "stop", "texts", "reason"),
    [
        (("AB", "CD", "EFG", "H"), "DEFGH", "ABC", "stop"),
        (("ABCDEFGHIJ",), "DEFGH", "ABC", "stop"),
        (("AB", "CD", "EX"), "DEFGH", "ABCDEX", "stop"),
        (("AB", "CD"), "DEFGH", "ABCD", "stop"),
        (("hello", " world"), "zzzz", "hello world", "stop"),
    ],
)
async def test_nothing_of_a_stop_string_is_sent_and_nothing_else_is_lost(
    path: str, said: tuple[str, ...], stop: str, texts: str, reason: str
):
    async with serving(pieces(*said)) as served:
        chunks, end = await streamed(served, path, stop=[stop])
        _, whole = await served.post(path, {**ASK[path], "max_tokens": 40, "stop": stop})
    choice = whole["choices"][0]
    content = choice["text"] if path == TEXT else choice["message"]["content"]
    assert ("".join(chunks), end) == (texts, reason)
    assert (content, choice["finish_reason"]) == (texts, reason)
    if texts == "ABC":
        assert not any("D" in chunk for chunk in chunks)
    if stop == "zzzz":
        assert chunks[0] == "hello"  # nothing of it could be the beginning of the stop string


# Whatever a field is given

JUNK: tuple[object, ...] = (
    "2", "", True, False, 0, -1, 1, 2.5, 1e300, -(2**63), 2**70, [], [[]], [1, "a"], [-1], {}, {"a": 1},
    "x" * 3000, "\x00", ["\ud7ff"] * 40, {"type": "nonsense"}, [None], {"1": None},
)  # fmt: skip
TYPES = {"str", "int", "bool", "float", "list", "dict"}


@BOTH
async def test_any_value_in_any_field_is_an_answer_or_a_400_that_names_it(path: str):
    schema = ChatRequest if path == CHAT else CompletionRequest
    refusals = 0
    async with serving(pieces("a", "b")) as served:
        for name in sorted(schema.model_fields.keys() | schema.unsupported.keys() | {"nonsense"}):
            for value in JUNK:
                fields = {**ASK[path], name: value}
                async with served.http.post(served.url + path, json=fields) as response:
                    raw = await response.read()
                if response.status == 200:
                    continue
                assert response.status in (400, 404), (name, value, raw)
                error = json.loads(raw)["error"]
                assert len(raw) <= 1024
                assert error["param"] is not None, (name, value, raw)
                named = error["param"].replace("[", ".").split(".")[0]
                assert named == name or name in error["message"], (name, value, raw)
                steps = re.split(r"[.\[\]]+", error["param"])
                assert TYPES.isdisjoint(steps), (
                    name,
                    value,
                    raw,
                )  # what a client wrote, not what we hoped for
                refusals += 1
        assert served.engine.running == {}
        status, _ = await served.post(path, ASK[path])
        assert status == 200
    assert refusals > 500
